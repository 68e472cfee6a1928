"""Steps in place on shards: the bits of one process where edges cut tiles too, and by a back end."""

import math

import pytest

from gefen_nn.checkpoint import same_bits
from tests.distributed.fused import fused_step
from tests.distributed.training import train

SHAPES = {
    "wide": (50, 512),
    "tall": (300, 256),
    "like tall": (300, 256),
    "experts": (4, 40, 256),
    "conv": (64, 32, 3, 3),
    "bias": (70,),
    "few": (33, 1024),
    "a slot a row": (130, 64),
}
SQUARE = {"experts": (4, 40, 256), "more experts": (4, 40, 256), "square": (300, 512), "short": (40, 1024)}
ROWS = [
    ("default", "rows", (2,)),
    ("tile16", "rows", (3,)),
    ("whole columns", "rows", (4,)),
    ("one tile", "rows", (3,)),
    ("clip", "hsdp", (2, 2)),
    ("default", "strided", (2, 2)),
    ("tile16", "columns", (2,)),
    ("random", "rows", (3,)),
]


def differing(tx, shapes, how, got):
    """The names of what is not as one process has it."""
    expected = train(0, tx, shapes, 3, None, how)
    assert expected.keys() == got.keys()
    return [k for k, x in expected.items() if x.dtype != got[k].dtype or not same_bits(x, got[k])]


@pytest.mark.parametrize(("tx", "how", "sides"), ROWS, ids=[f"{tx} on {how} of {sides}" for tx, how, sides in ROWS])
def test_leaves_with_cut_tiles_are_stepped_by_kernels_with_the_bits_of_one_process(pools, tx, how, sides):
    shapes = SHAPES if how == "rows" else SQUARE
    answers = pools(math.prod(sides)).run(fused_step, tx, shapes, 3, sides, how)
    assert [answer[:2] for answer in answers] == [(sorted(shapes), "cpu: numba loops")] * len(answers)
    assert not differing(tx, shapes, how, answers[0][2])


def test_members_with_a_back_end_and_without_step_together(pools):
    answers = pools(3).run(fused_step, "tile16", SHAPES, 3, (3,), "rows", (1,))
    assert [len(answer[0]) for answer in answers] == [len(SHAPES), 0, len(SHAPES)]
    assert not differing("tile16", SHAPES, "rows", answers[0][2])
