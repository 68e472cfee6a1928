"""One run of a comparison: a task trained with an optimizer at a learning rate from a seed, and what came of it."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import gefen_fn
from gefen_nn.console import Watch, silent
from gefen_nn.demo_train import torch_threads
from gefen_nn.optimizer_bytes import state_bytes
from gefen_nn.task import Build, Run, Task, check_run, trained_entries
from gefen_nn.training import Training, judged, lr_factor


class Cell(NamedTuple):
    """What a run is known by; a run of the same cell is not made again.

    Attributes:
        task: Name of the task.
        arm: Name of the optimizer.
        lr: Peak of the learning rate.
        seed: Of parameters and batches.
        steps: Length of the run.
    """

    task: str
    arm: str
    lr: float
    seed: int
    steps: int


class Outcome(NamedTuple):
    """A finished run, as the log keeps it.

    Attributes:
        cell: Which run it was.
        held_out: The loss on held-out data after the last step; None if it, or a training loss, was not finite.
        losses: The training loss before each step, up to the first that was not finite.
        parameters: Trained entries.
        state_bytes: Of the optimizer, after the last step.
        seconds: Of the whole run.
        optimizer_ms: Median of the optimizer's steps.
        provenance: Versions, threads, machine and time; what `compare_marks` adds.
    """

    cell: Cell
    held_out: float | None
    losses: list[float]
    parameters: int
    state_bytes: int
    seconds: float
    optimizer_ms: float
    provenance: dict[str, Any]

    @property
    def score(self) -> float:
        """The held-out loss, infinite for a run that left the finite numbers."""
        return math.inf if self.held_out is None else self.held_out


def train(cell: Cell, task: Task, build: Build, *, threads: int = 1, watch: Watch = silent) -> Outcome:
    """Makes one run: warm-up, then a cosine down to a twentieth of the peak (`training.lr_factor`).

    Args:
        cell: Learning rate, seed and length; its names go into the outcome.
        task: Makes the model and its losses.
        build: Makes the optimizer, when the model's first gradients are there.
        threads: Of torch; the bits of a sum depend on how many share it.
        watch: Shows the steps.

    Returns:
        What came of it.

    Raises:
        ValueError: If the task or the optimizer is none, or there is no held-out loss.
    """
    started = time.perf_counter()
    with torch_threads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell.seed)
        run = task(cell.seed)
        check_judged(run, cell.task)
        with watch(f"{cell.arm}, lr {cell.lr:g}, seed {cell.seed}", cell.steps) as took:
            training = Training(run, build, cell.lr, lambda at: lr_factor(at, cell.steps))
            losses = [round(loss, 5) for loss in training.take(cell.steps, took)]
        held_out = judged(run) if len(losses) == cell.steps else math.nan
    return Outcome(
        cell,
        held_out if math.isfinite(held_out) else None,
        losses,
        parameters=trained_entries(run.model),
        state_bytes=state_bytes(training.optimizer),
        seconds=round(time.perf_counter() - started, 3),
        optimizer_ms=round(1e3 * median(training.seconds), 4) if losses else 0.0,
        provenance={**_provenance(), "threads": threads, **_moment()},
    )


def check_judged(run: Run, task: str) -> None:
    """Refuse a run that a comparison cannot train or judge.

    Raises:
        ValueError: naming the task.
    """
    check_run(run, task)
    if run.held_out is None:
        raise ValueError(
            f"`compare` judges by held-out data: the runs of {task} have none. Give them held_out=, a function that "
            "returns a float."
        )


@cache
def _provenance() -> dict[str, str]:
    versions = {"gefen-fn": gefen_fn.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**versions, "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores"} | _commit()


def _commit() -> dict[str, str]:
    """The commit that the package lies at, where it lies in its own repository; `+` if files differ from it."""
    source = Path(gefen_fn.__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(source.parent), *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)
        return {"commit": git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+")}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _moment() -> dict[str, Any]:
    return {"ended": datetime.now(timezone.utc).isoformat(timespec="seconds"), "load": round(os.getloadavg()[0], 2)}
