"""Optimizers on one task, each at its own best learning rate, at the best one of the first of them, and at twice that.

An arm, as an optimizer is called here, is first trained with the first seed over a grid of rates, to which half and
twice the best one are added while it has no neighbour as near as that. With the other seeds it is trained at its own
best rate and, to be compared under one rate, at the best rate of the first arm and at twice that. Under a seed all arms
see the same parameters and batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gefen_nn import compare_log
from gefen_nn.compare_run import Cell, Outcome, train
from gefen_nn.console import Watch, silent
from gefen_nn.task import Build, Task

_LONGEST_GRID = 12
_WIDEST = 2.01  # between a best rate and its neighbours


class Plan(NamedTuple):
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
        """One run of this plan."""
        return Cell(self.task, arm, lr, seed, self.steps)

    def cells(self, found: Mapping[Cell, Outcome]) -> Iterator[Cell]:
        """The runs in their order; one may come twice.

        Args:
            found: The outcomes so far; must hold that of each run before the next one is asked for.
        """
        for arm in self.arms:
            yield from self._sweep(arm, found)
            for lr in dict.fromkeys((*self.shared_rates(found), self.best_rate(arm, found))):
                yield from (self.cell(arm, lr, seed) for seed in range(self.seeds))

    def tried(self, arm: str, found: Mapping[Cell, Outcome]) -> dict[float, float]:
        """The held-out losses of the first seed by learning rate, ascending in the rate.

        Args:
            arm: Which optimizer.
            found: The outcomes so far.
        """
        mine = [cell for cell in found if cell == self.cell(arm, cell.lr, 0)]
        return {cell.lr: found[cell].score for cell in sorted(mine, key=lambda cell: cell.lr)}

    def best_rate(self, arm: str, found: Mapping[Cell, Outcome]) -> float:
        """The rate at which the first seed came lowest; of equal ones the lower rate.

        Args:
            arm: Which optimizer.
            found: The outcomes so far, of which some are this arm's.
        """
        tried = self.tried(arm, found)
        return min(tried, key=tried.__getitem__)

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
        while len(tried := list(self.tried(arm, found))) < _LONGEST_GRID:
            best = self.best_rate(arm, found)
            at = tried.index(best)
            if at == 0 or tried[at - 1] < best / _WIDEST:
                yield self.cell(arm, best / 2, 0)
            elif at == len(tried) - 1 or tried[at + 1] > best * _WIDEST:
                yield self.cell(arm, best * 2, 0)
            else:
                return


def run_plan(
    plan: Plan, task: Task, builds: Mapping[str, Build], log: Path, *, threads: int = 1, watch: Watch = silent
) -> dict[Cell, Outcome]:
    """Makes the runs of a plan that its log does not hold yet.

    Args:
        plan: What to compare.
        task: The task of that name.
        builds: The optimizer of each arm.
        log: File of the runs; they are added one by one, so that a stopped plan may be carried on.
        threads: Of torch.
        watch: Shows the steps of each run.

    Returns:
        The outcomes in the log.

    Raises:
        ValueError: For a log that is none, or a task whose runs cannot be judged.
    """
    found = compare_log.read(log)
    for cell in plan.cells(found):
        if cell not in found:
            found[cell] = train(cell, task, builds[cell.arm], threads=threads, watch=watch)
            compare_log.append(log, found[cell])
    return found
