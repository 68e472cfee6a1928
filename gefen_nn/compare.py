"""Optimizers on one task, each at its own best learning rate, at the best one of the first of them, and at twice that.

An arm, as an optimizer is called here, is first trained with the first seed over a grid of rates, to which half and
twice the best one are added while it has no neighbour as near as that; below the grid that ends where losses are
equal. The other seeds decide between the two rates that came lowest; all seeds are trained, too, at the best rate of
the first arm and at twice that, so that arms are compared under one rate. Under a seed all arms see the same parameters
and batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from gefen_nn import compare_log
from gefen_nn.compare_marks import Marks
from gefen_nn.compare_run import Cell, Outcome, train
from gefen_nn.console import Watch, silent
from gefen_nn.task import Build, Task

_LONGEST_GRID = 12
_WIDEST = 2.01  # between a best rate and its neighbours


class Comparison(NamedTuple):
    """What is compared.

    Attributes:
        task: Name of the task.
        arms: Names of the optimizers; the others are compared with the first.
        rates: The grid of learning rates to begin with.
        seeds: How many.
        steps: Of each run.
    """

    task: str
    arms: Sequence[str]
    rates: Sequence[float] = (1e-3, 2e-3, 4e-3)
    seeds: int = 3
    steps: int = 300

    def cell(self, arm: str, lr: float, seed: int) -> Cell:
        """One run of this comparison."""
        return Cell(self.task, arm, lr, seed, self.steps)

    def cells(self, found: Mapping[Cell, Outcome]) -> Iterator[Cell]:
        """The runs in their order; some come several times.

        Args:
            found: The outcomes so far; must hold that of each run before the next one is asked for.
        """
        for arm in self.arms:
            yield from self._sweep(arm, found)
            done: list[float] = []
            while done != (shared := self.shared_rates(found)):  # of the first arm they may move with its best rate
                yield from self._seeds(arm, shared)
                yield from self._sweep(arm, found)
                done = shared

    def seeds_of(self, arm: str, found: Mapping[Cell, Outcome]) -> int:
        """With how many seeds, up to this comparison's, every run of an arm and of the first one has been made.

        Args:
            arm: Which optimizer.
            found: The outcomes so far.
        """
        pair = list(dict.fromkeys((self.arms[0], arm)))

        def complete(seeds: int) -> bool:  # stops at the first run that is not there
            return all(cell in found for cell in self._replace(arms=pair, seeds=seeds).cells(found))

        return next((seeds for seeds in range(self.seeds, 0, -1) if complete(seeds)), 0)

    def finished(self, found: Mapping[Cell, Outcome], least: int | None = None) -> Comparison:
        """This comparison with those arms alone that can be judged.

        Args:
            found: The outcomes so far.
            least: With how many seeds; None for all of the comparison's.
        """
        needed = self.seeds if least is None else least
        return self._replace(arms=[arm for arm in self.arms if self.seeds_of(arm, found) >= needed])

    def known(self, found: Mapping[Cell, Outcome]) -> dict[Cell, Outcome]:
        """The outcomes of this task in runs of this length, of other arms and seeds too.

        Args:
            found: The outcomes so far.
        """
        return {cell: out for cell, out in found.items() if cell == self.cell(cell.arm, cell.lr, cell.seed)}

    def tried(self, arm: str, found: Mapping[Cell, Outcome]) -> dict[float, float]:
        """The held-out losses of the first seed by learning rate, ascending in the rate.

        Args:
            arm: Which optimizer.
            found: The outcomes so far.
        """
        mine = [cell for cell in found if cell == self.cell(arm, cell.lr, 0)]
        return {cell.lr: found[cell].score for cell in sorted(mine, key=lambda cell: cell.lr)}

    def contenders(self, arm: str, found: Mapping[Cell, Outcome]) -> list[float]:
        """The rates that came lowest and second with the first seed; of equal ones the lower rate is first.

        Args:
            arm: Which optimizer.
            found: The outcomes so far.
        """
        tried = self.tried(arm, found)
        return sorted(tried, key=tried.__getitem__)[:2]

    def best_rate(self, arm: str, found: Mapping[Cell, Outcome]) -> float:
        """The contender with the lower mean over all seeds that have been run.

        Args:
            arm: Which optimizer.
            found: The outcomes so far, of which some are this arm's.
        """

        def mean(lr: float) -> float:
            return fmean(out.score for cell, out in found.items() if cell == self.cell(arm, lr, cell.seed))

        return min(self.contenders(arm, found), key=mean)

    def shared_rates(self, found: Mapping[Cell, Outcome]) -> list[float]:
        """The best rate of the first arm and twice that; none before it is known.

        Args:
            found: The outcomes so far.
        """
        first = self.best_rate(self.arms[0], found) if self.tried(self.arms[0], found) else None
        return [] if first is None else [first, 2 * first]

    def _sweep(self, arm: str, found: Mapping[Cell, Outcome]) -> Iterator[Cell]:
        shared = [] if arm == self.arms[0] else self.shared_rates(found)
        yield from (self.cell(arm, lr, 0) for lr in sorted({*self.rates, *shared}))
        while len(self.tried(arm, found)) < _LONGEST_GRID and (lr := self._missing(arm, found)):
            yield self.cell(arm, lr, 0)
        yield from self._seeds(arm, self.contenders(arm, found))

    def _seeds(self, arm: str, rates: Sequence[float]) -> Iterator[Cell]:
        yield from (self.cell(arm, lr, seed) for lr in rates for seed in range(self.seeds))

    def _missing(self, arm: str, found: Mapping[Cell, Outcome]) -> float | None:
        """The near neighbour that the first seed's best rate lacks, the lower one first."""
        tried, best = list(self.tried(arm, found)), self.contenders(arm, found)[0]
        at = tried.index(best)
        if at == 0 or tried[at - 1] < best / _WIDEST:
            return None if self._is_flat(arm, found) else best / 2
        return best * 2 if at == len(tried) - 1 or tried[at + 1] > best * _WIDEST else None

    def _is_flat(self, arm: str, found: Mapping[Cell, Outcome]) -> bool:
        """Whether the search went below the grid to the same finite loss as above; it would go on without end."""
        (lowest, loss), *above = self.tried(arm, found).items()
        return lowest < min(self.rates) and math.isfinite(loss) and bool(above) and above[0][1] == loss


def compare(
    comparison: Comparison,
    task: Task,
    builds: Mapping[str, Build],
    log: Path,
    *,
    threads: int = 1,
    watch: Watch = silent,
) -> dict[Cell, Outcome]:
    """Makes the runs of a comparison that its log does not hold yet.

    Args:
        comparison: What to compare.
        task: The task of that name.
        builds: The optimizer of each arm.
        log: File of the runs; they are added one by one, so that a stopped comparison may be carried on.
        threads: Of torch.
        watch: Shows the steps of each run.

    Returns:
        The outcomes in the log.

    Raises:
        ValueError: For a log that is none or was made by other code, or a task whose runs cannot be trained or judged.
    """
    found, marks = compare_log.read(log), Marks(comparison.task, task, builds, threads)
    marks.check(comparison.known(found).values(), log)
    for cell in comparison.cells(found):
        if cell not in found:
            made_by = marks.of(cell)
            outcome = train(cell, task, builds[cell.arm], threads=threads, watch=watch)
            found[cell] = outcome._replace(provenance={**outcome.provenance, **made_by})
            compare_log.append(log, found[cell])
    return found
