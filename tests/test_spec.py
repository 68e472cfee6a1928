"""Which axes of a leaf are its matrices: a split leaf is several parameters, and no matrix is refused by name."""

import math

import pytest
import torch

from gefen_fn import (
    MatrixAxes,
    StructureError,
    adjust_scale,
    apply_updates,
    describe,
    flatten_state,
    gefen_muon,
    muon,
    muon_labels,
    scale_by_matrix_shape,
    scale_by_muon,
)
from gefen_fn.spec import default_axes, matrices_of, not_muon_reason


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Shape, spec (None: the default), and the sides of its matrices with how many there are of each.
VIEWS = {
    "matrix": ((64, 96), None, [(1, 64, 96)]),
    "experts": ((4, 64, 96), None, [(4, 64, 96)]),
    "convolution": ((64, 32, 3, 3), None, [(1, 64, 288)]),
    "one-dimensional convolution": ((64, 48, 3), None, [(1, 64, 144)]),
    "convolution, a matrix per place": ((64, 32, 3, 3), MatrixAxes(0, 1), [(9, 64, 32)]),
    "stored as in by out": ((64, 96), MatrixAxes(1, 0), [(1, 96, 64)]),
    "heads apart": ((4, 32, 96), MatrixAxes(-2, -1), [(4, 32, 96)]),
    "heads merged": ((4, 32, 96), MatrixAxes((0, 1), 2), [(1, 128, 96)]),
    "heads in the middle": ((96, 4, 32), MatrixAxes(0, 2), [(4, 96, 32)]),
    "fused": ((256, 96), MatrixAxes(0, 1, split=(128, 64, 64)), [(1, 128, 96), (1, 64, 96), (1, 64, 96)]),
    "fused experts": ((3, 128, 64), MatrixAxes(1, 2, split=(64, 64)), [(3, 64, 64), (3, 64, 64)]),
    "one row": ((1, 96), MatrixAxes(0, 1), [(1, 1, 96)]),
    "one column": ((96, 1), MatrixAxes(0, 1), [(1, 96, 1)]),
}
every_view = pytest.mark.parametrize(("shape", "axes", "parts"), VIEWS.values(), ids=VIEWS)


@every_view
def test_the_matrices_of_a_leaf_are_these_and_make_it_again_m9(shape, axes, parts):
    seen, x = matrices_of(shape, axes or default_axes(shape)), drawn(*shape)
    views = seen.parts(x)
    assert [(math.prod(v.shape[:-2]), *v.shape[-2:]) for v in views] == parts
    assert seen.sizes == [part[1:] for part in parts]
    assert torch.equal(seen.join(views), x) and seen.join(views).is_contiguous()


@every_view
def test_the_update_of_a_leaf_is_that_of_its_matrices_alone_to_the_bit_m9_m12_m13(shape, axes, parts):
    seen = matrices_of(shape, axes or default_axes(shape))
    tx, one = (
        muon(0.1, quantize=False, weight_decay=0.0, spec=axes),
        muon(0.1, quantize=False, weight_decay=0.0, spec=MatrixAxes(-2, -1)),
    )
    grads = {"w": drawn(*shape)}
    apart = {str(i): x.contiguous() for i, x in enumerate(seen.parts(grads["w"]))}
    whole, _ = tx.update(grads, tx.init(grads), grads)
    updates, _ = one.update(apart, one.init(apart), apart)
    assert torch.equal(whole["w"], seen.join(list(updates.values())))


SPLITS = {"fused attention": (128, 64, 64), "heads": (32,) * 8, "grouped, ragged": (192, 40, 24)}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("normuon", [False, "norm_kept", "paper"])
@pytest.mark.parametrize("quantize", [True, False], ids=["quantized", "dense"])
def test_a_split_leaf_trains_as_separate_parameters_to_the_bit_m13(split, normuon, quantize):
    options = {"normuon": normuon, "quantize": quantize, "codebook": "fixed", "adjust": "match_rms_adamw"}
    one, many = muon(0.05, spec=MatrixAxes(0, 1, split), **options), muon(0.05, spec=MatrixAxes(0, 1), **options)
    whole, parts = {"w": drawn(256, 200)}, dict(enumerate(drawn(256, 200).split(split)))
    states = one.init(whole), many.init(parts)
    for seed in range(4):
        g = drawn(256, 200, seed=seed)
        updates, first = one.update({"w": g}, states[0], whole)
        whole = apply_updates(whole, updates)
        updates, second = many.update(dict(enumerate(g.split(split))), states[1], parts)
        parts, states = apply_updates(parts, updates), (first, second)
    for own, theirs in zip(whole["w"].split(split), parts.values(), strict=True):
        assert torch.equal(own, theirs)


def test_a_spec_may_be_a_value_a_tree_or_a_function_of_params():
    params = {"qkv": drawn(192, 64), "out": drawn(64, 64)}
    axes = MatrixAxes(0, 1, split=(64, 64, 64))
    trees = {"qkv": axes, "out": None}
    forms = [trees, lambda p: {k: axes if "qkv" in k else None for k in p}]
    outs = []
    for spec in forms:
        tx = muon(0.1, spec=spec, codebook="fixed")
        outs.append(tx.update(params, tx.init(params), params)[0])
    plain, single = (muon(0.1, spec=own, codebook="fixed") for own in (None, axes))
    assert torch.equal(outs[0]["qkv"], outs[1]["qkv"])
    assert torch.equal(outs[0]["out"], plain.update(params, plain.init(params), params)[0]["out"])
    only = {"qkv": params["qkv"]}
    assert torch.equal(outs[0]["qkv"], single.update(only, single.init(only), only)[0]["qkv"])


def test_blocks_of_the_momentum_lie_behind_the_axes_that_number_matrices():
    params = {"w": drawn(2, 3, 40, 300)}
    shapes = {}
    for name, spec in {"two batch axes": MatrixAxes(2, 3), "none": MatrixAxes(0, (1, 2, 3))}.items():
        state = scale_by_muon(spec=spec).init(params)
        shapes[name] = tuple(state.mu["w"].absmax.shape)
    assert shapes == {"two batch axes": (2, 3, 40, 2), "none": (2, 141)}


SCALES = {
    "square": ((64, 64), 1.0, 0.2 * 8),
    "tall": ((256, 64), 2.0, 0.2 * 16),
    "wide": ((64, 256), 1.0, 0.2 * 16),
    "convolution": ((64, 16, 3, 3), 1.0, 0.2 * 12),
    "tall convolution": ((256, 4, 4, 4), 2.0, 0.2 * 16),
    "experts": ((8, 256, 64), 2.0, 0.2 * 16),
}


@pytest.mark.parametrize(("shape", "original", "matched"), SCALES.values(), ids=SCALES)
def test_the_scale_of_the_learning_rate_is_the_flattened_matrixs(shape, original, matched):
    rules = {None: original, "original": original, "match_rms_adamw": matched, "none": 1.0}
    for rule, expected in rules.items():
        assert adjust_scale(shape, rule) == pytest.approx(expected)
        grads, tx = {"w": drawn(*shape)}, scale_by_matrix_shape(rule, spec=default_axes(shape))
        updates, _ = tx.update(grads, tx.init(grads))
        torch.testing.assert_close(updates["w"], expected * grads["w"])


def test_parts_of_other_heights_have_their_own_scale():
    grads, tx = {"w": drawn(320, 64)}, scale_by_matrix_shape("original", MatrixAxes(0, 1, split=(256, 64)))
    updates, _ = tx.update(grads, tx.init(grads))
    assert torch.equal(updates["w"], torch.cat([2.0 * grads["w"][:256], grads["w"][256:]]))


REFUSED = {
    "vector": ((4096,), "fewer than 2 axes"),
    "scalar": ((), "fewer than 2 axes"),
    "one row m2": ((1, 4096), "one row or column"),
    "one column": ((4096, 1), "one row or column"),
    "depthwise": ((64, 1, 7, 7), "depthwise"),
    "depthwise, one-dimensional": ((256, 1, 4), "depthwise"),
    "low rank": ((16, 4096), "a side below 32"),
    "few outputs": ((4096, 10), "a side below 32"),
}


@pytest.mark.parametrize(("shape", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_matrix_is_refused_by_name_and_routed_away_m2_m6(shape, reason):
    params = {"a": {"w": drawn(64, 64)}, "b.c": drawn(*shape)}
    assert reason in not_muon_reason(shape)
    with pytest.raises(ValueError, match=rf"leaf `b\.c`.*{reason}"):
        muon(0.1).init(params)
    assert muon_labels(params) == {"a": {"w": "muon"}, "b.c": "gefen"}
    tx = gefen_muon(0.1)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["b.c"].shape == shape and updates["b.c"].isfinite().all()


def test_a_leaf_that_a_spec_names_is_muons_whatever_its_shape_m2():
    params = {"row": drawn(1, 512), "column": drawn(512, 1), "kernel": drawn(64, 1, 5, 5), "w": drawn(64, 64)}
    spec = {"row": MatrixAxes(0, 1), "column": MatrixAxes(0, 1), "kernel": MatrixAxes(0, (1, 2, 3)), "w": None}
    tx = gefen_muon(1.0, adjust="none", spec=spec)
    assert set(muon_labels(params, spec=spec).values()) == {"muon"}
    updates, _ = tx.update(params, tx.init(params), params)
    for name in ("row", "column"):
        assert 0.6 < float(updates[name].norm()) < 1.2


BAD = {
    "no axis": (ValueError, "axes for rows", lambda: MatrixAxes((), 1)),
    "an empty split": (ValueError, "parts of at least one row", lambda: MatrixAxes(0, 1, split=())),
    "a part of no rows": (ValueError, "parts of at least one row", lambda: MatrixAxes(0, 1, split=(64, 0))),
    "a list for a split": (TypeError, "tuples of ints", lambda: MatrixAxes(0, 1, split=[64])),
    "a name for an axis": (TypeError, "tuples of ints", lambda: MatrixAxes("rows", 1)),
    "an axis twice": (
        ValueError,
        "leaf `w`.*differ",
        lambda: muon(0.1, spec=MatrixAxes(0, -2)).init({"w": drawn(64, 64)}),
    ),
    "an axis that is not there": (
        ValueError,
        "leaf `w`.*be there",
        lambda: muon(0.1, spec=MatrixAxes(0, 2)).init({"w": drawn(64, 64)}),
    ),
    "rows left over": (
        ValueError,
        "leaf `w`.*63 in.*of 64 rows",
        lambda: muon(0.1, spec=MatrixAxes(0, 1, split=(32, 31))).init({"w": drawn(64, 64)}),
    ),
    "a spec of another kind": (
        TypeError,
        "MatrixAxes, or None",
        lambda: muon(0.1, spec={"w": (0, 1)}).init({"w": drawn(64, 64)}),
    ),
    "a spec of other leaves": (StructureError, "`v`", lambda: muon(0.1, spec={"v": None}).init({"w": drawn(64, 64)})),
    "an unknown scale": (
        ValueError,
        "'original', 'match_rms_adamw', 'none'",
        lambda: adjust_scale((64, 64), "spectral"),
    ),
    "an unknown scale of muon": (ValueError, "match_rms_adamw", lambda: muon(0.1, adjust="spectral")),
    "the scale of a vector": (ValueError, "at least two axes", lambda: adjust_scale((64,), None)),
}


@pytest.mark.parametrize(("error", "says", "do"), BAD.values(), ids=BAD)
def test_a_bad_spec_is_refused_with_the_reason(error, says, do):
    with pytest.raises(error, match=says):
        do()


def test_a_report_says_which_leaf_has_which_rule_m28():
    params = {
        "up": {"weight": drawn(128, 64), "bias": drawn(128)},
        "embed": {"weight": drawn(300, 64)},
        "small": drawn(32, 64),
    }
    leaves = {leaf.path: leaf for leaf in describe(gefen_muon(1e-3), params).leaves}
    gefens, muons = ("up.bias", "embed.weight"), ("up.weight", "small")
    assert {leaves[path].rule for path in gefens} == {"scale_by_gefen"}
    assert {leaves[path].rule for path in muons} == {"scale_by_muon"}
    assert leaves["small"].note == "dense: fewer than 4,096 entries" and leaves["up.weight"].note == ""
    dense = describe(muon(1e-3, quantize=False), {"w": params["small"]}).leaves[0]
    assert dense.note == "dense: as asked" and "scale_by_muon" in str(describe(gefen_muon(1e-3), params))


def test_names_of_state_say_whose_it_is():
    params = {"w": drawn(64, 96), "b": drawn(7)}
    names = set(flatten_state(gefen_muon(1e-3, normuon="norm_kept").init(params)))
    muons = {f"scale_by_muon.{x}" for x in ("codebook", "learned", "count.w", "mu.w.codes", "mu.w.absmax", "nu.w")}
    gefens = {f"scale_by_gefen.{x}" for x in ("codebook", "learned", "count.b", "mu.b", "nu.b")}
    assert names == muons | gefens
