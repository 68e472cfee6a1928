"""The tiles of a factored second moment, in the part of a leaf that is held here."""

import math
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gefen_fn.blocks import LeafLayout
from gefen_fn.shards import Peers
from gefen_fn.tree import StructureError
from gefen_kernels import reference

_TINY = torch.finfo(torch.float32).tiny


class Tiles(NamedTuple):
    """Tiles of a matrix `[.., R, C]`: those of which rows are held here, and all columns that are.

    Attributes:
        parts: `(first, last + 1)` of the rows held here, counted from the tile's first, for each tile.
        heights: rows of each of these tiles, those held elsewhere included.
        widths: columns of each column tile.
        height: nominal rows of a tile.
        width: nominal columns of a tile.
        packed: Q, the rows over which a tile's column means are laid.
        first: number of the first of these tiles.
        peers: who holds which rows, if a tile is cut by an edge between two parts, anywhere; else None.
    """

    parts: tuple[tuple[int, int], ...]
    heights: tuple[int, ...]
    widths: tuple[int, ...]
    height: int
    width: int
    packed: int
    first: int
    peers: Peers | None

    @classmethod
    def of(cls, sides: tuple[int | None, int | None], layout: LeafLayout) -> "Tiles":
        """The tiles of `sides` in the part of a leaf.

        Raises:
            StructureError: if an edge between two parts cuts columns inside a tile.
        """
        whole, columns, axis = layout.entire, layout.columns, layout.start - 1
        height, width = sides[0] or whole.rows, min(sides[1] or whole.columns, whole.columns)
        count = max(1, whole.rows // height)
        tiles = [(k * height, whole.rows if k == count - 1 else (k + 1) * height) for k in range(count)]
        begin = layout.piece.offset[axis]
        end = begin + layout.rows
        touched = [k for k, (top, bottom) in enumerate(tiles) if max(top, begin) < min(bottom, end)]
        parts = tuple((max(tiles[k][0], begin) - tiles[k][0], min(tiles[k][1], end) - tiles[k][0]) for k in touched)
        widths = (width,) * (-(-columns // width) - 1)
        # A power of two divides most blocks, so that an edge of blocks is one of slots; whole columns need none.
        packed = whole.rows if sides[0] is None else 1 << (min(height, whole.rows).bit_length() - 1)
        _check_columns(layout, width, packed)
        edges = layout.piece.edges(axis)
        return cls(
            parts,
            tuple(tiles[k][1] - tiles[k][0] for k in touched),
            (*widths, columns - width * len(widths)),
            height,
            width,
            packed,
            touched[0] if touched else 0,
            layout.piece.peers(frozenset((axis,))) if edges - {top for top, _ in tiles} else None,
        )

    def shapes(self, lead: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of `FactoredState`, `lead` being the axes before the columns."""
        return (*lead, len(self.widths)), (*lead, self.slots)

    @property
    def tops(self) -> tuple[int, ...]:
        """Where each tile begins among the rows held here."""
        return tuple(accumulate((b - a for a, b in self.parts), initial=0))[:-1]

    @property
    def cut(self) -> tuple[int, ...]:
        """Which of these tiles are not all held here: the first and the last at most."""
        return tuple(n for n, part in enumerate(self.parts) if part != (0, self.heights[n]))

    @property
    def complete(self) -> "Tiles":
        """Those that are all held here."""
        kept = [n for n in range(len(self.parts)) if n not in self.cut]
        parts, heights = tuple(self.parts[n] for n in kept), tuple(self.heights[n] for n in kept)
        return self._replace(parts=parts, heights=heights, first=self.first + (kept[0] if kept else 0), peers=None)

    @property
    def slots(self) -> int:
        """Columns of the packed means: `ceil(C / Q)`."""
        return -(-sum(self.widths) // self.packed)

    def row_means(self, square: Tensor) -> Tensor:
        """`[.., R, C]` -> `[.., R, column tiles]`."""
        return _tile_sums(square, self.width) / lengths(self.widths, square)

    def normalisers(self, columns: Tensor) -> Tensor:
        """Each tile's mean of `col`, which equals its mean of `row`: `[.., n, C]` -> `[.., n, column tiles]`."""
        return self.row_means(columns).clamp(min=_TINY)

    def column_means(self, square: Tensor) -> Tensor:
        """`[.., R, C]` -> `[.., row tiles, C]`, where all tiles are complete."""
        count, columns = len(self.heights), square.shape[-1]
        if not count:
            return square
        edge = self.height * (count - 1)
        last = reference.tree_sum(square[..., edge:, :], -2).unsqueeze(-2)
        tall = square[..., :edge, :].reshape(*square.shape[:-2], count - 1, self.height, columns)
        sums = torch.cat([reference.tree_sum(tall, -2), last], -2) if count > 1 else last
        return sums / lengths(self.heights, square).unsqueeze(-1)

    def pack(self, columns: Tensor) -> Tensor:
        """Column c of tile k to `[.., k, c % Q, c // Q]`: `[.., n, C]` -> `[.., n, Q, ceil(C / Q)]`."""
        padded = F.pad(columns, (0, self.slots * self.packed - columns.shape[-1]))
        return padded.reshape(*columns.shape[:-1], self.slots, self.packed).transpose(-1, -2)

    def unpack(self, slots: Tensor) -> Tensor:
        """The inverse of `pack`."""
        columns = slots.transpose(-1, -2).reshape(*slots.shape[:-2], self.slots * self.packed)
        return columns[..., : sum(self.widths)]

    def stack(self, slots: Tensor) -> Tensor:
        """Packed means in the rows of their tiles, all complete, zeros below: `[.., n, Q, W]` -> `[.., R, W]`."""
        stacked = slots.reshape(*slots.shape[:-3], len(self.parts) * self.packed, self.slots)
        return F.pad(stacked, (0, 0, 0, sum(self.heights) - stacked.shape[-2]))

    def unstack(self, col: Tensor) -> Tensor:
        """The inverse of `stack`."""
        count = len(self.parts)
        return col[..., : count * self.packed, :].reshape(*col.shape[:-2], count, self.packed, self.slots)

    def across(self, x: Tensor) -> Tensor:
        """Repeat each column tile's value over its columns: `[.., column tiles]` -> `[.., C]`."""
        if len(self.widths) == 1:
            return x
        return x[..., torch.arange(sum(self.widths), device=x.device) // self.width]

    def down(self, x: Tensor) -> Tensor:
        """Repeat each row tile's values over its rows: `[.., n, C]` -> `[.., R, C]`."""
        if len(self.parts) == 1:
            return x
        above = self.parts[0][0] if self.parts else 0
        row = torch.arange(sum(b - a for a, b in self.parts), device=x.device) + above
        return x[..., (row // self.height).clamp(max=len(self.parts) - 1), :]


def _check_columns(layout: LeafLayout, width: int, packed: int) -> None:
    edges = layout.piece.edges(layout.start) if layout.start < len(layout.shape) else set()
    rest = layout.columns // max(layout.shape[layout.start], 1) if edges else 1
    if any(edge * rest % math.lcm(width, packed) for edge in edges):
        raise StructureError(
            f"A shard must hold whole column tiles, and whole slots of packed means: got tiles of {width} columns and "
            f"slots of {packed} for shape {layout.piece.whole} cut at columns {sorted(edge * rest for edge in edges)}. "
            "Use a tile whose sides divide these, such as (32, 32), or shard the rows."
        )


def _tile_sums(x: Tensor, width: int) -> Tensor:
    """Tree sums of runs of `width` along the last axis; the zeros that fill the last run do not change its bits."""
    count = -(-x.shape[-1] // width)
    padded = F.pad(x, (0, count * width - x.shape[-1]))
    return reference.tree_sum(padded.reshape(*x.shape[:-1], count, width), -1)


def lengths(values: tuple[int, ...], like: Tensor) -> Tensor:
    """A divisor for each tile: a tensor, because CUDA multiplies by the reciprocal of a Python number.

    Filled where it is used: nothing may be copied from the host while a GPU captures.
    """
    out = torch.empty(len(values), dtype=torch.float32, device=like.device)
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    for part, (value, _) in zip(torch.split(out, [count for _, count in runs]), runs, strict=True):
        part.fill_(value)
    return out
