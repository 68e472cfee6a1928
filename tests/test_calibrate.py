"""Codebooks learned before the first step, inside any expression, and learned anew."""

from collections import OrderedDict

import pytest
import torch

from gefen_fn import (
    MultiSteps,
    apply_if_finite,
    calibrate,
    chain,
    clip_by_global_norm,
    dequantize,
    flatten_state,
    gefen,
    gradient_histogram,
    identity,
    inject_hyperparams,
    learn_codebook,
    masked,
    named_chain,
    partition,
    refresh,
    scale_by_gefen,
    trace,
)


def noise(seed=0, power=1):
    generator = torch.Generator().manual_seed(seed)
    return OrderedDict(w=torch.randn(64, 100, generator=generator) ** power, b=torch.randn(7, generator=generator))


EXPRESSIONS = {
    "alone": scale_by_gefen(),
    "chain": chain(trace(0.0), gefen(1e-3)),
    "named chain": named_chain(("clip", clip_by_global_norm(1e9)), ("gefen", gefen(1e-3))),
    "injected": inject_hyperparams(gefen)(1e-3),
    "masked": masked(gefen(1e-3), {"w": True, "b": False}),
    "partition": partition({0: gefen(1e-3), 1: identity()}, OrderedDict(w=0, b=1)),
    "accumulating": MultiSteps(gefen(1e-3), 4),
    "accumulating twice": MultiSteps(MultiSteps(gefen(1e-3), 2), 2),
    "guarded": apply_if_finite(gefen(1e-3), 3),
}


@pytest.mark.parametrize("tx", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_calibrate_learns_the_codebook_and_leaves_all_else(tx):
    params = noise()
    state = tx.init(params)
    before, after = flatten_state(state), flatten_state(calibrate(tx, params, state, params))
    changed = {key.split(".")[-1] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"codebook", "learned"}
    book = next(value for key, value in after.items() if key.endswith("codebook"))
    assert torch.equal(book, learn_codebook(gradient_histogram(params)))


def test_calibrate_in_the_middle_of_an_accumulation_keeps_it():
    tx, g = MultiSteps(gefen(1e-3), 3), noise()
    _, state = tx.update(g, tx.init(g), g)
    learned = calibrate(tx, noise(1), state, g)
    assert learned.mini_step == 1 and torch.equal(learned.acc_grads["w"], state.acc_grads["w"])
    assert flatten_state(learned)["scale_by_gefen.learned"]


def test_refresh_moves_the_codes_to_a_new_codebook_under_the_same_scales():
    tx, g = scale_by_gefen(), noise()
    _, state = tx.update(g, tx.init(g))
    new = refresh(tx, noise(1, power=3), state)
    assert torch.equal(new.codebook, learn_codebook(gradient_histogram(noise(1, power=3))))
    assert torch.equal(new.mu["w"].absmax, state.mu["w"].absmax) and torch.equal(new.nu["w"].row, state.nu["w"].row)
    old_values, new_values = (dequantize(s.mu["w"], s.codebook) for s in (state, new))
    gap = new.codebook.diff().max() / 2 * state.mu["w"].absmax.max()
    assert 0 < (new_values - old_values).abs().max() <= gap


def test_refresh_leaves_a_fixed_codebook_and_a_zero_gradient_alone():
    for tx, g in ((scale_by_gefen(codebook="fixed"), noise()), (scale_by_gefen(), {"w": torch.zeros(64, 100)})):
        state = tx.init(g)
        before, after = flatten_state(state), flatten_state(refresh(tx, g, state))
        assert all(torch.equal(before[key], after[key]) for key in before)
