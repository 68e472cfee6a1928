"""Who is told of a failure: items 29 to 36 of the list that the design accepts shards by."""

from unittest import mock

import pytest

from gefen_fn.scope import control_device
from tests.distributed.groups import (
    OVERLAPS,
    captured,
    compiled,
    hybrid,
    local_collectives,
    overlap,
    union,
    unsorted,
    vote_group,
)
from tests.distributed.pool import GROUP_SECONDS
from tests.distributed.test_shards import different

TOLD = ("GroupFailure", True)


@pytest.mark.parametrize("part", ["30 backup's mesh alone", "31 no Muon leaf"])
def test_30_31_members_of_a_hybrids_only_mesh_are_told(pools, part):
    assert pools(2).run(hybrid, part[3:]) == [TOLD, TOLD]


@pytest.mark.parametrize("case", OVERLAPS)
def test_32_overlapping_meshes_are_refused_at_construction_on_every_member(pools, case):
    answers = pools(4).run(overlap, case)
    seeing = answers[:3] if case == "one left out" else answers
    assert all("overlap" in answer or "One mesh must contain the others" in answer for answer in seeing)
    assert answers[len(seeing) :] == ["none"] * (4 - len(seeing))


@pytest.mark.parametrize("bad", [0, 3])
def test_32_members_that_all_see_overlapping_meshes_are_one_group(pools, bad):
    assert pools(4).run(union, bad) == [TOLD] * 4


@pytest.mark.parametrize("kind", ["hsdp", "rows and columns"])
def test_33_a_mesh_whose_groups_do_not_sort_as_its_axes_has_the_bits_of_one_process(pools, kind):
    expected = unsorted(0, False, kind)
    for got in pools(4).run(unsorted, True, kind):
        assert not different(expected, got)


@pytest.mark.parametrize(
    ("config", "device"),
    [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu"), ("xpu:xccl", "xpu")],
    ids=lambda x: x,
)
def test_34_records_travel_where_the_group_can_send_them_and_on_the_cpu_if_it_can_there(config, device):
    with mock.patch("torch.distributed.distributed_c10d.get_backend_config", lambda group: config):
        assert control_device(None).type == device


def test_35_no_vote_is_held_while_a_graph_is_captured(pools):
    for voting, silent in pools(2).run(captured):
        assert voting.pop("all_gather") == 1 and silent == voting


def test_36_no_graph_contains_a_vote_and_no_step_recompiles(pools):
    for functions, early, late, same in pools(2).run(compiled):
        assert early == late > 0 and same
        assert functions and not [f for f in functions if "gather" in f or "reduce" in f or "c10d" in f]


def test_votes_have_a_process_group_of_their_own_with_its_own_timeout(pools):
    assert pools(2).run(vote_group) == [(True, True, GROUP_SECONDS, True)] * 2


@pytest.mark.parametrize("where", ["plain tensors", "one process"])
def test_29_without_a_group_no_collective_is_issued(pools, where):
    assert pools(2).run(local_collectives, where) == [{}, {}]
