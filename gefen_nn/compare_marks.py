"""What tells the runs of a log from those that today's task and optimizers would make: marks kept with each run.

A task is marked by what its runs begin with under a seed: two numbers of the parameters, the loss of the first batch,
the held-out loss. An optimizer is marked by the source of its function; what that calls and reads is not seen.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gefen_nn.compare_run import Cell, Outcome, check_judged
from gefen_nn.demo_train import torch_threads
from gefen_nn.task import BUILDS, Build, Task
from gefen_nn.training import judged, next_loss

MARKS = ("start", "source")  # names in a run's provenance
_CLOSE = 1e-3  # of numbers that differ by how many threads, or which machine, computed them


class Marks:
    """The marks of a task and its optimizers as they are now.

    Args:
        name: Of the task.
        task: Makes its runs.
        builds: The optimizer of each arm.
        threads: Of torch.
    """

    def __init__(self, name: str, task: Task, builds: Mapping[str, Build], threads: int) -> None:
        self._start = cache(partial(_start, name, task, threads))
        self._sources = {
            arm: hashlib.sha256(source.encode()).hexdigest()[:16]
            for arm, build in builds.items()
            if (source := _source(build))
        }

    def of(self, cell: Cell) -> dict[str, Any]:
        """The marks of a run that is made now.

        Args:
            cell: Which one.

        Raises:
            ValueError: For a task whose runs cannot be trained or judged.
        """
        source = self._sources.get(cell.arm)
        return {"start": self._start(cell.seed), **({"source": source} if source else {})}

    def check(self, outcomes: Iterable[Outcome], log: Path) -> None:
        """Refuse a log some of whose runs have other marks; those without marks pass.

        Args:
            outcomes: The runs of this task in it.
            log: Named in the error.

        Raises:
            ValueError: Naming the run, what differs and the fix.
        """
        for outcome in outcomes:
            if any(mark in outcome.provenance for mark in MARKS):
                _check(outcome, self.of(outcome.cell), log)


def _start(name: str, task: Task, threads: int, seed: int) -> dict[str, Any]:
    """What the runs of a seed begin with; one of its own is made for that, so that the others are left as they are."""
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        run = task(seed)
        check_judged(run, name)
        run.model.train()
        numbers, loss = _numbers(run.model), next_loss(run).item()
        if not math.isfinite(loss):
            raise ValueError(f"A run must begin with a finite loss: got {loss} from {name}. Look at the task.")
        held_out = judged(run)
    return {**numbers, "loss": loss, "held_out": held_out if math.isfinite(held_out) else None}


def _numbers(model: nn.Module) -> dict[str, float]:
    """The norm of all parameters, and their sum by the cosine of their place, which tells their order apart."""
    squares = along = begin = 0.0
    for p in model.parameters():
        x = p.detach().to("cpu", torch.float64).flatten()
        squares += float(x.square().sum())
        along += float(x @ torch.arange(begin, begin + len(x), dtype=torch.float64).cos())
        begin += len(x)
    return {"norm": math.sqrt(squares), "along": along}


def _source(build: Build) -> str | None:
    """The source of a user's function; none of ours, which versions tell, and of what has none."""
    try:
        return None if build in BUILDS.values() else inspect.getsource(build)
    except (OSError, TypeError):
        return None


def _check(outcome: Outcome, now: Mapping[str, Any], log: Path) -> None:
    cell, then = outcome.cell, outcome.provenance
    for mark, of in zip(MARKS, (f"start of {cell.task}", f"source of {cell.arm}"), strict=True):
        if mark in then and mark in now and not _alike(then[mark], now[mark]):
            raise ValueError(
                f"A log must hold runs of the task and the optimizers that are there now: {log} has one of {cell.arm} "
                f"at lr {cell.lr:g} with seed {cell.seed}, made when the {of} was another: "
                f"{_difference(then[mark], now[mark])}. Name another folder, or delete {log.name}; a task must depend "
                "on its seed alone."
            )


def _difference(then: Any, now: Any) -> str:
    if not isinstance(now, dict) or not isinstance(then, dict):
        return f"{then}, now {now}"
    other = [name for name, value in now.items() if not _alike(then.get(name), value)]
    return "; ".join(f"{name} {then.get(name)}, now {now[name]}" for name in other)


def _alike(then: Any, now: Any) -> bool:
    if isinstance(now, dict):
        return isinstance(then, dict) and all(_alike(then.get(name), value) for name, value in now.items())
    if isinstance(now, float):
        return isinstance(then, (int, float)) and math.isclose(then, now, rel_tol=_CLOSE)
    return bool(then == now)
