"""Which leaves are quantized, and where their blocks lie: decided from the global shape alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gefen_fn.scalar import check_int
from gefen_fn.tree import Tree, broadcast, check_floating, tree_map
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
    """

    tree: Tree = DEFAULT_BLOCK


Blocks = int | Tree | FlatBlocks


@dataclass(frozen=True)
class LeafLayout:
    """Where the blocks of one leaf lie.

    Attributes:
        shape: the leaf's shape.
        start: first of the axes that are merged into columns; 0 for a flattened leaf.
        block: entries per block along the merged columns; the last block may be ragged.
        dense: the leaf keeps fp32 moments and is updated by plain Adam.
    """

    shape: tuple[int, ...]
    start: int
    block: int
    dense: bool

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
        return self if self.start or len(self.shape) < 2 else replace(self, start=start_axis(self.shape))


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


def leaf_layout(shape: Sequence[int], block: int = DEFAULT_BLOCK, *, flat: bool = False) -> LeafLayout:
    """The layout of one leaf.

    Args:
        shape: the leaf's global shape.
        block: entries per block.
        flat: blocks run over the flattened leaf, as `FlatBlocks` says.

    Raises:
        ValueError: if `block` is not a positive int.
    """
    check_block(block)
    partition = flat and len(shape) == 1 and shape[0] >= _SHORTEST_PARTITION
    return LeafLayout(tuple(shape), 0 if flat else start_axis(shape), block, is_dense(shape) and not partition)


def layouts(block: Blocks, tree: Tree) -> Tree:
    """A tree of `LeafLayout` like `tree`, `None` where it holds `None`.

    Raises:
        ValueError: if a block length is not a positive int.
        StructureError: if a tree of block lengths does not fit `tree`.
    """
    flat = isinstance(block, FlatBlocks)
    lengths = broadcast(block.tree if isinstance(block, FlatBlocks) else block, tree)
    return tree_map(lambda x, length: leaf_layout(x.shape, length, flat=flat), tree, lengths)


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
