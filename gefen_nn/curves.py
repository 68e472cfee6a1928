"""Curves of training losses: smoothed, and asked whether they jump."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median

_HALF = 15  # steps averaged before and after each, where the fall that runs have in common is read
_WINDOW = 10  # steps averaged where a rise is read


def smoothed(losses: Sequence[float], half: int) -> list[float]:
    """Centred means; near the ends the window shrinks on both sides, so that the fall is not flattened.

    Args:
        losses: One a step.
        half: Steps averaged before and after each.

    Returns:
        As many means as losses.
    """
    return [fmean(losses[at - min(at, half) : at + min(at, half) + 1]) for at in range(len(losses))]


def batch_noise(curves: Sequence[Sequence[float]]) -> list[float]:
    """How far each batch's loss lies above the trend, read from runs that saw the same batches.

    Args:
        curves: Training losses of runs of one length under one seed, with whatever optimizer.

    Returns:
        At each step their median less its trend, which never rises; a rise that most of them share is taken for noise.
    """
    common = [median(losses) for losses in zip(*curves, strict=True)]
    trend = accumulate(smoothed(common, _HALF), min)
    return [loss - level for loss, level in zip(common, trend, strict=True)]


def largest_rise(losses: Sequence[float], noise: Sequence[float]) -> float:
    """How far a run ever stood above where it had been, by means of ten steps without the noise of the batches.

    Args:
        losses: One a step.
        noise: At least as many, see `batch_noise`.

    Returns:
        The largest height above the least mean before; 0 for a run that only falls.
    """
    clean = [loss - extra for loss, extra in zip(losses, noise, strict=False)]
    width = min(_WINDOW, len(clean))
    means = [fmean(clean[at : at + width]) for at in range(len(clean) - width + 1)]
    return max((mean - least for mean, least in zip(means, accumulate(means, min), strict=True)), default=0.0)
