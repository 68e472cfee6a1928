"""Transforms and their combinations: oracles, laws of combination, `None` leaves, vmap, grad and errors."""

from collections import namedtuple

import pytest
import torch

from gefen_fn.adam import scale_by_adam, scale_by_lion
from gefen_fn.base import apply_updates, identity
from gefen_fn.clip import adaptive_grad_clip, clip, clip_by_block_rms, clip_by_global_norm, global_norm
from gefen_fn.combine import chain, masked, named_chain, partition
from gefen_fn.scale import (
    add_decayed_weights,
    ema,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
    zero_nans,
)
from gefen_fn.schedule import linear_schedule
from gefen_fn.tree import StructureError, tree_leaves

Pair = namedtuple("Pair", "w b")
TREES = {
    "dict": lambda a, b: {"w": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "nested": lambda a, b: {"x": [a], "y": (b,)},
    "bare": lambda a, b: a,
}
STATELESS = {
    "scale": lambda: scale(0.5),
    "learning rate": lambda: scale_by_learning_rate(0.1),
    "decay": lambda: add_decayed_weights(0.1),
    "clip": lambda: clip(0.5),
    "global norm": lambda: clip_by_global_norm(0.5),
    "block rms": lambda: clip_by_block_rms(0.5),
    "adaptive": lambda: adaptive_grad_clip(0.1),
    "identity": identity,
}
STATEFUL = {
    "adam": scale_by_adam,
    "nadam": lambda: scale_by_adam(nesterov=True),
    "lion": scale_by_lion,
    "trace": lambda: trace(0.9),
    "nesterov": lambda: trace(0.9, nesterov=True),
    "ema": lambda: ema(0.9),
}
ALL = {
    **STATELESS,
    **STATEFUL,
    "schedule": lambda: scale_by_schedule(linear_schedule(1.0, 0.0, 5)),
    "zero nans": zero_nans,
    "chain": lambda: chain(
        clip_by_global_norm(1.0), scale_by_adam(), add_decayed_weights(0.1), scale_by_learning_rate(0.1)
    ),
    "named": lambda: named_chain(("a", scale_by_adam()), ("b", scale(2.0))),
}
every = pytest.mark.parametrize("build", ALL.values(), ids=ALL)


def run(tx, params, grads, apply=True):
    """Params after the gradients, the last updates and the state."""
    state, updates = tx.init(params), None
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = apply_updates(params, updates) if apply else params
    return params, updates, state


def draw(steps=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"w": torch.randn(3, 5, generator=generator), "b": torch.randn(3, generator=generator)} for _ in range(steps)
    ]


def same(a, b):
    return len(tree_leaves(a)) == len(tree_leaves(b)) and all(
        x is y or torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


ORACLES = {
    "sgd": (torch.optim.SGD, {}, lambda: identity(), 0.0),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, lambda: trace(0.9), 0.0),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, lambda: trace(0.9, nesterov=True), 0.0),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95)}, lambda: scale_by_adam(0.8, 0.95), 0.0),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}, scale_by_adam, 0.1),
}


@pytest.mark.parametrize(("kind", "options", "build", "decay"), ORACLES.values(), ids=ORACLES)
def test_torch_optim_takes_the_same_steps(kind, options, build, decay):
    start, *grads = draw(21)
    ours, _, _ = run(chain(build(), add_decayed_weights(decay), scale_by_learning_rate(0.01)), start, grads)
    theirs = {k: torch.nn.Parameter(p.clone()) for k, p in start.items()}
    optimizer = kind(theirs.values(), lr=0.01, **options)
    for g in grads:
        for k, p in theirs.items():
            p.grad = g[k]
        optimizer.step()
    for k in ours:
        torch.testing.assert_close(ours[k], theirs[k].detach(), rtol=2e-6, atol=2e-7)


def test_nadam_and_lion_follow_their_formulas():
    g1, g2 = torch.tensor([1.0]), torch.tensor([-0.5])
    _, u, _ = run(scale_by_adam(0.9, 0.99, 0.0, nesterov=True), g1, [g1, g2], apply=False)
    m, v = 0.9 * 0.1 - 0.05, 0.99 * 0.01 + 0.01 * 0.25
    ahead = 0.9 * m / (1 - 0.9**3) + 0.1 * -0.5 / (1 - 0.9**2)
    assert u.item() == pytest.approx(ahead / (v / (1 - 0.99**2)) ** 0.5, rel=1e-5)
    _, u, state = run(scale_by_lion(0.5, 0.9), g1, [g1, g2], apply=False)
    assert u.item() == -1.0 and state.mu.item() == pytest.approx(0.9 * 0.1 - 0.05, rel=1e-6)


def test_ema_is_debiased_by_the_leafs_own_count():
    _, u, _ = run(ema(0.9), torch.ones(2), [torch.ones(2)] * 3, apply=False)
    assert torch.allclose(u, torch.ones(2))


def test_a_schedule_starts_at_zero_and_is_taken_everywhere():
    ramp = linear_schedule(0.0, 1.0, 10)
    p, sizes = torch.ones(2), {scale_by_schedule: 0.0, scale_by_learning_rate: 0.0, add_decayed_weights: 1.0}
    for build, at_zero in sizes.items():
        tx = build(ramp)
        first, state = tx.update(p, tx.init(p), p)
        second, state = tx.update(p, state, p)
        assert first.tolist() == [at_zero] * 2 and abs(second[0] - first[0]).item() == pytest.approx(0.1)
        assert state.count.item() == 2


@pytest.mark.parametrize("kind", ["float", "tensor", "schedule", "tree"])
def test_every_form_of_a_learning_rate_gives_the_same_bits(kind):
    g = draw(1)[0]
    lr = 0.1
    exact = torch.tensor(lr, dtype=torch.float64)
    forms = {"float": lr, "tensor": exact, "schedule": lambda count: lr, "tree": {"w": exact, "b": lr}}
    tx = scale_by_learning_rate(forms[kind])
    u, _ = tx.update(g, tx.init(g))
    assert same(u, {k: x * -lr for k, x in g.items()})


def test_tensors_as_hyperparameters_give_the_bits_of_floats():
    start, *grads = draw(5)
    exact = [torch.tensor(h, dtype=torch.float64) for h in (0.9, 0.999, 1e-8, 0.0)]
    assert same(run(scale_by_adam(*exact), start, grads)[0], run(scale_by_adam(), start, grads)[0])
    per_leaf = {"w": exact[0], "b": 0.9}
    assert same(run(scale_by_adam(per_leaf), start, grads)[0], run(scale_by_adam(), start, grads)[0])


def test_chain_is_associative_and_named_chain_agrees():
    start, *grads = draw()
    a, b, c = clip_by_global_norm(1.0), scale_by_adam(), scale_by_learning_rate(0.1)
    flat = run(chain(a, b, c), start, grads)[0]
    assert same(flat, run(chain(chain(a, b), c), start, grads)[0])
    assert same(flat, run(chain(a, chain(b, c)), start, grads)[0])
    out, _, state = run(named_chain(("a", a), ("b", b), ("c", c)), start, grads)
    assert same(flat, out) and list(state) == ["a", "b", "c"]
    assert same(run(chain(), start, grads)[1], grads[-1])


@pytest.mark.parametrize("mask", [{"w": True, "b": False}, lambda p: {"w": True, "b": False}], ids=["tree", "function"])
def test_masked_is_partition_with_identity(mask):
    start, *grads = draw()
    labels = {"w": "on", "b": "off"}
    parts = partition({"on": scale_by_adam(), "off": identity()}, labels)
    one, two = run(masked(scale_by_adam(), mask), start, grads), run(parts, start, grads)
    assert same(one[0], two[0]) and same(one[1], two[1]) and one[1]["b"] is grads[-1]["b"]
    assert tree_leaves(one[2].inner_state.mu["b"]) == [] and same(one[2].inner_state, two[2].inner_states["on"])


def test_masks_and_labels_may_be_prefixes():
    p = {"x": [torch.ones(2), torch.ones(3)], "y": torch.ones(1)}
    _, u, _ = run(masked(scale(2.0), {"x": True, "y": False}), p, [p])
    assert [x[0].item() for x in tree_leaves(u)] == [2.0, 2.0, 1.0]
    _, u, _ = run(partition({0: scale(2.0), 1: scale(3.0)}, lambda q: {"x": 0, "y": 1}), p, [p])
    assert [x[0].item() for x in tree_leaves(u)] == [2.0, 2.0, 3.0]


@every
def test_a_none_leaf_passes_with_the_same_state_tensors(build):
    tx, p = build(), draw(1)[0]
    state = tx.init(p)
    for step in range(2):
        before = state
        u, state = tx.update({"w": p["w"], "b": None}, state, p)
        assert u["b"] is None and u["w"] is not None, step
    fresh = tx.init({"w": p["w"]})
    u_alone, fresh = tx.update({"w": p["w"]}, fresh, {"w": p["w"]})
    u_alone, fresh = tx.update({"w": p["w"]}, fresh, {"w": p["w"]})
    assert torch.equal(u["w"], u_alone["w"])
    kept = {id(x) for x in tree_leaves(before)} & {id(x) for x in tree_leaves(state)}
    of_b = len(tree_leaves(state)) - len(tree_leaves(fresh))
    assert len(kept) >= of_b


@every
@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_any_tree_gives_the_leaves_of_the_dict(build, make):
    g = draw(1)[0]
    a, b = g["w"], g["b"]
    tree = make(a, b)
    reference = {"w": a} if tree is a else g
    by_path = run(build(), tree, [tree, tree])[0]
    expected = run(build(), reference, [reference, reference])[0]
    got = sorted(tree_leaves(by_path), key=lambda x: -x.ndim)
    for x, y in zip(got, sorted(tree_leaves(expected), key=lambda x: -x.ndim), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@every
def test_eight_members_map_as_one_f11(build):
    tx = build()
    many = [draw(3, seed) for seed in range(8)]
    stacked = [{k: torch.stack([m[i][k] for m in many]) for k in ("w", "b")} for i in range(3)]

    def two_steps(p, g1, g2):
        return run(tx, p, [g1, g2])[0]

    together = torch.vmap(two_steps)(*stacked)
    for i, (p, g1, g2) in enumerate(many):
        alone = two_steps(p, g1, g2)
        for k in alone:
            torch.testing.assert_close(together[k][i], alone[k], rtol=1e-6, atol=1e-6)


def test_state_may_be_made_and_kept_by_vmap():
    tx, g = scale_by_adam(), {k: torch.stack([x, x + 1]) for k, x in draw(1)[0].items()}
    state = torch.vmap(tx.init)(g)
    u, state = torch.vmap(lambda g, s: tx.update(g, s))(g, state)
    assert state.count["w"].tolist() == [1, 1] and u["w"].shape == (2, 3, 5)


def test_grad_flows_through_three_steps_of_adam():
    tx = chain(scale_by_adam(eps_root=1e-6), scale_by_learning_rate(0.1))
    target = torch.tensor([0.3, -0.2, 0.5])

    def loss(p, shift):
        return ((p - target - shift) ** 2).sum()

    def meta(shift):
        p = torch.zeros(3)
        state = tx.init(p)
        for _ in range(3):
            u, state = tx.update(torch.func.grad(loss)(p, shift), state, p)
            p = apply_updates(p, u)
        return loss(p, torch.zeros(()))

    slope = torch.func.grad(meta)(torch.tensor(0.01))
    numeric = (meta(torch.tensor(0.02)) - meta(torch.tensor(0.0))) / 0.02
    assert torch.isfinite(slope) and abs(slope - numeric) < 0.05 * abs(numeric) + 1e-3


@pytest.mark.parametrize("build", STATELESS.values(), ids=STATELESS)
def test_stateless_transforms_keep_the_dtype(build):
    p = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    assert run(build(), p, [p])[1]["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("build", STATEFUL.values(), ids=STATEFUL)
def test_fp32_state_makes_fp32_updates(build):
    p = {"w": torch.ones(2, 2, dtype=torch.bfloat16)}
    assert run(build(), p, [p])[1]["w"].dtype == torch.float32


def test_accumulators_are_stored_in_the_dtype_asked_for():
    p = torch.ones(4)
    for tx, field in (
        (trace(0.9, accumulator_dtype=torch.bfloat16), "trace"),
        (scale_by_adam(mu_dtype=torch.bfloat16), "mu"),
    ):
        _, u, state = run(tx, p, [p, p])
        assert getattr(state, field).dtype == torch.bfloat16 and u.dtype == torch.float32


@every
def test_update_compiles_into_one_graph(build):
    tx, g = build(), draw(1)[0]
    state = tx.init(g)
    compiled = torch.compile(tx.update, fullgraph=True, backend="eager")
    u, new = compiled(g, state, g)
    expected, expected_new = tx.update(g, state, g)
    assert same(u, expected) and same(new, expected_new)


@every
def test_init_on_meta_tensors_and_repr(build):
    tx = build()
    state = tx.init({"w": torch.empty(3, 5, device="meta"), "b": None})
    assert all(x.is_meta for x in tree_leaves(state) if x is not None and x.ndim)
    assert repr(tx).endswith(")")


def test_global_norm_clipping_meets_its_bound_and_leaves_small_updates():
    g = draw(1)[0]
    clipped = run(clip_by_global_norm(0.5), g, [g])[1]
    assert global_norm(clipped).item() == pytest.approx(0.5, rel=1e-6)
    assert same(run(clip_by_global_norm(1e3), g, [g])[1], g)
    zero = {"w": torch.zeros(2)}
    assert same(run(clip_by_global_norm(1.0), zero, [zero])[1], zero)


def test_each_clip_bounds_what_it_names():
    g = draw(1)[0]
    assert run(clip(0.25), g, [g])[1]["w"].abs().max() == 0.25
    assert run(clip_by_block_rms(0.1), g, [g])[1]["w"].square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-6)
    p = {"w": torch.ones(3, 5), "b": torch.zeros(3)}
    u, _ = adaptive_grad_clip(0.01).update(g, adaptive_grad_clip(0.01).init(p), p)
    torch.testing.assert_close(u["w"].norm(dim=1), torch.full((3,), 0.01 * 5**0.5))
    assert u["b"].norm().item() == pytest.approx(1e-5, rel=1e-5)


def test_zero_nans_clears_and_reports():
    g = {"w": torch.tensor([1.0, float("nan"), float("inf")]), "b": torch.ones(2)}
    _, u, state = run(zero_nans(), g, [g])
    assert u["w"].tolist() == [1.0, 0.0, float("inf")]
    assert state.found_nan["w"].item() is True and state.found_nan["b"].item() is False


@pytest.mark.parametrize(
    "build", [b for b in ALL.values() if b is not identity], ids=[k for k in ALL if k != "identity"]
)
def test_swapped_arguments_are_refused_f12(build):
    tx, p = build(), {"w": torch.ones(2, 2)}
    with pytest.raises(StructureError, match="got"):
        tx.update(p, p, tx.init(p))


def test_another_tree_or_shape_is_refused():
    tx, p = scale_by_adam(), {"w": torch.ones(2)}
    for wrong in ({"v": torch.ones(2)}, {"w": torch.ones(3)}, {"w": torch.ones(2, dtype=torch.int64)}):
        with pytest.raises(StructureError, match="got"):
            tx.update(wrong, tx.init(p))
    with pytest.raises(StructureError, match="one entry per stage"):
        chain(scale(1.0), scale(1.0)).update(p, chain(scale(1.0)).init(p))


BAD = {
    "b1": (ValueError, lambda: scale_by_adam(1.0)),
    "b2": (ValueError, lambda: scale_by_adam(0.9, -0.1)),
    "eps": (ValueError, lambda: scale_by_adam(eps=-1.0)),
    "eps_root": (ValueError, lambda: scale_by_adam(eps_root=float("nan"))),
    "lion": (ValueError, lambda: scale_by_lion(2.0)),
    "learning rate": (ValueError, lambda: scale_by_learning_rate(-0.1)),
    "weight decay": (ValueError, lambda: add_decayed_weights(-0.1)),
    "trace": (ValueError, lambda: trace(1.0)),
    "ema": (ValueError, lambda: ema(1.5)),
    "max norm": (ValueError, lambda: clip_by_global_norm(0.0)),
    "clip": (ValueError, lambda: clip(-1.0)),
    "no schedule": (TypeError, lambda: scale_by_schedule(0.1)),
    "no transform": (TypeError, lambda: chain(scale)),
    "a list": (TypeError, lambda: chain([scale(1.0)])),
    "names": (ValueError, lambda: named_chain(("a", scale(1.0)), ("a", scale(1.0)))),
    "no params": (
        ValueError,
        lambda: add_decayed_weights(0.1).update(torch.ones(2), add_decayed_weights(0.1).init(None)),
    ),
    "label": (ValueError, lambda: partition({"a": scale(1.0)}, "b").init(torch.ones(2))),
    "mask": (TypeError, lambda: masked(scale(1.0), "yes").init(torch.ones(2))),
}


@pytest.mark.parametrize(("kind", "build"), BAD.values(), ids=BAD)
def test_what_cannot_work_is_refused_by_rule_value_and_fix(kind, build):
    with pytest.raises(kind, match=r"got .*\. [A-Z]"):
        build()


@pytest.mark.parametrize("inner", [add_decayed_weights(0.1), adaptive_grad_clip(0.1)], ids=repr)
def test_a_bare_tensor_may_be_hidden(inner):
    p = torch.ones(3, 4)
    for tx in (masked(inner, False), partition({0: inner, 1: identity()}, 1)):
        assert torch.equal(tx.update(p, tx.init(p), p)[0], p)
