"""What the runs of a comparison say: spread over seeds, differences seed by seed, jumps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from gefen_nn.compare import Comparison
from gefen_nn.compare_run import Cell, Outcome
from gefen_nn.curves import batch_noise, largest_rise


class Losses(NamedTuple):
    """Runs of one arm at one learning rate, one a seed.

    Attributes:
        lr: The rate.
        by_seed: Held-out losses; infinite where a run left the finite numbers.
        differences: From the first arm's, seed by seed: at the same rate, or where both stand at their own best.
        rises: The largest rise of each run's training loss, see `curves.largest_rise`; infinite as above.
    """

    lr: float
    by_seed: list[float]
    differences: list[float]
    rises: list[float]

    @property
    def mean(self) -> float:
        """Of the held-out losses."""
        return fmean(self.by_seed)

    @property
    def difference(self) -> float:
        """Mean of the differences."""
        return fmean(self.differences)

    @property
    def error(self) -> float:
        """Standard error of the mean difference; not a number for a single seed."""
        count = len(self.differences)
        if count < 2 or not math.isfinite(self.difference):
            return math.nan
        return stdev(self.differences) / math.sqrt(count)

    def not_worse(self) -> int:
        """Seeds whose loss is no greater than the first arm's."""
        return sum(difference <= 0 for difference in self.differences)

    def jumps(self, threshold: float) -> int:
        """Runs that rose by the threshold or more."""
        return sum(rise >= threshold for rise in self.rises)


class ArmResult(NamedTuple):
    """One arm of a comparison.

    Attributes:
        arm: Its name.
        sweep: Held-out loss of the first seed by learning rate.
        own: At its own best rate.
        shared: At the best rate of the first arm.
        twice: At twice that.
        state_bytes_per_param: Of the optimizer.
        optimizer_ms: Median over runs of a step of the optimizer.
    """

    arm: str
    sweep: dict[float, float]
    own: Losses
    shared: Losses
    twice: Losses
    state_bytes_per_param: float
    optimizer_ms: float


def rows_of(comparison: Comparison, found: Mapping[Cell, Outcome]) -> list[ArmResult]:
    """The arms of a comparison that has been run.

    Args:
        comparison: What was compared.
        found: The outcomes of all its cells, others too.

    Returns:
        One row an arm, in the comparison's order.
    """
    noise = {seed: batch_noise(_curves(comparison, found, seed)) for seed in range(comparison.seeds)}
    return [_row(comparison, arm, found, noise) for arm in comparison.arms]


def _row(
    comparison: Comparison, arm: str, found: Mapping[Cell, Outcome], noise: Mapping[int, Sequence[float]]
) -> ArmResult:
    shared, twice = comparison.shared_rates(found)
    own, seeds = comparison.best_rate(arm, found), range(comparison.seeds_of(arm, found))
    outcomes = [outcome for cell, outcome in found.items() if cell == comparison.cell(arm, cell.lr, cell.seed)]

    def losses(lr: float, first_lr: float) -> Losses:
        runs = [found[comparison.cell(arm, lr, seed)] for seed in seeds]
        first = [found[comparison.cell(comparison.arms[0], first_lr, seed)].score for seed in seeds]
        differences = [_minus(run.score, base) for run, base in zip(runs, first, strict=True)]
        return Losses(lr, [run.score for run in runs], differences, [_rise(run, noise[run.cell.seed]) for run in runs])

    return ArmResult(
        arm,
        comparison.tried(arm, found),
        losses(own, shared),
        losses(shared, shared),
        losses(twice, twice),
        outcomes[0].state_bytes / outcomes[0].parameters,
        median(outcome.optimizer_ms for outcome in outcomes),
    )


def _curves(comparison: Comparison, found: Mapping[Cell, Outcome], seed: int) -> list[list[float]]:
    """Training losses of the runs of a seed that came to their end; of others the longest, where none did."""
    of_seed = [out.losses for cell, out in found.items() if cell == comparison.cell(cell.arm, cell.lr, seed)]
    longest = max(map(len, of_seed), default=0)
    return [losses for losses in of_seed if len(losses) == longest]


def _rise(run: Outcome, noise: Sequence[float]) -> float:
    return math.inf if run.held_out is None else largest_rise(run.losses, noise)


def _minus(loss: float, base: float) -> float:
    return 0.0 if loss == base else loss - base  # two infinite losses are alike
