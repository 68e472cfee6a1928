"""Data-driven block lengths: the rules that read a block length off a leaf's first squared gradient."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gefen_kernels import ops
from gefen_kernels.reference import tree_sum

_RULES = ("variance_drop", "log_contrast")
_SMALLEST = 8
_FALLBACK_LIMIT = 2048
_CONTRAST_LIMIT = 1024


def find_block(
    squared_grad: Tensor,
    shape: Sequence[int],
    *,
    rule: str = "variance_drop",
    fallback: bool = True,
    rowwise: bool = True,
    start: int = 1,
) -> int:
    """Return the block length that a leaf's first squared gradient suggests.

    Runs on the host (it reads one number per divisor), so call it while calibrating, not inside a compiled step.
    Sums are float64, in a fixed order; squares that are not finite count as 0. Source: the Gefen paper (arXiv
    2606.13894) for `variance_drop`, its authors' later rule for `log_contrast`.

    Args:
        squared_grad: `g^2`, any shape with as many entries as `shape`.
        shape: the leaf's shape.
        rule: `"variance_drop"`: the divisor at which the mean variance inside blocks drops most;
            `"log_contrast"`: the divisor at which neighbouring block means of `ln g^2` differ most.
        fallback: where the rule answers 1, take the memory-safe length instead: the last axis or the largest divisor
            up to 2048, whichever is larger, if at least 8.
        rowwise: take divisors of a row, so that blocks shard with the leaf; else of the flattened leaf.
        start: first of the axes that are merged into a row (0 for a leaf with that many axes or fewer).

    Returns:
        A divisor of the row's (or the leaf's) length.

    Raises:
        TypeError: if `squared_grad` is no tensor.
        ValueError: if the rule is unknown or `squared_grad` does not have the entries of `shape`.

    Example:
        >>> g = torch.randn(8, 64).repeat_interleave(16, dim=1)  # [8, 1024], alike in runs of 16
        >>> find_block(g.square(), g.shape, rule="log_contrast")
        16
        >>> find_block(g.square(), g.shape), find_block(g.square(), g.shape, fallback=False)
        (1024, 1)
    """
    if rule not in _RULES:
        raise ValueError(f"`rule` must be one of {_RULES}: got {rule!r}. Use 'variance_drop' for the paper's rule")
    if not isinstance(squared_grad, Tensor):
        raise TypeError(
            f"`squared_grad` must be a tensor: got {type(squared_grad).__name__}. Pass `p.grad.square()`, or a tree of "
            "gradients to `gefen_fn.find_blocks`"
        )
    if squared_grad.numel() != math.prod(shape):
        raise ValueError(
            f"`squared_grad` must have the entries of `shape`: got {squared_grad.numel()} for {tuple(shape)}. "
            "Pass the square of the whole gradient and the leaf's own shape"
        )
    length = math.prod(shape[start:] if rowwise and len(shape) > start else shape)
    found = 1
    if length >= _SMALLEST and squared_grad.numel():
        rows = torch.where(squared_grad.isfinite(), squared_grad, 0).reshape(-1, length)
        found = _variance_drop(rows) if rule == "variance_drop" else _log_contrast(rows)
    return _memory_safe(shape, length) if found == 1 and fallback else found


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive integer, ascending, itself included."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def block_means(x: Tensor, block: int) -> Tensor:
    """Mean of each run of `block` entries, added by `tree_sum`: float64 `[entries / block]`.

    Args:
        x: any shape and floating dtype.
        block: divides the number of entries.
    """
    return _mean(x.reshape(-1, block).double(), 1)


def block_variances(x: Tensor, block: int) -> Tensor:
    """Population variance of each run of `block` entries, about its mean; arguments and result as in `block_means`."""
    runs = x.reshape(-1, block).double()
    return _mean((runs - _mean(runs, 1)[:, None]).square(), 1)


def _mean(x: Tensor, dim: int) -> Tensor:
    # A tensor as divisor: CUDA turns division by a Python number into a product with its rounded reciprocal.
    return tree_sum(x, dim) / torch.tensor(x.shape[dim], dtype=torch.float64, device=x.device)


def _variance_drop(rows: Tensor) -> int:
    """Return the proper divisor with the most negative step of `E(p)`, 1 if that is below 8; `rows` is `[R, N]`.

    `E(p)` is the root of the mean population variance inside blocks.
    """
    variances = _back_end_of(rows, "block_variances", block_variances)
    candidates = divisors(rows.shape[1])[:-1]
    spread = torch.stack([_mean(variances(rows, p), 0) for p in candidates]).sqrt().tolist()
    steps = [1e-12, *(b - a for a, b in pairwise(spread))]
    winner = candidates[steps.index(min(steps))]
    return winner if winner >= _SMALLEST else 1


def _log_contrast(rows: Tensor) -> int:
    """Return the highest strict interior local maximum above 8 of the contrast, shortened to stay near 1024.

    The contrast is the mean absolute difference of neighbouring block means within a row.
    """
    means = _back_end_of(rows, "block_means", block_means)
    logs, length = (rows.double() + 1e-12).log(), rows.shape[1]
    candidates = [p for p in divisors(length) if length // p >= 4]
    gaps = (means(logs, p).reshape(len(rows), -1).diff(dim=1).abs().reshape(-1) for p in candidates)
    score = torch.stack([_mean(gap, 0) for gap in gaps]).tolist()
    inner = range(1, len(score) - 1)
    peaks = [k for k in inner if candidates[k] > _SMALLEST and score[k - 1] < score[k] > score[k + 1]]
    winner = candidates[max(peaks, key=lambda k: score[k])] if peaks else 1
    return winner if winner <= _CONTRAST_LIMIT else next(d for d in divisors(winner) if d > _CONTRAST_LIMIT)


def _back_end_of(x: Tensor, name: str, plain: Any) -> Any:
    """The function of this name of the back end of a tensor's device, where it has one."""
    return getattr(ops.back_end(x.device), name, plain)


def _memory_safe(shape: Sequence[int], length: int) -> int:
    largest = max((d for d in divisors(length) if d <= _FALLBACK_LIMIT), default=1) if length else 1
    last = shape[-1] if shape and length and length % shape[-1] == 0 else 1
    best = max(last, largest)
    return best if best >= _SMALLEST else 1
