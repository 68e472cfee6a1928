"""The codebook of the quantized first moment: an exact one-dimensional segmentation of a histogram."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .default_levels import DEFAULT_MAGNITUDES

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class _Points(NamedTuple):
    """Prefix sums `[m + 1]` of w, w u and w u^2 over `m` non-empty bins, u being a bin centre."""

    weight: Floats
    first: Floats
    second: Floats


class _Layers(NamedTuple):
    """The solved recurrence: `total[k]` is the least cost with `k` free segments between the pinned ends."""

    points: _Points
    total: Floats
    end: Ints  # [free + 1] where the pinned last segment starts
    start: Ints  # [free, m + 1] where free segment k starts if it ends at j


def learn_codebook(histogram: Tensor, *, levels: int = 256, zero: bool = True, symmetric: bool = True) -> Tensor:
    """Return the levels that minimise the squared distance of the histogram's bin centres to their level.

    The exact optimum of `sum w (c - q)^2` over segmentations of the non-empty bins, by divide and conquer
    (the cost is Monge). Pinned levels (the ends, and 0 with `zero`) are costed where they are pinned. Source: the
    Gefen paper (arXiv 2606.13894), whose form is `zero=False, symmetric=False`.

    Args:
        histogram: int64 counts `[2n]` of block-scaled entries in equal bins on [-1, 1], exact zeros not counted.
        levels: even size of the codebook, from 4 to 256.
        zero: pin a level at exactly 0.
        symmetric: fold the bins to `|x|` and mirror the magnitudes, so that `codebook[i] == -codebook[levels - 1 - i]`
            to the bit; with `zero`, 0 then stands twice in the middle.

    Returns:
        fp32 `[levels]` on the CPU, non-decreasing, first -1, last +1. If there are fewer non-empty bins than levels,
        0 is repeated (without `zero`: the smallest magnitude, or the last level if not symmetric).

    Raises:
        TypeError: if the counts are not int64.
        ValueError: if a count is negative, all are zero, or the number of bins or levels does not fit.

    Example:
        >>> counts = gradient_histogram(torch.randn(64, 256))
        >>> book = learn_codebook(counts, levels=16)
        >>> book.shape, float(book[0]), float(book[-1])
        (torch.Size([16]), -1.0, 1.0)
    """
    _check(histogram, levels)
    counts = np.array(histogram.tolist(), dtype=np.int64)
    if symmetric:
        book = _mirrored(counts, levels // 2, zero)
    elif zero:
        book = _two_sided(counts, levels)
    else:
        book = _published(counts, levels)
    return torch.from_numpy(book.astype(np.float32))


def default_codebook() -> Tensor:
    """Return a fresh fp32 `[256]` codebook learned from Gaussian blocks of 256 scaled by their maximum.

    Example:
        >>> book = default_codebook()
        >>> book.shape, torch.equal(book, -book.flip(0))
        (torch.Size([256]), True)
    """
    levels = [0.0 - x for x in reversed(DEFAULT_MAGNITUDES)] + list(DEFAULT_MAGNITUDES)
    return torch.tensor(levels, dtype=torch.float32, device="cpu")


def _check(histogram: Tensor, levels: int) -> None:
    if not isinstance(levels, int) or levels % 2 or not 4 <= levels <= 256:
        raise ValueError(
            f"`levels` must be even and from 4 to 256: got {levels!r}. Use 256 for uint8 codes, 16 for 4 bits"
        )
    if not isinstance(histogram, Tensor) or histogram.dtype != torch.int64:
        came = histogram.dtype if isinstance(histogram, Tensor) else type(histogram).__name__
        raise TypeError(
            f"`histogram` must hold int64 counts: got {came}. Pass `gradient_histogram(grads)`, or convert yours by "
            "`.to(torch.int64)`"
        )
    if histogram.dim() != 1 or histogram.numel() % 2:
        raise ValueError(
            f"`histogram` must have shape [2n], an even number of bins on [-1, 1]: got {tuple(histogram.shape)}. "
            "Use 4096 bins, as `gradient_histogram` does"
        )
    if bool((histogram < 0).any()):
        raise ValueError(
            f"counts must be >= 0: got {int(histogram.min())}. Build them by counting, or undo an overflow"
        )
    if not bool((histogram > 0).any()):
        raise ValueError(
            f"`histogram` must count at least one entry: got {histogram.numel()} empty bins. "
            "Use `default_codebook()` until a gradient is not zero"
        )


def _centres(low: int, high: int) -> Floats:
    """Return bin centres in units of a bin, exact in fp64."""
    return np.arange(low, high, dtype=np.float64) + 0.5


def _mirrored(counts: Ints, magnitudes: int, zero: bool) -> Floats:
    half = len(counts) // 2
    folded = counts[half:] + counts[:half][::-1]
    layers = _solve(folded, _centres(0, half), magnitudes - 1 - zero, 0.0 if zero else None, half)
    found = _levels(layers, len(layers.total) - 1) / half
    found = np.concatenate([np.zeros(int(zero)), found, np.ones(1)])
    padded = np.concatenate([np.full(magnitudes - len(found), found[0]), found])
    return np.concatenate([0.0 - padded[::-1], padded])


def _published(counts: Ints, levels: int) -> Floats:
    half = len(counts) // 2
    layers = _solve(counts, _centres(-half, half), levels - 2, -half, half)
    found = _levels(layers, len(layers.total) - 1) / half
    return np.concatenate([-np.ones(1), found, np.ones(levels - 1 - len(found))])


def _two_sided(counts: Ints, levels: int) -> Floats:
    """Both sides pinned at 0 and at their end, the free levels split between them at least cost."""
    half = len(counts) // 2
    centres = _centres(0, half)
    below = _solve(counts[:half][::-1], centres, levels - 3, 0.0, half)
    above = _solve(counts[half:], centres, levels - 3, 0.0, half)
    most = min(levels - 3, len(below.total) + len(above.total) - 2)
    left = np.arange(max(0, most - len(above.total) + 1), min(most, len(below.total) - 1) + 1)
    best = int(left[np.argmin(below.total[left] + above.total[most - left])])
    middle = np.zeros(levels - 2 - most)
    negative, positive = -_levels(below, best)[::-1] / half, _levels(above, most - best) / half
    return np.concatenate([-np.ones(1), negative, middle, positive, np.ones(1)])


def _solve(counts: Ints, centres: Floats, free: int, first: float | None, last: float) -> _Layers:
    """Solve `f_k(j) = min_i f_{k-1}(i) + cost(i, j)`, the segments before and after the free ones pinned.

    Pinned segments may be empty, free ones not: with `min(free, m)` of them the optimum is the same, as taking a
    bin out of any other segment never costs more. `first=None` pins nothing on the left.
    """
    kept = counts > 0
    points = _prefix_sums(counts[kept].astype(np.float64), centres[kept])
    size, free = int(kept.sum()), min(free, int(kept.sum()))
    cost = _pinned(points, first, 0, slice(None)) if first is not None else np.r_[0.0, np.full(size, np.inf)]
    tail = _pinned(points, last, slice(None), size)
    start, total, end = np.zeros((free, size + 1), np.int64), np.empty(free + 1), np.empty(free + 1, np.int64)
    tree, lower = _bisection(size), np.zeros(size + 1, np.int64)
    for k in range(free + 1):
        end[k] = np.argmin(cost + tail)
        total[k] = cost[end[k]] + tail[end[k]]
        if k < free:
            cost, lower = _layer(points, cost, lower, tree)
            start[k] = lower
    return _Layers(points, total, end, start)


def _prefix_sums(weights: Floats, centres: Floats) -> _Points:
    sums = [np.concatenate([np.zeros(1), np.cumsum(weights * centres**power)]) for power in range(3)]
    return _Points(*sums)


def _pinned(points: _Points, level: float, i: int | slice, j: int | slice) -> Floats:
    weight, first, second = (p[j] - p[i] for p in points)
    return np.asarray(second - 2.0 * level * first + level * level * weight)


def _bisection(size: int) -> list[tuple[Ints, Ints, Ints]]:
    """Return, per depth, the middles of `1..size` with the solved neighbours on each side (0 and size + 1: none)."""
    depths, edges = [], np.array([0, size + 1])
    while len(edges) < size + 2:
        left, right = edges[:-1], edges[1:]
        wide = right - left > 1
        left, right = left[wide], right[wide]
        middle = (left + right) // 2
        depths.append((middle, left, right))
        edges = np.sort(np.concatenate([edges, middle]))
    return depths


def _layer(points: _Points, cost: Floats, lower: Ints, tree: list[tuple[Ints, Ints, Ints]]) -> tuple[Floats, Ints]:
    """Add one free segment: the best start grows with the end `j` and with the number of segments (`lower`)."""
    size = len(cost) - 1
    base = cost - points.second
    best, gain = np.zeros(size + 2, np.int64), np.full(size + 1, np.inf)
    best[-1] = size
    for middle, left, right in tree:
        high = np.minimum(best[right], middle - 1)
        low = np.minimum(np.maximum(best[left], lower[middle]), high)
        best[middle], gain[middle] = _window_minima(points, base, middle, low, high - low + 1)
    return gain + points.second, best[:-1]


def _window_minima(points: _Points, base: Floats, ends: Ints, low: Ints, length: Ints) -> tuple[Ints, Floats]:
    """Minimise `base[i] - S(i, j)^2 / W(i, j)` over i in `low .. low + length - 1` for each j of `ends`."""
    offset = np.cumsum(length) - length
    i = np.arange(offset[-1] + length[-1]) + np.repeat(low - offset, length)
    first = np.repeat(points.first[ends], length) - points.first[i]
    value = base[i] - first * first / (np.repeat(points.weight[ends], length) - points.weight[i])
    least = np.minimum.reduceat(value, offset)
    hits = np.flatnonzero(value == np.repeat(least, length))
    return i[hits[np.searchsorted(hits, offset)]], least


def _levels(layers: _Layers, free: int) -> Floats:
    """Walk back through the starts and return the weighted means of the `free` segments, ascending."""
    edges = [int(layers.end[free])]
    for k in range(free - 1, -1, -1):
        edges.append(int(layers.start[k, edges[-1]]))
    cuts = np.array(edges[::-1])
    return np.asarray(np.diff(layers.points.first[cuts]) / np.diff(layers.points.weight[cuts]))
