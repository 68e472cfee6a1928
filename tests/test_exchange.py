"""What waits for other members waits together, and takes as many rounds as the longest of it."""

import pytest
import torch

from gefen_fn.exchange import Later, Parcel, begun, finish, then, together


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
    "nothing waits": (lambda: together(["here", begun(talk("a", 0))]), [], ["here", []]),
    "two of other lengths": (
        lambda: together([begun(talk("a", 2)), "here", begun(talk("b", 1))]),
        [["a", "b"], ["a"]],
        [["a1", "a2"], "here", ["b1"]],
    ),
    "groups of groups": (
        lambda: together([together([begun(talk("a", 1)), begun(talk("b", 2))]), begun(talk("c", 2))]),
        [["a", "b", "c"], ["b", "c"]],
        [[["a1"], ["b1", "b2"]], ["c1", "c2"]],
    ),
    "one after the other beside one": (
        lambda: together(
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
    assert finish(then(together([1, 2]), sum)) == 3
