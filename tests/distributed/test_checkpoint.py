"""The torch optimizer on shards, and its state through stock checkpoints onto other meshes."""

import pytest

from tests.distributed.adapter import load, save, take_steps
from tests.distributed.test_shards import different

MOVES = [((2,), (4,), False), ((4,), (2,), True), ((2, 2), (3,), False), ((2,), (3,), True)]


def size(sides):
    return sides[0] * (sides[1] if len(sides) > 1 else 1)


@pytest.mark.parametrize("sides", [(2,), (3,), (2, 2)], ids=str)
def test_fsdp2_steps_have_the_bits_of_one_process(pools, sides):
    expected = take_steps(0, None, 1, 4)
    assert not different(expected, pools(size(sides)).run(take_steps, sides, 1, 4)[0])


@pytest.mark.parametrize(
    ("before", "after", "flat"), MOVES, ids=[f"{a} to {b}, {'flat' if flat else 'nested'}" for a, b, flat in MOVES]
)
def test_a_stock_checkpoint_restores_the_bits_on_another_mesh_and_the_next_step_too(
    pools, tmp_path, before, after, flat
):
    saved = pools(size(before)).run(save, before, str(tmp_path / "run"), flat)[0]
    loaded, stepped = pools(size(after)).run(load, after, str(tmp_path / "run"), flat)[0]
    assert not different(saved, loaded)
    assert not different(take_steps(0, None, 1, 4), stepped)
