"""How the second moment is stored: whole, one per block, or as row and column means of tiles.

A policy has `init(leaf, layout) -> nu` and `update(g, nu, b2, layout) -> (root, nu)`, where `root` is `sqrt(nu_hat)` in
the leaf's shape. Sums are fixed pairwise fp32 trees, so their bits do not depend on who holds which rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from gefen_fn.blocks import LeafLayout
from gefen_fn.cut_tiles import Edge, finish_columns, strips_of
from gefen_fn.exchange import Talk
from gefen_fn.scalar import Scalar, moving_average
from gefen_fn.shards import zeros_placed
from gefen_fn.tiles import Tiles
from gefen_fn.tree import StructureError
from gefen_kernels import reference

_SHORTEST_SIDE = 32

Edges = dict[int, Edge]


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

    def shapes(self, layout: LeafLayout) -> tuple[tuple[int, ...], ...]:
        """Shapes of the state's tensors, as far as they are held here."""

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """Raise `StructureError` unless `nu` is a state of this policy for a leaf of this layout."""

    def share(self, g: Tensor, nu: Any, b2: Scalar, layout: LeafLayout) -> Talk[Any] | None:
        """Return the talk that gathers what a sharded leaf needs of its other parts; None if it needs nothing.

        The gradient `g` is of any floating dtype.
        """

    def update(self, g: Tensor, nu: Any, b2: Scalar, layout: LeafLayout, shared: Any = None) -> tuple[Tensor, Any]:
        """Return `sqrt(nu_hat)` in the shape of the fp32 gradient `g`, and the new state; `shared` is of `share`."""


@dataclass(frozen=True)
class Dense:
    """Adam's second moment: one fp32 per entry (arXiv 1412.6980). 4 bytes per parameter.

    Example:
        >>> tx = scale_by_gefen(second_moment=Dense())
        >>> tx.init(torch.ones(256, 512)).nu.shape
        torch.Size([256, 512])
    """

    warms: ClassVar[bool] = False

    def init(self, leaf: Tensor, layout: LeafLayout) -> Tensor:
        """Zeros like the leaf."""
        return zeros_placed(leaf, self.shapes(layout.entire)[0])

    def shapes(self, layout: LeafLayout) -> tuple[tuple[int, ...], ...]:
        """One entry per entry of the leaf."""
        return (layout.shape,)

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """One entry per entry of the leaf."""
        _check_shapes(nu, *self.shapes(layout))

    def share(self, g: Tensor, nu: Tensor, b2: Scalar, layout: LeafLayout) -> None:
        """Nothing: every entry is here."""

    def update(
        self, g: Tensor, nu: Tensor, b2: Scalar, layout: LeafLayout, shared: None = None
    ) -> tuple[Tensor, Tensor]:
        """EMA of `g^2` and its root."""
        self.check(nu, layout)
        nu = moving_average(b2, nu, g * g)
        return reference.root(nu), nu


@dataclass(frozen=True)
class Block:
    """The Gefen paper's second moment (arXiv 2606.13894): one fp32 per momentum block, 4 / block bytes per entry.

    Example:
        >>> tx = scale_by_gefen(second_moment=Block(), block=128)
        >>> tx.init(torch.ones(256, 512)).nu.shape
        torch.Size([256, 4])
    """

    warms: ClassVar[bool] = True

    def init(self, leaf: Tensor, layout: LeafLayout) -> Tensor:
        """Zeros, one per block."""
        return zeros_placed(leaf, self.shapes(layout.entire)[0])

    def shapes(self, layout: LeafLayout) -> tuple[tuple[int, ...], ...]:
        """One entry per block."""
        return (reference.scale_shape(layout.shape, layout.block, layout.start),)

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """One entry per block."""
        _check_shapes(nu, *self.shapes(layout))

    def share(self, g: Tensor, nu: Tensor, b2: Scalar, layout: LeafLayout) -> None:
        """Nothing: every block is whole."""

    def update(
        self, g: Tensor, nu: Tensor, b2: Scalar, layout: LeafLayout, shared: None = None
    ) -> tuple[Tensor, Tensor]:
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

    Example:
        >>> tx = scale_by_gefen(second_moment=Factored(tile=(128, 256)))
        >>> nu = tx.init(torch.ones(256, 512)).nu
        >>> nu.row.shape, nu.col.shape
        (torch.Size([256, 2]), torch.Size([256, 4]))
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
        layout = layout.unflattened.entire
        return layout.start > 0 and min(layout.rows, layout.columns) >= _SHORTEST_SIDE

    def tiles(self, layout: LeafLayout) -> Tiles:
        """The tiles of a leaf; `FlatBlocks` flattens it for its codes alone.

        Raises:
            StructureError: if an edge between two shards cuts columns inside a tile.
        """
        return Tiles.of(self.sides, layout.unflattened)

    def shapes(self, layout: LeafLayout) -> tuple[tuple[int, ...], ...]:
        """Of `row` and `col`."""
        return self.tiles(layout).shapes(layout.unflattened.matrix[:-1])

    def init(self, leaf: Tensor, layout: LeafLayout) -> FactoredState:
        """Zeros in the shapes of `FactoredState`."""
        self.tiles(layout)  # refuses what cannot be cut
        return FactoredState(*(zeros_placed(leaf, shape) for shape in self.shapes(layout.entire)))

    def check(self, nu: Any, layout: LeafLayout) -> None:
        """Row and column means in the shapes of `FactoredState`."""
        _check_shapes(nu, *self.shapes(layout))

    def share(self, g: Tensor, nu: FactoredState, b2: Scalar, layout: LeafLayout) -> Talk[Edges] | None:
        """The new column means of cut tiles, for a leaf that has such anywhere; None for any other."""
        tiles = self.tiles(layout)
        if tiles.peers is None:
            return None
        at = layout.unflattened
        sums = reference.strip_sums(g.reshape(at.matrix), strips_of(tiles, at.start - 1))
        return finish_columns(tiles, at.start - 1, sums, nu.col, partial(moving_average, b2))

    def update(
        self, g: Tensor, nu: FactoredState, b2: Scalar, layout: LeafLayout, shared: Edges | None = None
    ) -> tuple[Tensor, FactoredState]:
        """EMAs of the row and column means of `g^2`; the root is a product of two vectors' roots."""
        self.check(nu, layout)
        tiles = self.tiles(layout)
        square = (g * g).reshape(layout.unflattened.matrix)
        row = moving_average(b2, nu.row, tiles.row_means(square))
        col, columns = _columns(tiles, square, nu.col, b2, shared or {})
        scaled = columns / tiles.across(tiles.normalisers(columns))
        root = tiles.across(reference.root(row)) * tiles.down(reference.root(scaled))
        return root.reshape(g.shape), FactoredState(row, col)


def _columns(tiles: Tiles, square: Tensor, col: Tensor, b2: Scalar, edges: Edges) -> tuple[Tensor, Tensor]:
    """New column means: `[.., R, W]` as they are stored, and `[.., n, C]` of each tile; those of edges are given."""
    own, above = tiles.complete, edges[0].col.shape[-2] if 0 in edges else 0
    rows = slice(above, above + sum(own.heights))
    new = moving_average(b2, col[..., rows, :], own.stack(own.pack(own.column_means(square[..., rows, :]))))
    means = own.unpack(own.unstack(new))
    if not edges:
        return new, means
    head, tail = ([edge for n, edge in edges.items() if (n == 0) is first] for first in (True, False))
    kept = torch.cat([*(edge.col for edge in head), new, *(edge.col for edge in tail)], -2)
    return kept, torch.cat([*(edge.means for edge in head), means, *(edge.means for edge in tail)], -2)


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
