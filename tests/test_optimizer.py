"""The torch optimizer over any transform."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from gefen_fn.accumulate import MultiSteps, apply_if_finite
from gefen_fn.adam import scale_by_adam
from gefen_fn.alias import adamw, gefen, sgd
from gefen_fn.base import GradientTransformation, apply_updates
from gefen_fn.clip import clip_by_global_norm
from gefen_fn.combine import chain, named_chain, partition
from gefen_fn.inject import inject_hyperparams
from gefen_fn.muon_alias import muon
from gefen_fn.qk_clip import HeadRows, QKHeads, clip_by_qk
from gefen_fn.scale import scale
from gefen_fn.tree import StructureError
from gefen_nn.offload import offload
from gefen_nn.optimizer import TransformOptimizer
from tests.small_net import backward, bits, flat, injected, model, same, train


def test_d1_reading_the_state_of_a_fresh_optimizer_changes_nothing() -> None:
    net, twin = model(), model()
    read, unread = (TransformOptimizer(m.named_parameters(), injected()) for m in (net, twin))
    assert len(read.state_dict()["state"]) == 4
    assert all(not leaf.any() for leaf in flat(read))
    train(net, read, range(2))
    train(twin, unread, range(2))
    assert same(bits(net), bits(twin))


def test_groups_with_their_own_lr_step_as_separate_optimizers_would() -> None:
    net, twin = model(), model()
    halves = [list(m.parameters()) for m in (net, twin)]
    one = TransformOptimizer([{"params": halves[0][:2], "lr": 0.3}, {"params": halves[0][2:]}], injected())
    two = [TransformOptimizer(halves[1][:2], injected(0.3)), TransformOptimizer(halves[1][2:], injected())]
    for i in range(3):
        backward(net, i)
        backward(twin, i)
        one.step()
        for optimizer in two:
            optimizer.step()
    assert same(bits(net), bits(twin))


def test_schedulers_drive_the_step_and_survive_a_round_trip() -> None:
    def build() -> tuple[nn.Module, TransformOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        net = model()
        optimizer = TransformOptimizer(net.named_parameters(), injected())
        return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def go(net: nn.Module, optimizer: TransformOptimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        for i in range(3):
            train(net, optimizer, range(i, i + 1))
            scheduler.step()

    first, second = build(), build()
    go(*first)
    assert first[1].param_groups[0]["lr"] < 0.1
    for source, target in zip(first, second, strict=True):
        target.load_state_dict(source.state_dict())
    go(*first)
    go(*second)
    assert same(bits(first[0]), bits(second[0]))
    assert first[1].param_groups[0]["lr"] == second[1].param_groups[0]["lr"]


def test_without_injected_names_a_scheduler_raises_and_names_the_fix() -> None:
    optimizer = TransformOptimizer(model().parameters(), sgd(0.1))
    with pytest.raises(KeyError, match="inject_hyperparams"):
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(KeyError, match="inject_hyperparams"):
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match="inject_hyperparams"):
        TransformOptimizer([{"params": list(model().parameters()), "lr": 1.0}], sgd(0.1))


def test_two_injections_give_no_group_keys() -> None:
    tx = chain(inject_hyperparams(clip_by_global_norm)(1.0), inject_hyperparams(sgd)(0.1))
    with pytest.raises(KeyError, match="one `inject_hyperparams`"):
        torch.optim.lr_scheduler.ExponentialLR(TransformOptimizer(model().parameters(), tx), 0.9)


WRAPPED = {
    "chain": lambda tx: chain(clip_by_global_norm(1.0), tx),
    "named_chain": lambda tx: named_chain(("clip", clip_by_global_norm(1.0)), ("rest", chain(tx))),
    "MultiSteps": lambda tx: MultiSteps(chain(clip_by_global_norm(1.0), tx), 2),
    "apply_if_finite": lambda tx: apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "pure"])
@pytest.mark.parametrize("factory", [gefen, adamw])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_an_injection_inside_of_an_expression_gives_group_keys_as_the_outermost_does(wrap, factory, fused) -> None:
    inside = wrap(inject_hyperparams(factory)(0.1))
    outermost = inject_hyperparams(lambda learning_rate: wrap(factory(learning_rate)))(0.1)

    def build(tx) -> tuple[nn.Module, TransformOptimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        net = nn.Linear(72, 64)
        groups = [{"params": [("w", net.weight)], "lr": 0.3}, {"params": [("b", net.bias)]}]
        optimizer = TransformOptimizer(groups, tx, fused=fused)
        return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def go(net, optimizer, scheduler, seeds) -> None:
        for seed in seeds:
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
            scheduler.step()

    first, second, other = build(inside), build(inside), build(outermost)
    go(*first, range(2))
    for source, target in zip(first, second, strict=True):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    go(*second, range(2, 4))
    go(*other, range(4))
    assert same(bits(second[0]), bits(other[0]))
    assert [group["lr"] for group in second[1].param_groups] == [0.3 * 0.5**4, 0.1 * 0.5**4]
    assert not any("learning_rate" in key for leaves in second[1].state.values() for key in leaves)


def test_its_text_is_torchs_without_the_keys_that_never_change() -> None:
    text = repr(TransformOptimizer(model().parameters(), injected()))
    assert "lr: 0.1" in text and "inject_hyperparams(adamw)" in text
    assert "format_version" not in text and "block" not in text


def test_the_closure_runs_first_with_gradients_and_its_loss_comes_back() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = TransformOptimizer([p], sgd(0.5))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert torch.equal(p.detach(), torch.zeros(3)) and not optimizer.step_was_skipped


def test_a_step_without_gradients_is_skipped() -> None:
    net = model()
    optimizer = TransformOptimizer(net.parameters(), injected())
    optimizer.step()
    assert optimizer.step_was_skipped and all(not leaf.any() for leaf in flat(optimizer))


def test_a_bad_gradient_is_refused_before_anything_changes() -> None:
    net = model()
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    backward(net, 0)
    before = bits(net)
    weight = net[2].weight
    weight.grad = None
    weight.grad = torch.zeros_like(weight).to_sparse()
    with pytest.raises(StructureError, match=r"2\.weight"):
        optimizer.step()
    assert same(before, bits(net)) and all(not leaf.any() for leaf in flat(optimizer))


def test_bf16_parameters_are_rounded_once() -> None:
    p = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer = TransformOptimizer([p], sgd(0.004))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((4,), 1.0 - 0.004).bfloat16())


def test_an_added_group_gets_fresh_state_and_the_others_keep_theirs() -> None:
    net, extra = model(), nn.Parameter(torch.ones(2))
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    train(net, optimizer, range(2))
    before = {k: v.clone() for k, v in optimizer.state[net[0].weight].items()}
    optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.5})
    assert all(torch.equal(v, before[k]) for k, v in optimizer.state[net[0].weight].items())
    extra.grad = torch.ones(2)
    optimizer.step()
    assert torch.allclose(extra.detach(), torch.full((2,), 0.5 - 0.005), atol=1e-5)


def test_a_frozen_parameter_gets_state_when_it_starts_to_require_a_gradient() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    train(net, optimizer, range(1))
    assert set(optimizer.state) == set(net[2].parameters())
    net[0].requires_grad_(True)
    assert set(optimizer.state) == set(net.parameters())
    before = bits(net)
    train(net, optimizer, range(1, 2))
    assert not any(torch.equal(x, y) for x, y in zip(before, bits(net), strict=True))


@pytest.mark.parametrize("named", [True, False])
def test_parameters_or_names_given_twice_are_refused(named: bool) -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    twice = [{"params": [("a", p)]}, {"params": [("a", q)]}] if named else [{"params": [p]}, {"params": [p]}]
    with pytest.raises(ValueError, match=r"twice|more than one"):
        TransformOptimizer(twice, sgd(0.1))


def test_i1_replaced_parameter_objects_keep_their_state_by_name() -> None:
    net, twin = model(), model()
    optimizer, plain = (TransformOptimizer(m.named_parameters(), injected()) for m in (net, twin))
    train(net, optimizer, range(2))
    train(twin, plain, range(2))
    for layer in (net[0], net[2]):
        layer.weight, layer.bias = (nn.Parameter(p.detach().clone()) for p in (layer.weight, layer.bias))
    optimizer.param_groups[0]["params"] = list(net.parameters())
    train(net, optimizer, range(2, 4))
    train(twin, plain, range(2, 4))
    assert same(bits(net), bits(twin))
    assert set(optimizer.state) == set(net.parameters())


def test_state_made_on_meta_becomes_real_with_the_parameters() -> None:
    with torch.device("meta"):
        net = nn.Linear(6, 3)
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    assert all(leaf.is_meta for leaf in flat(optimizer) if leaf.dim())
    net.to_empty(device="cpu")
    nn.init.ones_(net.weight)
    nn.init.zeros_(net.bias)
    optimizer.param_groups[0]["params"] = list(net.parameters())
    train(net, optimizer, range(1))
    assert all(not leaf.is_meta and leaf.isfinite().all() for leaf in flat(optimizer))


def test_empty_parameters_step() -> None:
    p, q = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(2))
    optimizer = TransformOptimizer([p, q], injected())
    (p.sum() + q.sum()).backward()
    optimizer.step()
    assert p.shape == (0, 4) and q.detach().ne(1).all()


def test_a_deep_copy_steps_alone() -> None:
    net = model()
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    train(net, optimizer, range(2))
    twin, other = copy.deepcopy((net, optimizer))
    before = bits(net)
    train(twin, other, range(2, 3))
    assert same(before, bits(net))
    train(net, optimizer, range(2, 3))
    assert same(bits(net), bits(twin))


def test_pickling_over_closures_names_the_state_dict() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(TransformOptimizer(model().parameters(), sgd(0.1)))


def test_a_grad_scaler_skips_an_overflow_and_steps_otherwise() -> None:
    net = model()
    optimizer = TransformOptimizer(net.parameters(), injected())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for bad in (True, False):
        before = bits(net)
        optimizer.zero_grad()
        scaler.scale(net(torch.full((1, 6), float("inf") if bad else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same(before, bits(net)) == bad


def test_a_group_that_cannot_be_labelled_leaves_no_trace() -> None:
    labels = {"a": "x"}
    tx = partition({"x": sgd(0.1)}, lambda params: {name: labels[name] for name in params})
    optimizer = TransformOptimizer([("a", nn.Parameter(torch.ones(3)))], tx)
    with pytest.raises(KeyError):
        optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(3)))]})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


@pytest.mark.parametrize("stages", ["labels", "names"])
def test_labels_and_stage_names_may_be_parameter_names(stages: str) -> None:
    tx = named_chain(("w", scale_by_adam()), ("b", scale(-0.1)))
    if stages == "labels":
        tx = partition({"w": adamw(1e-2), "b": adamw(1e-2)}, lambda params: {k: k for k in params})
    p, q = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    optimizer = TransformOptimizer([("w", p), ("b", q)], tx)
    p.grad, q.grad = torch.ones(8, 8), torch.ones(8, 8)
    optimizer.step()
    assert {key.rsplit(".", 1)[-1] for key in optimizer.state[q]} == {"count", "mu", "nu"}
    assert all(
        leaves["scale_by_adam.count"] == 1 for leaves in optimizer.state.values() if "scale_by_adam.count" in leaves
    )


@pytest.mark.parametrize("tx", [gefen(0.1), named_chain(("g", gefen(0.1))), inject_hyperparams(gefen)(0.1)], ids=str)
def test_a_model_of_matrices_alone_keeps_the_statistics_of_each_with_it(tx):
    matrices = nn.ParameterDict({"left": torch.zeros(64, 72), "right": torch.zeros(80, 72)})
    for name, p in matrices.items():
        own = TransformOptimizer(matrices.named_parameters(), tx).state[p]
        assert own["scale_by_gefen.nu.row"].shape == (len(p), 1)
        assert not [key for key in own if f".{name}" in key]


# ---- extra arguments of a step

LOGITS = torch.tensor([4.0, 0.5])


def attention(tx) -> tuple[list[nn.Parameter], TransformOptimizer]:
    """Queries and keys of two heads of 32 rows, with gradients, and their optimizer."""
    draws = [torch.randn(64, 48, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    params = [nn.Parameter(x.clone()) for x in draws[:2]]
    for p, g in zip(params, draws[2:], strict=True):
        p.grad = g
    return params, TransformOptimizer(zip(("q_proj.weight", "k_proj.weight"), params, strict=True), tx)


def ready(tx) -> GradientTransformation:
    return chain(tx, clip_by_qk(1.0))


CLIPPED = {
    "chain": lambda: ready(muon(0.1)),
    "injected": lambda: inject_hyperparams(lambda learning_rate: ready(gefen(learning_rate)))(0.1),
    "named": lambda: named_chain(("step", gefen(0.1)), ("qk", clip_by_qk(1.0))),
    "MultiSteps": lambda: MultiSteps(ready(gefen(0.1)), 1),
    "apply_if_finite": lambda: apply_if_finite(ready(adamw(0.1)), 2),
}


@pytest.mark.parametrize("make", CLIPPED.values(), ids=CLIPPED)
def test_extra_arguments_of_a_step_are_those_of_the_transform(make) -> None:
    params, optimizer = attention(make())
    tree = dict(zip(("q_proj.weight", "k_proj.weight"), (p.detach().clone() for p in params), strict=True))
    grads, tx = {name: p.grad for name, p in zip(tree, params, strict=True)}, make()
    updates, _ = tx.update(grads, tx.init(tree), tree, max_logits=LOGITS)
    optimizer.step(max_logits=LOGITS)
    assert same(bits_of(params), list(apply_updates(tree, updates).values()))
    plain, other = attention(make())
    other.step(max_logits=None)
    assert not torch.equal(plain[0], params[0])


def bits_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def scaled_step(optimizer: TransformOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer, max_logits=LOGITS)


def scheduled_step(optimizer: TransformOptimizer) -> None:
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    optimizer.step(max_logits=LOGITS)


def hooked_step(optimizer: TransformOptimizer) -> None:
    seen = []
    optimizer.register_step_pre_hook(lambda own, args, kwargs: (args, {**kwargs, "max_logits": LOGITS}))
    optimizer.register_step_post_hook(lambda own, args, kwargs: seen.append(kwargs))
    optimizer.step()
    assert seen == [{"max_logits": LOGITS}]


def closure_step(optimizer: TransformOptimizer) -> None:
    logits = {}
    optimizer.step(lambda: logits.update({"": LOGITS}), max_logits=logits)


GIVEN = {"a scaler": scaled_step, "a scheduler": scheduled_step, "a pre-hook": hooked_step, "a closure": closure_step}


@pytest.mark.parametrize("call", GIVEN.values(), ids=GIVEN)
def test_extra_arguments_come_through_what_torch_puts_around_a_step(call) -> None:
    (params, optimizer), (others, other) = (attention(CLIPPED["injected"]()) for _ in range(2))
    optimizer.step(max_logits=LOGITS)
    call(other)
    assert same(bits_of(params), bits_of(others))


def needy(updates, state, params=None, *, value, **extra):
    return updates, state


OWN = GradientTransformation(lambda params: (), needy)
ILL_GIVEN = {
    "missing": (ready(gefen(0.1)), {}, ValueError, "got none, and clip_by_qk reads `max_logits`"),
    "misspelt": (ready(gefen(0.1)), {"max_logit": LOGITS}, ValueError, "got `max_logit`, and clip_by_qk reads"),
    "missing for an own stage": (chain(OWN, sgd(0.1)), {"loss": 1.0}, ValueError, "a stage of your own reads `value`"),
    "missing inside": (MultiSteps(ready(gefen(0.1)), 2), {}, ValueError, "clip_by_qk reads `max_logits`"),
    "one too many": (
        ready(gefen(0.1)),
        {"max_logits": LOGITS, "loss": 1.0},
        TypeError,
        "got `max_logits`, `loss`, and stages that read `max_logits`",
    ),
    "read by none": (gefen(0.1), {"max_logits": LOGITS}, TypeError, "got `max_logits`, and stages that read none"),
}


@pytest.mark.parametrize(("tx", "extra", "error", "text"), ILL_GIVEN.values(), ids=ILL_GIVEN)
def test_a_step_without_what_a_stage_reads_or_with_what_none_does_changes_nothing(tx, extra, error, text) -> None:
    params, optimizer = attention(tx)
    before = bits_of(params) + [x.clone() for x in flat(optimizer)]
    with pytest.raises(error, match=text):
        optimizer.step(**extra)
    assert same(before, bits_of(params) + list(flat(optimizer)))


def test_a_stage_of_your_own_is_given_every_extra_argument() -> None:
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    attention(chain(OWN, GradientTransformation(lambda params: (), update), sgd(0.1)))[1].step(value=1.0, loss=2.0)
    assert seen == [{"value": 1.0, "loss": 2.0}]


def test_a_compiled_step_takes_extra_arguments() -> None:
    heads = {"q_proj.weight": QKHeads("", query=HeadRows(32)), "k_proj.weight": QKHeads("", key=HeadRows(32))}
    rule = inject_hyperparams(lambda learning_rate: chain(adamw(learning_rate), clip_by_qk(1.0, heads)))
    (params, optimizer), (others, other) = (attention(rule(0.1)) for _ in range(2))
    optimizer.step(max_logits=LOGITS)
    torch.compile(lambda logits: other.step(max_logits=logits), fullgraph=True, backend="eager")(LOGITS)
    assert same(bits_of(params), bits_of(others))


def test_state_that_is_kept_away_is_fetched_for_a_step_with_extra_arguments() -> None:
    (params, optimizer), (others, other) = (attention(CLIPPED["injected"]()) for _ in range(2))
    offload(other)
    for own in (optimizer, other):
        own.step(max_logits=LOGITS)
    assert same(bits_of(params), bits_of(others))


def test_a_copy_needs_the_same_extra_arguments() -> None:
    other = copy.deepcopy(attention(ready(gefen(0.1)))[1])
    with pytest.raises(ValueError, match="max_logits"):
        other.step()
    other.step(max_logits=None)
