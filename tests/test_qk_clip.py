"""`clip_by_qk` multiplies the logits of the heads that exceed the threshold, and of no others (case m23)."""

import pytest
import torch

from gefen_fn import (
    EmptyState,
    HeadRows,
    QKHeads,
    StructureError,
    adamw,
    apply_updates,
    calibrate,
    chain,
    clip_by_qk,
    gefen,
    identity,
)
from gefen_nn import TransformOptimizer
from tests.test_bad_input import equal, refuse

HEADS, SIZE, DIM, VALUE = 8, 16, 48, 12
X = torch.randn(5, DIM, generator=torch.Generator().manual_seed(9))


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def split(weight, heads):
    return [weight[n * SIZE : (n + 1) * SIZE] for n in range(heads)]


def logits_of(query, key):
    """`[heads, queries, keys]` of lists of head weights `[size, DIM]`; one key serves several queries in turn."""
    shared = len(query) // len(key)
    return torch.stack([(X @ q.T) @ (X @ key[n // shared].T).T for n, q in enumerate(query)])


def separate(keys):
    params = {
        "q_proj": {"weight": drawn(HEADS * SIZE, DIM, seed=0)},
        "k_proj": {"weight": drawn(keys * SIZE, DIM, seed=1)},
    }
    read = lambda p: logits_of(split(p["q_proj"]["weight"], HEADS), split(p["k_proj"]["weight"], keys))  # noqa: E731
    return params, read, {}


def fused(keys):
    params = {"qkv": {"weight": drawn((HEADS + 2 * keys) * SIZE, DIM, seed=2)}}

    def read(p):
        parts = split(p["qkv"]["weight"], HEADS + 2 * keys)
        return logits_of(parts[:HEADS], parts[HEADS : HEADS + keys])

    return params, read, {"key_heads": keys}


def transposed():
    """GPT-2's: `[in, 3 out]`."""
    params = {"c_attn": {"weight": drawn(DIM, 3 * HEADS * SIZE, seed=3)}}

    def read(p):
        parts = split(p["c_attn"]["weight"].T, 3 * HEADS)
        return logits_of(parts[:HEADS], parts[HEADS : 2 * HEADS])

    heads = QKHeads("attn", HeadRows(SIZE), HeadRows(SIZE, HEADS * SIZE), axis=1)
    return params, read, {"heads": {"attn": {"c_attn": {"weight": heads}}}}


def interleaved():
    """GPT-NeoX's: query, key and value of the first head, then of the second."""
    params = {"query_key_value": {"weight": drawn(3 * HEADS * SIZE, DIM, seed=4)}}

    def read(p):
        parts = split(p["query_key_value"]["weight"], 3 * HEADS)
        return logits_of(parts[0::3], parts[1::3])

    heads = QKHeads("attn", HeadRows(SIZE, 0, 3 * SIZE), HeadRows(SIZE, SIZE, 3 * SIZE))
    return params, read, {"heads": lambda params: {"attn": {"query_key_value": {"weight": heads}}}}


def latent():
    """Multi-head latent attention: 12 rows of a head meet its own keys, 4 one rotary key that all heads share."""
    whole = SIZE + VALUE
    params = {"q_b": drawn(HEADS * SIZE, DIM, seed=5), "kv_b": drawn(HEADS * whole, DIM, seed=6)}
    rotary = drawn(4, DIM, seed=7)

    def read(p):
        query = split(p["q_b"], HEADS)
        key = [torch.cat([p["kv_b"][n * whole : n * whole + 12], rotary]) for n in range(HEADS)]
        return logits_of(query, key)

    heads = {"q_b": QKHeads("attn", query=HeadRows(12, 0, SIZE), rotary=HeadRows(4, 12, SIZE))}
    heads["kv_b"] = QKHeads("attn", key=HeadRows(12, 0, whole))
    return params, read, {"heads": {"attn": heads}}


LAYERS = {
    "multi-head": lambda: separate(HEADS),
    "grouped-query": lambda: separate(2),
    "multi-query": lambda: separate(1),
    "fused": lambda: fused(HEADS),
    "fused grouped-query": lambda: fused(2),
    "transposed": transposed,
    "interleaved": interleaved,
    "latent": latent,
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_only_logits_above_the_threshold_shrink_and_they_to_it_m23(make):
    layer, read, options = make()
    params = {"attn": layer}
    before = read(layer)
    largest = before.amax((1, 2))
    threshold = float(largest.sort().values[HEADS // 2]) * 1.01  # some heads exceed it
    tx = clip_by_qk(threshold, **options)
    zeros = {"attn": torch.utils._pytree.tree_map(torch.zeros_like, layer)}
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits={"attn": largest})
    after = read(apply_updates(params, updates)["attn"])
    factor = torch.where(largest > threshold, threshold / largest, 1.0)
    assert 0 < (factor < 1).sum() < HEADS
    torch.testing.assert_close(after, before * factor[:, None, None], rtol=1e-4, atol=1e-3)


def test_query_and_key_of_a_head_take_the_root_each_m23():
    layer, _, _ = separate(HEADS)
    tx, ones = clip_by_qk(50.0), {"attn": torch.utils._pytree.tree_map(torch.ones_like, layer)}
    largest = torch.full((HEADS,), 10.0)
    largest[3] = 200.0
    updates, _ = tx.update(ones, tx.init({}), {"attn": layer}, max_logits={"attn": largest})
    for name in ("q_proj", "k_proj"):
        moved = apply_updates({"attn": layer}, updates)["attn"][name]["weight"]
        torch.testing.assert_close(split(moved, HEADS)[3], 0.5 * (split(layer[name]["weight"], HEADS)[3] + 1))
        others = torch.arange(HEADS).repeat_interleave(SIZE) != 3
        assert torch.equal(updates["attn"][name]["weight"][others], ones["attn"][name]["weight"][others])


def test_biases_shrink_with_their_weights_and_values_stay():
    names = {
        "q_proj": {"weight": drawn(32, 8, seed=0), "bias": drawn(32, seed=1)},
        "k_proj": {"weight": drawn(32, 8, seed=2)},
    }
    params = {"0": {"self_attn": {**names, "v_proj": {"weight": drawn(32, 8, seed=3)}}}}
    zeros = torch.utils._pytree.tree_map(torch.zeros_like, params)
    tx = clip_by_qk(1.0)
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits={"0.self_attn": torch.tensor([4.0, 4.0])})
    new = apply_updates(params, updates)["0"]["self_attn"]
    torch.testing.assert_close(new["q_proj"]["bias"], 0.5 * names["q_proj"]["bias"])
    assert torch.equal(new["v_proj"]["weight"], params["0"]["self_attn"]["v_proj"]["weight"])


@pytest.mark.parametrize("measured", [None, {"attn": torch.tensor([1.0, float("inf"), float("nan"), -5.0])}])
def test_nothing_measured_and_nothing_above_the_threshold_change_no_bit(measured):
    params = {"attn": {"q": drawn(8, 8, seed=0), "k": drawn(8, 8, seed=1)}}
    tx, grads = clip_by_qk(2.0), {"attn": {"q": drawn(8, 8, seed=2), "k": None}}
    updates, _ = tx.update(grads, tx.init(params), params, max_logits=measured)
    assert torch.equal(updates["attn"]["q"], grads["attn"]["q"]) and updates["attn"]["k"] is None


def test_it_clips_what_the_stages_before_it_would_have_made_of_the_weights():
    params = {"attn": {"q": drawn(64, 72, seed=0).bfloat16(), "k": drawn(64, 72, seed=1).bfloat16()}}
    plain, clipped = gefen(0.1), chain(gefen(0.1), clip_by_qk(1.0))
    grads = {"attn": {name: drawn(64, 72, seed=5) for name in "qk"}}
    target = apply_updates(
        {"attn": {k: p.float() for k, p in params["attn"].items()}}, plain.update(grads, plain.init(params), params)[0]
    )
    updates, _ = clipped.update(grads, clipped.init(params), params, max_logits=torch.tensor([4.0, 0.5]))
    new = apply_updates(params, updates)["attn"]["q"].float()
    torch.testing.assert_close(new[:32], (target["attn"]["q"][:32] * 0.5).bfloat16().float(), rtol=2**-7, atol=0)
    assert torch.equal(new[32:], target["attn"]["q"][32:].bfloat16().float())


def test_codebooks_can_be_calibrated_through_it():
    params = {"attn": {"q": drawn(64, 72, seed=0), "k": drawn(64, 72, seed=1)}}
    tx = chain(gefen(0.1), clip_by_qk())
    assert calibrate(tx, params, tx.init(params), params)[0][0].learned


BAD = {
    "no logits": ({}, {}, ValueError, "max_logits"),
    "no params": ({"params": None, "max_logits": None}, {}, ValueError, "params=None"),
    "another name": ({"max_logits": {"attm": torch.ones(8)}}, {}, StructureError, "attm"),
    "heads that do not divide the rows": ({"max_logits": {"attn": torch.ones(7)}}, {}, StructureError, "7 heads"),
    "rows that are not there": (
        {"max_logits": {"attn": torch.ones(16)}},
        {"heads": {"attn": QKHeads("attn", query=HeadRows(16))}},
        StructureError,
        "128 rows",
    ),
    "a trace by names": ({"max_logits": {"attn": torch.ones(8)}}, {}, RuntimeError, "QKHeads"),
}


@pytest.mark.parametrize(("given", "options", "error", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_the_reason(given, options, error, says, monkeypatch):
    if error is RuntimeError:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    params = {"attn": separate(HEADS)[0]}
    tx = clip_by_qk(**options)
    with pytest.raises(error, match=says):
        tx.update(params, tx.init(params), given.pop("params", params) if "params" in given else params, **given)


NO_LOGITS = {
    "text": (TypeError, "x"),
    "number": (TypeError, 5.0),
    "list": (TypeError, [1.0, 2.0]),
    "list in a dict": (TypeError, {"attn": [1.0, 2.0]}),
    "None in a dict": (TypeError, {"attn": None}),
    "layers by number": (TypeError, {0: torch.ones(8)}),
    "one per head and query": (StructureError, {"attn": torch.ones(4, 4)}),
    "one of all": (StructureError, {"attn": torch.tensor(1.0)}),
    "empty": (StructureError, {"attn": torch.ones(0)}),
    "meta": (StructureError, {"attn": torch.ones(8, device="meta")}),
    "sparse": (StructureError, {"attn": torch.ones(8).to_sparse()}),
    "complex": (StructureError, {"attn": torch.ones(8).cfloat()}),
    "bool": (StructureError, {"attn": torch.ones(8, dtype=torch.bool)}),
}


@pytest.mark.parametrize(("error", "given"), NO_LOGITS.values(), ids=NO_LOGITS)
def test_what_are_no_logits_is_refused_before_anything_changes(error, given):
    params = {f"attn.{name}.weight": torch.nn.Parameter(p["weight"]) for name, p in separate(HEADS)[0].items()}
    before = [p.detach().clone() for p in params.values()]
    optimizer = TransformOptimizer(params.items(), chain(gefen(0.1), clip_by_qk()))
    for p in params.values():
        p.grad = torch.ones_like(p)
    state = optimizer.state_tree()
    refuse(error, lambda: optimizer.step(max_logits=given), "`max_logits` must be")
    assert all(map(torch.equal, before, params.values())) and equal(state, optimizer.state_tree())


THRESHOLDS = {"least": 5e-324, "a tensor of 0": torch.tensor(0.0), "below 0": torch.tensor(-1.0)}
THRESHOLDS |= {"NaN": torch.tensor(float("nan"))}


@pytest.mark.parametrize("threshold", THRESHOLDS.values(), ids=THRESHOLDS)
def test_weights_stay_finite_whatever_the_logits_and_a_threshold_that_is_not_read(threshold):
    params = {"attn": separate(4)[0]}
    logits = torch.tensor([1e308, -1e308, float("nan"), float("inf")], dtype=torch.float64).repeat(2)
    updates, _ = clip_by_qk(threshold).update(params, EmptyState(), params, max_logits={"attn": logits})
    assert all(u["weight"].isfinite().all() for u in updates["attn"].values())


@pytest.mark.parametrize("heads", ["2", 0, 2.0, True])
def test_key_heads_is_an_int_of_at_least_1(heads):
    refuse(ValueError, lambda: clip_by_qk(key_heads=heads), "`key_heads`")


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_a_threshold_is_above_zero(threshold):
    with pytest.raises(ValueError, match="threshold > 0"):
        clip_by_qk(threshold)


def test_it_compiles_with_a_tree_of_heads():
    params = {"q": drawn(32, 16, seed=0), "k": drawn(32, 16, seed=1)}
    tx = chain(identity(), clip_by_qk(1.0, {"q": QKHeads("", query=HeadRows(16)), "k": QKHeads("", key=HeadRows(16))}))
    step = torch.compile(tx.update, fullgraph=True, backend="eager")
    logits, state = torch.tensor([4.0, 0.5]), tx.init(params)
    compiled, plain = (f(params, state, params, max_logits=logits)[0] for f in (step, tx.update))
    assert all(torch.equal(compiled[k], plain[k]) for k in params)


def test_adamw_with_a_threshold_never_reached_is_adamw():
    params, grads = ({"q": drawn(8, 8, seed=s), "k": drawn(8, 8, seed=s + 1)} for s in (0, 2))
    plain, clipped = adamw(0.1), chain(adamw(0.1), clip_by_qk(100.0))
    one = plain.update(grads, plain.init(params), params)[0]
    two = clipped.update(grads, clipped.init(params), params, max_logits=torch.full((2,), 99.0))[0]
    assert all(torch.equal(one[k], two[k]) for k in params)
