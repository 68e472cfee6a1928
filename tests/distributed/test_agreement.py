"""One member without entries, without a codebook, or with another state: items 11 to 17 of the acceptance list."""

import pytest

from tests.distributed.empty import digests, loaded_alone, refreshed, resumed, solver_fails, steps
from tests.distributed.test_shards import different


@pytest.mark.parametrize("lacking", [False, True], ids=["11 empty", "12 a gradient only where entries are"])
def test_11_12_13_a_member_without_entries_learns_and_steps_with_the_others_and_stays_inert(pools, lacking):
    expected, _, _ = steps(0, True, False)
    answers = pools(2).run(steps, False, lacking)
    for got, _, counts in answers:
        assert not different(expected, got) and counts == [3, 3]
    assert set(answers[1][1]) == {0} and min(answers[0][1]) > 0


def test_11_a_refreshed_codebook_is_that_of_the_member_with_entries(pools):
    for got in pools(2).run(refreshed, False):
        assert not different(refreshed(0, True), got)


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "pure"])
def test_14_a_codebook_that_one_member_cannot_learn_is_learned_by_all_at_the_next_try(pools, fused):
    (other, *_, first), (own, *_, second) = answers = pools(2).run(solver_fails, fused)
    assert (other, own) == ("GroupFailure", "MemoryError")
    assert all(unchanged for _, unchanged, _ in answers) and not different(first, second)


def test_15_a_member_without_codes_moves_to_a_learned_codebook_with_the_one_that_loaded_some(pools):
    for got in pools(2).run(resumed, False):
        assert not different(resumed(0, True), got)


@pytest.mark.parametrize("what", ["count", "codebook"])
def test_16_what_one_member_loaded_alone_is_checked_by_all_before_a_step(pools, what):
    for error, unchanged, goes_on in pools(2).run(loaded_alone, what):
        assert error.startswith("GroupFailure") and "Load one checkpoint on all members" in error
        assert unchanged and goes_on


def test_17_a_structure_is_digested_once_and_not_at_every_step(pools):
    assert pools(2).run(digests) == [(1, 1)] * 2
