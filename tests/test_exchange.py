"""What waits for other members waits together, and takes as many rounds as the longest of it."""

import pytest
import torch

from gefen_fn import exchange
from gefen_fn.exchange import Later, Parcel, at_once, begun, finish, then


def talk(name, rounds):
    came = []
    for _ in range(rounds):
        came.append((yield Parcel(name, torch.device("cpu"))))
    return came


def answered(x):
    """The groups asked in each round, and the result; each parcel is answered by its group and round."""
    rounds = []
    while isinstance(x, Later):
        rounds.append([parcel.group for parcel in x.parcels])
        x = x.resume([f"{group}{len(rounds)}" for group in rounds[-1]])
    return rounds, x


SIDE = {
    "nothing waits": (lambda: at_once(["here", begun(talk("a", 0))]), [], ["here", []]),
    "two of other lengths": (
        lambda: at_once([begun(talk("a", 2)), "here", begun(talk("b", 1))]),
        [["a", "b"], ["a"]],
        [["a1", "a2"], "here", ["b1"]],
    ),
    "groups of groups": (
        lambda: at_once([at_once([begun(talk("a", 1)), begun(talk("b", 2))]), begun(talk("c", 2))]),
        [["a", "b", "c"], ["b", "c"]],
        [[["a1"], ["b1", "b2"]], ["c1", "c2"]],
    ),
    "one after the other beside one": (
        lambda: at_once(
            [then(begun(talk("a", 1)), lambda x: then(begun(talk("b", 1)), lambda y: x + y)), begun(talk("c", 1))]
        ),
        [["a", "c"], ["b"]],
        [["a1", "b2"], ["c1"]],
    ),
}


@pytest.mark.parametrize(("make", "rounds", "result"), SIDE.values(), ids=SIDE)
def test_what_waits_side_by_side_takes_the_same_rounds(make, rounds, result):
    assert answered(make()) == (rounds, result)


def test_what_waits_for_nobody_is_there_at_once():
    assert finish(then(at_once([1, 2]), sum)) == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["as they lie", "the other way round"])
def test_groups_are_asked_in_the_order_of_their_leaves_whatever_is_put_together_first(monkeypatch, order):
    asked = []
    monkeypatch.setattr(exchange, "_swap", lambda parcels: asked.append(parcels[0].group) or [{}] * len(parcels))
    talks = [begun(talk("a", 1), (0, 5)), begun(talk("b", 1), (1,)), begun(talk("c", 1))]
    finish(at_once([talks[n] for n in order]))
    assert asked == ["c", "a", "b"]


CPU = torch.device("cpu")
SENT = {
    "whole": torch.arange(12.0).reshape(2, 6),
    "a column": torch.arange(12.0).reshape(2, 6)[:, 3:4],
    "an entry with a stride": torch.arange(256.0).reshape(2, 128)[:, :1].reshape(2, 1, 1),
    "across": torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2),
    "nothing": torch.zeros(2, 0, 3),
    "bf16": torch.arange(10.0).to(torch.bfloat16).reshape(2, 5),
}


@pytest.mark.parametrize("leaves", [1, 2])
def test_what_is_sent_is_what_comes_for_each_leaf(leaves):
    parcel = Parcel(None, CPU, places=tuple(range(leaves)))
    for x in SENT.values():
        own = x[:leaves]
        parcel.send[1].append(own)
        parcel.expect[0].append((tuple(own.shape), own.dtype))
    raw = parcel.bytes_for(1)
    assert [len(x) for x in raw] == [parcel.bytes_from(0)] * leaves
    came = parcel.opened({0: raw})[0]
    assert all(
        torch.equal(got, x[:leaves]) and got.dtype == x.dtype for got, x in zip(came, SENT.values(), strict=True)
    )
    assert all(len(x) == 0 for x in parcel.bytes_for(2))


def test_members_that_nothing_is_for_cost_nothing(monkeypatch):
    parcel, asked = Parcel("group", CPU, places=(4, 2)), []
    parcel.send[7].append(torch.ones(2, 3))
    parcel.expect[900].append(((2, 3), torch.float32))
    monkeypatch.setattr(Parcel, "bytes_for", lambda p, m, f=Parcel.bytes_for: asked.append(m) or f(p, m))
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda group: 1000)
    monkeypatch.setattr(
        exchange.dist, "all_to_all_single", lambda came, sent, coming, going, group: came.copy_(sent[: len(came)])
    )
    (answer,) = exchange._answered([parcel])
    assert asked == [7] and list(answer) == [900] and torch.equal(next(answer[900]), torch.ones(2, 3))
