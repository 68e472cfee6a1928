"""Hooks of a step see, change and raise what those of torch's optimizers do; a closure must be a function."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gefen_fn import sgd
from gefen_nn import TransformOptimizer
from tests.small_net import backward, model


def seven():
    return 7.0


def eight():
    return 8.0


def in_place(own, args, kwargs):
    kwargs["closure"] = eight


HOOKS = {
    "as given": lambda own, args, kwargs: (args, kwargs),
    "a copy": lambda own, args, kwargs: ((own, *args[1:]), {**kwargs}),
    "nothing": lambda own, args, kwargs: None,
    "another closure": lambda own, args, kwargs: ((own, eight), kwargs),
    "no closure": lambda own, args, kwargs: ((own,), kwargs),
    "a closure by name": lambda own, args, kwargs: ((own,), {"closure": eight}),
    "a closure in place": in_place,
    "a closure twice": lambda own, args, kwargs: ((own, seven), {"closure": eight}),
    "too many": lambda own, args, kwargs: ((own, seven, eight), kwargs),
    "an argument that no step has": lambda own, args, kwargs: (args, {"rate": 1}),
    "a number": lambda own, args, kwargs: 3,
    "three": lambda own, args, kwargs: (args, kwargs, own),
}
MADE = {
    "torch's": lambda net: torch.optim.SGD(net.parameters(), 0.1),
    "ours": lambda net: TransformOptimizer(net.parameters(), sgd(0.1)),
}


def told(make, hook, given):
    """What a step returned or raised, and what each hook saw, in order."""
    net, seen = model(), []
    backward(net, 0)
    optimizer = make(net)

    def note(where):
        return lambda own, args, kwargs: seen.append((where, own is args[0] is optimizer, args[1:], dict(kwargs)))

    every = register_optimizer_step_pre_hook(note("before all")), register_optimizer_step_post_hook(note("after all"))
    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    try:
        return optimizer.step(*given), seen
    except (RuntimeError, TypeError) as error:
        return type(error), seen
    finally:
        for handle in every:
            handle.remove()


@pytest.mark.parametrize("given", [(), (seven,)], ids=["alone", "with a closure"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_does_in_a_step_what_it_does_in_one_of_torch(hook, given):
    assert told(MADE["ours"], hook, given) == told(MADE["torch's"], hook, given)


@pytest.mark.parametrize("args", [(seven,), ()], ids=["a closure", "nothing"])
def test_arguments_without_the_optimizer_are_refused(args):
    optimizer = MADE["ours"](model())
    optimizer.register_step_pre_hook(lambda own, _, kwargs: (args, kwargs))
    with pytest.raises(RuntimeError, match="must begin with the optimizer: got"):
        optimizer.step()


def test_a_number_in_the_place_of_a_closure_is_refused():
    with pytest.raises(TypeError, match="`closure` must be a function that returns the loss: got 5"):
        MADE["ours"](model()).step(5)
