"""How the second moment is stored: whole, one per block, or as row and column means of tiles.

A policy has `init(leaf, layout) -> nu` and `update(g, nu, b2, layout) -> (root, nu)`, where `root` is `sqrt(nu_hat)` in
the leaf's shape. Sums are fixed pairwise fp32 trees, so their bits do not depend on who holds which rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gefen_fn.blocks import LeafLayout
from gefen_fn.scalar import Scalar, moving_average
from gefen_fn.tree import StructureError
from gefen_kernels import reference

_SHORTEST_SIDE = 32
_TINY = torch.finfo(torch.float32).tiny


def _check_shapes(nu: Any, *shapes: Sequence[int]) -> None:
    """Refuse the state of another policy, tile or block."""
    got = [getattr(x, "shape", None) for x in (nu if isinstance(nu, FactoredState) else (nu,))]
    if got != list(shapes):
        raise StructureError(
            f"A second moment must be of its policy, {[tuple(shape) for shape in shapes]}: got {type(nu).__name__} "
            f"{got}. Use the state that `init` made with this policy."
        )


class SecondMoment(Protocol):
    """What a policy must offer. `warms`: whether `b2_warmup` applies, which leaves no bias to correct."""

    warms: ClassVar[bool]

    def init(self, leaf: Tensor, layout: LeafLayout) -> Any:
        """Return the zero state of a leaf; every shape in it is final."""

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """Raise `StructureError` unless `nu` is a state of this policy for a leaf of this layout."""

    def update(self, g: Tensor, nu: Any, b2: Scalar, layout: LeafLayout) -> tuple[Tensor, Any]:
        """Return `sqrt(nu_hat)` in the shape of the fp32 gradient `g`, and the new state."""


@dataclass(frozen=True)
class Dense:
    """Adam's second moment: one fp32 per entry (arXiv 1412.6980). 4 bytes per parameter."""

    warms: ClassVar[bool] = False

    def init(self, leaf: Tensor, layout: LeafLayout) -> Tensor:
        """Zeros like the leaf."""
        return torch.zeros_like(leaf, dtype=torch.float32, memory_format=torch.contiguous_format)

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """One entry per entry of the leaf."""
        _check_shapes(nu, layout.shape)

    def update(self, g: Tensor, nu: Tensor, b2: Scalar, layout: LeafLayout) -> tuple[Tensor, Tensor]:
        """EMA of `g^2` and its root."""
        self.check(nu, layout)
        nu = moving_average(b2, nu, g * g)
        return reference.root(nu), nu


@dataclass(frozen=True)
class Block:
    """The Gefen paper's second moment (arXiv 2606.13894): one fp32 per momentum block, 4 / block bytes per entry."""

    warms: ClassVar[bool] = True

    def init(self, leaf: Tensor, layout: LeafLayout) -> Tensor:
        """Zeros, one per block."""
        return leaf.new_zeros(reference.scale_shape(layout.shape, layout.block, layout.start), dtype=torch.float32)

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """One entry per block."""
        _check_shapes(nu, reference.scale_shape(layout.shape, layout.block, layout.start))

    def update(self, g: Tensor, nu: Tensor, b2: Scalar, layout: LeafLayout) -> tuple[Tensor, Tensor]:
        """EMA of the block's mean of `g^2`; its root is shared by the block."""
        self.check(nu, layout)
        mean = reference.block_mean_square(g, block=layout.block, start=layout.start)
        nu = moving_average(b2, nu, mean)
        return reference.expand_blocks(reference.root(nu), g.shape, block=layout.block, start=layout.start), nu


class FactoredState(NamedTuple):
    """EMAs of tile means of `g^2` for a leaf `[.., R, C]`, both with the leaf's leading axes.

    Attributes:
        row: fp32 `[.., R, ceil(C / Tc)]`, each row's mean inside a tile.
        col: fp32 `[.., R, ceil(C / Q)]`; column c of row tile k lies at `[.., k * Tr + c % Q, c // Q]`, else 0.
            Q is R for whole columns, else the largest power of two up to `min(Tr, R)`.
    """

    row: Tensor
    col: Tensor


@dataclass(frozen=True)
class Factored:
    """Row and column means inside each tile (one tile: Adafactor, arXiv 1804.04235), 4 / Tr + 4 / Tc bytes per entry.

    `sqrt(nu_hat) = sqrt(row_i) * sqrt(col_j / mean(col))` inside each tile. There are `max(1, R // Tr)` row tiles, the
    last one taking the remainder, and `ceil(C / Tc)` column tiles.

    Attributes:
        tile: `(Tr, Tc)`, rows (a power of two) and columns of a tile, None for the whole side; None for one tile.

    Raises:
        ValueError: if a side is not a positive int, or `Tr` not a power of two.
    """

    tile: tuple[int | None, int | None] | None = None
    warms: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the tile."""
        fits = self.tile is None or (isinstance(self.tile, tuple) and len(self.tile) == 2)
        fits = fits and all(side is None or (type(side) is int and side > 0) for side in self.sides)
        if not fits or (self.sides[0] or 1) & ((self.sides[0] or 1) - 1):
            raise ValueError(
                f"`tile` must be (Tr, Tc), Tr a power of two: got {self.tile!r}. "
                "Use (128, 256), or None for a whole side."
            )

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """`(Tr, Tc)`."""
        return (None, None) if self.tile is None else self.tile

    def fits(self, layout: LeafLayout) -> bool:
        """Whether a leaf is a matrix with both sides of at least 32; the policy falls back to `Block` elsewhere."""
        layout = layout.unflattened
        return layout.start > 0 and min(layout.rows, layout.columns) >= _SHORTEST_SIDE

    def init(self, leaf: Tensor, layout: LeafLayout) -> FactoredState:
        """Zeros in the shapes of `FactoredState`."""
        layout = layout.unflattened
        shapes = _Tiles.of(self.sides, layout).shapes(layout.matrix[:-1])
        return FactoredState(*(leaf.new_zeros(shape, dtype=torch.float32) for shape in shapes))

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """Row and column means in the shapes of `FactoredState`."""
        layout = layout.unflattened
        _check_shapes(nu, *_Tiles.of(self.sides, layout).shapes(layout.matrix[:-1]))

    def update(self, g: Tensor, nu: FactoredState, b2: Scalar, layout: LeafLayout) -> tuple[Tensor, FactoredState]:
        """EMAs of the row and column means of `g^2`; the root is a product of two vectors' roots."""
        layout = layout.unflattened
        tiles = _Tiles.of(self.sides, layout)
        self.check(nu, layout)
        square = (g * g).reshape(layout.matrix)
        row = moving_average(b2, nu.row, tiles.row_means(square))
        col = moving_average(b2, nu.col, tiles.pack(tiles.column_means(square)))
        columns = tiles.unpack(col)
        scaled = columns / tiles.across(tiles.normalisers(columns))
        root = tiles.across(reference.root(row)) * tiles.down(reference.root(scaled))
        return root.reshape(g.shape), FactoredState(row, col)


DEFAULT_SECOND_MOMENT = Factored(tile=(128, 256))


def check_policy(policy: Any) -> None:
    """Raise `ValueError` unless `policy` is an instance with the methods of `SecondMoment`."""
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in ("init", "update", "warms")):
        raise ValueError(
            f"`second_moment` must be a policy: got {policy!r}. Use `Dense()`, `Block()` or `Factored((128, 256))`."
        )


def policy_for(policy: SecondMoment, layout: LeafLayout) -> SecondMoment:
    """The policy a leaf really gets: `Dense` on dense leaves, `Block` where `Factored` does not fit."""
    if layout.dense:
        return Dense()
    return Block() if isinstance(policy, Factored) and not policy.fits(layout) else policy


class _Tiles(NamedTuple):
    """The tiles of a matrix `[.., R, C]`: their heights and widths, the nominal width, and Q."""

    heights: tuple[int, ...]
    widths: tuple[int, ...]
    height: int
    width: int
    packed: int

    @classmethod
    def of(cls, sides: tuple[int | None, int | None], layout: LeafLayout) -> "_Tiles":
        rows, columns = layout.rows, layout.columns
        height, width = sides[0] or rows, min(sides[1] or columns, columns)
        count = max(1, rows // height)
        heights = (height,) * (count - 1) + (rows - height * (count - 1),)
        widths = (width,) * (-(-columns // width) - 1)
        # A power of two divides a block, so that an edge between blocks is one between slots; whole columns need none.
        packed = rows if sides[0] is None else 1 << (min(height, rows).bit_length() - 1)
        return cls(heights, (*widths, columns - width * len(widths)), height, width, packed)

    def shapes(self, lead: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of `FactoredState`, `lead` being the axes before the columns."""
        return (*lead, len(self.widths)), (*lead, -(-sum(self.widths) // self.packed))

    def row_means(self, square: Tensor) -> Tensor:
        """`[.., R, C]` -> `[.., R, column tiles]`."""
        return _tile_sums(square, self.width) / _lengths(self.widths, square)

    def normalisers(self, columns: Tensor) -> Tensor:
        """Each tile's mean of `col`, which equals its mean of `row`: `[.., n, C]` -> `[.., n, column tiles]`."""
        return self.row_means(columns).clamp(min=_TINY)

    def column_means(self, square: Tensor) -> Tensor:
        """`[.., R, C]` -> `[.., row tiles, C]`."""
        count, columns = len(self.heights), square.shape[-1]
        edge = self.height * (count - 1)
        last = reference.tree_sum(square[..., edge:, :], -2).unsqueeze(-2)
        tall = square[..., :edge, :].reshape(*square.shape[:-2], count - 1, self.height, columns)
        sums = torch.cat([reference.tree_sum(tall, -2), last], -2) if count > 1 else last
        return sums / _lengths(self.heights, square).unsqueeze(-1)

    def pack(self, columns: Tensor) -> Tensor:
        """Column c of tile k to `[.., k * Tr + c % Q, c // Q]`: `[.., n, C]` -> `[.., R, ceil(C / Q)]`."""
        width = -(-columns.shape[-1] // self.packed)
        padded = F.pad(columns, (0, width * self.packed - columns.shape[-1]))
        slots = padded.reshape(*columns.shape[:-1], width, self.packed).transpose(-1, -2)
        stacked = slots.reshape(*columns.shape[:-2], -1, width)
        return F.pad(stacked, (0, 0, 0, sum(self.heights) - stacked.shape[-2]))

    def unpack(self, col: Tensor) -> Tensor:
        """The inverse of `pack`."""
        count = len(self.heights)
        slots = col[..., : count * self.packed, :].reshape(*col.shape[:-2], count, self.packed, col.shape[-1])
        return slots.transpose(-1, -2).reshape(*col.shape[:-2], count, -1)[..., : sum(self.widths)]

    def across(self, x: Tensor) -> Tensor:
        """Repeat each column tile's value over its columns: `[.., column tiles]` -> `[.., C]`."""
        if len(self.widths) == 1:
            return x
        return x[..., torch.arange(sum(self.widths), device=x.device) // self.width]

    def down(self, x: Tensor) -> Tensor:
        """Repeat each row tile's values over its rows: `[.., n, C]` -> `[.., R, C]`."""
        if len(self.heights) == 1:
            return x
        tile = torch.arange(sum(self.heights), device=x.device) // self.height
        return x[..., tile.clamp(max=len(self.heights) - 1), :]


def _tile_sums(x: Tensor, width: int) -> Tensor:
    """Tree sums of runs of `width` along the last axis; the zeros that fill the last run do not change its bits."""
    count = -(-x.shape[-1] // width)
    padded = F.pad(x, (0, count * width - x.shape[-1]))
    return reference.tree_sum(padded.reshape(*x.shape[:-1], count, width), -1)


def _lengths(lengths: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(lengths, dtype=torch.float32, device=like.device)
