"""The collectives of a step are few, whatever the number of leaves: one vote, one exchange out, one back."""

import pytest

from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_nn.model_shapes import LeafShape
from gefen_nn.scale_model import simulate
from tests.distributed.counting import CUT, WIDE, bytes_sent, collectives

ROWS = {
    "clip, no tile cut": ("clip", WIDE, {"all_gather": 1}),
    "clip, a tile cut": ("clip", CUT, {"all_gather": 1, "all_to_all_single": 2}),
    "Muon": ("hybrid", WIDE, {"all_gather": 1, "all_to_all_single": 2}),
}


@pytest.mark.parametrize(("tx", "shapes", "expected"), ROWS.values(), ids=ROWS)
def test_a_step_votes_once_and_exchanges_at_most_twice(pools, tx, shapes, expected):
    assert pools(2).run(collectives, tx, shapes, (2,)) == [expected] * 2


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("muon", [False, True], ids=["gefen", "muon"])
def test_the_simulation_of_scale_counts_the_bytes_that_are_sent(pools, muon, world):
    model = {name: LeafShape(shape, 1) for name, shape in CUT.items()}
    report = simulate(model, world, muon=muon, policy=DEFAULT_SECOND_MOMENT)
    assert report.sent == max(pools(world).run(bytes_sent, "hybrid" if muon else "clip", CUT, (world,)))
