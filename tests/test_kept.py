"""What failed while it wrote is not gone on with: not by a step, not by a save, until something whole is loaded."""

import pytest
import torch
from torch import nn

import gefen_nn.optimizer
from gefen_fn import chain, gefen, stateless
from gefen_nn import CheckpointError, Gefen, OptimizerState, TransformOptimizer, load, save
from gefen_nn.checkpoint import same_bits

KINDS = {
    "fused": lambda params: Gefen(params, lr=0.1),
    "pure": lambda params: Gefen(params, lr=0.1, fused=False),
    "expression": lambda params: TransformOptimizer(params, gefen(0.1)),
}


def run(kind, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 48))
    optimizer = KINDS[kind](model.named_parameters())
    for n in range(steps):
        step(model, optimizer, n)
    return model, optimizer


def step(model, optimizer, n):
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * n + i))
    optimizer.step()


def held(model, optimizer):
    return [*model.parameters(), *(x for own in optimizer.state.values() for x in own.values())]


def same(one, other):
    return all(same_bits(x, y) for x, y in zip(held(*one), held(*other), strict=True))


def interrupt_after(monkeypatch, writes):
    """An interrupt at a write of the step that is to come."""
    seen = []

    def interrupted(name, kept):
        def call(*args, **kwargs):
            out = kept(*args, **kwargs)
            seen.append(name)
            if len(seen) > writes:
                raise KeyboardInterrupt
            return out

        return call

    monkeypatch.setattr(torch, "_foreach_add_", interrupted("counts", torch._foreach_add_))
    monkeypatch.setattr(gefen_nn.optimizer, "write_updates", interrupted("updates", gefen_nn.optimizer.write_updates))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_ends_half_way_is_refused_to_go_on_from_until_a_whole_moment_is_loaded(tmp_path, monkeypatch, kind):
    model, optimizer = run(kind, 1)
    save(tmp_path / "run", model, optimizer)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            step(model, optimizer, 1)
    for attempt in (lambda: step(model, optimizer, 1), lambda: save(tmp_path / "run", model, optimizer)):
        with pytest.raises(RuntimeError, match=r"of one moment: got .* `step` that failed while it wrote. Load"):
            attempt()
    with pytest.raises(RuntimeError, match="of one moment"):
        OptimizerState(optimizer).state_dict()
    load(tmp_path / "run", model, optimizer)
    step(model, optimizer, 1)
    assert same((model, optimizer), run(kind, 2))


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_step_that_fails_before_it_writes_may_be_tried_again(order):
    failing = []

    def fail(updates, params=None):
        if failing:
            raise OSError(failing.pop())
        return updates

    def made():
        stages = (stateless(fail), gefen(0.1))
        model = nn.Linear(64, 80)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        return model, TransformOptimizer(model.named_parameters(), chain(*stages[:: 1 if order == "before" else -1]))

    one, other = made(), made()
    step(*one, 0)
    step(*other, 0)
    failing.append("the network is down")
    with pytest.raises(OSError):
        step(*one, 1)
    assert same(one, other)
    step(*one, 1)
    step(*other, 1)
    assert same(one, other)


def test_a_load_puts_model_and_optimizer_in_place_as_one_write(tmp_path, monkeypatch):
    save(tmp_path / "run", *run("fused", 2))
    model, optimizer = run("fused", 1)

    def fail(*args, **kwargs):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(model, "load_state_dict", fail)
        with pytest.raises(MemoryError):
            load(tmp_path / "run", model, optimizer)
    with pytest.raises(RuntimeError, match=r"of one moment: got .* `load_state_dict` that failed"):
        step(model, optimizer, 1)
    load(tmp_path / "run", model, optimizer)
    assert same((model, optimizer), run("fused", 2))
    (tmp_path / "run" / "extra.pt").unlink()
    with pytest.raises(CheckpointError):
        load(tmp_path / "run", model, optimizer)
    step(model, optimizer, 2)


def test_a_saver_that_is_not_known_gets_the_state_itself():
    optimizer = run("fused", 1)[1]
    given = OptimizerState(optimizer).state_dict()["state"]
    own = {slot.path: slot.value for slot in optimizer.slots() if slot.value is not None}
    assert given.keys() == own.keys() and all(given[path] is x for path, x in own.items())
