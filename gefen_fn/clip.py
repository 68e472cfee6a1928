"""Limits on the size of updates; all keep the dtype they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.base import GradientTransformation, Params, ScalarOrSchedule, Updates
from gefen_fn.blocks import start_axis
from gefen_fn.scalar import Scalar, check_positive, exact, multiply, rounded, wide_dtype
from gefen_fn.scale import by_leaf, by_scalar, map_scalar, need_params
from gefen_fn.shards import local
from gefen_fn.tree import Tree, check_floating, check_leaves, tree_leaves
from gefen_kernels import reference


def global_norm(updates: Updates, sum_of_squares: Callable[[Tensor, int], Tensor] | None = None) -> Tensor:
    """L2 norm over all leaves, as one fp32 scalar; `None` leaves count nothing, replicas and shards each entry once.

    Squares are added block by block in fp32 by a fixed tree, then in float64, and the root is rounded once.

    Args:
        updates: any tree.
        sum_of_squares: `(leaf, first column axis) -> 0-dim float64`, a back end's; the reference's if None.
    """
    add = sum_of_squares or (lambda x, start: reference.sum_of_squares(x, start=start))
    check_leaves(updates)
    leaves = tree_leaves(updates)
    group = agree.group_of(leaves)
    squares = torch.zeros((), dtype=torch.float64, device="cpu")
    for u, counts in zip(leaves, agree.counted(leaves, group), strict=True):
        if u is not None and counts:
            square = add(local(u), min(start_axis(u.shape), u.ndim))
            squares = square + squares.to(square.device)
    return agree.total(squares, group).sqrt().float()


def _sum_of_squares(x: Tensor) -> Tensor:
    return reference.sum_of_squares(x, start=min(start_axis(x.shape), x.ndim))


def clip(max_delta: ScalarOrSchedule | Tree) -> GradientTransformation:
    """Clamp every entry to `[-max_delta, max_delta]`.

    Raises:
        ValueError: if a number is not positive.
    """
    check_positive("max_delta", max_delta)
    return by_scalar("clip", max_delta, by_leaf(_clip_leaf))


def _clip_leaf(u: Tensor, s: Scalar) -> Tensor:
    limit = torch.as_tensor(rounded(s, u.dtype), dtype=u.dtype, device=u.device)
    return torch.clamp(u, -limit, limit)


def clip_by_global_norm(max_norm: ScalarOrSchedule) -> GradientTransformation:
    """Scale all updates by `min(1, max_norm / norm)`, with `norm` the L2 norm over every leaf.

    Args:
        max_norm: a number > 0, a 0-dim tensor, or a schedule; one for the whole tree.

    Raises:
        ValueError: if a number is not positive, or if there is one per leaf.
    """
    check_positive("max_norm", max_norm)
    if isinstance(max_norm, (dict, list, tuple)):
        raise ValueError(f"`max_norm` is one for the whole tree: got a {type(max_norm).__name__}. Clip parts by masks.")
    return by_scalar("clip_by_global_norm", max_norm, _norm_rule)


def clip_factor(norm: Tensor, max_norm: Scalar) -> Tensor:
    """`min(1, max_norm / norm)` as a 0-dim float64 tensor; NaN for a NaN norm."""
    ratio = exact(max_norm) / norm.to(torch.float64)
    return torch.where(ratio > 1, torch.ones_like(ratio), ratio)


def _norm_rule(updates: Updates, max_norm: Any, params: Params | None) -> Updates:
    factor = clip_factor(global_norm(updates), max_norm)
    return map_scalar(lambda u, s: multiply(s, u), updates, factor)


def clip_by_block_rms(threshold: ScalarOrSchedule | Tree) -> GradientTransformation:
    """Divide each leaf by `max(1, rms(leaf) / threshold)` (arXiv 1804.04235, section 6).

    Raises:
        ValueError: if a number is not positive.
    """
    check_positive("threshold", threshold)
    return by_scalar("clip_by_block_rms", threshold, by_leaf(_rms_leaf))


def _rms_leaf(u: Tensor, s: Scalar) -> Tensor:
    x = u.to(wide_dtype(u.dtype))
    rms = (_sum_of_squares(x) / max(x.numel(), 1)).sqrt()
    ratio = rms.to(x.dtype) / rounded(s, x.dtype)
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
    """
    check_positive("clipping", clipping)
    check_positive("eps", eps)

    def leaf(u: Tensor, s: Scalar, p: Tensor) -> Tensor:
        check_floating(p, u)
        limit = torch.clamp(_unit_norm(p), min=eps) * rounded(s)
        norm = _unit_norm(u)
        factor = torch.where(norm > limit, limit / torch.clamp(norm, min=1e-6), torch.ones_like(norm))
        return (u.float() * factor).to(u.dtype)

    def rule(updates: Updates, value: Any, params: Params | None) -> Updates:
        return map_scalar(leaf, updates, value, need_params(params, "adaptive_grad_clip"))

    return by_scalar("adaptive_grad_clip", clipping, rule, eps=eps)


def _unit_norm(x: Tensor) -> Tensor:
    """L2 norm of each unit, fp32, `[R, 1, ...]`, or 0-dim for fewer than two axes."""
    if x.ndim < 2:
        return _sum_of_squares(x).sqrt().float()
    squares = reference.tree_sum(x.float().square().flatten(1), -1)
    return reference.root(squares).reshape(-1, *(1,) * (x.ndim - 1))
