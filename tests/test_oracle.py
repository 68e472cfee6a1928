"""torch.optim is the oracle: SGD to the bit, AdamW step by step from its own state, and over a hundred steps."""

import pytest
import torch

from gefen_fn import adamw, add_decayed_weights, apply_updates, chain, gefen, inject_hyperparams, sgd, tree_set
from gefen_nn import Gefen, TransformOptimizer

# "matrix" is large enough for gefen to quantize it; the other leaves are dense there.
SHAPES = {"matrix": (64, 72), "small": (33, 17), "vector": (5000,), "bias": (7,), "scalar": ()}
DENSE = ("small", "vector", "bias", "scalar")


def drawn(seed):
    draws = torch.Generator().manual_seed(seed)
    return {k: torch.randn(shape, generator=draws) for k, shape in SHAPES.items()}


def parameters(tree):
    return {k: torch.nn.Parameter(x.clone()) for k, x in tree.items()}


def step(optimizer, params, grads):
    for k, p in params.items():
        p.grad = grads[k].clone()
    optimizer.step()


# torch adds products in one rounding, we in two: they agree where the products are exact, at powers of two.
DESCENTS = {
    "plain": ({}, lambda: sgd(0.125)),
    "momentum": ({"momentum": 0.9}, lambda: sgd(0.125, 0.9)),
    "nesterov": ({"momentum": 0.5, "nesterov": True}, lambda: sgd(0.125, 0.5, nesterov=True)),
    "decay": ({"weight_decay": 0.25}, lambda: chain(add_decayed_weights(0.25), sgd(0.125))),
    "momentum and decay": (
        {"momentum": 0.9, "weight_decay": 0.25},
        lambda: chain(add_decayed_weights(0.25), sgd(0.125, 0.9)),
    ),
    "nesterov and decay": (
        {"momentum": 0.5, "nesterov": True, "weight_decay": 0.25},
        lambda: chain(add_decayed_weights(0.25), sgd(0.125, 0.5, nesterov=True)),
    ),
}


@pytest.mark.parametrize(("options", "build"), DESCENTS.values(), ids=DESCENTS)
def test_sgd_follows_torch_to_the_bit(options, build):
    tx, ours = build(), drawn(0)
    state, theirs = tx.init(ours), parameters(ours)
    optimizer = torch.optim.SGD(theirs.values(), lr=0.125, **options)
    for t in range(1, 51):
        grads = drawn(t)
        updates, state = tx.update(grads, state, ours)
        ours = apply_updates(ours, updates)
        step(optimizer, theirs, grads)
        assert all(torch.equal(ours[k], theirs[k]) for k in SHAPES), t


# Learning rate and betas, as torch takes them.
RATES = {"usual": (1e-3, (0.9, 0.999)), "large": (0.1, (0.9, 0.95)), "short memory": (3e-3, (0.5, 0.9))}
rates = pytest.mark.parametrize(("lr", "betas"), RATES.values(), ids=RATES)
RULES = {"adamw": (adamw, tuple(SHAPES)), "gefen, dense leaves": (gefen, DENSE)}
rules = pytest.mark.parametrize(("factory", "leaves"), RULES.values(), ids=RULES)


def torch_adamw(lr, betas):
    """A start, the parameters that torch moves from there, and its optimizer."""
    start = drawn(0)
    theirs = parameters(start)
    return start, theirs, torch.optim.AdamW(theirs.values(), lr, betas, weight_decay=0.1)


def state_of(optimizer, theirs, fresh):
    """`fresh` with the counts and moments of torch's optimizer."""
    names = ("step", "exp_avg", "exp_avg_sq")
    count, mu, nu = ({k: optimizer.state[p][name].clone() for k, p in theirs.items()} for name in names)
    return tree_set(fresh, count={k: t.int() for k, t in count.items()}, mu=mu, nu=nu)


@rules
@rates
def test_a_step_from_the_state_of_torchs_adamw_is_its_next_step(factory, leaves, lr, betas):
    _, theirs, optimizer = torch_adamw(lr, betas)
    theirs = {k: theirs[k] for k in leaves}
    tx = factory(lr, *betas, weight_decay=0.1)
    fresh = tx.init(theirs)
    for t in range(1, 31):
        grads, before, state = drawn(t), {k: p.detach().clone() for k, p in theirs.items()}, fresh
        if t > 1:
            state = state_of(optimizer, theirs, fresh)
        updates, _ = tx.update({k: grads[k] for k in leaves}, state, before)
        ours = apply_updates(before, updates)
        step(optimizer, theirs, grads)
        for k in leaves:
            allowed = (4 * ulp(theirs[k].detach())).clamp(min=1e-5 * lr)
            assert ((ours[k] - theirs[k]).abs() <= allowed).all(), (t, k)


def ulp(x):
    return torch.nextafter(x.abs(), torch.tensor(torch.inf)) - x.abs()


@rules
@rates
def test_a_hundred_steps_stay_with_torchs_adamw(factory, leaves, lr, betas):
    ours, theirs, optimizer = torch_adamw(lr, betas)
    tx = factory(lr, *betas, weight_decay=0.1)
    state = tx.init(ours)
    for t in range(1, 101):
        grads = drawn(t)
        updates, state = tx.update(grads, state, ours)
        ours = apply_updates(ours, updates)
        step(optimizer, theirs, grads)
    for k in leaves:
        assert (ours[k] - theirs[k]).abs().max() <= 2e-2 * lr, k


PRESETS = {
    "Gefen": lambda params, lr, betas: Gefen(params, lr, betas, weight_decay=0.1),
    "TransformOptimizer": lambda params, lr, betas: TransformOptimizer(
        params, inject_hyperparams(adamw)(lr, *betas, weight_decay=0.1)
    ),
}


@pytest.mark.parametrize("build", PRESETS.values(), ids=PRESETS)
@rates
def test_a_hundred_steps_of_a_torch_optimizer_on_tiny_leaves_stay_with_torchs_adamw(build, lr, betas):
    start, theirs, optimizer = torch_adamw(lr, betas)
    ours = {k: p for k, p in parameters(start).items() if k in DENSE}
    preset = build(ours.items(), lr, betas)
    for t in range(1, 101):
        grads = drawn(t)
        step(preset, ours, grads)
        step(optimizer, theirs, grads)
    for k in ours:
        assert (ours[k] - theirs[k]).abs().max() <= 2e-2 * lr, k
