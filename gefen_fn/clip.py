"""Limits on the size of updates; all keep the dtype they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.base import GradientTransformation, Params, ScalarOrSchedule, Updates
from gefen_fn.blocks import start_axis
from gefen_fn.scalar import Scalar, check_positive, exact, multiply, per_leaf, rounded, wide_dtype
from gefen_fn.scale import by_leaf, by_scalar, map_scalar, need_params
from gefen_fn.shards import local, piece_of
from gefen_fn.tree import (
    StructureError,
    Tree,
    check_floating,
    check_leaves,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)
from gefen_kernels import reference

SumOfSquares = Callable[[Tensor, int], Tensor]
"""`(leaf, first column axis) -> 0-dim float64`."""


def global_norm(updates: Updates) -> Tensor:
    """L2 norm over all leaves, as one fp32 scalar; `None` leaves count nothing, replicas and shards each entry once.

    Squares are added block by block in fp32 by a fixed tree, then in float64, and the root is rounded once.

    Example:
        >>> global_norm({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0), "frozen": None})
        tensor(5.)
    """
    return norm_by(_sum_of_squares, updates)


def norm_by(add: SumOfSquares, updates: Updates) -> Tensor:
    """`global_norm`, the squares of each leaf added by a back end."""
    return agree.total(squares_here(add, updates), agree.group_of(tree_leaves(updates))).sqrt().float()


def squares_here(add: SumOfSquares, updates: Updates) -> Tensor:
    """The sum of squares of what this member counts, 0-dim float64."""
    squares = [square for square in _own_squares(updates, add)[1] if square is not None]
    total = squares[0] if squares else torch.zeros((), dtype=torch.float64, device="cpu")
    for square in squares[1:]:
        total = square + total.to(square.device)
    return total


def leaf_squares(updates: Updates) -> Tree:
    """The sum of squares of each leaf, shards and all, as 0-dim float64 tensors."""
    group, own = _own_squares(updates, _sum_of_squares)
    if group is not None:
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        sums = agree.total(torch.stack([zero if square is None else square.cpu() for square in own]), group)
        own = [None if square is None else x.to(square.device) for x, square in zip(sums, own, strict=True)]
    return tree_unflatten(tree_structure(updates), own)


def _own_squares(updates: Updates, add: SumOfSquares) -> tuple[Any, list[Tensor | None]]:
    """The group of the leaves, and for each leaf the sum of squares of what this member counts of it."""
    check_leaves(updates)
    leaves = tree_leaves(updates)
    group = agree.group_of(leaves)
    own = [
        u if u is None or counts else u.flatten()[:0]
        for u, counts in zip(map(local, leaves), agree.counted(leaves, group), strict=True)
    ]
    return group, [None if u is None else add(u, first_column_axis(u)) for u in own]


def _sum_of_squares(x: Tensor, start: int) -> Tensor:
    return reference.sum_of_squares(x, start=start)


def first_column_axis(x: Tensor) -> int:
    """First of the axes that are merged into the rows of a norm's sums."""
    return min(start_axis(x.shape), x.ndim)


def clip(max_delta: ScalarOrSchedule | Tree) -> GradientTransformation:
    """Clamp every entry to `[-max_delta, max_delta]`.

    Raises:
        ValueError: if a number is not positive.

    Example:
        >>> tx = clip(1.0)
        >>> tx.update(torch.tensor([-3.0, 0.5]), tx.init(torch.zeros(2)))[0]
        tensor([-1.0000,  0.5000])
    """
    check_positive("max_delta", max_delta)
    return by_scalar("clip", max_delta, by_leaf(_clip_leaf))


def _clip_leaf(u: Tensor, s: Scalar) -> Tensor:
    limit = torch.as_tensor(rounded(s, u.dtype), dtype=u.dtype, device=u.device)
    return torch.clamp(u, -limit, limit)


def clip_by_global_norm(max_norm: ScalarOrSchedule) -> GradientTransformation:
    """Scale all updates by `min(1, max_norm / norm)`, with `norm` the L2 norm over every leaf.

    `update` takes the norm as `global_norm`, a 0-dim fp32 tensor, where it is known already.

    Args:
        max_norm: a number > 0, a 0-dim tensor, or a schedule; one for the whole tree.

    Raises:
        ValueError: if a number is not positive, or if there is one per leaf.

    Example:
        >>> tx = clip_by_global_norm(1.0)
        >>> grads = {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}  # norm 5
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    check_positive("max_norm", max_norm)
    if isinstance(max_norm, (dict, list, tuple)):
        raise ValueError(f"`max_norm` is one for the whole tree: got a {type(max_norm).__name__}. Clip parts by masks.")
    return by_scalar("clip_by_global_norm", max_norm, _norm_rule, wants=("global_norm",))


def clip_factor(norm: Tensor, max_norm: Scalar) -> Tensor:
    """`min(1, max_norm / norm)` as a 0-dim float64 tensor; NaN for a NaN norm."""
    ratio = exact(max_norm) / norm.to(torch.float64)
    return torch.where(ratio > 1, torch.ones_like(ratio), ratio)


def _norm_rule(updates: Updates, max_norm: Any, params: Params | None, **known: Tensor) -> Updates:
    norm = known["global_norm"] if known else global_norm(updates)
    factor = clip_factor(norm, max_norm)
    return map_scalar(lambda u, s: multiply(s, u), updates, factor)


def clip_by_block_rms(threshold: ScalarOrSchedule | Tree) -> GradientTransformation:
    """Divide each leaf by `max(1, rms(leaf) / threshold)` (arXiv 1804.04235, section 6).

    Raises:
        ValueError: if a number is not positive.

    Example:
        >>> tx = clip_by_block_rms(1.0)
        >>> updates = {"large": torch.full((4,), 3.0), "small": torch.full((4,), 0.5)}
        >>> tx.update(updates, tx.init(updates))[0]
        {'large': tensor([1., 1., 1., 1.]), 'small': tensor([0.5000, 0.5000, 0.5000, 0.5000])}
    """
    check_positive("threshold", threshold)

    def rule(updates: Updates, value: Any, params: Params | None) -> Updates:
        squares = leaf_squares(updates)
        own = tree_map(
            lambda u, square, limit: (square / max(u.numel(), 1), limit), updates, squares, per_leaf(value, updates)
        )
        return map_scalar(_rms_leaf, updates, own)

    return by_scalar("clip_by_block_rms", threshold, rule)


def _rms_leaf(u: Tensor, own: tuple[Tensor, Scalar]) -> Tensor:
    x, (mean, limit) = u.to(wide_dtype(u.dtype)), own
    ratio = mean.sqrt().to(x.dtype) / rounded(limit, x.dtype)
    return (x / torch.clamp(ratio, min=1.0)).to(u.dtype)


def adaptive_grad_clip(clipping: ScalarOrSchedule | Tree, eps: float = 1e-3) -> GradientTransformation:
    """Limit each unit's update to `clipping * max(norm of the unit's weights, eps)` (arXiv 2102.06171, section 4.1).

    A unit is a row, all axes but the first, which is torch's layout of an output; a leaf with fewer than two axes is
    one unit.

    Args:
        clipping: largest ratio of the two norms, > 0.
        eps: floor of the weights' norm, so that zero weights can move.

    Raises:
        ValueError: if a number is not positive, or if `update` is called without params.

    Example:
        >>> tx, params = adaptive_grad_clip(0.1), torch.tensor([[3.0, 4.0], [0.0, 10.0]])
        >>> updates, state = tx.update(torch.tensor([[5.0, 0.0], [0.5, 0.0]]), tx.init(params), params)
        >>> updates  # rows of norm 5 and 10: at most 0.5 and 1
        tensor([[0.5000, 0.0000],
                [0.5000, 0.0000]])
    """
    check_positive("clipping", clipping)
    check_positive("eps", eps)

    def leaf(u: Tensor, own: tuple[Scalar, Tensor, Tensor]) -> Tensor:
        clipping, norm, weight = own
        limit = torch.clamp(weight, min=eps) * rounded(clipping)
        factor = torch.where(norm > limit, limit / torch.clamp(norm, min=1e-6), torch.ones_like(norm))
        return (u.float() * factor).to(u.dtype)

    def rule(updates: Updates, value: Any, params: Params | None) -> Updates:
        params = need_params(params, "adaptive_grad_clip")
        norms = (unit_norms(updates), unit_norms(tree_map(_fitting, updates, params)))
        own = tree_map(lambda u, *each: each, updates, per_leaf(value, updates), *norms)
        return map_scalar(leaf, updates, own)

    return by_scalar("adaptive_grad_clip", clipping, rule, eps=eps)


def _fitting(u: Tensor, p: Tensor) -> Tensor:
    check_floating(p, u)
    return p


def unit_norms(tree: Tree) -> Tree:
    """L2 norm of each unit of each leaf, fp32: `[R, 1, ...]` of the rows held here, 0-dim for fewer than two axes.

    Raises:
        StructureError: if shards cut a unit of several axes.
    """
    whole = tree_map(lambda x: None if x.ndim > 1 else x, tree)
    return tree_map(_unit_norm, tree, leaf_squares(whole))


def _unit_norm(x: Tensor, square: Tensor | None) -> Tensor:
    if square is not None:
        return square.sqrt().float()
    if piece_of(x).axes - {0}:
        raise StructureError(
            f"A unit must lie in one shard: got shape {tuple(x.shape)} cut along axes {sorted(piece_of(x).axes)}. "
            "Shard the leading axis, or clip by the global norm."
        )
    squares = reference.tree_sum(local(x).float().square().flatten(1), -1)
    return reference.root(squares).reshape(-1, *(1,) * (x.ndim - 1))
