"""Data-driven block lengths: the rules that read a block length off a leaf's first squared gradient."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

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
    Sums are float64; squares that are not finite count as 0. Source: the Gefen paper (arXiv 2606.13894) for
    `variance_drop`, its authors' later rule for `log_contrast`.

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
        ValueError: if the rule is unknown or `squared_grad` does not have the entries of `shape`.
    """
    if rule not in _RULES:
        raise ValueError(f"`rule` must be one of {_RULES}: got {rule!r}. Use 'variance_drop' for the paper's rule")
    if squared_grad.numel() != math.prod(shape):
        raise ValueError(
            f"`squared_grad` must have the entries of `shape`: got {squared_grad.numel()} for {tuple(shape)}. "
            "Pass the square of the whole gradient and the leaf's own shape"
        )
    length = math.prod(shape[start:] if rowwise and len(shape) > start else shape)
    found = 1
    if length >= _SMALLEST and squared_grad.numel():
        rows = torch.where(squared_grad.isfinite(), squared_grad, 0).double().reshape(-1, length)
        found = _variance_drop(rows) if rule == "variance_drop" else _log_contrast(rows)
    return _memory_safe(shape, length) if found == 1 and fallback else found


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive integer, ascending, itself included."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _variance_drop(rows: Tensor) -> int:
    """Return the proper divisor with the most negative step of `E(p)`, 1 if that is below 8; `rows` is `[R, N]`."""
    candidates = divisors(rows.shape[1])[:-1]
    spread = [_spread(rows, p) for p in candidates]
    steps = [1e-12, *(b - a for a, b in pairwise(spread))]
    winner = candidates[steps.index(min(steps))]
    return winner if winner >= _SMALLEST else 1


def _spread(rows: Tensor, block: int) -> float:
    """Return `E(p)`: the root of the mean population variance inside blocks."""
    return math.sqrt(float(rows.reshape(-1, block).var(dim=1, correction=0).mean()))


def _log_contrast(rows: Tensor) -> int:
    """Return the highest strict interior local maximum above 8 of the contrast, shortened to stay near 1024."""
    logs, length = (rows + 1e-12).log(), rows.shape[1]
    candidates = [p for p in divisors(length) if length // p >= 4]
    score = [_contrast(logs, p) for p in candidates]
    inner = range(1, len(score) - 1)
    peaks = [k for k in inner if candidates[k] > _SMALLEST and score[k - 1] < score[k] > score[k + 1]]
    winner = candidates[max(peaks, key=lambda k: score[k])] if peaks else 1
    return winner if winner <= _CONTRAST_LIMIT else next(d for d in divisors(winner) if d > _CONTRAST_LIMIT)


def _contrast(logs: Tensor, block: int) -> float:
    """Return the mean absolute difference of neighbouring block means within a row."""
    means = logs.reshape(logs.shape[0], -1, block).mean(dim=2)
    return float(means.diff(dim=1).abs().mean())


def _memory_safe(shape: Sequence[int], length: int) -> int:
    largest = max((d for d in divisors(length) if d <= _FALLBACK_LIMIT), default=1) if length else 1
    last = shape[-1] if shape and length and length % shape[-1] == 0 else 1
    best = max(last, largest)
    return best if best >= _SMALLEST else 1
