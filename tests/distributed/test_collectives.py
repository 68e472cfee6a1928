"""The collectives of a step are few, whatever the number of leaves: one vote, one exchange out, one back."""

import pytest

from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_nn.model_shapes import LeafShape
from gefen_nn.scale_model import simulate
from tests.distributed.counting import BOTH, CUT, DEEP, WIDE, bytes_sent, collectives, groups_made

VOTE = {"all_gather": 1}
ALL = {"all_gather": 1, "all_to_all_single": 2}
ROWS = {
    "clip, no tile cut": ("clip", WIDE, (2,), VOTE),
    "clip, a tile cut": ("clip", CUT, (2,), ALL),
    "clip, a tile cut, HSDP": ("clip", CUT, (2, 2), ALL),
    "Muon": ("hybrid", WIDE, (2,), ALL),
    "Muon beside a cut tile": ("hybrid", BOTH, (2,), ALL),
    "Muon beside a cut tile, HSDP": ("hybrid", BOTH, (2, 2), ALL),
    "two kinds of cut tiles": ("two kinds", BOTH, (2,), ALL),
    "three parts, nested": ("nested", DEEP, (2,), ALL),
    "two in a row": ("in a row", BOTH, (2,), {"all_gather": 1, "all_to_all_single": 4}),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "pure"])
@pytest.mark.parametrize(("tx", "shapes", "sides", "expected"), ROWS.values(), ids=ROWS)
def test_a_step_votes_once_and_exchanges_at_most_twice(pools, tx, shapes, sides, expected, fused):
    world, how = (4, "hsdp") if len(sides) > 1 else (2, "rows")
    assert pools(world).run(collectives, tx, shapes, sides, how, fused) == [expected] * world


@pytest.mark.parametrize("tx", ["default", "block", "clip", "chores", "nested"])
def test_groups_are_made_by_init_and_never_by_an_update(pools, tx):
    for at_init, at_update in pools(4).run(groups_made, tx):
        assert at_init > 0 and at_update == 0


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("muon", [False, True], ids=["gefen", "muon"])
def test_the_simulation_of_scale_counts_the_bytes_that_are_sent(pools, muon, world):
    model = {name: LeafShape(shape, 1) for name, shape in CUT.items()}
    report = simulate(model, world, muon=muon, policy=DEFAULT_SECOND_MOMENT)
    assert report.sent == max(pools(world).run(bytes_sent, "hybrid" if muon else "clip", CUT, (world,)))
