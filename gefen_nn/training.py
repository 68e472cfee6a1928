"""A training run step by step, as the tools of the `gefen` command make it."""

import math
import time
from collections.abc import Callable
from functools import cached_property
from typing import SupportsFloat

import torch
from torch import Tensor

from gefen_nn.task import Build, Run


class Training:
    """A run and its optimizer, which is made when the first gradients are there.

    Args:
        run: what is trained; its model is put into training mode.
        build: makes the optimizer.
        lr: the rate that it is made with.
        factor: of the steps taken, what the rate is multiplied by.

    Attributes:
        seconds: of each of the optimizer's steps.
    """

    def __init__(self, run: Run, build: Build, lr: float, factor: Callable[[int], float]) -> None:
        self._run, self._build, self._lr, self._factor = run, build, lr, factor
        self.seconds: list[float] = []
        run.model.train()

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.

        Raises:
            ValueError: If what was made is none.
        """
        made = self._build(self._run.model, self._lr)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                f"An optimizer's function must return a torch.optim.Optimizer: got {type(made).__name__}. Return it."
            )
        return made

    @cached_property
    def _schedule(self) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)

    def loss(self) -> float:
        """The loss of the next batch, whose gradients are there then."""
        loss = next_loss(self._run)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves `backward` unannotated
        return loss.item()

    def step(self) -> None:
        """Steps by the gradients, which are gone then."""
        self.seconds.append(take_step(self.optimizer, self._schedule))

    def take(self, steps: int, took: Callable[[], None]) -> list[float]:
        """Takes steps until a loss is not finite.

        Args:
            steps: How many at most.
            took: Called after each.

        Returns:
            The loss before each step taken.
        """
        losses: list[float] = []
        while len(losses) < steps and math.isfinite(loss := self.loss()):
            self.step()
            losses.append(loss)
            took()
        return losses


def next_loss(run: Run) -> Tensor:
    """The loss of the next batch, before its gradients.

    Args:
        run: whose loss is asked for.

    Raises:
        ValueError: If it is nothing that can be differentiated.
    """
    loss: object = run.loss()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        came = f"{type(loss).__name__} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        cut = " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise ValueError(
            f"The loss of a run must be a 0-dim tensor that can be differentiated: got {came}{cut}. Return it without "
            "`item` or `detach`."
        )
    return loss


def take_step(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> float:
    """Steps by the gradients that are there, and clears them.

    Args:
        optimizer: takes the step.
        schedule: of its rates, moved on by one.

    Returns:
        The seconds that the optimizer's step took.
    """
    before = time.perf_counter()
    optimizer.step()
    seconds = time.perf_counter() - before
    schedule.step()
    optimizer.zero_grad()
    return seconds


def lr_factor(step: int, steps: int) -> float:
    """The schedule of whole runs: a tenth of linear warm-up, then a cosine to a twentieth of the peak.

    Args:
        step: steps taken.
        steps: length of the run.
    """
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def judged(run: Run) -> float:
    """The held-out loss of a run that has one; its model is left in evaluation mode.

    Raises:
        ValueError: If it is no number.
    """
    assert run.held_out is not None
    run.model.eval()
    loss: object = run.held_out()
    if not isinstance(loss, SupportsFloat) or (isinstance(loss, Tensor) and loss.numel() != 1):
        raise ValueError(f"`held_out` of a run must return a number: got {type(loss).__name__}. Return a float.")
    return float(loss)
