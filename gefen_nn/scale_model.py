"""What a step and a checkpoint cost on many processes, from shapes alone: the talks of a step held on meta tensors.

Nothing is started and nothing is sent: a simulated member yields the parcels it would send, and is answered with meta
tensors of the shapes that it expects.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gefen_fn.blocks import leaf_layout
from gefen_fn.exchange import Talk
from gefen_fn.muon_shards import Done, Job, talks
from gefen_fn.second_moment import Factored, FactoredState, SecondMoment, policy_for
from gefen_fn.shards import Peers, Piece
from gefen_fn.spec import default_axes, matrices_of
from gefen_kernels import reference
from gefen_nn.model_shapes import Cut, Model, cut_of

VOTE_BYTES = 64


@dataclass(frozen=True)
class SimulatedPiece(Piece):
    """The part of a leaf that one member of a mesh would hold.

    Attributes:
        cut: into how many parts each axis is cut.
        at: the member's place along each axis that is cut.
    """

    cut: tuple[tuple[int, int], ...] = ()
    at: tuple[int, ...] = ()

    def peers(self, axes: frozenset[int]) -> Peers | None:
        """Who would hold the other parts along these axes, numbered in the order of their places."""
        return _peers(self.whole, self.cut, self.at, axes & self.axes)


@functools.lru_cache(maxsize=65_536)
def _peers(
    whole: tuple[int, ...], cut: tuple[tuple[int, int], ...], own: tuple[int, ...], axes: frozenset[int]
) -> Peers | None:
    over = [n for n, (axis, count) in enumerate(cut) if axis in axes and count > 1]
    if not over:
        return None
    boxes, number_here = {}, 0
    for number, places in enumerate(itertools.product(*(range(cut[n][1]) for n in over))):
        at = list(own)
        for n, place in zip(over, places, strict=True):
            at[n] = place
        boxes[number] = _box(whole, cut, at)
        number_here = number if tuple(at) == own else number_here
    return Peers(boxes, number_here, (tuple(over), tuple(a for n, a in enumerate(own) if n not in over)))


def _box(whole: Sequence[int], cut: Sequence[tuple[int, int]], at: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The `(first, last + 1)` of each axis; parts are of one length but for the last ones, as `torch.chunk` cuts."""
    box = [(0, length) for length in whole]
    for (axis, count), place in zip(cut, at, strict=True):
        step = -(-whole[axis] // count)
        box[axis] = (min(place * step, whole[axis]), min((place + 1) * step, whole[axis]))
    return tuple(box)


def piece_at(whole: Sequence[int], cut: Cut, at: Sequence[int]) -> SimulatedPiece:
    """The part at a place of a leaf that is cut along some axes."""
    parts = tuple(sorted(cut.items()))
    box = _box(whole, parts, at)
    shape, offset = tuple(b - a for a, b in box), tuple(a for a, _ in box)
    axes = frozenset(axis for axis, count in parts if count > 1)
    return SimulatedPiece(shape, tuple(whole), offset, axes, cut=parts, at=tuple(at))


class Report(NamedTuple):
    """A model on a world of processes; per member the most that any of them has, in bytes where nothing else is said.

    Attributes:
        world: processes.
        entries: of all parameters.
        checkpoint: all state.
        local_entries: of the parameters of one member.
        local_state: its state.
        sent: what it sends in a step, its record of the vote not counted.
        vote: one record of the vote.
        collectives: in a step.
    """

    world: int
    entries: int
    checkpoint: int
    local_entries: int
    local_state: int
    sent: int
    vote: int
    collectives: int

    def __str__(self) -> str:
        """One number a line."""
        share = self.local_state / max(self.local_entries, 1)
        rows = {
            "parameters": f"{self.entries:,}",
            "checkpoint": _size(self.checkpoint),
            "parameters of a process": f"{self.local_entries:,}",
            "state of a process": f"{_size(self.local_state)} ({share:.4f} B a parameter)",
            "sent by a process in a step": _size(self.sent),
            "its record in the vote": f"{self.vote:,} B",
            "collectives in a step": str(self.collectives),
        }
        return "\n".join(f"{name:<28}{value}" for name, value in rows.items())


def _size(number: int) -> str:
    """Bytes with a unit of a thousand, a million or a thousand million."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:,.3f} {unit}"
    return f"{number} B"


class _Held(NamedTuple):
    """What one member holds and sends."""

    entries: int
    state: int
    sent: int
    exchanges: int


def simulate(model: Model, world: int, *, muon: bool = False, expert_parallel: int = 1, policy: SecondMoment) -> Report:
    """Cost of a step and of a checkpoint of Gefen, or of Muon with Gefen beside it, under FSDP2.

    Args:
        model: shapes of the leaves.
        world: processes.
        muon: whether matrices are Muon's.
        expert_parallel: processes that share out the experts; a divisor of `world`.
        policy: Gefen's second moment.

    Raises:
        ValueError: if `expert_parallel` does not divide `world`.
    """
    if world % expert_parallel:
        raise ValueError(f"`expert_parallel` must divide `world`: got {expert_parallel} for {world}. Use a divisor.")
    ranks = _sample(world, 8 if muon else 24)  # Muon's members plan every matrix of the group
    held = [_member(model, world, rank, muon, expert_parallel, policy) for rank in ranks]
    alone = _member(model, 1, 0, muon, 1, policy)
    most = _Held(*(max(column) for column in zip(*held, strict=True)))
    vote = VOTE_BYTES + -(-sum(leaf.copies for leaf in model.values()) // 8) * 2
    return Report(world, alone.entries, alone.state, *most[:3], vote, 1 + most.exchanges)


def _sample(world: int, count: int) -> list[int]:
    """All members of a small world; of a large one about so many, the first and the last among them."""
    if world <= count:
        return list(range(world))
    return sorted({*range(0, world, world // count), 1, world - 2, world - 1})


def _member(model: Model, world: int, rank: int, muon: bool, expert_parallel: int, policy: SecondMoment) -> _Held:
    """One member's share of all leaves."""
    entries = state = sent = rounds = 0
    matrices: list[SimulatedPiece] = []
    for leaf in model.values():
        cut = cut_of(leaf, world, expert_parallel)
        place = (rank % expert_parallel, rank // expert_parallel) if len(cut) > 1 else (rank,)
        piece = piece_at(leaf.shape, cut, place)
        entries += leaf.copies * math.prod(piece.shape)
        if muon and leaf.muon:
            matrices += [piece] * leaf.copies
            state += leaf.copies * _moment_bytes(piece)
            continue
        own, traffic = _gefen(piece, policy)  # type: ignore[arg-type]  # policies are frozen dataclasses
        state, sent, rounds = state + leaf.copies * own, sent + leaf.copies * sum(traffic), max(rounds, len(traffic))
    traffic = _muon(matrices)
    return _Held(entries, state, sent + sum(traffic), max(rounds, len(traffic)))


def _moment_bytes(piece: Piece) -> int:
    """Codes and scales of the part held here, or an fp32 moment."""
    layout, size = leaf_layout(piece), math.prod(piece.shape)
    scales = math.prod(reference.scale_shape(piece.shape, layout.block, layout.start)) if not layout.dense else 0
    return 4 * size if layout.dense else size + 4 * scales


@functools.lru_cache(maxsize=65_536)
def _gefen(piece: SimulatedPiece, policy: SecondMoment) -> tuple[int, tuple[int, ...]]:
    """Bytes of state, and bytes sent in each exchange."""
    layout = leaf_layout(piece)
    own = policy_for(policy, layout)
    tensors = [torch.empty(shape, device="meta") for shape in own.shapes(layout)]
    state = _moment_bytes(piece) + sum(4 * x.numel() for x in tensors)
    nu = FactoredState(*tensors) if isinstance(own, Factored) else tensors[0]
    talk = own.share(torch.empty(piece.shape, device="meta"), nu, 0.999, layout)
    return state, () if talk is None else _traffic(talk)


def _muon(pieces: Sequence[SimulatedPiece]) -> tuple[int, ...]:
    """Bytes sent in each exchange for matrices that are cut."""
    jobs = [
        Job(torch.empty(p.shape, device="meta"), matrices_of(p.whole, default_axes(p.whole)), None, None)
        for p in pieces
    ]
    meetings = talks(jobs, [[p] for p in pieces], "distributed", torch.bfloat16, _unworked)
    rounds = [_traffic(talk) for talk in meetings]
    return tuple(map(sum, itertools.zip_longest(*rounds, fillvalue=0)))


def _unworked(jobs: Sequence[Job]) -> list[Done]:
    return [Done(job.x.float(), None) for job in jobs]


def _traffic(talk: Talk[Any]) -> tuple[int, ...]:
    """Bytes that a talk sends in each of its exchanges, answered by tensors without data."""
    sent = []
    answer = None
    try:
        while True:
            parcel = talk.send(answer)  # type: ignore[arg-type]  # None starts a generator
            sent.append(sum(x.numel() * x.itemsize for parts in parcel.send.values() for x in parts))
            answer = {
                m: iter([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in parcel.expect[m]])
                for m in list(parcel.expect)
            }
    except StopIteration:
        return tuple(sent)
