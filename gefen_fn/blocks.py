"""Which leaves are quantized, and where their blocks lie: decided from the global shape alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gefen_fn.scalar import check_int
from gefen_fn.shards import Piece, piece_of
from gefen_fn.tree import (
    StructureError,
    Tree,
    check_floating,
    check_leaves,
    tree_leaves,
    tree_map,
    tree_parts,
    tree_structure,
    tree_unflatten,
)
from gefen_kernels.block_search import find_block

DEFAULT_BLOCK = 256
_FEWEST_ENTRIES = 4096
_SHORTEST_EXPERT_SIDE = 32
_SHORTEST_PARTITION = 65_536


@dataclass(frozen=True)
class FlatBlocks:
    """Blocks over the flattened leaf, as the published packages lay them; such a state refuses to shard.

    It also declares that a leaf of one axis with 65,536 entries or more is a wrapper's flattened partition, which is
    then quantized as one row.

    Attributes:
        tree: the block length, or a tree of one per leaf.

    Example:
        >>> w = torch.ones(64, 96)
        >>> by_row, flat = scale_by_gefen(block=256), scale_by_gefen(block=FlatBlocks(256))
        >>> by_row.init(w).mu.absmax.shape, flat.init(w).mu.absmax.shape
        (torch.Size([64, 1]), torch.Size([24]))
    """

    tree: Tree = DEFAULT_BLOCK


Blocks = int | Tree | FlatBlocks


def lengths_in(block: Blocks) -> Any:
    """The length or tree of lengths, whatever the blocks run over.

    Raises:
        ValueError: for a string, which would be taken for a tree.
    """
    lengths = block.tree if isinstance(block, FlatBlocks) else block
    if isinstance(lengths, str):
        check_block(lengths)
    return lengths


@dataclass(frozen=True)
class LeafLayout:
    """Where the blocks of one leaf lie, in the part of it that is held here.

    Attributes:
        piece: the part that is held here; all of an unsharded leaf.
        start: first of the axes that are merged into columns; 0 for a flattened leaf.
        block: entries per block along the merged columns; the last block may be ragged.
        dense: the leaf keeps fp32 moments and is updated by plain Adam.
    """

    piece: Piece
    start: int
    block: int
    dense: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part that is held here."""
        return self.piece.shape

    @property
    def entire(self) -> "LeafLayout":
        """The layout of the whole leaf."""
        return replace(self, piece=Piece.all_of(self.piece.whole))

    @property
    def columns(self) -> int:
        """Entries per row: the product of the merged axes."""
        return math.prod(self.shape[self.start :])

    @property
    def rows(self) -> int:
        """Length of the axis before the columns; 1 for a flattened leaf."""
        return self.shape[self.start - 1] if self.start else 1

    @property
    def matrix(self) -> tuple[int, ...]:
        """The leaf as `[.., R, C]`, the axes before the rows as batch; `[C]` for a flattened leaf."""
        return (*self.shape[: self.start], self.columns)

    @property
    def unflattened(self) -> "LeafLayout":
        """The same leaf seen as a matrix; `FlatBlocks` flattens a leaf for its codes, not for row and column means."""
        return self if self.start or len(self.shape) < 2 else replace(self, start=start_axis(self.piece.whole))


def is_dense(shape: Sequence[int]) -> bool:
    """Whether a leaf of this global shape keeps fp32 moments."""
    return dense_reason(shape) is not None


def dense_reason(shape: Sequence[int]) -> str | None:
    """Why a leaf of this global shape keeps fp32 moments; None if it is quantized."""
    if len(shape) < 2:
        return "fewer than 2 axes"
    if math.prod(shape) < _FEWEST_ENTRIES:
        return f"fewer than {_FEWEST_ENTRIES:,} entries"
    return "one entry per row" if math.prod(shape[1:]) == 1 else None


def start_axis(shape: Sequence[int]) -> int:
    """First of the axes merged into columns: 2 for experts `[E, M, N]` with M, N >= 32, else 1."""
    return 2 if len(shape) == 3 and min(shape[1:]) >= _SHORTEST_EXPERT_SIDE else 1


def leaf_layout(
    shape: Sequence[int] | Piece, block: int = DEFAULT_BLOCK, *, flat: bool = False, start: int | None = None
) -> LeafLayout:
    """The layout of one leaf, or of the part of it that is held here.

    Args:
        shape: the leaf's shape, or a part of it.
        block: entries per block.
        flat: blocks run over the flattened leaf, as `FlatBlocks` says.
        start: first of the axes merged into columns, if the shape is not to decide.

    Raises:
        ValueError: if `block` is not a positive int.
        StructureError: if a part begins or ends inside a block.
    """
    check_block(block)
    piece = shape if isinstance(shape, Piece) else Piece.all_of(shape)
    whole = piece.whole
    partition = flat and len(whole) == 1 and whole[0] >= _SHORTEST_PARTITION
    first = start_axis(whole) if start is None else start
    layout = LeafLayout(piece, 0 if flat else first, block, is_dense(whole) and not partition)
    if piece.axes and not layout.dense:
        _check_cut(layout)
    return layout


def _check_cut(layout: LeafLayout) -> None:
    """Refuse a part whose blocks are not blocks of the whole; the answer is the same for every member."""
    start, whole = layout.start, layout.piece.whole
    inner = [axis for axis in layout.piece.axes if axis >= start]
    edges = {edge * math.prod(whole[axis + 1 :]) for axis in inner for edge in layout.piece.edges(axis)}
    if not inner:
        return
    # Of a row of several axes torch may cut what is kept of it, being of another length, at other places.
    row = replace(layout.piece, whole=(*whole[:start], math.prod(whole[start:])))
    alike = start > 0 and inner == [start] and row.edges(start) == edges
    if alike and not any(edge % layout.block for edge in edges):
        return
    fits = math.gcd(*edges) if alike else 0
    fix = f"Use block={fits}, which fits these shards" if fits > 1 else "Shard the leading axis"
    flat = "" if start else " of a flattened leaf (FlatBlocks)"
    raise StructureError(
        f"A shard must hold whole blocks{flat}: got block={layout.block} for shape {whole} cut along axes "
        f"{sorted(layout.piece.axes)} at columns {sorted(edges)}. {fix}."
    )


def layouts(block: Blocks, tree: Tree) -> Tree:
    """A tree of `LeafLayout` like `tree`, `None` where it holds `None`.

    Raises:
        ValueError: if a block length is not a positive int.
        StructureError: if a tree of block lengths does not fit `tree`.
    """
    return tree_unflatten(tree_structure(tree), layout_list(block, tree))


def layout_list(block: Blocks, tree: Tree) -> list[LeafLayout | None]:
    """`layouts` as a list over the leaves, which a compiled graph can build."""
    check_leaves(tree)
    flat, leaves = isinstance(block, FlatBlocks), tree_leaves(tree)
    given = lengths_in(block)
    lengths = [given] * len(leaves) if isinstance(given, (int, float)) else tree_parts(tree, given)
    pairs = zip(leaves, lengths, strict=True)
    return [None if x is None else leaf_layout(piece_of(x), length, flat=flat) for x, length in pairs]


def check_block(block: object) -> None:
    """Raise `ValueError` unless `block` is a positive int."""
    check_int("block", block, 1, "Use 256, or a tree of ints per leaf.")


def find_blocks(grads: Tree, *, rule: str = "variance_drop", fallback: bool = True, rowwise: bool = True) -> Tree:
    """Find each leaf's block length from its first gradient; the result is the `block` of a transform.

    Runs on the host, so call it while calibrating. Source: the Gefen paper (arXiv 2606.13894).

    Args:
        grads: gradients; `None` and dense leaves get 256, which nothing reads.
        rule: `"variance_drop"` or `"log_contrast"`, see `gefen_fn.find_block`.
        fallback: where the rule answers 1, take the memory-safe length instead.
        rowwise: blocks divide a row; else the flattened leaf, and the result belongs in `FlatBlocks`.

    Returns:
        A tree of int like `grads`.

    Raises:
        ValueError: if the rule is unknown.
        StructureError: if a leaf is not a dense floating-point tensor.

    Example:
        >>> runs = torch.randn(8, 64).repeat_interleave(16, dim=1)
        >>> lengths = find_blocks({"w": runs, "b": torch.randn(64)}, rule="log_contrast")
        >>> lengths
        {'w': 16, 'b': 256}
        >>> tx = gefen(1e-3, block=lengths)
    """

    def find(g: Tensor | None) -> int:
        if g is None:
            return DEFAULT_BLOCK
        check_floating(g)
        if is_dense(g.shape):
            return DEFAULT_BLOCK
        square, start = g.detach().float().square(), start_axis(g.shape)
        return find_block(square, tuple(g.shape), rule=rule, fallback=fallback, rowwise=rowwise, start=start)

    return tree_map(find, grads, skip_none=False)
