"""Scopes given by hand: plain tensors whose gradients differ learn one codebook, and never without being told to."""

import pytest
import torch
import torch.distributed as dist

from gefen_fn import Scope, learn_codebook
from tests.distributed.scoped import WAYS, copied, described, histogram, learn, narrow, of_parts, other_names
from tests.distributed.test_shards import different


@pytest.mark.parametrize("way", WAYS)
def test_members_of_a_scope_learn_from_all_their_gradients_and_others_each_from_its_own(pools, way):
    ours, theirs = pools(2).run(learn, way, True)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    assert any(torch.equal(book, learn_codebook(sum(pools(2).run(histogram)))) for book in ours)
    assert not all(map(torch.equal, *pools(2).run(learn, way, False)))


def test_a_report_says_who_learns_a_codebook(pools):
    for scoped, alone, sharded in pools(2).run(described):
        assert scoped == "codebook of scale_by_gefen: learned by members 0, 1 of scope 'replicas'"
        assert alone == "codebook of scale_by_gefen: learned by this process alone"
        assert sharded == "codebook of scale_by_gefen: learned by members 0, 1 of the meshes"


def test_members_that_name_their_scope_otherwise_are_told(pools):
    for error in pools(2).run(other_names):
        assert error.startswith("GroupFailure") and "same scope" in error


def test_a_scope_may_be_a_replica_but_no_part_of_one(pools):
    answers = pools(4).run(narrow)
    for (book,), refusal in answers:
        assert torch.equal(book, answers[0][0][0]) and "hold every entry" in refusal and "[0, 1, 2, 3]" in refusal


def test_copies_of_an_optimizer_vote_in_the_same_scope(pools):
    assert pools(2).run(copied) == [True, True]


@pytest.mark.parametrize("plain", [(), (1,)], ids=["in place", "one member by the pure path"])
def test_parts_of_one_expression_learn_each_with_the_members_of_its_own_leaves(pools, plain):
    answers = pools(2).run(of_parts, plain)
    assert all(map(torch.equal, *answers[0])) and all(map(torch.equal, *answers[1]))
    (mesh, ours), (same, theirs) = answers[0][0], answers[1][0]
    assert torch.equal(mesh, same) and not torch.equal(ours, theirs)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


BAD = {
    "no text": ({"name": 3}, TypeError, "`name` must be a text"),
    "empty name": ({"name": ""}, ValueError, "`name` must be a text"),
    "one rank": ({"members": 0}, TypeError, "`members` must be a tuple"),
    "a truth": ({"members": (False,)}, TypeError, "`members` must hold whole numbers"),
    "twice": ({"members": (0, 0)}, ValueError, "each once"),
    "nobody": ({"members": ()}, ValueError, "at least one"),
    "others": ({"members": (0, 1)}, ValueError, "ranks of the group"),
    "no group": ({"group": None}, TypeError, "`group` must be a process group"),
    "no device": ({"device": 0}, TypeError, "`device` must be a torch.device"),
    "other device": ({"device": "meta"}, ValueError, "one that the group serves"),
}


@pytest.mark.parametrize(("given", "error", "text"), BAD.values(), ids=BAD)
def test_a_scope_that_is_none_is_refused_where_it_is_written(group, given, error, text):
    with pytest.raises(error, match=text):
        Scope(**{"name": "all", "members": (0,), "group": group, **given})


def test_a_scope_keeps_a_copy_of_its_members_and_prints_without_its_group(group):
    members = [0]
    scope = Scope("all", members, group, "cpu")
    members.append(1)
    assert scope.members == (0,) and repr(scope) == "Scope('all', members=(0,))" and scope.device.type == "cpu"


def test_a_scope_of_one_process_asks_nobody(group):
    scope = Scope("all", (0,), group)
    expected, got = (train_alone(book) for book in ("learned", scope))
    assert not different(expected, got)


def train_alone(codebook):
    from gefen_fn import flatten_state, gefen

    grads = {"w": torch.randn(64, 80, generator=torch.Generator().manual_seed(0))}
    tx = gefen(0.1, codebook=codebook)
    return flatten_state(tx.update(grads, tx.init(grads), grads)[1])
