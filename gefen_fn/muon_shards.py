"""Muon on shards: the parts of a matrix come together at one member, are made orthogonal there, and go back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.exchange import Answer, Parcel, Talk
from gefen_fn.shards import Piece
from gefen_fn.spec import Matrices


class Job(NamedTuple):
    """A leaf with all of its matrices, or what is held here of them.

    Attributes:
        x: what is made orthogonal.
        seen: its matrices.
        nu: NorMuon's averages of its rows, `x` with column axes of length 1; None without.
        t: the leaf's count, for NorMuon's correction of bias; None without.
    """

    x: Tensor
    seen: Matrices
    nu: Tensor | None
    t: Tensor | None


class Done(NamedTuple):
    """What became of a job: orthogonal matrices in the place of `x`, fp32, and `nu`."""

    x: Tensor
    nu: Tensor | None


_Worker = Callable[[Sequence[Job]], list[Done]]


class _Scattered(NamedTuple):
    """A tensor of which each peer holds a part.

    Attributes:
        x: the part held here.
        boxes: of each peer the `(first, last + 1)` of each axis of its part of the leaf.
        axes: those along which the parts make up one tensor; along the others it stays as it is held here.
        shape: of that tensor.
        out: the dtype in which it travels to an owner.
        back: the dtype in which the owner's result travels.
    """

    x: Tensor
    boxes: Mapping[int, tuple[tuple[int, int], ...]]
    axes: frozenset[int]
    shape: tuple[int, ...]
    out: torch.dtype
    back: torch.dtype

    @classmethod
    def of(cls, x: Tensor, piece: Piece, axes: frozenset[int], out: torch.dtype, back: torch.dtype) -> _Scattered:
        """The part `x` of a leaf that is cut along some of these axes."""
        peers = piece.peers(axes)
        assert peers is not None  # asked of leaves that are cut
        shape = tuple(piece.whole[n] if n in axes else length for n, length in enumerate(x.shape))
        return cls(x, peers.boxes, axes, shape, out, back)

    def at(self, member: int) -> tuple[slice, ...]:
        """Where a member's part lies; found when it is asked for, as there may be thousands of them."""
        return tuple(slice(*ends) if n in self.axes else slice(None) for n, ends in enumerate(self.boxes[member]))

    def shape_at(self, member: int) -> tuple[int, ...]:
        """The shape of a member's part."""
        return tuple(len(range(length)[at]) for at, length in zip(self.at(member), self.shape, strict=True))

    def assembled(self, me: int, came: Answer) -> Tensor:
        """The whole, of the part held here and those that came."""
        whole = self.x.new_empty(self.shape, dtype=self.out)
        for m in sorted(self.boxes):
            whole[self.at(m)] = self.x if m == me else next(came[m])
        return whole


class _Leaf(NamedTuple):
    """A leaf whose matrices are cut: its job, its tensors, and who makes it orthogonal."""

    job: Job
    tensors: list[_Scattered]
    owners: tuple[int, ...]

    @property
    def peers(self) -> list[int]:
        """The members that hold it between them."""
        return sorted(self.tensors[0].boxes)

    @property
    def cost(self) -> int:
        """Of the products of its matrices, up to a factor."""
        numel, rows = torch.Size(self.tensors[0].shape).numel(), sum(self.job.seen.split)
        return sum(min(size) * numel * size[0] // max(rows, 1) for size in self.job.seen.sizes)


def talks(
    jobs: Sequence[Job | None], pieces: Sequence[Sequence[Piece]], mode: str, dtype: torch.dtype, work: _Worker
) -> list[Talk[dict[int, Done]]]:
    """One talk for each group whose members hold leaves that are cut inside their matrices.

    Args:
        jobs: by number of the leaf, `x` and `nu` as they are held here and `seen` of the whole leaf.
        pieces: where `x` and `nu` lie.
        mode: `"exact"`: every member makes every matrix orthogonal; `"distributed"`: one does, for all.
        dtype: in which matrices are made orthogonal, and travel.
        work: does whole jobs.

    Returns:
        Talks that return what is held here of their leaves, by number.
    """
    groups: dict[tuple[Any, int], dict[int, _Leaf]] = {}
    for n, (job, own) in enumerate(zip(jobs, pieces, strict=True)):
        if job is None or not is_cut(job.seen, own[0]):
            continue
        axes = _matrix_axes(job.seen)
        tensors = [_Scattered.of(job.x, own[0], axes, dtype, dtype if job.nu is None else torch.float32)]
        if job.nu is not None:
            tensors.append(_Scattered.of(job.nu, own[1], axes, torch.float32, torch.float32))
        peers = own[0].peers(axes)
        groups.setdefault((peers.group, peers.own), {})[n] = _Leaf(job, tensors, ())  # type: ignore[union-attr]  # it is cut
    return [_meeting(group, me, _owned(leaves, mode), work) for (group, me), leaves in groups.items()]


def is_cut(seen: Matrices, piece: Piece) -> bool:
    """Whether several members hold parts of one matrix."""
    return piece.peers(_matrix_axes(seen)) is not None


def _matrix_axes(seen: Matrices) -> frozenset[int]:
    return frozenset((*seen.rows, *seen.cols))


def _owned(leaves: dict[int, _Leaf], mode: str) -> dict[int, _Leaf]:
    """The leaves with their owners; in `"distributed"` the longest first, each to the member with the least to do."""
    if mode == "exact":
        return {n: leaf._replace(owners=tuple(leaf.peers)) for n, leaf in leaves.items()}
    load: dict[int, int] = {m: 0 for leaf in leaves.values() for m in leaf.peers}
    owner = {}
    for n in sorted(leaves, key=lambda n: (-leaves[n].cost, n)):
        owner[n] = min(leaves[n].peers, key=load.__getitem__)
        load[owner[n]] += leaves[n].cost
    return {n: leaf._replace(owners=(owner[n],)) for n, leaf in leaves.items()}


def _meeting(group: Any, me: int, leaves: dict[int, _Leaf], work: _Worker) -> Talk[dict[int, Done]]:
    """Out go the parts to the owners, back come the parts of what they made of the whole."""
    device = next(iter(leaves.values())).job.x.device
    out, back = Parcel(group, device), Parcel(group, device)
    for leaf in leaves.values():
        _send_out(out, leaf, me)
    came = yield out
    own = [n for n, leaf in leaves.items() if me in leaf.owners]
    done = dict(zip(own, work([_whole(leaves[n], me, came) for n in own]), strict=True))
    for n, leaf in leaves.items():
        _send_back(back, leaf, me, done.get(n))
    came = yield back
    return {n: _held(leaf, me, done.get(n), came) for n, leaf in leaves.items()}


def _send_out(parcel: Parcel, leaf: _Leaf, me: int) -> None:
    for owner in leaf.owners:
        if owner != me:
            parcel.send[owner] += [own.x.to(own.out) for own in leaf.tensors]
    if me in leaf.owners:
        for m in leaf.peers:
            if m != me:
                parcel.expect[m] += [(own.shape_at(m), own.out) for own in leaf.tensors]


def _whole(leaf: _Leaf, me: int, came: Answer) -> Job:
    """The job of an owner."""
    x, *nu = (own.assembled(me, came) for own in leaf.tensors)
    return Job(x, replace(leaf.job.seen, shape=tuple(x.shape)), nu[0] if nu else None, leaf.job.t)


def _send_back(parcel: Parcel, leaf: _Leaf, me: int, done: Done | None) -> None:
    """Nothing, where every member is an owner."""
    if done is None:
        parcel.expect[leaf.owners[0]] += [(own.shape_at(me), own.back) for own in leaf.tensors]
        return
    for m in leaf.peers:
        if m not in leaf.owners:
            parcel.send[m] += [x[own.at(m)].to(own.back) for x, own in _pairs(leaf, done)]


def _pairs(leaf: _Leaf, done: Done) -> list[tuple[Tensor, _Scattered]]:
    return [(x, own) for x, own in zip(done, leaf.tensors, strict=False) if x is not None]


def _held(leaf: _Leaf, me: int, done: Done | None, came: Answer) -> Done:
    """What is held here of a result, fp32."""
    if done is not None:
        x, *nu = (x[own.at(me)] for x, own in _pairs(leaf, done))
    else:
        x, *nu = (next(came[leaf.owners[0]]).float() for _ in leaf.tensors)
    return Done(x, nu[0] if nu else None)
