"""Step time of optimizers on one's own model, measured in turn: another one first in each round, all in one process."""

import copy
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gefen_fn.text import table
from gefen_kernels.ops import warm_up
from gefen_nn.console import Watch, silent, size
from gefen_nn.errors import WrongArgumentError
from gefen_nn.optimizer_bytes import state_bytes
from gefen_nn.task import Build, build_named

_BASE = "adamw"
_LEAST_SECONDS = 0.05  # of a turn: shorter ones measure the clock


class Arm(NamedTuple):
    """What was measured of one optimizer.

    Attributes:
        name: of it.
        step_s: seconds a step, one number per round.
        first_s: seconds of its first step, in which state is made and codebooks are learned.
        state_bytes: of its state after that.
        ratios: of `step_s` to AdamW's in the same round.
    """

    name: str
    step_s: tuple[float, ...]
    first_s: float
    state_bytes: int
    ratios: tuple[float, ...]


class Bench(NamedTuple):
    """What `bench` measured; printed, it is a table.

    Attributes:
        arms: AdamW, `fused=True`, first.
        entries: of all parameters.
        device: where they are.
        threads: of torch.
        steps: of each turn.
    """

    arms: tuple[Arm, ...]
    entries: int
    device: str
    threads: int
    steps: int

    def __str__(self) -> str:
        """One optimizer a line: medians, and the least and largest ratio."""
        times = ("ms a step", "ns a parameter", "first step ms")
        rows: list[tuple[str, ...]] = [("optimizer", *times, "state", "B a parameter", "against AdamW")]
        for arm in self.arms:
            step, share = median(arm.step_s), arm.state_bytes / self.entries
            spread = f"{median(arm.ratios):.2f} ({min(arm.ratios):.2f} to {max(arm.ratios):.2f})"
            shown = f"{1e3 * step:.3f}", f"{1e9 * step / self.entries:.3f}", f"{1e3 * arm.first_s:.1f}"
            rows.append((arm.name, *shown, size(arm.state_bytes), f"{share:.3f}", spread))
        turns = f"{len(self.arms[0].step_s)} rounds of {self.steps} steps each, in turn"
        return f"{table(rows)}\n{self.entries:,} parameters on {self.device}, {self.threads} threads; {turns}"


def bench(
    model: nn.Module, optimizers: Sequence[str], *, rounds: int = 9, device: str = "cpu", watch: Watch | None = None
) -> Bench:
    """Time steps on random gradients that stay the same; every optimizer has a copy of the parameters.

    Args:
        model: whose parameters are stepped; it is not run, and not changed.
        optimizers: names in `gefen_nn.task.BUILDS` or `module:function`; AdamW is always there.
        rounds: in each of which every optimizer has a turn.
        device: where to step.
        watch: shows progress; None for none.

    Raises:
        WrongArgumentError: for a name that is none, or a device that torch cannot use here.
        ValueError: for a model without parameters to train.
    """
    _check_device(device)
    builds: dict[str, Build] = {name: build_named(name) for name in dict.fromkeys((_BASE, *optimizers))}
    entries = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not entries:
        raise ValueError("The model must have parameters to train: got none. Name another factory.")
    warm_up()  # what loops take to compile once a machine is no step's
    players, first, watch = {}, {}, watch or silent
    with watch("first steps", len(builds)) as advance:
        for name, build in builds.items():
            players[name] = build(_copy(model, device), 1e-6)
            first[name] = _turn(players[name], 1)
            advance()
    steps = max(1, round(_LEAST_SECONDS / min(_turn(player, 2) for player in players.values())))
    times = _rounds(players, rounds, steps, watch)
    arms = []
    for name, player in players.items():
        ratios = tuple(own / base for own, base in zip(times[name], times[_BASE], strict=True))
        arms.append(Arm(name, tuple(times[name]), first[name], state_bytes(player), ratios))
    return Bench(tuple(arms), entries, device, torch.get_num_threads(), steps)


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise WrongArgumentError(
            f"`device` must be one that torch can use here: got {device!r} ({reason}). Use cpu."
        ) from error


def _copy(model: nn.Module, device: str) -> nn.Module:
    """The model with parameters of its own, and gradients."""
    net, generator = copy.deepcopy(model).to(device), torch.Generator().manual_seed(0)
    for p in net.parameters():
        if p.requires_grad:
            p.grad = (torch.randn(p.shape, generator=generator, device="cpu") * 1e-2).to(p)
    return net


def _rounds(
    players: Mapping[str, torch.optim.Optimizer], rounds: int, steps: int, watch: Watch
) -> dict[str, list[float]]:
    """Seconds a step of each, round by round."""
    names, times = list(players), {name: [0.0] * rounds for name in players}
    with watch("rounds", rounds) as advance:
        for n in range(rounds):
            at = n % len(names)
            for name in names[at:] + names[:at]:
                _turn(players[name], 1)  # brings its state into the caches, and wakes its threads
                times[name][n] = _turn(players[name], steps)
            advance()
    return times


def _turn(optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Seconds of one step, of so many."""
    p: Tensor = optimizer.param_groups[0]["params"][0]
    _wait(p)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    _wait(p)
    return (time.perf_counter() - start) / steps


def _wait(p: Tensor) -> None:
    if p.is_cuda:
        torch.cuda.synchronize(p.device)
