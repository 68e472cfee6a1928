"""Which axes of a leaf are the rows and columns of its matrices, and which leaves have matrices at all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import Params
from gefen_fn.blocks import LeafLayout, leaf_layout, start_axis
from gefen_fn.combine import choices_of
from gefen_fn.shards import Piece
from gefen_fn.tree import Tree, readable, tree_leaves, tree_paths

_SHORTEST_SIDE = 32

Axes = int | tuple[int, ...]


@dataclass(frozen=True)
class MatrixAxes:
    """The rows and columns of a leaf's matrices; its other axes number the matrices.

    Experts `[E, M, N]` are `MatrixAxes(1, 2)`, a convolution `[O, I, kh, kw]` is `MatrixAxes(0, (1, 2, 3))`, a weight
    stored as `[in, out]` is `MatrixAxes(1, 0)`. The fused weight of a grouped-query attention is
    `MatrixAxes(0, 1, split=(4096, 1024, 1024))`, 12 heads apart are `MatrixAxes(0, 1, split=(64,) * 12)`: each part
    is a matrix as if it were a parameter of its own.

    Attributes:
        rows: an axis, or several that are merged in this order; negative ones count from the last.
        cols: likewise.
        split: row counts of the parts, which add up to all rows; None for one part.

    Raises:
        TypeError: if an axis or a row count is not an int.
        ValueError: if there is no axis, or a row count is below 1.

    Example:
        >>> qkv = torch.randn(192, 64)
        >>> whole = scale_by_muon(quantize=False, spec=MatrixAxes(0, 1, split=(64, 64, 64)))
        >>> alone = scale_by_muon(quantize=False)
        >>> updates, _ = whole.update(qkv, whole.init(qkv))
        >>> query, _ = alone.update(qkv[:64], alone.init(qkv[:64]))
        >>> torch.allclose(updates[:64], query, atol=0.02)
        True
    """

    rows: Axes
    cols: Axes
    split: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a shape."""
        counts = () if self.split is None else self.split
        axes = (*_axes(self.rows), *_axes(self.cols))
        if not isinstance(counts, tuple) or any(type(n) is not int for n in (*axes, *counts)):
            raise TypeError(
                f"Axes and row counts must be ints or tuples of ints: got {self!r}. "
                "Write MatrixAxes(0, 1), or MatrixAxes(0, 1, split=(256, 64, 64))."
            )
        if () in (self.rows, self.cols, self.split) or any(n < 1 for n in counts):
            raise ValueError(
                f"A matrix needs axes for rows and columns, and parts of at least one row: got {self!r}. "
                "Write MatrixAxes(0, 1), or MatrixAxes(0, 1, split=(256, 64, 64))."
            )


Spec = MatrixAxes | Tree | Callable[[Params], Tree] | None


def _axes(given: Axes) -> tuple[int, ...]:
    return given if isinstance(given, tuple) else (given,)


@dataclass(frozen=True)
class Matrices:
    """One leaf seen as matrices `[.., R, C]`; each part of the rows is a matrix of its own.

    Attributes:
        shape: the leaf's shape.
        batch: the axes that number matrices.
        rows: the axes that are merged into rows.
        cols: those that are merged into columns.
        split: row counts of the parts.
    """

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    split: tuple[int, ...]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """`(R, C)` of each part."""
        return [(rows, self._length(self.cols)) for rows in self.split]

    @property
    def row_values(self) -> Matrices:
        """The same leaf with one entry per row, its column axes of length 1."""
        return replace(self, shape=tuple(1 if n in self.cols else length for n, length in enumerate(self.shape)))

    def many(self, count: int) -> Matrices:
        """The matrices of `count` such leaves, stacked along a first axis."""
        batch, rows, cols = (tuple(n + 1 for n in axes) for axes in (self.batch, self.rows, self.cols))
        return Matrices((count, *self.shape), (0, *batch), rows, cols, self.split)

    def parts(self, x: Tensor) -> list[Tensor]:
        """The leaf's matrices `[.., R, C]`, part by part."""
        lead = [self.shape[n] for n in self.batch]
        whole = x.permute(self._order).reshape(*lead, self._length(self.rows), self._length(self.cols))
        return [whole] if len(self.split) == 1 else list(torch.split(whole, list(self.split), dim=-2))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The leaf of these matrices; the inverse of `parts`."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-2)
        order = self._order
        back = sorted(range(len(order)), key=order.__getitem__)
        return whole.reshape([self.shape[n] for n in order]).permute(back).contiguous()

    def layout(self, block: int, piece: Piece, *, flat: bool) -> LeafLayout:
        """Where the blocks of the leaf's quantized momentum lie: behind the axes that number matrices and one more."""
        leading = self.batch == tuple(range(len(self.batch))) and len(self.shape) > 1
        return leaf_layout(piece, block, flat=flat, start=len(self.batch) + 1 if leading else None)

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.batch, *self.rows, *self.cols)

    def _length(self, axes: tuple[int, ...]) -> int:
        return math.prod([self.shape[n] for n in axes])


def default_axes(shape: Sequence[int]) -> MatrixAxes:
    """Experts `[E, M, N]` with M, N >= 32 are E matrices; else the first axis is the rows, the others the columns."""
    start = start_axis(shape)
    return MatrixAxes(start - 1, tuple(range(start, len(shape))))


def matrices_of(shape: Sequence[int], axes: MatrixAxes) -> Matrices:
    """The matrices of a leaf of this shape.

    Raises:
        ValueError: if an axis is not there or stands twice, or the parts do not add up.
    """
    rows, cols = (tuple(n + len(shape) if n < 0 else n for n in _axes(given)) for given in (axes.rows, axes.cols))
    used = (*rows, *cols)
    if len(set(used)) < len(used) or not all(0 <= n < len(shape) for n in used):
        raise ValueError(
            f"The axes of a matrix must differ and be there: got {axes} for shape {tuple(shape)}. "
            "Number each axis once, from 0 on."
        )
    height = math.prod([shape[n] for n in rows])
    split = (height,) if axes.split is None else axes.split
    if sum(split) != height:
        raise ValueError(
            f"The parts must add up to all rows: got {sum(split)} in {axes} of {height} rows in shape {tuple(shape)}. "
            "Give the row count of every part."
        )
    return Matrices(tuple(shape), tuple(n for n in range(len(shape)) if n not in used), rows, cols, split)


def not_muon_reason(shape: Sequence[int]) -> str | None:
    """Why a leaf of this shape is not Muon's without a spec; None if it is."""
    if len(shape) < 2:
        return "fewer than 2 axes"
    if max(shape) == math.prod(shape):
        return "one row or column"
    if len(shape) > 2 and shape[1] == 1:
        return "a depthwise convolution"
    sizes = matrices_of(shape, default_axes(shape)).sizes
    return f"a side below {_SHORTEST_SIDE}" if min(min(size) for size in sizes) < _SHORTEST_SIDE else None


def spec_of(spec: Spec, updates: Tree, params: Params | None) -> list[MatrixAxes | None]:
    """What a spec says of each leaf of `updates`, in order.

    Args:
        spec: one value for all leaves, a tree that is a prefix of the leaves', or a function of params that makes one.
        updates: the tree whose leaves count.
        params: what a function is asked about; `updates` if None.

    Raises:
        TypeError: if the spec of a leaf is neither a `MatrixAxes` nor None.
        StructureError: if the tree does not fit.
    """
    if spec is None or isinstance(spec, MatrixAxes):
        return [spec] * len(tree_leaves(updates))
    choices = choices_of(spec, updates, params)
    for choice in choices:
        if choice is not None and not isinstance(choice, MatrixAxes):
            raise TypeError(
                f"A spec must hold MatrixAxes, or None for the default: got {type(choice).__name__}. "
                "Write MatrixAxes(0, 1), or a tree of those."
            )
    return choices


def matrices(spec: Spec, updates: Tree, params: Params | None = None) -> list[Matrices | None]:
    """The matrices of each leaf, in order; None where `updates` holds `None`.

    Arguments and errors as of `spec_of`.

    Raises:
        ValueError: naming the leaf, if its spec does not fit its shape, or it has none and is no matrix.
    """
    found: list[Matrices | None] = []
    see = _checked if torch.compiler.is_compiling() else _known
    for index, (axes, x) in enumerate(zip(spec_of(spec, updates, params), tree_leaves(updates), strict=True)):
        try:
            found.append(None if x is None else see(x.shape, axes))
        except ValueError as error:
            path = readable(tree_paths(updates)[index])
            raise ValueError(f"Muon cannot take leaf `{path}`. {error}") from None
    return found


def _checked(shape: Sequence[int], axes: MatrixAxes | None) -> Matrices:
    if axes is not None:
        return matrices_of(shape, axes)
    reason = not_muon_reason(shape)
    if reason is not None:
        raise ValueError(
            f"Without a spec it must be a matrix with sides of at least {_SHORTEST_SIDE}: got {reason} in shape "
            f"{tuple(shape)}. Give the leaf to another transform, as `gefen_muon` does, or say by "
            "`spec=MatrixAxes(rows, cols)` which axes are its matrix."
        )
    return matrices_of(shape, default_axes(shape))


_known = functools.lru_cache(maxsize=4096)(_checked)


def check_rule(rule: Any, name: str = "adjust") -> None:
    """Raise `ValueError` unless `rule`, given as the argument `name`, names a scale of the learning rate."""
    if rule not in (None, *_RULES):
        raise ValueError(
            f"`{name}` must be None or one of {', '.join(map(repr, _RULES))}: got {rule!r}. "
            "Use 'match_rms_adamw' with learning rates of AdamW, 'original' with those of Muon."
        )


_RULES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / max(cols, 1))),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "none": lambda rows, cols: 1.0,
}


def adjust_scale(shape: Sequence[int], rule: str | None) -> float:
    """What Muon's learning rate is multiplied by for a leaf, from the sides R, C of its flattened matrix.

    Names are those of torch.optim.Muon: "original" (Jordan 2024) is `sqrt(max(1, R / C))`, "match_rms_adamw" is
    `0.2 sqrt(max(R, C))`, which gives the update the size of AdamW's (arXiv 2502.16982), "none" is 1.

    Args:
        shape: of the leaf: a convolution counts as `O x (I kh kw)`, experts `[E, M, N]` as `M x N`.
        rule: a name; None is "original".

    Raises:
        ValueError: if the name is unknown, or the shape has fewer than 2 axes.

    Example:
        >>> adjust_scale((64, 16), "original"), adjust_scale((16, 64), "original")
        (2.0, 1.0)
        >>> adjust_scale((64, 3, 3, 3), "match_rms_adamw")  # a convolution: 64 x 27
        1.6
    """
    check_rule(rule)
    if len(shape) < 2:
        raise ValueError(f"A matrix has at least two axes: got shape {tuple(shape)}. This leaf is not Muon's.")
    ((rows, cols),) = matrices_of(shape, default_axes(shape)).sizes
    return scale_of(rule, rows, cols)


def scale_of(rule: str | None, rows: int, cols: int) -> float:
    """`adjust_scale` of a matrix `[rows, cols]`; the rule is checked."""
    return _RULES[rule or "original"](rows, cols)
