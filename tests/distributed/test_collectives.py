"""The collectives of a step are few, whatever the number of leaves: one vote, one exchange out, one back."""

import pytest

from tests.distributed.counting import CUT, WIDE, collectives

ROWS = {
    "clip, no tile cut": ("clip", WIDE, {"all_gather": 1}),
    "clip, a tile cut": ("clip", CUT, {"all_gather": 1, "all_to_all_single": 2}),
    "Muon": ("hybrid", WIDE, {"all_gather": 1, "all_to_all_single": 2}),
}


@pytest.mark.parametrize(("tx", "shapes", "expected"), ROWS.values(), ids=ROWS)
def test_a_step_votes_once_and_exchanges_at_most_twice(pools, tx, shapes, expected):
    assert pools(2).run(collectives, tx, shapes, (2,)) == [expected] * 2
