"""Column means of tiles that several members hold rows of: finished by one, given back to all.

Members send each other the sums of the maximal complete subtrees of their rows, each to the holder of the column, who
finishes the tree, so the bits of a mean do not depend on where the cuts are.
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


class Columns(NamedTuple):
    """Column means after a step.

    Attributes:
        col: fp32 `[.., R, W]`, what is stored here.
        means: fp32 `[.., n, C]`, for each tile of which rows are held here.
    """

    col: Tensor
    means: Tensor


def subtrees(first: int, last: int) -> list[Node]:
    """The maximal complete subtrees `(level, index)` that cover rows `first .. last - 1` of a binary tree."""
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


class _Cut(NamedTuple):
    """A tile as all members hold it.

    Attributes:
        height: its rows.
        parts: `(first, last + 1)` of each member's rows of it, by member; those that hold none are missing.
        slots: `(first, last + 1)` of each member's rows of its packed means.
    """

    height: int
    parts: dict[int, tuple[int, int]]
    slots: dict[int, tuple[int, int]]


def _cuts(tiles: Tiles, rows: Rows) -> Iterator[_Cut]:
    """The tiles of which rows are held here."""
    for k, height in enumerate(tiles.heights, tiles.first):
        top = k * tiles.height
        held = {m: (max(a - top, 0), min(b - top, height)) for m, (a, b) in enumerate(rows.ranges)}
        parts = {m: (a, b) for m, (a, b) in held.items() if a < b}
        slots = {m: (min(a, tiles.packed), min(b, tiles.packed)) for m, (a, b) in parts.items()}
        yield _Cut(height, parts, slots)


def finish_columns(tiles: Tiles, rows: Rows, square: Tensor, col: Tensor, b2: Scalar) -> Program[Columns]:
    """The new column means of a leaf: out go partial sums, back come finished means.

    Args:
        tiles: of the leaf.
        rows: who holds which rows.
        square: fp32 `[.., R, C]`, the squares of the rows held here.
        col: fp32 `[.., R, W]`, the means stored here.
        b2: their decay.
    """
    me, cuts = rows.own, list(_cuts(tiles, rows))
    lead, starts = square.shape[:-2], _starts(tiles)
    sums = [_packed_sums(tiles, cut.parts[me], square, at) for cut, at in zip(cuts, starts, strict=True)]
    came = yield _out(tiles, rows, cuts, sums, lead.numel())
    fresh = [
        _finished(cut, me, nodes) for cut, nodes in zip(cuts, _received(tiles, cuts, me, sums, came, lead), strict=True)
    ]
    new = torch.zeros_like(col)
    for cut, mean, at in zip(cuts, fresh, starts, strict=True):
        stored = slice(at, at + mean.shape[-2])
        new[..., stored, :] = moving_average(b2, col[..., stored, :], mean / lengths((cut.height,), mean))
    own = [new[..., at : at + mean.shape[-2], :] for mean, at in zip(fresh, starts, strict=True)]
    came = yield _back(tiles, rows, cuts, own, lead.numel())
    return Columns(new, tiles.unpack(_assembled(tiles, cuts, me, own, came, lead, square)))


def _starts(tiles: Tiles) -> list[int]:
    """Where each tile's rows begin among those held here."""
    ends = [sum(b - a for a, b in tiles.parts[: n + 1]) for n in range(len(tiles.parts))]
    return [0, *ends[:-1]]


def _packed_sums(tiles: Tiles, part: tuple[int, int], square: Tensor, at: int) -> dict[Node, Tensor]:
    """The sums of a part's subtrees, each `[.., Q, W]`."""
    first, last = part
    out = {}
    for level, index in subtrees(first, last):
        low = at + (index << level) - first
        out[level, index] = tiles.pack(reference.tree_sum(square[..., low : low + (1 << level), :], -2))
    return out


def _out(tiles: Tiles, rows: Rows, cuts: list[_Cut], sums: list[dict[Node, Tensor]], lead: int) -> Parcel:
    """Each member's columns of the sums of the rows held here."""
    send: dict[int, list[Tensor]] = {}
    expect: dict[int, int] = {}
    for cut, nodes in zip(cuts, sums, strict=True):
        mine = cut.slots[rows.own]
        for m in cut.parts.keys() - {rows.own}:
            low, high = cut.slots[m]
            send.setdefault(m, []).extend(x[..., low:high, :].reshape(-1) for x in nodes.values())
            size = lead * (mine[1] - mine[0]) * tiles.slots
            expect[m] = expect.get(m, 0) + len(subtrees(*cut.parts[m])) * size
    return Parcel(rows.group, {m: torch.cat(parts) for m, parts in send.items()}, expect)


def _received(
    tiles: Tiles, cuts: list[_Cut], me: int, sums: list[dict[Node, Tensor]], came: dict[int, Tensor], lead: torch.Size
) -> Iterator[dict[Node, Tensor]]:
    """All members' sums of the columns stored here, for each tile."""
    left = dict(came)
    for cut, nodes in zip(cuts, sums, strict=True):
        low, high = cut.slots[me]
        shape = (*lead, high - low, tiles.slots)
        all_nodes = {node: x[..., low:high, :] for node, x in nodes.items()}
        for m in sorted(cut.parts.keys() - {me}):
            names = subtrees(*cut.parts[m])
            size = lead.numel() * (high - low) * tiles.slots
            parts = left[m][: size * len(names)].split(size) if size else [left[m][:0]] * len(names)
            left[m] = left[m][size * len(names) :]
            all_nodes.update({node: x.reshape(shape) for node, x in zip(names, parts, strict=True)})
        yield all_nodes


def _finished(cut: _Cut, me: int, nodes: dict[Node, Tensor]) -> Tensor:
    return finish(nodes, cut.height)


def _back(tiles: Tiles, rows: Rows, cuts: list[_Cut], own: list[Tensor], lead: int) -> Parcel:
    """The finished columns stored here, to all that hold rows of their tile."""
    send: dict[int, list[Tensor]] = {}
    expect: dict[int, int] = {}
    for cut, x in zip(cuts, own, strict=True):
        for m in cut.parts.keys() - {rows.own}:
            low, high = cut.slots[m]
            send.setdefault(m, []).append(x.reshape(-1))
            expect[m] = expect.get(m, 0) + lead * (high - low) * tiles.slots
    return Parcel(rows.group, {m: torch.cat(parts) for m, parts in send.items()}, expect)


def _assembled(
    tiles: Tiles,
    cuts: list[_Cut],
    me: int,
    own: list[Tensor],
    came: dict[int, Tensor],
    lead: torch.Size,
    like: Tensor,
) -> Tensor:
    """The packed means of all tiles held here: `[.., n, Q, W]`."""
    out = like.new_zeros((*lead, len(cuts), tiles.packed, tiles.slots))
    left = dict(came)
    for n, (cut, mine) in enumerate(zip(cuts, own, strict=True)):
        for m, (low, high) in cut.slots.items():
            if m != me:
                size = lead.numel() * (high - low) * tiles.slots
                mine_or_theirs, left[m] = left[m][:size].reshape(*lead, high - low, tiles.slots), left[m][size:]
            else:
                mine_or_theirs = mine
            out[..., n, low:high, :] = mine_or_theirs
    return out
