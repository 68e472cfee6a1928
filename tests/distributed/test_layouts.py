"""A decoder on every layout: the same gradients give the same bits as on one process, real training the same losses."""

import math

import pytest

from tests.distributed.layouts import ONE, OPTIMIZERS, digests_after, losses

LAYOUTS = {
    "FSDP2 on 2": ("fsdp", (2,)),
    "FSDP2 on 3": ("fsdp", (3,)),
    "FSDP2 on 4": ("fsdp", (4,)),
    "HSDP 2x2": ("fsdp", (2, 2)),
    "FSDP2 x TP 2x2": ("tp", (2, 2)),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)
KEPT = {"codes", "absmax", "codebook", "row", "col", "count", "weight"}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture(scope="module")
def alone():
    """`alone(optimizer, last)`: what one process holds after the steps `1 .. last`."""
    held = {}

    def after(optimizer, last):
        if (optimizer, last) not in held:
            held[optimizer, last] = digests_after(0, optimizer, ONE, last)
        return held[optimizer, last]

    return after


def check_bits(pools, alone, optimizer, layout, last):
    workers = pools(math.prod(layout[1]))
    for (got,) in workers.run(digests_after, optimizer, layout, last, seconds=600):
        (expected,) = alone(optimizer, last)
        assert {name.rsplit(".", 1)[-1] for name in got} >= KEPT
        assert got.keys() == expected.keys() and [name for name in got if got[name] != expected[name]] == []


@optimizers
@layouts
def test_the_first_steps_on_every_layout_have_the_bits_of_one_process(pools, alone, optimizer, layout):
    check_bits(pools, alone, optimizer, layout, 2)


@pytest.mark.slow
@optimizers
@layouts
def test_twenty_steps_on_every_layout_have_the_bits_of_one_process(pools, alone, optimizer, layout):
    check_bits(pools, alone, optimizer, layout, 20)


@optimizers
def test_real_training_has_the_losses_of_one_process_on_others_over_twenty_steps(pools, optimizer):
    expected = losses(0, optimizer, "alone", 20)
    assert expected[-1] < 0.9 * expected[0]
    for kind, world in (("fsdp", 2), ("fsdp", 3), ("ddp", 2)):
        for got in pools(world).run(losses, optimizer, kind, 20, seconds=120):
            assert got == pytest.approx(expected, rel=1e-5)
