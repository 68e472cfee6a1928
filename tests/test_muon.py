"""Muon as a transform: torch.optim.Muon is the oracle; its momentum in 8 bits, NorMuon, conventions, whole models."""

import gc
import math

import pytest
import torch

from gefen_fn import (
    MatrixAxes,
    StructureError,
    apply_if_finite,
    apply_updates,
    calibrate,
    constant_schedule,
    dequantize,
    flatten_state,
    fuse,
    gefen_muon,
    inject_hyperparams,
    linear_schedule,
    muon,
    orthogonalize,
    quantize,
    refresh,
    scale_by_muon,
    state_bytes,
)
from gefen_kernels import newton_schulz

# A square, both orientations, sides that are no multiple of anything, and one whose momentum is dense.
SHAPES = {"square": (64, 64), "tall": (128, 32), "wide": (48, 128), "odd": (71, 73), "small": (33, 70)}


def drawn(seed, shapes=SHAPES):
    draws = torch.Generator().manual_seed(seed)
    return {k: torch.randn(shape, generator=draws) for k, shape in shapes.items()}


def gradients(step):
    """A constant drift under noise."""
    return {k: x + 0.3 * d for (k, x), d in zip(drawn(step).items(), drawn(999).values(), strict=True)}


def both(tx, steps, gradient, lr, **options):
    """Parameters after steps of ours and of torch's, and before."""
    first = drawn(0)
    params, theirs = first, {k: torch.nn.Parameter(p.clone()) for k, p in first.items()}
    state, optimizer = tx.init(params), torch.optim.Muon(theirs.values(), lr=lr, **options)
    for t in range(1, steps + 1):
        grads = gradient(t)
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
        for k, p in theirs.items():
            p.grad = grads[k].clone()
        optimizer.step()
    return params, {k: p.detach() for k, p in theirs.items()}, first


@pytest.mark.parametrize("scale", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_fifty_dense_steps_move_as_torchs_muon(scale, nesterov):
    tx = muon(0.02, nesterov=nesterov, quantize=False, adjust=scale)
    options = {"weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov, "adjust_lr_fn": scale}
    ours, theirs, first = both(tx, 50, gradients, 0.02, **options)
    for k in SHAPES:
        assert (ours[k] - theirs[k]).norm() < 0.01 * (theirs[k] - first[k]).norm()


def signs(step):
    """Entries -1, 0 and 1: with momentum 0.5 every sum is exact for some twenty steps, in any order."""
    draws = torch.Generator().manual_seed(step)
    return {k: torch.randint(-1, 2, shape, generator=draws).float() for k, shape in SHAPES.items()}


EXACT = {"no momentum": (0.0, 50, gradients), "momentum": (0.5, 20, signs)}


@pytest.mark.parametrize(("momentum", "steps", "gradient"), EXACT.values(), ids=EXACT)
def test_dense_steps_are_torchs_to_the_bit_with_its_norm_rounded_to_bf16(momentum, steps, gradient, monkeypatch):
    norm = newton_schulz.frobenius_norm
    monkeypatch.setattr(newton_schulz, "frobenius_norm", lambda x: norm(x).bfloat16().float())
    monkeypatch.setenv("GEFEN_REFERENCE", "1")  # loops take their own norm
    # torch adds products in one rounding, we in two: they agree where the products are exact, at powers of two.
    tx = muon(2**-6, momentum, weight_decay=0.0, quantize=False)
    ours, theirs, _ = both(tx, steps, gradient, 2**-6, weight_decay=0.0, momentum=momentum)
    assert all(torch.equal(ours[k], theirs[k]) for k in SHAPES)


def test_fifty_quantized_steps_move_as_dense_ones():
    ours, theirs, first = both(muon(0.02), 50, gradients, 0.02, weight_decay=0.1)
    for k in SHAPES:
        assert (ours[k] - theirs[k]).norm() < 0.015 * (theirs[k] - first[k]).norm()


MOMENTA = {
    "ema": ("ema", lambda m, g, t: (0.9 * m + 0.1 * g, lambda m: 0.9 * m + 0.1 * g)),
    "sum": ("sum", lambda m, g, t: (0.9 * m + g, lambda m: 0.9 * m + g)),
    "nadam": (
        "nadam",
        lambda m, g, t: (
            0.9 * m + 0.1 * g,
            lambda m: 0.9 * m / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t),
        ),
    ),
}


@pytest.mark.parametrize(("convention", "formula"), MOMENTA.values(), ids=MOMENTA)
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "dense"])
def test_the_direction_is_the_orthogonal_factor_of_the_stored_momentum(convention, formula, nesterov, quantized):
    tx = scale_by_muon(0.9, nesterov, quantize=quantized, codebook="fixed", convention=convention)
    state, m = tx.init(drawn(0)), {k: torch.zeros(shape) for k, shape in SHAPES.items()}
    for t in range(1, 4):
        grads = drawn(t)
        updates, state = tx.update(grads, state)
        for k, g in grads.items():
            m[k], ahead = formula(m[k], g, t)
            if quantized and m[k].numel() >= 4096:
                m[k] = dequantize(quantize(m[k], state.codebook), state.codebook)
            last = m[k] / (1 - 0.9**t) if convention == "nadam" else m[k]
            expected = orthogonalize(ahead(m[k]) if nesterov else last).float()
            assert (updates[k] - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("form", ["norm_kept", "paper"])
def test_normuon_divides_rows_by_their_running_size_and_keeps_the_norm(form):
    plain, tx = scale_by_muon(quantize=False), scale_by_muon(quantize=False, normuon=form)
    first, second = plain.init(drawn(0)), tx.init(drawn(0))
    v = {k: torch.zeros(shape[0], 1, dtype=torch.float64) for k, shape in SHAPES.items()}
    for t in range(1, 5):
        grads = {k: g * torch.linspace(0.1, 3, len(g))[:, None] for k, g in drawn(t).items()}
        flat, first = plain.update(grads, first)
        updates, second = tx.update(grads, second)
        for k, o in flat.items():
            o = o.double()
            v[k] = 0.95 * v[k] + 0.05 * o.square().mean(1, keepdim=True)
            scaled = o / ((v[k] / (1 - 0.95**t) if form == "norm_kept" else v[k]).sqrt() + 1e-8)
            norm = o.norm() if form == "norm_kept" else 0.2 * math.sqrt(o.numel())
            torch.testing.assert_close(updates[k].double(), scaled * norm / scaled.norm(), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(second.nu[k].double(), v[k], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"quantize": False}, {"normuon": "norm_kept"}, {"convention": "nadam"}], ids=str
)
def test_the_negated_gradients_give_the_negated_updates_to_the_bit(options):
    tx = scale_by_muon(**options)
    states = [tx.init(drawn(0))] * 2
    for t in range(1, 4):
        grads = drawn(t)
        (one, first), (two, second) = (
            tx.update(grads, states[0]),
            tx.update({k: -g for k, g in grads.items()}, states[1]),
        )
        states = [first, second]
        assert all(torch.equal(one[k], -two[k]) for k in SHAPES)


def test_a_zero_gradient_gives_zero_and_leaves_the_codebook_to_learn():
    tx, zeros = scale_by_muon(normuon="norm_kept"), {k: torch.zeros(shape) for k, shape in SHAPES.items()}
    updates, state = tx.update(zeros, tx.init(zeros))
    assert not state.learned and all(not u.any() for u in updates.values())
    _, state = tx.update(drawn(1), state)
    assert state.learned


def test_a_leaf_without_gradient_keeps_its_state_as_the_same_tensors_m4():
    tx = gefen_muon(0.1, normuon="norm_kept", weight_decay=0.1)
    params = drawn(0)
    first = tx.init(params)
    assert {key.split(".")[2] for key in flatten_state(first) if ".mu." in key} == set(SHAPES)
    grads = {**drawn(1), "tall": None}
    updates, state = tx.update(grads, first, params)
    assert updates["tall"] is None and updates["wide"] is not None
    before, after = flatten_state(first), flatten_state(state)
    for key in before:
        assert (after[key] is before[key]) == (".tall" in key or key.startswith("scale_by_gefen"))
    assert (
        int(state.inner_states["muon"][0].count["tall"]) == 0 and int(state.inner_states["muon"][0].count["wide"]) == 1
    )


def test_a_skipped_overflow_leaves_all_state_alone_m7():
    tx, params = apply_if_finite(gefen_muon(0.1), 10), drawn(0)
    _, state = tx.update(drawn(1), tx.init(params), params)
    bad = {**drawn(2), "tall": torch.full(SHAPES["tall"], float("inf"))}
    updates, after = tx.update(bad, state, params)
    assert all(not u.any() for u in updates.values())
    old, new = flatten_state(state.inner_state), flatten_state(after.inner_state)
    assert all(torch.equal(old[key], new[key]) for key in old)
    good, _ = tx.update(drawn(3), after, params)
    assert all(u.isfinite().all() for u in good.values())


def live_tensors():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def test_twenty_steps_leave_no_more_tensors_than_two_m19():
    tx, params = gefen_muon(0.1, normuon="norm_kept"), drawn(0)
    step, state, grads = fuse(tx), tx.init(params), drawn(1)
    held = []
    for t in range(20):
        _, state = tx.update(grads, state, params)
        state = step(grads, state, params)
        if t in (1, 19):
            held.append(live_tensors())
    assert held[0] == held[1]


LLAMA = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
LLAMA |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}


@pytest.mark.parametrize("normuon", [False, "norm_kept"])
def test_the_state_of_llama_3_8b_takes_one_byte_per_parameter(normuon):
    params = {f"{n}.{k}": torch.empty(shape, device="meta") for n in range(32) for k, shape in LLAMA.items()}
    size = sum(p.numel() for p in params.values())
    assert state_bytes(muon(1e-3, normuon=normuon).init(params)) <= 1.02 * size


def test_a_codebook_is_calibrated_and_refreshed_as_gefens_is():
    tx, params = gefen_muon(0.1), {**drawn(0), "embed": torch.randn(300, 64)}
    first = tx.init(params)
    state = calibrate(tx, params, first, params)
    book = state.inner_states["muon"][0].codebook
    assert state.inner_states["muon"][0].learned and state.inner_states["gefen"][0].learned
    _, state = tx.update(params, state, params)
    assert torch.equal(state.inner_states["muon"][0].codebook, book)
    cubes = {k: p**3 for k, p in params.items()}
    old, new = state.inner_states["muon"][0], refresh(tx, cubes, state, params).inner_states["muon"][0]
    assert not torch.equal(new.codebook, book) and torch.equal(new.mu["wide"].absmax, old.mu["wide"].absmax)
    values = [dequantize(part.mu, part.codebook)["wide"] for part in (old, new)]
    assert (values[0] - values[1]).norm() < 0.02 * values[0].norm()


def whole_model():
    return {"layers": {"w": torch.randn(64, 96), "b": torch.randn(64)}, "embed": torch.randn(100, 64)}


@pytest.mark.parametrize("fused", [False, True])
def test_a_codebook_is_learned_from_the_blocks_that_a_spec_gives(fused):
    torch.manual_seed(0)
    g, books = torch.randn(4, 64, 64) * torch.logspace(0, 1, 64), []
    for x, axes in ((g, MatrixAxes(0, (1, 2))), (g.flatten(1), MatrixAxes(0, 1))):
        tx, params = muon(0.1, spec=axes), {"w": torch.zeros_like(x)}
        state = tx.init(params)
        state = fuse(tx)({"w": x}, state, params) if fused else tx.update({"w": x}, state, params)[1]
        books.append(state[0].codebook)
    assert torch.equal(*books)


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
def test_matrices_are_muons_and_the_rest_the_backups(backup):
    params = whole_model()
    tx = gefen_muon(0.01, backup=backup, weight_decay=0.1)
    updates, state = tx.update(params, tx.init(params), params)
    own = muon(0.01, weight_decay=0.1, adjust="match_rms_adamw")
    alone, _ = own.update(params["layers"]["w"], own.init(params["layers"]["w"]), params["layers"]["w"])
    assert torch.equal(updates["layers"]["w"], alone)
    assert set(state.inner_states) == {"muon", backup}
    # At the first step the backup moves each entry by the learning rate; so does Muon's update in root mean square.
    for u, p in ((updates["layers"]["b"], params["layers"]["b"]), (updates["embed"], params["embed"])):
        assert 0.9 < (u + 0.001 * p).square().mean().sqrt() / 0.01 < 1.1
    assert 0.1 < (updates["layers"]["w"] + 0.001 * params["layers"]["w"]).square().mean().sqrt() / 0.01 < 0.3


def test_both_parts_follow_their_schedules_in_one_ratio():
    rate, params = linear_schedule(0.1, 0.02, 4), whole_model()
    one, ten = gefen_muon(rate), gefen_muon(rate, muon_learning_rate=lambda count: 10 * rate(count))
    states = one.init(params), ten.init(params)
    for _ in range(3):
        (u, first), (v, second) = one.update(params, states[0], params), ten.update(params, states[1], params)
        states = first, second
        assert torch.equal(u["embed"], v["embed"]) and torch.equal(u["layers"]["b"], v["layers"]["b"])
        torch.testing.assert_close(v["layers"]["w"], 10 * u["layers"]["w"])


def test_an_injected_rate_of_the_whole_drives_both_parts_and_one_of_muon_its_own():
    params = whole_model()
    for given, follows in (({}, True), ({"muon_learning_rate": 0.1}, False)):
        tx = inject_hyperparams(gefen_muon)(0.1, **given)
        state = tx.init(params)
        assert tx.update.hyperparams[0] == "learning_rate" and ("muon_learning_rate" in state.hyperparams) != follows
        before, _ = tx.update(params, state, params)
        after, _ = tx.update(params, state._replace(hyperparams={**state.hyperparams, "learning_rate": 0.2}), params)
        torch.testing.assert_close(after["embed"], 2 * before["embed"])
        torch.testing.assert_close(after["layers"]["w"], (2 if follows else 1) * before["layers"]["w"])


def test_the_backup_alone_is_allowed_only_when_asked_for_m6():
    params = {"bias": torch.randn(64), "embed": torch.randn(100, 64)}
    with pytest.raises(ValueError, match=r"at least one matrix.*`bias`: fewer than 2 axes.*`embed`: an embedding"):
        gefen_muon(0.1).init(params)
    with pytest.raises(ValueError, match="labelled otherwise"):
        gefen_muon(0.1, param_labels=lambda p: {k: "gefen" for k in p}).init({"w": torch.randn(64, 64)})
    tx = gefen_muon(0.1, require_muon=False)
    assert tx.update(params, tx.init(params), params)[0]["bias"].any()


BAD = {
    "a decay of 1": (ValueError, "0 <= momentum < 1", lambda: muon(0.1, momentum=1.0)),
    "a negative eps": (ValueError, "0 <= eps", lambda: muon(0.1, eps=-1.0)),
    "an unknown convention": (ValueError, r"`convention`.*'sum'", lambda: muon(0.1, convention="heavy")),
    "an unknown NorMuon": (ValueError, r"`normuon`.*'norm_kept', 'paper'", lambda: muon(0.1, normuon=True)),
    "unknown coefficients": (ValueError, r"`coeffs`.*tuned3", lambda: muon(0.1, coeffs="tuned5")),
    "no block": (ValueError, "`block`", lambda: muon(0.1, block=0)),
    "no codebook": (ValueError, "`codebook`", lambda: muon(0.1, codebook="learnt")),
    "an unknown backup": (ValueError, r"`backup`.*'adamw'", lambda: gefen_muon(0.1, backup="sgd")),
    "one schedule": (
        ValueError,
        "Both learning rates.*constant_schedule",
        lambda: gefen_muon(constant_schedule(0.1), muon_learning_rate=0.1),
    ),
    "a label of no part": (
        ValueError,
        "Every label",
        lambda: gefen_muon(0.1, param_labels={"w": "adam"}, require_muon=False).init({"w": torch.randn(64, 64)}),
    ),
    "an integer": (StructureError, "floating", lambda: muon(0.1).init({"w": torch.ones(64, 64).int()})),
    "the state of another rule": (
        StructureError,
        "must fit its gradient",
        lambda: muon(0.1).update(
            {"w": torch.ones(64, 64)}, muon(0.1, quantize=False).init({"w": torch.ones(64, 64)}), {}
        ),
    ),
    "a state of other transforms": (
        StructureError,
        "ScaleByMuonState",
        lambda: scale_by_muon().update({"w": torch.ones(64, 64)}, (), {}),
    ),
}


@pytest.mark.parametrize(("error", "says", "do"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_the_reason(error, says, do):
    with pytest.raises(error, match=says):
        do()


def test_the_expression_is_its_own_text():
    text = repr(muon(0.1, spec=MatrixAxes(0, 1)))
    assert "scale_by_muon(momentum=0.95" in text and "scale_by_matrix_shape('original'" in text
    assert repr(gefen_muon(0.1)).startswith("partition({'muon': chain(scale_by_muon(")
