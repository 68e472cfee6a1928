"""What fails on one member fails on all, and changes nothing; numbers are of the design's acceptance list."""

import pytest

from gefen_fn import agree
from gefen_fn.agree import GroupFailure, answered, together
from tests.distributed.failing import (
    BAD,
    BUILT,
    CALLS,
    FAULTS,
    OTHERS,
    PLAIN,
    build_differently,
    call_alone,
    fail,
    scaled_together,
    step_at_another_rate,
    step_with_extras,
)

WORDS = {
    "18": "closure",
    "19": "structure",
    "20": "structure",
    "21": "pre-hooks",
    "22": "gradients",
    "23": "gradient must be there",
}
CAUSES = {"18": "disk is full", "21": "disk is full", "22": "StructureError"}


@pytest.mark.parametrize("kind", ["gefen", "hybrid", "clip", "finite", *PLAIN])
@pytest.mark.parametrize("fault", FAULTS)
def test_18_19_20_21_22_23_24_25_26_a_fault_on_one_member_is_told_to_all_and_nothing_changes(pools, fault, kind):
    answers = pools(2).run(fail, fault, (2,), kind, seconds=60)
    number = fault.split()[0]
    for rank, (error, text, cause, unchanged) in enumerate(answers):
        assert unchanged and error == "GroupFailure" and WORDS.get(number, "") in text
        assert rank != BAD or CAUSES.get(number, "") in cause


@pytest.mark.parametrize("overflow", [True, False], ids=["27 overflow", "28 no overflow"])
def test_27_28_members_that_agree_skip_or_unscale_once(pools, overflow):
    for unchanged, as_unscaled, hooks in pools(2).run(scaled_together, (2,), overflow):
        assert (unchanged, as_unscaled, hooks) == (overflow, not overflow, 1)


def test_members_with_other_learning_rates_are_told_before_a_step(pools):
    for text, unchanged in pools(2).run(step_at_another_rate, (2,)):
        assert unchanged and "group values" in text


def test_members_that_give_a_step_other_extra_arguments_are_told_and_the_same_ones_step_as_one_process(pools):
    for told, as_one in pools(2).run(step_with_extras, (2,)):
        assert as_one and [name for name, _, unchanged in told if unchanged] == list(OTHERS)
        texts = {name: text for name, text, _ in told}
        assert all(f"failure in extra arguments on member {BAD}" in texts[name] for name in list(OTHERS)[:3])
        assert all("codebooks and extra arguments" in texts[name] for name in list(OTHERS)[3:])


@pytest.mark.parametrize("what", BUILT)
def test_members_that_built_other_optimizers_are_told_before_the_first_step(pools, what):
    for text, unchanged in pools(2).run(build_differently, what, (2,)):
        assert unchanged and f"one {'structure' if 'number' in what else 'transform'}" in text


@pytest.mark.parametrize("call", CALLS)
def test_a_member_that_calls_something_else_while_the_others_step_is_told_and_nothing_changes(pools, call):
    for text, unchanged in pools(2).run(call_alone, call, (2,)):
        assert unchanged and f"got `step` on members [0] against `{call}` on members [1]" in text


def test_a_member_that_calls_alone_is_asked_whether_all_of_them_call(monkeypatch):
    def lost(*_):
        raise GroupFailure("got no answer") from RuntimeError("Timed out")

    monkeypatch.setattr(agree, "gathered", lost)
    with pytest.raises(GroupFailure, match=r"no answer.*all of them call `save`.*under `if rank == 0`"):
        together(lambda: 1, object(), "save")
    with pytest.raises(OSError, match="full"):
        together(_full, object(), "save")


def _full():
    raise OSError("the disk is full")


def test_a_member_that_hears_nothing_from_the_others_is_told_so_and_what_to_do():
    def lost():
        raise RuntimeError("Timed out waiting 6000ms for send operation to complete")

    with pytest.raises(GroupFailure, match=r"got no answer from some.*6000ms.*start all of them again"):
        answered(lost)
