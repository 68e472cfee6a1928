"""Runs that move to another layout: the state arrives to the bit, and the next step is the uninterrupted run's."""

import math

import pytest

from tests.distributed.layouts import ONE, OPTIMIZERS, digests_after, resume, save_at

MOVES = {
    "46 HSDP": (("fsdp", (2, 2)), [("fsdp", (1, 4)), ("fsdp", (4, 1))]),
    "47 FSDP2 x TP to FSDP2": (("tp", (2, 2)), [("fsdp", (2,)), ("fsdp", (4,))]),
}
MORE_MOVES = {
    "44 2 to 4, 3 and 1": (("fsdp", (2,)), [("fsdp", (4,)), ("fsdp", (3,)), ONE]),
    "44 4 to 2": (("fsdp", (4,)), [("fsdp", (2,))]),
    "44 1 to 2": (ONE, [("fsdp", (2,))]),
    "46 HSDP to FSDP2 and to one": (("fsdp", (2, 2)), [("fsdp", (3,)), ONE]),
    "47 FSDP2 x TP to 3, one and HSDP": (("tp", (2, 2)), [("fsdp", (3,)), ONE, ("fsdp", (2, 2))]),
    "47 FSDP2 to FSDP2 x TP": (("fsdp", (2,)), [("tp", (2, 2))]),
}


@pytest.fixture(scope="module")
def alone():
    """`alone(optimizer)`: what one process holds after two steps, and after three."""
    held = {}

    def after(optimizer):
        if optimizer not in held:
            held[optimizer] = digests_after(0, optimizer, ONE, 2, 3)
        return held[optimizer]

    return after


def on(pools, layout, case, optimizer, *args):
    """What each worker of a layout returns; None: this process alone."""
    if layout[1] is None:
        return [case(0, optimizer, layout, *args)]
    return pools(math.prod(layout[1])).run(case, optimizer, layout, *args, seconds=60)


def check_moves(pools, folder, alone, optimizer, before, after):
    on(pools, before, save_at, optimizer, 2, folder)
    for layout in after:
        for loaded, stepped in on(pools, layout, resume, optimizer, folder):
            for expected, got in zip(alone(optimizer), (loaded, stepped), strict=True):
                assert got.keys() == expected.keys() and [k for k in got if got[k] != expected[k]] == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), MOVES.values(), ids=MOVES)
def test_46_47_a_decoder_moves_to_another_mesh_to_the_bit_and_its_next_step_too(
    pools, tmp_path, alone, optimizer, before, after
):
    check_moves(pools, str(tmp_path / "run"), alone, optimizer, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), MORE_MOVES.values(), ids=MORE_MOVES)
def test_44_46_47_a_decoder_moves_everywhere_to_the_bit_and_its_next_step_too(
    pools, tmp_path, alone, optimizer, before, after
):
    check_moves(pools, str(tmp_path / "run"), alone, optimizer, before, after)
