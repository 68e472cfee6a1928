"""bf16 parameters with the bits below them: with 16 they are fp32 weights to the bit, with 8 they have 24 bits."""

import math

import pytest
import torch
from torch import nn
from torch.func import vmap

from gefen_fn import (
    CompensatedState,
    MultiSteps,
    adamw,
    apply_updates,
    chain,
    compensated,
    describe,
    gefen,
    masked,
    partition,
    scale,
    sgd,
)
from gefen_fn.compensate import split, weight_of
from gefen_nn import OptimizerState, TransformOptimizer
from tests.recorded_graph import Graph

BF16 = torch.bfloat16
KINDS = {8: torch.int8, 16: torch.int16}
either = pytest.mark.parametrize("bits", KINDS)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(tx, params, grads, state=None, steps=1):
    state = tx.init(params) if state is None else state
    for step in range(steps):
        updates, state = tx.update(grads(step) if callable(grads) else grads, state, params)
        params = apply_updates(params, updates)
    return params, state


def test_with_16_bits_they_are_the_fp32_weights_to_the_bit():
    start = noise(20, 257).to(BF16)
    grads = lambda step: noise(20, 257, seed=step + 1)  # noqa: E731
    rule = gefen(1e-3, codebook="fixed")
    expected, _ = stepped(rule, start.float(), grads, steps=5)
    p, state = stepped(chain(rule, compensated(16)), start, grads, steps=5)
    assert torch.equal(weight_of(p, state[1].low), expected)
    assert p.dtype == BF16 and (p.float() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_with_8_bits_a_weight_keeps_24():
    w = torch.cat([noise(5000), noise(5000) * 10.0 ** (20 * noise(5000, seed=1)).clamp(-30, 30)])
    p, low = split(w, torch.int8)
    error = (weight_of(p, low) - w).abs() / w.abs()
    assert error.max() <= 2**-16 and error.max() > 2**-18
    assert torch.equal(split(weight_of(p, low), torch.int8)[0], p)


@either
def test_every_bf16_number_and_all_bits_below_it_come_back(bits):
    p = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    normal = p[p.isfinite() & (p.abs() >= torch.finfo(BF16).tiny)]
    ends = 2 ** (bits - 1)
    for value in (-ends, -1, 0, 1, ends - 1):
        low = torch.full(normal.shape, value, dtype=KINDS[bits])
        again, rest = split(weight_of(normal, low), KINDS[bits])
        held = again.isfinite()
        assert torch.equal(again[held], normal[held]) and torch.equal(rest[held], low[held])
    strange = p[~(p.isfinite() & (p.abs() >= torch.finfo(BF16).tiny))]
    full = torch.full(strange.shape, ends - 1, dtype=KINDS[bits])
    assert torch.equal(weight_of(strange, full).nan_to_num(7.0), strange.float().nan_to_num(7.0))


@either
def test_steps_too_small_for_bf16_arrive(bits):
    p = torch.full((300,), 1.5, dtype=BF16)
    lost, _ = stepped(scale(-1.0), p, torch.full((300,), 2e-5), steps=200)
    kept, state = stepped(chain(scale(-1.0), compensated(bits)), p, torch.full((300,), 2e-5), steps=200)
    assert torch.equal(lost, p)
    grid = 2**-15 if bits == 8 else 2e-5  # with 8 bits every step is one unit of the 24th bit
    assert weight_of(kept, state[1].low)[0] == pytest.approx(1.5 - 200 * grid, abs=1e-4)
    assert (kept.float() - weight_of(kept, state[1].low)).abs().max() <= 2**-8


@either
def test_mirrored_gradients_give_mirrored_parameters_and_no_update_changes_nothing(bits):
    p, tx = noise(3000).to(BF16), chain(scale(-1e-4), compensated(bits))
    new, state = stepped(tx, p, noise(3000, seed=1), steps=5)
    mirrored, other = stepped(tx, -p, -noise(3000, seed=1), steps=5)
    assert torch.equal(new, -mirrored) and torch.equal(state[1].low, other[1].low)
    still, after = stepped(tx, new, torch.zeros(3000), state)
    assert torch.equal(still, new) and torch.equal(after[1].low, state[1].low)


@either
def test_the_weight_is_within_half_a_bf16_step_of_its_parameter_even_where_they_nearly_cancel(bits):
    p, tx = noise(2000).to(BF16), compensated(bits)
    u = torch.stack([-p.float() * (1 - 2.0**-20), -p.float(), 1e9 * noise(2000, seed=1), noise(2000, seed=2)])
    p, state = p.expand(4, 2000), CompensatedState(torch.ones(4, 2000, dtype=KINDS[bits]))
    new, state = stepped(tx, p, u, state)
    assert (weight_of(new, state.low) - new.float()).abs().le(2**-8 * new.float().abs()).all()


def test_what_is_not_finite_stays_so():
    p, u = torch.ones(4, dtype=BF16), torch.tensor([math.inf, -math.inf, math.nan, 3.4e38])
    new, state = stepped(compensated(), p, u)
    assert new.tolist()[:2] == [math.inf, -math.inf] and new[2].isnan() and new[3] == math.inf
    assert state.low.tolist() == [0, 0, 0, 0]


def test_other_dtypes_pass_unchanged_and_a_leaf_without_gradient_keeps_its_bits():
    p = {"a": torch.ones(9, dtype=BF16), "b": torch.ones(9), "c": torch.ones(9, dtype=BF16)}
    u = {"a": torch.full((9,), 1e-4), "b": torch.full((9,), 1e-4), "c": None}
    start = compensated().init(p)
    updates, state = compensated().update(u, start, p)
    assert updates["b"] is u["b"] and state.low["b"] is None and updates["c"] is None
    assert state.low["c"] is start.low["c"] and (state.low["a"] != 0).all()
    hiding = masked(compensated(), {"a": False, "b": True, "c": True})
    assert hiding.update(u, hiding.init(p), p)[0]["b"] is u["b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda tx: chain(adamw(5e-5), tx),
        lambda tx: MultiSteps(chain(sgd(1e-4), tx), 2),
        lambda tx: masked(chain(gefen(5e-5, codebook="fixed"), tx), {"a": True, "b": False}),
        lambda tx: partition({"x": chain(gefen(5e-5, codebook="fixed"), tx), "y": sgd(1e-3)}, {"a": "x", "b": "y"}),
    ],
    ids=["adamw", "accumulation", "masked", "partition"],
)
def test_any_optimizer_may_end_in_it(make):
    p = {"a": torch.ones(32, 128, dtype=BF16), "b": torch.ones(7, dtype=BF16)}
    g = {k: x.float() for k, x in p.items()}
    kept, lost = (stepped(make(tx), p, g, steps=60)[0] for tx in (compensated(), scale(1.0)))
    assert torch.equal(lost["a"], p["a"]) and (kept["a"] < 1).all() and kept["a"].dtype == BF16


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64).bfloat16(), nn.LayerNorm(64))
    return model, TransformOptimizer(model.named_parameters(), chain(gefen(1e-4, codebook="fixed"), compensated()))


def take_steps(model, optimizer, first, last):
    for step in range(first, last):
        for n, p in enumerate(model.parameters()):
            p.grad = noise(*p.shape, seed=10 * step + n).to(p.dtype)
        optimizer.step()


def test_the_adapter_resumes_to_the_bit_by_both_kinds_of_checkpoint():
    (whole, straight), (model, optimizer) = network(), network()
    take_steps(whole, straight, 0, 6)
    take_steps(model, optimizer, 0, 3)
    for holder in (lambda optimizer: optimizer, OptimizerState):
        again, resumed = network()
        again.load_state_dict(model.state_dict())
        holder(resumed).load_state_dict(holder(optimizer).state_dict())
        take_steps(again, resumed, 3, 6)
        assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))
        for p, q in zip(whole.parameters(), again.parameters(), strict=True):
            low, again_low = (o.state[x].get("compensated.low") for o, x in ((straight, p), (resumed, q)))
            assert torch.equal(low, again_low) if p.dtype == BF16 else low is again_low is None


def test_describe_shows_the_bits_and_their_bytes():
    params = {"w": torch.empty(64, 128, dtype=BF16, device="meta"), "b": torch.empty(64, device="meta")}
    leaves = {leaf.path: leaf for leaf in describe(chain(sgd(1e-3), compensated()), params).leaves}
    assert leaves["w"].kept == {"low": "int8[64, 128]"} and leaves["w"].bytes == 64 * 128 and not leaves["b"].bytes


def test_an_ensemble_maps_over_it_and_the_host_reads_nothing():
    tx, p, u = compensated(), noise(3, 40, 70).to(BF16), noise(3, 40, 70, seed=1) * 1e-3
    state = CompensatedState(torch.full((3, 40, 70), 5, dtype=torch.int8))
    shown = []
    Graph(lambda: shown.append(tx.update(u, state, p)), [], [])
    updates, low = vmap(lambda u, low, p: tx.update(u, CompensatedState(low), p))(u, state.low, p)
    assert torch.equal(updates, shown[0][0]) and torch.equal(low.low, shown[0][1].low)


def test_a_compiled_step_has_the_bits_of_one_that_is_not():
    p, u = noise(40, 70).to(BF16), noise(40, 70, seed=1) * 1e-3
    tx = compensated()
    state = CompensatedState(torch.full((40, 70), 5, dtype=torch.int8))
    plain, compiled = tx.update(u, state, p), torch.compile(tx.update, backend="aot_eager")(u, state, p)
    assert torch.equal(plain[0], compiled[0]) and torch.equal(plain[1].low, compiled[1].low)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compensated(4), r"`bits` must be one of \(8, 16\): got 4"),
        (lambda: stepped(compensated(), None, torch.ones(3), compensated().init(torch.ones(3))), "compensated reads"),
    ],
    ids=["bits", "no params"],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
