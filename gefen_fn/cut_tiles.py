"""Column means of tiles that several members hold rows of: finished by one, given back to all.

Members send each other the sums of the maximal complete subtrees of their rows, each to the holder of the column, who
finishes the tree; so the bits of a mean do not depend on where the cuts are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gefen_fn.exchange import Parcel, Program
from gefen_fn.scalar import Scalar, moving_average
from gefen_fn.shards import Rows
from gefen_fn.tiles import Tiles, lengths
from gefen_kernels import reference

Node = tuple[int, int]
Range = tuple[int, int]


class Columns(NamedTuple):
    """Column means after a step.

    Attributes:
        col: fp32 `[.., R, W]`, what is stored here.
        means: fp32 `[.., n, C]`, for each tile of which rows are held here.
    """

    col: Tensor
    means: Tensor


class _Cut(NamedTuple):
    """A tile of which rows are held here.

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
    def others(self) -> list[int]:
        """The other members that hold rows."""
        return [m for m in self.parts if m != self.own]

    @property
    def stored(self) -> slice:
        """Where its means stored here lie, among all rows held here."""
        low, high = self.slots[self.own]
        return slice(self.top, self.top + high - low)


def finish_columns(tiles: Tiles, rows: Rows, square: Tensor, col: Tensor, b2: Scalar) -> Program[Columns]:
    """The new column means of a leaf: out go partial sums, back come finished means.

    Args:
        tiles: of the leaf.
        rows: who holds which rows.
        square: fp32 `[.., R, C]`, the squares of the rows held here.
        col: fp32 `[.., R, W]`, the means stored here.
        b2: their decay.
    """
    cuts = list(_cuts(tiles, rows))
    lead, out, back = square.shape[:-2], Parcel(rows.group, col.device), Parcel(rows.group, col.device)
    sums = [_packed_sums(tiles, cut, square) for cut in cuts]
    del square  # as large as the leaf, and all leaves wait here together
    for cut, own in zip(cuts, sums, strict=True):
        _send_sums(out, cut, own, lead, tiles.slots)
    came = yield out
    new = torch.zeros_like(col)
    for cut, own in zip(cuts, sums, strict=True):
        nodes = {node: _rows(x, cut.slots[cut.own]) for node, x in own.items()}
        nodes.update({node: next(came[m]) for m in cut.others for node in subtrees(*cut.parts[m])})
        mean = finish(nodes, cut.height)
        mean = mean / lengths((cut.height,), mean)
        new[..., cut.stored, :] = moving_average(b2, col[..., cut.stored, :], mean)
        _send_means(back, cut, new[..., cut.stored, :], lead, tiles.slots)
    came = yield back
    packed = col.new_zeros((*lead, len(cuts), tiles.packed, tiles.slots))
    for n, cut in enumerate(cuts):
        for m, (low, high) in cut.slots.items():
            packed[..., n, low:high, :] = new[..., cut.stored, :] if m == cut.own else next(came[m])
    return Columns(new, tiles.unpack(packed))


def _cuts(tiles: Tiles, rows: Rows) -> Iterator[_Cut]:
    top = 0
    for k, height in enumerate(tiles.heights, tiles.first):
        held = {
            m: (max(a - k * tiles.height, 0), min(b - k * tiles.height, height)) for m, (a, b) in enumerate(rows.ranges)
        }
        parts = {m: (a, b) for m, (a, b) in held.items() if a < b}
        slots = {m: (min(a, tiles.packed), min(b, tiles.packed)) for m, (a, b) in parts.items()}
        yield _Cut(top, height, rows.own, parts, slots)
        top += parts[rows.own][1] - parts[rows.own][0]


def _packed_sums(tiles: Tiles, cut: _Cut, square: Tensor) -> dict[Node, Tensor]:
    """The sums of the subtrees of the rows held here, each `[.., Q, W]`."""
    first, last = cut.parts[cut.own]
    below = cut.top - first
    rows = {(level, i): (below + (i << level), 1 << level) for level, i in subtrees(first, last)}
    return {node: tiles.pack(reference.tree_sum(square.narrow(-2, *at), -2)) for node, at in rows.items()}


def _send_sums(parcel: Parcel, cut: _Cut, sums: dict[Node, Tensor], lead: torch.Size, width: int) -> None:
    """Each sum to the holders of its columns."""
    low, high = cut.slots[cut.own]
    for m in cut.others:
        parcel.send[m] += [_rows(x, cut.slots[m]) for x in sums.values()]
        parcel.expect[m] += [(*lead, high - low, width)] * len(subtrees(*cut.parts[m]))


def _send_means(parcel: Parcel, cut: _Cut, own: Tensor, lead: torch.Size, width: int) -> None:
    """The means stored here to all that hold rows of the tile."""
    for m in cut.others:
        low, high = cut.slots[m]
        parcel.send[m].append(own)
        parcel.expect[m].append((*lead, high - low, width))


def _rows(x: Tensor, at: Range) -> Tensor:
    return x[..., at[0] : at[1], :]


def subtrees(first: int, last: int) -> list[Node]:
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


def finish(nodes: dict[Node, Tensor], rows: int) -> Tensor:
    """The sum over `rows` rows from those of subtrees that cover them; a subtree without rows counts nothing."""
    for level in range((rows - 1).bit_length()):
        for index in sorted({i >> 1 for at, i in nodes if at == level}):
            left, right = nodes.pop((level, 2 * index)), nodes.pop((level, 2 * index + 1), None)
            nodes[level + 1, index] = left if right is None else left + right
    (total,) = nodes.values()
    return total
