"""Eight models under torch.vmap take the steps of eight single ones, and every tree works under vmap, grad and compile.

Case f11. What decides from values whether to step, or learns from them, refuses vmap and says so.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gefen_fn import (
    Block,
    Dense,
    Factored,
    GradientTransformation,
    HeadRows,
    MatrixAxes,
    MultiSteps,
    QKHeads,
    adam,
    adamw,
    adaptive_grad_clip,
    add_decayed_weights,
    apply_if_finite,
    apply_updates,
    chain,
    clip,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_qk,
    ema,
    flatten_state,
    gefen,
    gefen_muon,
    identity,
    inject_hyperparams,
    learn_codebook,
    linear_schedule,
    lion,
    masked,
    named_chain,
    partition,
    scale,
    scale_by_adam,
    scale_by_gefen,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_schedule,
    set_to_zero,
    sgd,
    stateless,
    trace,
    unflatten_state,
    zero_nans,
)
from gefen_fn.tree import tree_leaves, tree_map

RAMP = linear_schedule(0.2, 0.05, 3)
GIVEN = learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False)
# Two row tiles and two column tiles of the default policy, ragged blocks; and a dense leaf.
SHAPES = {"w": (272, 300), "b": (5,)}
ONLY_W = {"w": True, "b": False}
MATRIX = {"w": "muon", "b": "gefen"}
PARTS = {"w": MatrixAxes(0, 1, split=(128, 72, 72)), "b": None}


def squared(updates, params):
    return tree_map(lambda u: u * u.abs(), updates)


def root(updates, params):
    return tree_map(torch.sqrt, updates)


def by_name(tx):
    """`tx` with its state as names: hidden leaves hold `None`, which torch.vmap neither takes nor returns."""

    def update(updates, state, params=None, **extra):
        updates, state = tx.update(updates, unflatten_state(state, tx.init(params)), params, **extra)
        return updates, flatten_state(state)

    return GradientTransformation(lambda params: flatten_state(tx.init(params)), update)


def by_extra(tx):
    """`tx` with its logits read off its gradients."""

    def update(updates, state, params=None, **extra):
        return tx.update(updates, state, params, max_logits=20 * updates["w"][:8, 0])

    return GradientTransformation(tx.init, update)


POLICIES = [Dense(), Block(), Factored(), Factored(tile=(128, 256))]
GEFEN = {
    f"scale_by_gefen, {policy}, {drive}, {name} codebook": lambda policy=policy, drive=drive, book=book: scale_by_gefen(
        second_moment=policy, drive=drive, codebook=book
    )
    for policy in POLICIES
    for drive in ("m", "m_hat")
    for name, book in (("fixed", "fixed"), ("given", GIVEN))
}
EXACT = {
    "identity": identity,
    "set_to_zero": set_to_zero,
    "stateless": lambda: stateless(squared),
    "scale": lambda: scale(0.3),
    "scale by a tensor": lambda: scale(torch.tensor(0.3)),
    "scale_by_learning_rate, number": lambda: scale_by_learning_rate(0.3),
    "scale_by_learning_rate, tensor": lambda: scale_by_learning_rate(torch.tensor(0.3)),
    "scale_by_learning_rate, schedule": lambda: scale_by_learning_rate(RAMP),
    "scale_by_schedule": lambda: scale_by_schedule(RAMP),
    "add_decayed_weights": lambda: add_decayed_weights(0.1),
    "add_decayed_weights with a mask": lambda: add_decayed_weights(0.1, ONLY_W),
    "trace": lambda: trace(0.9),
    "trace, nesterov": lambda: trace(0.9, nesterov=True),
    "ema": lambda: ema(0.9),
    "scale_by_adam": scale_by_adam,
    "scale_by_adam, nesterov": lambda: scale_by_adam(nesterov=True),
    "scale_by_lion": scale_by_lion,
    "clip": lambda: clip(0.5),
    "zero_nans": lambda: chain(stateless(root), zero_nans()),
    "inject_hyperparams": lambda: inject_hyperparams(adamw)(RAMP, weight_decay=0.1),
    "masked": lambda: by_name(masked(scale_by_adam(), ONLY_W)),
    "partition": lambda: by_name(
        partition({"x": gefen(0.1, codebook="fixed"), "y": sgd(0.1, 0.9)}, {"w": "x", "b": "y"})
    ),
    "chain": lambda: chain(scale_by_adam(), add_decayed_weights(0.1), scale_by_learning_rate(0.1)),
    "named_chain": lambda: named_chain(("mean", ema(0.9)), ("step", scale(-0.1))),
    "MultiSteps, k = 1": lambda: MultiSteps(adamw(0.1), 1),
    **GEFEN,
    "sgd": lambda: sgd(0.1, 0.9),
    "adam": lambda: adam(0.1),
    "adamw": lambda: adamw(0.1),
    "lion": lambda: lion(0.1),
    "gefen": lambda: gefen(RAMP, weight_decay=0.1, codebook="fixed"),
    "gefen_muon": lambda: by_name(gefen_muon(RAMP, codebook="fixed", param_labels=MATRIX)),
    "gefen_muon, NorMuon of parts": lambda: by_name(
        gefen_muon(0.1, codebook="fixed", normuon="norm_kept", spec=PARTS, param_labels=MATRIX)
    ),
    "clip_by_qk": lambda: by_extra(clip_by_qk(10.0, {"w": QKHeads("", HeadRows(16), HeadRows(16, 128)), "b": None})),
}
# torch chooses the order of its own sums by shape, so these may differ in the last bits.
SUMS = {
    "clip_by_global_norm": lambda: clip_by_global_norm(0.5),
    "clip_by_block_rms": lambda: clip_by_block_rms(0.5),
    "adaptive_grad_clip": lambda: adaptive_grad_clip(0.1),
}
ROWS = {k: (build, {"rtol": 0.0, "atol": 0.0}) for k, build in EXACT.items()} | {
    k: (build, {"rtol": 2e-6, "atol": 1e-7}) for k, build in SUMS.items()
}


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacked(seed):
    """A tree of eight models, different ones for each seed."""
    return {k: drawn((8, *shape), 10 * seed + i) for i, (k, shape) in enumerate(SHAPES.items())}


def member(tree, i):
    return {k: x[i] for k, x in tree.items()}


def three_steps(init, update, add, params, grads):
    """Every update, parameter and state leaf of three steps."""
    state, seen = init(params), []
    for g in grads:
        updates, state = update(g, state, params)
        params = add(params, updates)
        seen.append((updates, params, state))
    return tree_leaves(seen)


@pytest.mark.parametrize(("build", "tolerance"), ROWS.values(), ids=ROWS)
def test_eight_models_under_vmap_equal_eight_single_runs_f11(build, tolerance):
    tx = build()
    params, *grads = (stacked(seed) for seed in range(4))
    together = three_steps(torch.vmap(tx.init), torch.vmap(tx.update), torch.vmap(apply_updates), params, grads)
    for i in range(8):
        alone = three_steps(tx.init, tx.update, apply_updates, member(params, i), [member(g, i) for g in grads])
        for many, one in zip(together, alone, strict=True):
            torch.testing.assert_close(many[i], one, **tolerance)


def test_each_model_may_have_its_own_learning_rate_f11():
    factory, rates = inject_hyperparams(adamw), torch.linspace(0.01, 0.08, 8, dtype=torch.float64)
    params, grads = stacked(0), stacked(1)
    tx = factory(0.1)
    state = torch.vmap(tx.init)(params)
    state.hyperparams["learning_rate"] = rates
    updates, _ = torch.vmap(tx.update)(grads, state, params)
    for i in range(8):
        own = factory(rates[i])
        alone, _ = own.update(member(grads, i), own.init(member(params, i)), member(params, i))
        assert all(torch.equal(updates[k][i], alone[k]) for k in SHAPES)


REFUSED = {
    "a learned codebook": (lambda: gefen(0.1), r'codebook="fixed".*calibrate'),
    "MultiSteps, k = 2": (lambda: MultiSteps(adamw(0.1), 2), r"under torch\.vmap.*every_k_schedule=1"),
    "MultiSteps, k a schedule": (lambda: MultiSteps(adamw(0.1), lambda step: 2), r"under torch\.vmap"),
    "MultiSteps that may skip": (
        lambda: MultiSteps(adamw(0.1), 1, should_skip_update_fn=lambda u, step, p: (u["b"].max() > 9, ())),
        r"under torch\.vmap",
    ),
    "apply_if_finite": (lambda: apply_if_finite(adamw(0.1), 2), r"under torch\.vmap.*zero_nans"),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_reads_values_on_the_host_refuses_vmap_and_says_so(build, reason):
    tx, params = build(), stacked(0)
    state = torch.vmap(tx.init)(params)
    with pytest.raises(RuntimeError, match=reason):
        torch.vmap(tx.update)(stacked(1), state, params)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


TREES = {
    "dict": lambda a, b: {"a": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
    "nested": lambda a, b: {"x": [a], "y": (b,)},
}


def one_step(tree):
    """Parameters after a step in which they are their own gradient."""
    tx = chain(clip_by_global_norm(10.0), gefen(0.1, weight_decay=0.1, codebook="fixed"))
    updates, _ = tx.update(tree, tx.init(tree), tree)
    return apply_updates(tree, updates)


def length(tree):
    return sum(x.square().sum() for x in tree_leaves(one_step(tree)))


def compiled(tree):
    return torch.compile(one_step, fullgraph=True, backend="eager")(tree)


# What a tree goes through, what a dict goes through to the same bits, and the leading axes of their leaves.
UNDER = {
    "vmap": (torch.vmap(one_step), torch.vmap(one_step), (2,)),
    "grad": (torch.func.grad(length), torch.func.grad(length), ()),
    "compile": (compiled, one_step, ()),
}


@pytest.mark.parametrize(("act", "reference", "lead"), UNDER.values(), ids=UNDER)
@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_any_tree_gives_the_leaves_of_a_dict_under_vmap_grad_and_compile(make, act, reference, lead):
    torch._dynamo.reset()
    a, b = drawn((*lead, 64, 72), 0), drawn((*lead, 5), 1)
    tree = make(a, b)
    out, expected = act(tree), reference({"a": a, "b": b})
    assert type(out) is type(tree)
    assert all(torch.equal(x, y) for x, y in zip(tree_leaves(out), tree_leaves(expected), strict=True))


SMOOTH = {
    "adam": lambda: adam(0.1, eps_root=0.01),
    "adam, nesterov": lambda: adam(0.1, eps_root=0.01, nesterov=True),
    "adamw": lambda: adamw(0.1, eps_root=0.01, weight_decay=0.1),
    "injected adamw": lambda: inject_hyperparams(adamw)(RAMP, eps_root=0.01, weight_decay=0.1),
    "chain": lambda: chain(clip_by_global_norm(0.5), trace(0.5), adam(0.1, eps_root=0.01)),
    "partition": lambda: partition({0: adam(0.1, eps_root=0.01), 1: sgd(0.1, 0.9)}, {"w": 0, "b": 1}),
}


@pytest.mark.parametrize("build", SMOOTH.values(), ids=SMOOTH)
def test_grad_through_three_steps_is_the_slope_also_beside_a_zero_gradient(build):
    tx, x, target = build(), drawn((12, 6), 0), drawn((12, 4), 1)
    x[:, 2] = 0  # so row 2 of the matrix never gets a gradient

    def loss(p):
        return (x @ p["w"] + p["b"] - target).square().mean()

    def after(p):
        state = tx.init(p)
        for _ in range(3):
            updates, state = tx.update(torch.func.grad(loss)(p), state, p)
            p = apply_updates(p, updates)
        return loss(p)

    start = {"w": drawn((6, 4), 2), "b": drawn((4,), 3)}
    slopes = torch.func.grad(after)(start)
    assert all(s.isfinite().all() for s in slopes.values())
    along = {"w": drawn((6, 4), 4), "b": drawn((4,), 5)}
    ahead, behind = (after({k: p + h * along[k] for k, p in start.items()}) for h in (2e-3, -2e-3))
    slope = sum((slopes[k] * along[k]).sum() for k in start)
    torch.testing.assert_close(slope, (ahead - behind) / 4e-3, rtol=2e-3, atol=2e-4)
