"""bf16 parameters rounded at random: right on average, by path, count and index alone, and only where it is asked."""

import math

import pytest
import torch

from gefen_fn import (
    MultiSteps,
    StochasticRoundingState,
    adamw,
    apply_updates,
    chain,
    gefen,
    masked,
    partition,
    scale,
    sgd,
    stochastic_rounding,
)

BF16 = torch.bfloat16


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(tx, params, grads, state=None, steps=1):
    state = tx.init(params) if state is None else state
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
    return params, state


def test_steps_too_small_for_bf16_arrive_on_average():
    p, tx = torch.ones(20_000, dtype=BF16), chain(scale(-1e-5), stochastic_rounding())
    lost, _ = stepped(scale(-1e-5), p, torch.ones_like(p), steps=50)
    kept, _ = stepped(tx, p, torch.ones_like(p), steps=50)
    gap, share = 2.0**-8, 50 * 1e-5 / 2.0**-8
    assert torch.equal(lost, p)
    assert abs(float(kept.double().mean()) - (1 - 50 * 1e-5)) <= 5 * gap * math.sqrt(share / len(p))


def test_a_parameter_becomes_one_of_its_two_neighbours():
    p, u = noise(5000).to(BF16), noise(5000, seed=1)
    new, _ = stepped(stochastic_rounding(), p, u)
    exact = p.float() + u
    up, down = (torch.nextafter(exact.to(BF16), torch.tensor(end).to(BF16)) for end in (math.inf, -math.inf))
    near = torch.stack([down, exact.to(BF16), up]).float()
    below, above = (near.where(side, math.inf * sign) for side, sign in ((near <= exact, -1), (near >= exact, 1)))
    assert ((new.float() == below.amax(0)) | (new.float() == above.amin(0))).all()


def test_entries_without_an_update_stay_and_the_negated_ones_mirror():
    p, u = noise(3000).to(BF16), noise(3000, seed=1) * 1e-3
    u[::3] = 0
    new, _ = stepped(stochastic_rounding(), p, u)
    mirrored, _ = stepped(stochastic_rounding(), -p, -u)
    assert torch.equal(new[::3], p[::3]) and torch.equal(new, -mirrored) and not torch.equal(new, p)


def test_what_is_not_finite_stays_so():
    p, u = torch.ones(3, dtype=BF16), torch.tensor([math.inf, -math.inf, math.nan])
    new, _ = stepped(stochastic_rounding(), p, u)
    assert new.tolist()[:2] == [math.inf, -math.inf] and new[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_dtypes_pass_unchanged(dtype):
    p, u = noise(300).to(dtype), noise(300, seed=1)
    updates, state = stochastic_rounding().update(u, stochastic_rounding().init(p), p)
    assert updates is u and state.count == 1


def test_replicas_agree_and_leaves_steps_and_codes_draw_differently():
    p = {"a": torch.ones(64, 256, dtype=BF16), "b": torch.ones(64, 256, dtype=BF16)}
    g = {k: noise(64, 256) for k in p}
    tx = chain(gefen(1e-3, codebook="fixed", rounding="stochastic"), stochastic_rounding())
    (ours, _), (theirs, _) = stepped(tx, p, g), stepped(tx, {k: x.clone() for k, x in p.items()}, g)
    assert all(torch.equal(ours[k], theirs[k]) for k in p) and not torch.equal(ours["a"], ours["b"])
    rounding = stochastic_rounding()
    states = [StochasticRoundingState(torch.tensor(t)) for t in (0, 1)]
    draws = [rounding.update(1e-3 * g["a"], state, p["a"])[0] for state in states]
    assert not torch.equal(*draws)


@pytest.mark.parametrize(
    "make",
    [
        lambda tx: chain(adamw(1e-3), tx),
        lambda tx: MultiSteps(chain(sgd(1e-3), tx), 2),
        lambda tx: masked(chain(gefen(1e-3), tx), {"a": True, "b": False}),
        lambda tx: partition({"x": chain(gefen(1e-3), tx), "y": sgd(1e-3)}, {"a": "x", "b": "y"}),
    ],
    ids=["adamw", "accumulation", "masked", "partition"],
)
def test_any_optimizer_may_end_in_it_and_a_leaf_alone_draws_the_same(make):
    p = {"a": torch.ones(64, 128, dtype=BF16), "b": torch.ones(7, dtype=BF16)}
    g = {k: noise(*x.shape) for k, x in p.items()}
    both, plain = (stepped(make(tx), p, g, steps=4)[0] for tx in (stochastic_rounding(), scale(1.0)))
    assert both["a"].dtype == BF16 and not torch.equal(both["a"], plain["a"])
    alone = chain(adamw(1e-3), stochastic_rounding())
    whole, part = stepped(alone, p, g)[0], stepped(alone, {"a": p["a"]}, {"a": g["a"]})[0]
    assert torch.equal(whole["a"], part["a"])


def test_a_leaf_without_gradient_keeps_its_count():
    p = {"a": torch.ones(9, dtype=BF16), "b": torch.ones(9, dtype=BF16)}
    updates, state = stochastic_rounding().update({"a": None, "b": torch.ones(9)}, stochastic_rounding().init(p), p)
    assert updates["a"] is None and (state.count["a"], state.count["b"]) == (0, 1)


def test_parameters_must_be_given():
    with pytest.raises(ValueError, match="stochastic_rounding reads the parameters: got params=None"):
        stochastic_rounding().update(torch.ones(3), stochastic_rounding().init(torch.ones(3)))
