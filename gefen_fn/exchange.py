"""Exchanges between the members of process groups: all that a step sends at one time goes in one all-to-all.

What needs other members is not sent where it arises. It is a `Later`: parcels, and what is done with the answers. The
Laters of leaves, of the parts of a partition and of a step in place become one that does them `at_once`, and `finish`
answers its parcels round by round, by one all-to-all for each group. What needs nobody is its plain result, in the same
places.

A leaf's share is written as a `Talk`, a generator that yields a `Parcel` and is sent what came for it; `begun` makes it
a Later. A round answers what waits at that time, so all members of a group go through the same talks in the same order,
and stages in a row that both exchange take their rounds one after the other.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gefen_fn.agree import answered

Result = TypeVar("Result")
Other = TypeVar("Other")
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Parcel:
    """What one leaf, or several of like layout, send to the other members of a group and expect of them, in order.

    Attributes:
        group: the process group.
        device: where the tensors are.
        send: tensors for each member.
        expect: shapes and dtypes of the tensors that each member sends.
        places: of the leaves; if they are several, they are the first axis of all tensors. Leaves go in the order of
            their places, so that members agree on it even where some step a leaf in place and others do not; what
            belongs to no one leaf goes first, as it is put together.
    """

    group: Any
    device: torch.device
    send: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    expect: defaultdict[int, list[Form]] = field(default_factory=lambda: defaultdict(list))
    places: tuple[int, ...] = (-1,)

    def bytes_for(self, member: int) -> Sequence[Tensor]:
        """All that goes to a member, for each leaf."""
        count = len(self.places)
        rows = [x.reshape(count, -1).contiguous() for x in self.send[member] if x.numel()]
        # A single entry counts as contiguous with any stride, but is seen as bytes with stride 1 only.
        parts = [x.as_strided(x.shape, (x.shape[1], 1)).view(torch.uint8) for x in rows]
        return (
            torch.cat(parts, 1).unbind() if parts else [torch.empty(0, dtype=torch.uint8, device=self.device)] * count
        )

    def bytes_from(self, member: int) -> int:
        """The size of all that comes from a member for one leaf."""
        return sum(map(_size, self.expect[member])) // len(self.places)

    def opened(self, came: Mapping[int, Sequence[Tensor]]) -> "Answer":
        """What came from each member for each leaf, in the forms announced."""
        return {m: iter(self._split(self.expect[m], raw)) for m, raw in came.items()}

    def _split(self, forms: Sequence[Form], raw: Sequence[Tensor]) -> list[Tensor]:
        # Copied, because a tensor need not begin at a multiple of its own entries.
        parts = torch.split(torch.stack(list(raw)), [_size(form) // len(raw) for form in forms], 1)
        return [
            x.reshape(-1).clone().view(dtype).reshape(shape) for x, (shape, dtype) in zip(parts, forms, strict=True)
        ]


Answer = dict[int, Iterator[Tensor]]
Talk = Generator[Parcel, Answer, Result]


@dataclass(frozen=True)
class Later(Generic[Result]):
    """A result that waits for other members.

    Attributes:
        parcels: what is exchanged next.
        resume: takes their answers, in order, and returns the result, or what then waits.
    """

    parcels: Sequence[Parcel]
    resume: "Callable[[Sequence[Answer]], Result | Later[Result]]"


def then(x: Result | Later[Result], f: Callable[[Result], Other | Later[Other]]) -> Other | Later[Other]:
    """`f(x)`, as soon as `x` is there."""
    if isinstance(x, Later):
        waiting = x  # for the closure: of this type
        return Later(waiting.parcels, lambda answers: then(waiting.resume(answers), f))
    return f(x)


def at_once(xs: Sequence[Result | Later[Result]]) -> list[Result] | Later[list[Result]]:
    """All of `xs` side by side: what waits of them is exchanged in the same rounds.

    Args:
        xs: in an order that is the same for every member.
    """
    waiting = [x for x in xs if isinstance(x, Later)]
    if not waiting:
        return [x for x in xs if not isinstance(x, Later)]

    def resume(answers: Sequence[Answer]) -> list[Result] | Later[list[Result]]:
        came = iter(answers)
        return at_once([x.resume([next(came) for _ in x.parcels]) if isinstance(x, Later) else x for x in xs])

    return Later([parcel for x in waiting for parcel in x.parcels], resume)


def finish(x: Result | Later[Result]) -> Result:
    """Exchange with the other members until the result is there."""
    while isinstance(x, Later):
        x = x.resume(_answered(x.parcels))
    return x


def begun(talk: Talk[Result], places: tuple[int, ...] = (-1,)) -> Result | Later[Result]:
    """A talk as far as it goes without other members; see `Parcel` for the places of its leaves."""
    return _resumed(talk, places, None)


def _resumed(talk: Talk[Result], places: tuple[int, ...], answers: Sequence[Answer] | None) -> Result | Later[Result]:
    try:
        parcel = talk.send(None if answers is None else answers[0])  # type: ignore[arg-type]  # None starts a generator
    except StopIteration as end:
        result: Result = end.value
        return result
    parcel.places = places
    return Later([parcel], partial(_resumed, talk, places))


def _size(form: Form) -> int:
    shape, dtype = form
    return torch.Size(shape).numel() * dtype.itemsize


def _answered(parcels: Sequence[Parcel]) -> list[Answer]:
    """What came for each parcel, by one all-to-all for each group, in the order of the first of their places."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for n in sorted(range(len(parcels)), key=lambda n: min(parcels[n].places)):
        groups[parcels[n].group, parcels[n].device.type].append(n)
    answers: dict[int, Answer] = {}
    for numbers in groups.values():
        answers.update(zip(numbers, _swap([parcels[n] for n in numbers]), strict=True))
    return [answers[n] for n in range(len(parcels))]


def _swap(parcels: Sequence[Parcel]) -> list[Answer]:
    """One all-to-all of bytes between the members of one group; what it costs grows with those who are written to."""
    group, device = parcels[0].group, parcels[0].device
    members, out, sizes = range(dist.get_world_size(group)), _sent(parcels), _expected(parcels)
    lengths = [sum(size for *_, size in sizes.get(m, ())) for m in members], [len(out.get(m, ())) for m in members]
    came = torch.empty(sum(lengths[0]), dtype=torch.uint8, device=device)
    sent = torch.cat([out[m] for m in members if m in out] or [came[:0]])
    answered(dist.all_to_all_single, came, sent, *lengths, group=group)
    leaves: list[dict[int, dict[int, Tensor]]] = [defaultdict(dict) for _ in parcels]
    for m, piece in zip(members, torch.split(came, lengths[0]), strict=True):
        rows = sizes.get(m, ())
        for (_, n, i, _), part in zip(rows, torch.split(piece, [size for *_, size in rows]), strict=True):
            leaves[n][m][i] = part
    return [
        p.opened({m: [own[i] for i in range(len(p.places))] for m, own in leaves[n].items()})
        for n, p in enumerate(parcels)
    ]


def _sent(parcels: Sequence[Parcel]) -> dict[int, Tensor]:
    """All that goes to each member that is written to, in the order of the leaves."""
    rows: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    raw = [{m: p.bytes_for(m) for m in tuple(p.send)} for p in parcels]
    for n, p in enumerate(parcels):
        for m in raw[n]:
            rows[m] += [(place, n, i) for i, place in enumerate(p.places)]
    return {m: torch.cat([raw[n][m][i] for _, n, i in sorted(own)]) for m, own in rows.items()}


def _expected(parcels: Sequence[Parcel]) -> dict[int, list[tuple[int, int, int, int]]]:
    """Place, parcel, number in it and size of each leaf's part of what comes from each member, in its order."""
    rows: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for n, p in enumerate(parcels):
        for m in p.expect:
            size = p.bytes_from(m)
            rows[m] += [(place, n, i, size) for i, place in enumerate(p.places)]
    return {m: sorted(own) for m, own in rows.items()}
