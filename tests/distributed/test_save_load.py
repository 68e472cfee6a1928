"""Saves, and loads onto other meshes: items 40 to 50 of the list that the design accepts shards by."""

import functools
import itertools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.pool import GROUP_SECONDS, Pool, WorkerFailure
from tests.distributed.saving import (
    DAMAGE,
    EDGES,
    OWN,
    converted,
    load_run,
    load_stock,
    load_trees,
    plain_loads,
    readings,
    refused_loads,
    refused_saves,
    run_after,
    save_another_kind,
    save_run,
    save_trees,
    save_while_training,
    save_without_end,
    shard_later,
    trees_after,
    trees_index,
    writing_timeout,
    written,
)
from tests.distributed.test_shards import different

ONE = (None, "rows")


def on(pools, sides, case, *args):
    """What rank 0 of as many workers as a mesh has members returns; None: this process alone."""
    if sides is None:
        return case(0, *args)
    world = sides[0] * (sides[1] if len(sides) > 1 else 1)
    return pools(world).run(case, *args)[0]


@pytest.fixture(scope="module")
def expected_trees():
    """`expected_trees(which)`: what one process holds after two steps, and after three."""
    return functools.cache(lambda which: [trees_after(0, which, ONE, last) for last in (2, 3)])


TREES = {
    "2 to 4, 3 and 1": (((2,), "rows"), [((4,), "rows"), ((3,), "rows"), ONE]),
    "4 to 2": (((4,), "rows"), [((2,), "rows")]),
    "1 to 2": (ONE, [((2,), "rows")]),
    "hsdp": (((2, 2), "hsdp"), [((1, 4), "hsdp"), ((4, 1), "hsdp")]),
}


def check_trees(pools, folder, expected, which, before, after):
    on(pools, before[0], save_trees, which, before, folder)
    for where in after:
        for wanted, got in zip(expected, on(pools, where[0], load_trees, which, where, folder), strict=True):
            assert not different(wanted, got)


@pytest.mark.parametrize(("before", "after"), TREES.values(), ids=TREES)
def test_43_44_46_d9_d14_every_policy_and_muon_move_between_meshes_to_the_bit(
    pools, tmp_path, expected_trees, before, after
):
    check_trees(pools, str(tmp_path / "run"), expected_trees("policies"), "policies", before, after)


@pytest.mark.parametrize(("before", "after"), list(TREES.values())[:3], ids=list(TREES)[:3])
def test_45_leaves_that_meshes_cut_in_every_way_move_between_them_to_the_bit(
    pools, tmp_path, expected_trees, before, after
):
    check_trees(pools, str(tmp_path / "run"), expected_trees("cuts"), "cuts", before, after)


def test_45_the_leaves_are_cut_as_their_names_say():
    parts = {name: [len(part) for part in torch.arange(rows).chunk(4)] for name, (rows, _) in EDGES.items()}
    ends = {name: {*itertools.accumulate(lengths)} for name, lengths in parts.items()}
    assert len(set(parts["uneven"])) > 1 and len(parts["empty"]) < 4 and len(parts["fewer than processes"]) < 4
    last_tile = range(16, EDGES["a tile of three"][0])
    assert len(ends["a tile of three"] & set(last_tile)) == 2
    assert any(end % 2 for end in ends["odd rows"] - {EDGES["odd rows"][0]})
    assert EDGES["remainder"][0] % 16 and EDGES["less than a tile"][0] < 128


RUNS = [
    ("net", (2,), "net", (2,)),
    ("net", (2,), "net", (3,)),
    ("net", None, "net", (2,)),
    ("net", (2, 2), "net", None),
    ("tp", (2, 2), "feed", (2,)),
    ("hybrid", (3,), "hybrid", (2,)),
]


@pytest.mark.parametrize(("kind", "before", "other", "after"), RUNS, ids=[f"{r[0]} {r[1]} to {r[3]}" for r in RUNS])
def test_q1_d26_44_47_a_run_goes_on_elsewhere_as_if_it_had_not_been_interrupted(
    pools, tmp_path, kind, before, other, after
):
    folder = str(tmp_path / "run")
    on(pools, before, save_run, kind, before, folder)
    report, loaded, stepped = on(pools, after, load_run, other, after, folder)
    assert report == ((), (), {"step": 2})
    assert not different(run_after(0, other, None, 2), loaded)
    assert not different(run_after(0, other, None, 3), stepped)


def state_of(tensors):
    return {key: x for key, x in tensors.items() if ": " in key}


def test_48_an_asynchronous_save_is_of_the_moment_of_the_call_while_training_goes_on(pools, tmp_path):
    pools(2).run(save_while_training, str(tmp_path))
    expected = run_after(0, "net", None, 2)
    assert not different(expected, load_run(0, "net", None, str(tmp_path / "ours"))[1])
    assert not different(state_of(expected), load_stock(0, None, str(tmp_path / "stock")))


def test_49_a_process_killed_during_a_save_ends_the_others_and_leaves_the_last_complete_checkpoint(tmp_path):
    pool = Pool(2)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(pool.run, save_without_end, str(tmp_path), seconds=2 * GROUP_SECONDS)
        deadline = time.monotonic() + GROUP_SECONDS
        while not (tmp_path / "run").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        pool.kill(1)
        with pytest.raises(WorkerFailure, match=r"(?s)rank 0: Traceback.*rank 1: the process died"):
            running.result()
    pool.close()
    report, loaded, _ = load_run(0, "net", None, str(tmp_path / "run"))
    assert not different(run_after(0, "net", None, report.extra["step"]), loaded)


@pytest.mark.parametrize("sides", [(3,), (2, 2)], ids=str)
def test_d13_q2_each_entry_is_written_once_by_one_that_holds_it_and_nothing_is_gathered(pools, tmp_path, sides):
    world = sides[0] * (sides[1] if len(sides) > 1 else 1)
    parts = pools(world).run(written, sides, str(tmp_path / "run"))
    metadata = dcp.FileSystemReader(tmp_path / "run").read_metadata()
    wrote = [Counter() for _ in parts]
    for index, info in metadata.storage_data.items():
        held = metadata.state_dict_metadata[index.fqn]
        if index.fqn.startswith("optimizer.state."):
            (chunk,) = [c for c in held.chunks if c.offsets == index.offset]
            writer = int(info.relative_path.split("_")[2])
            wrote[writer][index.fqn] += chunk.sizes.numel() * held.properties.dtype.itemsize
    for name in parts[0]:
        held = metadata.state_dict_metadata[name]
        assert sum(own[name] for own in wrote) == held.size.numel() * held.properties.dtype.itemsize
        assert all(own[name] <= part[name] for own, part in zip(wrote, parts, strict=True))


def test_50_a_save_is_refused_on_all_processes_before_the_first_byte(pools, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    others, own = pools(2).run(refused_saves, str(tmp_path))
    for name, (_, _, text) in OWN.items():
        assert own[name][0].startswith("CheckpointError") and text in own[name][0]
        assert others[name][0].startswith("GroupFailure") and "members [1]" in others[name][0]
        assert not own[name][1] and not others[name][1]


def test_50_a_model_that_is_none_on_one_process_is_refused_on_all(pools, tmp_path):
    others, own = pools(2).run(save_another_kind, str(tmp_path / "run"))
    assert own == ("TypeError", "TypeError") and others == ("GroupFailure", "GroupFailure")
    assert not list(tmp_path.iterdir())


def test_saves_wait_for_a_process_as_long_as_the_default_group_does(pools):
    assert pools(2).run(writing_timeout) == [GROUP_SECONDS] * 2


def test_41_42_d24_a_load_that_one_process_refuses_is_refused_by_all_and_changes_nothing(pools):
    others, own = pools(2).run(refused_loads, (2,))
    for name in DAMAGE:
        assert own[name][0].startswith("CheckpointError") and name in own[name][0]
        assert others[name][0].startswith("GroupFailure") and "members [1]" in others[name][0]
        assert not own[name][1] and not others[name][1]


def test_40_a_plain_load_takes_its_own_mesh_or_whole_tensors_and_copies_no_group(pools):
    expected = state_of(run_after(0, "net", None, 1))
    for refused, loaded, same_groups in pools(4).run(plain_loads):
        assert refused.startswith("CheckpointError") and "must lie as the target's" in refused
        assert not different(expected, loaded)
        assert same_groups


def test_d11_d18_d19_q7_q9_q10_every_process_has_the_same_keys_and_its_own_parts_and_stock_calls_gather(pools):
    answers = pools(4).run(readings, (2, 2))
    assert len({index for index, _, _ in answers}) == 1
    assert all(sized for _, sized, _ in answers)
    gathered = answers[0][2]["state"]
    assert gathered["up.bias"]["scale_by_gefen.count"] == 1 and gathered["up.weight"]["scale_by_gefen.count"] == 0
    assert gathered["head.weight"]["scale_by_gefen.mu.codes"].shape == (257, 64)
    assert len(set(pools(4).run(trees_index, ((4,), "rows")))) == 1


def test_d15_state_follows_parameters_that_are_sharded_after_the_optimizer_was_built(pools):
    expected = run_after(0, "feed", None, 3)
    assert not different(expected, pools(2).run(shard_later)[0])


def test_state_of_another_optimizer_is_read_part_by_part(pools):
    assert not different(converted(0, None), pools(3).run(converted, (3,))[0])
