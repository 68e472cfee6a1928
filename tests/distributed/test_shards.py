"""The same gradients give the same bits on one process and on any mesh."""

import pytest
import torch

from gefen_nn.checkpoint import same_bits
from tests.distributed.training import refused_cut, train

SHAPES = {
    "wide": (50, 512),
    "tall": (300, 256),
    "experts": (4, 32, 256),
    "conv": (64, 32, 3, 3),
    "bias": (70,),
    "few": (33, 1024),
}
ROWS = [("default", (2,)), ("tile16", (3,)), ("whole columns", (4,)), ("one tile", (3,))]
ROWS += [
    ("block", (2,)),
    ("dense", (3,)),
    ("clip", (4,)),
    ("adamw", (3,)),
    ("chores", (3,)),
    ("accumulated", (3,)),
    ("random", (3,)),
    ("compensated", (3,)),
    ("nested", (3,)),
]
MATRICES = {"square": (512, 512), "tall": (300, 512), "short": (40, 1024), "bias": (512,)}
MESHES = [("replicated", (2,)), ("columns", (2,)), ("hsdp", (2, 2)), ("rows and columns", (2, 2)), ("strided", (2, 2))]


MUON = {"tall": (300, 256), "wide": (50, 512), "experts": (4, 32, 256), "conv": (64, 32, 3, 3), "square": (256, 256)}
MUON_ROWS = [("muon", "rows", (3,)), ("exact muon", "rows", (2,)), ("normuon", "rows", (3,))]
MUON_ROWS += [("normuon", "hsdp", (2, 2)), ("hybrid", "rows and columns", (2, 2)), ("muon", "strided", (2, 2))]


def different(left, right):
    assert left.keys() == right.keys()
    return [k for k in left if left[k].dtype != right[k].dtype or not same_bits(left[k], right[k])]


@pytest.mark.parametrize(("tx", "sides"), ROWS, ids=[f"{tx} on {sides[0]}" for tx, sides in ROWS])
def test_rows_on_several_processes_have_the_bits_of_one(pools, tx, sides):
    expected = train(0, tx, SHAPES, 3, None, "rows")
    got = pools(sides[0]).run(train, tx, SHAPES, 3, sides, "rows")[0]
    assert not different(expected, got)


@pytest.mark.parametrize("tx", ["clip", "tile16", "block", "random"])
@pytest.mark.parametrize(("how", "sides"), MESHES, ids=[how for how, _ in MESHES])
def test_every_mesh_has_the_bits_of_one_process(pools, how, sides, tx):
    expected = train(0, tx, MATRICES, 3, None, how)
    got = pools(sides[0] * sides[-1] if len(sides) > 1 else sides[0]).run(train, tx, MATRICES, 3, sides, how)[0]
    assert not different(expected, got)


@pytest.mark.parametrize(
    ("tx", "how", "sides"), MUON_ROWS, ids=[f"{tx} on {how} of {sides}" for tx, how, sides in MUON_ROWS]
)
def test_matrices_cut_by_shards_are_made_orthogonal_whole_m1(pools, tx, how, sides):
    shapes = MUON if how == "rows" else {k: MUON[k] for k in ("experts", "square")}
    shapes = {"wide": (64, 1024), "bias": (70,)} if tx == "hybrid" else shapes
    expected = train(0, tx, shapes, 3, None, how)
    got = pools(torch.Size(sides).numel()).run(train, tx, shapes, 3, sides, how)[0]
    assert not different(expected, got)


CUT = {
    "a block of columns": ((40, 640), "columns", "columns [320]. Use block=320"),
    "a row of several axes, unevenly": ((8, 3, 512), "columns", "columns [1024]. Shard the leading axis"),
    "a row of several axes, evenly": ((8, 4, 512), "columns", "none"),
    "columns behind others": ((8, 4, 512), "last", "columns [256]. Shard the leading axis"),
}


@pytest.mark.parametrize(("shape", "how", "text"), CUT.values(), ids=CUT)
def test_shards_that_cut_a_block_or_what_is_kept_of_a_row_are_refused_on_every_member(pools, shape, how, text):
    for said in pools(2).run(refused_cut, shape, (2,), how):
        assert text in said
