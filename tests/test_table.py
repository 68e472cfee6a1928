"""One row per optimizer, every property for each row."""

import pytest
import torch

from gefen_fn import (
    Block,
    Dense,
    Factored,
    MultiSteps,
    adam,
    adamw,
    apply_updates,
    flatten_state,
    gefen,
    gefen_muon,
    inject_hyperparams,
    lion,
    masked,
    polynomial_schedule,
    sgd,
    unflatten_state,
)

RAMP = polynomial_schedule(0.8, 0.0, 2, 200)  # the size of an update of Muon does not follow the gradient's
ROWS = {
    "sgd": (sgd, {"learning_rate": 0.2}),
    "sgd with momentum": (sgd, {"learning_rate": 0.05, "momentum": 0.9}),
    "adam": (adam, {"learning_rate": 0.05}),
    "adamw": (adamw, {"learning_rate": 0.05}),
    "lion": (lion, {"learning_rate": 0.03, "b2": 0.9}),
    "gefen": (gefen, {"learning_rate": 0.05}),
    "gefen, fixed codebook": (gefen, {"learning_rate": 0.05, "codebook": "fixed"}),
    "gefen, dense": (gefen, {"learning_rate": 0.05, "second_moment": Dense()}),
    "gefen, block": (gefen, {"learning_rate": 0.05, "second_moment": Block()}),
    "gefen, one tile": (gefen, {"learning_rate": 0.05, "second_moment": Factored()}),
    "gefen_muon": (gefen_muon, {"learning_rate": RAMP}),
    "gefen_muon, dense": (gefen_muon, {"learning_rate": RAMP, "quantize": False, "backup": "adamw"}),
    "gefen_muon, NorMuon": (gefen_muon, {"learning_rate": RAMP, "normuon": "norm_kept", "coeffs": "tuned4"}),
    "gefen_muon, NorMuon's paper": (gefen_muon, {"learning_rate": RAMP, "normuon": "paper", "codebook": "fixed"}),
}
every_row = pytest.mark.parametrize(("factory", "arguments"), ROWS.values(), ids=ROWS)


def params_like(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(64, 72, generator=generator).to(dtype), "b": torch.randn(5, generator=generator).to(dtype)}


def train(tx, params, state, steps, **extra):
    """Steps on the loss `sum (p - 1)^2 / 2`, whose gradient is `p - 1`."""
    for _ in range(steps):
        updates, state = tx.update({k: p - 1 for k, p in params.items()}, state, params, **extra)
        params = apply_updates(params, updates)
    return params, state


def equal(a, b):
    a, b = flatten_state(a), flatten_state(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@every_row
def test_reaches_the_optimum(factory, arguments):
    tx, params = factory(**arguments), params_like()
    params, _ = train(tx, params, tx.init(params), 200)
    assert max((p - 1).abs().max() for p in params.values()) < 0.1


@every_row
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_the_dtypes_and_the_shapes_of_the_state(factory, arguments, dtype):
    tx, params = factory(**arguments), params_like(dtype)
    first = tx.init(params)
    params, last = train(tx, params, first, 2)
    assert all(p.dtype == dtype for p in params.values())
    shapes = [{k: (x.shape, x.dtype) for k, x in flatten_state(s).items()} for s in (first, last)]
    assert shapes[0] == shapes[1]


@every_row
def test_ignores_extra_arguments_and_changes_nothing_it_was_given(factory, arguments):
    tx, params = factory(**arguments), params_like()
    _, state = train(tx, params, tx.init(params), 1)
    before = {k: x.clone() for k, x in flatten_state(state).items()}
    one, two = train(tx, params, state, 1)[0], train(tx, params, state, 1, value=3.0, batch="unused")[0]
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert all(torch.equal(x, before[k]) for k, x in flatten_state(state).items())


@every_row
def test_injected_equals_plain_to_the_bit_f3(factory, arguments):
    plain, injected, params = factory(**arguments), inject_hyperparams(factory)(**arguments), params_like()
    one, two = (train(tx, params, tx.init(params), 5)[0] for tx in (plain, injected))
    assert all(torch.equal(one[k], two[k]) for k in one)


@every_row
def test_accumulating_two_equal_gradients_is_one_step(factory, arguments):
    plain, params = factory(**arguments), params_like()
    twice = MultiSteps(factory(**arguments), 2)
    one, two = train(plain, params, plain.init(params), 1)[0], train(twice, params, twice.init(params), 2)[0]
    assert all(torch.equal(one[k], two[k]) for k in one)


@every_row
def test_masked_leaves_pass_unchanged(factory, arguments):
    tx, params = masked(factory(**arguments), {"w": True, "b": False}), params_like()
    grads = {k: p - 1 for k, p in params.items()}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["b"] is grads["b"] and not torch.equal(updates["w"], grads["w"])


@every_row
def test_a_saved_state_goes_on_to_the_bit_m17(factory, arguments, tmp_path):
    tx, params = factory(**arguments), params_like()
    params, state = train(tx, params, tx.init(params), 3)
    torch.save(flatten_state(state), tmp_path / "state.pt")
    loaded = unflatten_state(torch.load(tmp_path / "state.pt", weights_only=True), tx.init(params))
    assert equal(loaded, state)
    one, two = train(tx, params, state, 2), train(tx, params, loaded, 2)
    assert equal(one[1], two[1]) and all(torch.equal(one[0][k], two[0][k]) for k in params)
