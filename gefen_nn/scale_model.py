"""What a step and a checkpoint cost on many processes, from shapes alone: the talks of a step held on meta tensors.

Nothing is started and nothing is sent: a simulated member yields the parcels it would send, and is answered with meta
tensors of the shapes that it expects.
"""

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gefen_fn.blocks import leaf_layout
from gefen_fn.exchange import Talk
from gefen_fn.second_moment import Factored, FactoredState, SecondMoment, policy_for
from gefen_fn.shards import Peers, Piece
from gefen_fn.spec import default_axes, matrices_of
from gefen_kernels import reference
from gefen_nn.errors import WrongArgumentError
from gefen_nn.model_shapes import Cut, Model, cut_of
from gefen_nn.vote import record_bytes


@dataclass(frozen=True)
class SimulatedPiece(Piece):
    """The part of a leaf that one member of a mesh would hold.

    Attributes:
        cut: into how many parts each axis is cut.
        at: the member's place along each axis that is cut.
        reach: entries of an axis beyond this part that its members can have to do with; None for all.
    """

    cut: tuple[tuple[int, int], ...] = ()
    at: tuple[int, ...] = ()
    reach: int | None = None

    def peers(self, axes: frozenset[int]) -> Peers | None:
        """Who would hold the other parts along these axes, numbered in the order of their places."""
        return _peers(self.whole, self.cut, self.at, axes & self.axes, self.reach)


@functools.lru_cache(maxsize=65_536)
def _peers(
    whole: tuple[int, ...],
    cut: tuple[tuple[int, int], ...],
    own: tuple[int, ...],
    axes: frozenset[int],
    reach: int | None,
) -> Peers | None:
    over = [n for n, (axis, count) in enumerate(cut) if axis in axes and count > 1]
    if not over:
        return None
    near = [_near(whole[cut[n][0]], cut[n][1], own[n], reach) for n in over]
    boxes = {}
    for places in itertools.product(*near):
        at = list(own)
        for n, place in zip(over, places, strict=True):
            at[n] = place
        boxes[_number(at, cut, over)] = _box(whole, cut, at)
    return Peers(boxes, _number(own, cut, over), (tuple(over), tuple(a for n, a in enumerate(own) if n not in over)))


def _near(length: int, count: int, own: int, reach: int | None) -> range:
    """The places along an axis whose parts lie within reach of one's own."""
    if reach is None:
        return range(count)
    away = -(-reach // -(-length // count))
    return range(max(own - away, 0), min(own + away + 1, count))


def _number(at: Sequence[int], cut: Sequence[tuple[int, int]], over: Sequence[int]) -> int:
    """A member's place in the group that is cut along these axes, the last one running fastest."""
    number = 0
    for n in over:
        number = number * cut[n][1] + at[n]
    return number


def _box(whole: Sequence[int], cut: Sequence[tuple[int, int]], at: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The `(first, last + 1)` of each axis; parts are of one length but for the last ones, as `torch.chunk` cuts."""
    box = [(0, length) for length in whole]
    for (axis, count), place in zip(cut, at, strict=True):
        step = -(-whole[axis] // count)
        box[axis] = (min(place * step, whole[axis]), min((place + 1) * step, whole[axis]))
    return tuple(box)


def piece_at(whole: Sequence[int], cut: Cut, at: Sequence[int], reach: int | None = None) -> SimulatedPiece:
    """The part at a place of a leaf that is cut along some axes; see `SimulatedPiece`."""
    parts = tuple(sorted(cut.items()))
    box = _box(whole, parts, at)
    shape, offset = tuple(b - a for a, b in box), tuple(a for a, _ in box)
    axes = frozenset(axis for axis, count in parts if count > 1)
    return SimulatedPiece(shape, tuple(whole), offset, axes, cut=parts, at=tuple(at), reach=reach)


class ScaleReport(NamedTuple):
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


def simulate(
    model: Model, world: int, *, muon: bool = False, expert_parallel: int = 1, policy: SecondMoment
) -> ScaleReport:
    """Cost of a step and of a checkpoint of Gefen, or of Muon with Gefen beside it, under FSDP2.

    Args:
        model: shapes of the leaves.
        world: processes.
        muon: whether matrices are Muon's.
        expert_parallel: processes that share out the experts; a divisor of `world`.
        policy: Gefen's second moment.

    Raises:
        WrongArgumentError: if `expert_parallel` does not divide `world`.
    """
    if world % expert_parallel:
        raise WrongArgumentError(
            f"`expert_parallel` must divide `world`: got {expert_parallel} for {world}. Use a divisor."
        )
    held = [_member(model, world, rank, muon, expert_parallel, policy) for rank in _sample(world, 24)]
    alone = _member(model, 1, 0, muon, 1, policy)
    most = _Held(*(max(column) for column in zip(*held, strict=True)))
    if world == 1:
        return ScaleReport(world, alone.entries, alone.state, *alone[:2], 0, 0, 0)
    vote = record_bytes(sum(leaf.copies for leaf in model.values()))
    return ScaleReport(world, alone.entries, alone.state, *most[:3], vote, 1 + most.exchanges)


def _sample(world: int, count: int) -> list[int]:
    """All members of a small world; of a large one about so many, the first and the last among them."""
    if world <= count:
        return list(range(world))
    return sorted({*range(0, world, world // count), 1, world - 2, world - 1})


def _member(model: Model, world: int, rank: int, muon: bool, expert_parallel: int, policy: SecondMoment) -> _Held:
    """One member's share of all leaves."""
    entries = state = sent = rounds = 0
    matrices: list[tuple[SimulatedPiece, int]] = []
    sides = policy.sides if isinstance(policy, Factored) else (0, 0)
    reach = None if sides[0] is None else 2 * sides[0]  # of rows; a last tile takes the remainder too
    for leaf in model.values():
        cut = cut_of(leaf, world, expert_parallel)
        place = (rank % expert_parallel, rank // expert_parallel) if len(cut) > 1 else (rank,)
        piece = piece_at(leaf.shape, cut, place, reach)
        entries += leaf.copies * math.prod(piece.shape)
        if muon and leaf.muon:
            matrices.append((piece, leaf.copies))
            state += leaf.copies * _moment_bytes(piece)
            continue
        own, traffic = gefen_costs(piece, policy)  # type: ignore[arg-type]  # policies are frozen dataclasses
        state, sent, rounds = state + leaf.copies * own, sent + leaf.copies * sum(traffic), max(rounds, len(traffic))
    traffic = muon_traffic(matrices)
    return _Held(entries, state, sent + sum(traffic), max(rounds, len(traffic)))


def _moment_bytes(piece: Piece) -> int:
    """Codes and scales of the part held here, or an fp32 moment."""
    layout, size = leaf_layout(piece), math.prod(piece.shape)
    scales = math.prod(reference.scale_shape(piece.shape, layout.block, layout.start)) if not layout.dense else 0
    return 4 * size if layout.dense else size + 4 * scales


@functools.lru_cache(maxsize=65_536)
def gefen_costs(piece: SimulatedPiece, policy: SecondMoment) -> tuple[int, tuple[int, ...]]:
    """Of Gefen: bytes of state, counters left out, and bytes that the member sends in each exchange."""
    layout = leaf_layout(piece)
    own = policy_for(policy, layout)
    tensors = [torch.empty(shape, device="meta") for shape in own.shapes(layout)]
    state = _moment_bytes(piece) + sum(4 * x.numel() for x in tensors)
    nu = FactoredState(*tensors) if isinstance(own, Factored) else tensors[0]
    talk = own.share(torch.empty(piece.shape, device="meta"), nu, 0.999, layout)
    return state, () if talk is None else _traffic(talk)


def state_bytes_of(shape: Sequence[int], policy: SecondMoment, *, muon: bool) -> int:
    """Bytes of state of a whole leaf, counters left out: of Muon, or of Gefen with this second moment."""
    piece = piece_at(shape, {}, ())
    return _moment_bytes(piece) if muon else gefen_costs(piece, policy)[0]  # type: ignore[arg-type]  # policies are frozen


def muon_traffic(pieces: Sequence[tuple[SimulatedPiece, int]]) -> tuple[int, ...]:
    """Bytes that a member sends in each of the two exchanges for cut matrices, each made by one member in bf16.

    What `gefen_fn.muon_shards.talks` plans, in closed form: it lists every part of every matrix, of which large worlds
    have too many.

    Args:
        pieces: held by the member, with their number.
    """
    groups: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    for piece, copies in pieces:
        seen = matrices_of(piece.whole, default_axes(piece.whole))
        over = [n for n, (axis, count) in enumerate(piece.cut) if axis in (*seen.rows, *seen.cols) and count > 1]
        if over:
            count, me = math.prod(piece.cut[n][1] for n in over), _number(piece.at, piece.cut, over)
            shape = list(piece.shape)
            for n in over:
                shape[piece.cut[n][0]] = piece.whole[piece.cut[n][0]]
            groups[count, me] += [(math.prod(shape), math.prod(piece.shape), min(seen.sizes[0]))] * copies
    out = back = 0
    for (count, me), leaves in groups.items():
        loads = [(0, member) for member in range(count)]
        for whole, own, side in sorted(leaves, key=lambda leaf: -leaf[0] * leaf[2]):
            load, owner = loads[0]
            heapq.heapreplace(loads, (load + whole * side, owner))
            out, back = out + 2 * own * (owner != me), back + 2 * (whole - own) * (owner == me)
    return (out, back) if groups else ()


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
