"""Column means of tiles that several members hold rows of: finished by one, given back to all.

Members send each other the sums of the maximal complete subtrees of their rows, each to the holder of the column, who
finishes the tree; so the bits of a mean do not depend on where the cuts are.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gefen_fn.exchange import Parcel, Talk
from gefen_fn.tiles import Tiles, lengths
from gefen_kernels import reference
from gefen_kernels.step import STRIP

Node = tuple[int, int]
Range = tuple[int, int]


class Edge(NamedTuple):
    """A tile that is not all held here, after a step.

    Attributes:
        col: fp32 `[.., rows held here, W]`, the column means stored in them.
        means: fp32 `[.., 1, C]`, of all columns.
    """

    col: Tensor
    means: Tensor


class _Cut(NamedTuple):
    """A tile of which some rows are held here, and some by others.

    Attributes:
        top: the first of them, among all rows held here.
        height: rows of the tile.
        own: this member.
        parts: the rows of the tile that each member holds, by member; without those that hold none.
        slots: the rows of its packed means that each of them stores.
    """

    top: int
    height: int
    own: int
    parts: dict[int, Range]
    slots: dict[int, Range]

    @property
    def nodes(self) -> dict[Node, Range]:
        """The subtrees of the rows held here, each with its first row among these and its rows."""
        first, last = self.parts[self.own]
        begin = self.top - first
        return {(level, i): (begin + (i << level), 1 << level) for level, i in _subtrees(first, last)}

    @property
    def others(self) -> list[int]:
        """The other members that hold rows."""
        return [m for m in self.parts if m != self.own]


def strips_of(tiles: Tiles, axis: int) -> tuple[Range, ...]:
    """The strips of rows held here whose sums of squares the other holders of cut tiles are told.

    Args:
        tiles: of the leaf, which several members hold rows of.
        axis: of the rows.

    Returns:
        Of each its first row and its rows, `STRIP` at most.
    """
    return tuple(strip for n in tiles.cut for node in _cut(tiles, axis, n).nodes.values() for strip in _strips(*node))


def finish_columns(
    tiles: Tiles, axis: int, sums: Tensor, col: Tensor, average: Callable[[Tensor, Tensor], Tensor]
) -> Talk[dict[int, Edge]]:
    """The new column means of the tiles that are cut: out go partial sums, back come finished means.

    Args:
        tiles: of the leaf.
        axis: of the rows.
        sums: fp32 `[.., strips, C]`, of the squares of the strips that `strips_of` names.
        col: fp32 `[.., R, W]`, the means stored here.
        average: from stored means and those of this step to the new ones.

    Returns:
        By the tile's place among those of which rows are held here.
    """
    cuts = [_cut(tiles, axis, n) for n in tiles.cut]
    assert tiles.peers is not None  # asked of leaves with cut tiles alone
    lead, group = sums.shape[:-2], tiles.peers.group
    out, back = Parcel(group, col.device), Parcel(group, col.device)
    partial = _packed_sums(tiles, cuts, sums)
    for cut, own in zip(cuts, partial, strict=True):
        _send_sums(out, cut, own, lead, tiles.slots)
    came = yield out
    stored = []
    for cut, own in zip(cuts, partial, strict=True):
        nodes = {node: _rows(x, cut.slots[cut.own]) for node, x in own.items()}
        nodes.update({node: next(came[m]) for m in cut.others for node in _subtrees(*cut.parts[m])})
        mean = _total(nodes, cut.height)
        old = col[..., cut.top : cut.top + mean.shape[-2], :]
        stored.append(average(old, mean / lengths((cut.height,), mean)))
        _send_means(back, cut, stored[-1], lead, tiles.slots)
    came = yield back
    edges = {}
    for n, cut, mine in zip(tiles.cut, cuts, stored, strict=True):
        packed = col.new_zeros((*lead, 1, tiles.packed, tiles.slots))
        for m, (low, high) in cut.slots.items():
            packed[..., 0, low:high, :] = mine if m == cut.own else next(came[m])
        first, last = cut.parts[cut.own]
        below = mine.new_zeros((*lead, last - first - mine.shape[-2], tiles.slots))
        edges[n] = Edge(torch.cat([mine, below], -2), tiles.unpack(packed))
    return edges


@functools.lru_cache(maxsize=4096)
def _cut(tiles: Tiles, axis: int, n: int) -> _Cut:
    """A cut tile by its place, kept because there may be thousands of members, and each step asks."""
    assert tiles.peers is not None  # asked of leaves with cut tiles alone
    top, height = (tiles.first + n) * tiles.height, tiles.heights[n]
    ranges = {m: box[axis] for m, box in sorted(tiles.peers.boxes.items())}
    held = {m: (max(a - top, 0), min(b - top, height)) for m, (a, b) in ranges.items()}
    parts = {m: (a, b) for m, (a, b) in held.items() if a < b}
    slots = {m: (min(a, tiles.packed), min(b, tiles.packed)) for m, (a, b) in parts.items()}
    return _Cut(tiles.tops[n], height, tiles.peers.own, parts, slots)


def _strips(first: int, rows: int) -> list[Range]:
    """A subtree in strips of `STRIP` rows, or as it is if it is shorter."""
    size = min(rows, STRIP)
    return [(top, size) for top in range(first, first + rows, size)]


def _packed_sums(tiles: Tiles, cuts: Sequence[_Cut], sums: Tensor) -> list[dict[Node, Tensor]]:
    """For each cut tile the sums of the subtrees of the rows held here, each `[.., Q, W]`."""
    counts = [[len(_strips(*rows)) for rows in cut.nodes.values()] for cut in cuts]
    parts = iter(torch.split(sums, list(chain.from_iterable(counts)), -2))
    return [{node: tiles.pack(reference.tree_sum(next(parts), -2)) for node in cut.nodes} for cut in cuts]


def _send_sums(parcel: Parcel, cut: _Cut, sums: dict[Node, Tensor], lead: torch.Size, width: int) -> None:
    """Each sum to the holders of its columns."""
    low, high = cut.slots[cut.own]
    for m in cut.others:
        parcel.send[m] += [_rows(x, cut.slots[m]) for x in sums.values()]
        parcel.expect[m] += [((*lead, high - low, width), torch.float32)] * len(_subtrees(*cut.parts[m]))


def _send_means(parcel: Parcel, cut: _Cut, own: Tensor, lead: torch.Size, width: int) -> None:
    """The means stored here to all that hold rows of the tile."""
    for m in cut.others:
        low, high = cut.slots[m]
        parcel.send[m].append(own)
        parcel.expect[m].append(((*lead, high - low, width), torch.float32))


def _rows(x: Tensor, at: Range) -> Tensor:
    return x[..., at[0] : at[1], :]


def _subtrees(first: int, last: int) -> list[Node]:
    """The maximal complete subtrees `(level, index)` that cover rows `first .. last - 1` of a binary tree, sorted."""
    out: list[Node] = []
    level = 0
    while first < last:
        if first & 1:
            out.append((level, first))
            first += 1
        if last & 1:
            last -= 1
            out.append((level, last))
        first, last, level = first >> 1, last >> 1, level + 1
    return sorted(out)


def _total(nodes: dict[Node, Tensor], rows: int) -> Tensor:
    """The sum over `rows` rows from those of subtrees that cover them; a subtree without rows counts nothing."""
    for level in range((rows - 1).bit_length()):
        for index in sorted({i >> 1 for at, i in nodes if at == level}):
            left, right = nodes.pop((level, 2 * index)), nodes.pop((level, 2 * index + 1), None)
            nodes[level + 1, index] = left if right is None else left + right
    (total,) = nodes.values()
    return total
