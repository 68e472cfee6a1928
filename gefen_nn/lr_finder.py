"""Finding a learning rate: a range test says where to look, short runs at round rates say which one.

The range test raises the rate exponentially from step to step (Smith, "Cyclical learning rates", arXiv 1506.01186): its
loss falls while steps help, and rises when they are too long. It is seen against the untrained model's loss on the same
batch, which takes out how batches differ. A quarter of the rate at its minimum is where short runs begin: each warms
up, decays and is judged; rates ten times apart are tried, then neighbours, until those of the best are worse.
Both parts stay within the same bounds.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gefen_fn.scalar import is_number
from gefen_fn.text import table
from gefen_nn.console import Watch, silent
from gefen_nn.errors import WrongArgumentError
from gefen_nn.task import Build, Run, Task, build_named, check_run
from gefen_nn.training import Training, judged, lr_factor

_DIGITS = (1, 2, 5)
_LEAST_RUNS = 3
_RATES = (1e-30, 1e30)  # beyond, numbers that optimizers compute of a rate leave those of fp32


class LrReport(NamedTuple):
    """What `lr_find` found; printed, it is a table of the short runs.

    Attributes:
        suggestion: the best rate of the short runs.
        enclosed: whether rates on both sides of it were worse; else `runs` or the bounds ended the search.
        bounds: the least and the largest rate that might be tried.
        range_test: of each step its rate, the training loss before it and the untrained model's on that batch; until
            the loss was twice that or not finite.
        sweep: loss of a short run at each rate, in ascending order of rates; infinite where it diverged.
        steps: of a short run.
        judged_by: "held-out loss", or "training loss" of the last tenth of a run.
    """

    suggestion: float
    enclosed: bool
    bounds: tuple[float, float]
    range_test: tuple[tuple[float, float, float], ...]
    sweep: tuple[tuple[float, float], ...]
    steps: int
    judged_by: str

    def __str__(self) -> str:
        """The short runs, and the suggestion with its limits."""
        rows = [("lr", self.judged_by, "")]
        rows += [(f"{lr:g}", _shown(loss), "best" if lr == self.suggestion else "") for lr, loss in self.sweep]
        lines = [table(rows, left=0), f"suggested: lr={self.suggestion:g}, best of runs of {self.steps} steps."]
        lines += [f"{lr:g} was not tried: allow {self._fix(lr)}." for lr in self.untried]
        lines.append("Each rate had one run: losses a few percent apart tell nothing. Longer runs may want less.")
        return "\n".join(lines)

    @property
    def untried(self) -> tuple[float, ...]:
        """Neighbours of the suggestion that had no run, because of `runs` or of the bounds."""
        tried, best = [lr for lr, _ in self.sweep], _nearest_place(self.suggestion)
        return tuple(_rate(place) for place in (best - 1, best + 1) if _rate(place) not in tried)

    def _fix(self, lr: float) -> str:
        low, high = self.bounds
        return "lower rates (--low)" if lr < low else "higher rates (--high)" if lr > high else "more runs (--runs)"


def _shown(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def lr_find(
    make_run: Task,
    optimizer: str | Build = "gefen",
    *,
    low: float = 1e-6,
    high: float = 1.0,
    range_steps: int = 100,
    steps: int = 100,
    runs: int = 10,
    seed: int = 0,
    watch: Watch | None = None,
) -> LrReport:
    """Find a learning rate for a model, its data and an optimizer.

    Args:
        make_run: makes a `gefen_nn.Run` of a seed: a fresh model, and its loss on the next batch.
        optimizer: a name in `gefen_nn.task.BUILDS`, or a function of a model and a learning rate.
        low: least rate to try, where the range test begins.
        high: largest one, where it ends.
        range_steps: of the range test.
        steps: of each short run.
        runs: most short runs; each costs `steps`.
        seed: of every run, so that rates alone differ.
        watch: shows progress; None for none.

    Raises:
        WrongArgumentError: for numbers out of range, or an unknown optimizer.
        TypeError: if the task or the optimizer is no function.
        ValueError: if a task makes no `Run`, no run ends with a finite loss, or all end with the same one.

    Example:
        >>> def task(seed):
        ...     torch.manual_seed(seed)
        ...     model, x = nn.Linear(8, 1), torch.randn(32, 8)
        ...     return Run(model, lambda: (model(x) - x.sum(1, True)).square().mean())
        >>> report = lr_find(task, "adamw", range_steps=30, steps=10, runs=4)  # print it for a table
        >>> len(report.sweep), 1e-6 <= report.suggestion <= 1.0
        (4, True)
    """
    _check(low, high, range_steps, steps, runs)
    build = build_named(optimizer) if isinstance(optimizer, str) else optimizer
    _check_functions(make_run, build)
    watch = watch or silent
    first, untrained = make_run(seed), make_run(seed)
    check_run(first, getattr(make_run, "__name__", "it"))
    with watch("range test", range_steps) as advance:
        test = tuple(_range_test(first, untrained, build, low, high, range_steps, advance))

    def judge(place: int) -> float:
        with watch(f"short run, lr {_rate(place):g}", steps) as advance:
            return _short_run(make_run(seed), build, _rate(place), steps, advance)

    places = _places(low, high)
    losses = _search(judge, min(max(_nearest_place(_guess(test)), places[0]), places[-1]), places, runs)
    best = min(losses, key=losses.__getitem__)
    _check_losses({_rate(place): losses[place] for place in sorted(losses)})
    sweep = tuple((_rate(place), losses[place]) for place in sorted(losses))
    judged_by = "training loss" if first.held_out is None else "held-out loss"
    enclosed = {best - 1, best + 1} <= losses.keys()
    return LrReport(_rate(best), enclosed, (low, high), test, sweep, steps, judged_by)


def _check(low: float, high: float, range_steps: int, steps: int, runs: int) -> None:
    least, most = _RATES
    if not (is_number(low) and is_number(high)):
        raise WrongArgumentError(f"`low` and `high` must be numbers: got {low!r} and {high!r}. Use 1e-6 and 1.")
    if not least <= low < high <= most or len(_places(low, high)) < _LEAST_RUNS:
        raise WrongArgumentError(
            f"`low` and `high` must be {least:g} <= low < high <= {most:g}, with {_LEAST_RUNS} rates of 1, 2 or 5 "
            f"times a power of ten between: got {low} and {high}. Use 1e-6 and 1."
        )
    for name, value, least in (("range_steps", range_steps, 10), ("steps", steps, 10), ("runs", runs, _LEAST_RUNS)):
        if not isinstance(value, int) or value < least:
            raise WrongArgumentError(f"`{name}` must be at least {least}, an int: got {value!r}. Use more.")


def _check_functions(make_run: Any, build: Any) -> None:
    """Raise `TypeError` for a task or a build that is no function; a module is none."""
    for name, given, wanted in (
        ("make_run", make_run, "of a seed that returns a gefen_nn.Run"),
        ("optimizer", build, "of a model and a learning rate, or a name"),
    ):
        if not callable(given) or isinstance(given, nn.Module):
            came = f"a {type(given).__name__}"
            raise TypeError(f"`{name}` must be a function {wanted}: got {came}. Write a function that makes it.")


def _check_losses(losses: Mapping[float, float]) -> None:
    """Refuse to suggest one of rates that tell nothing."""
    rates, values = ", ".join(f"{lr:g}" for lr in losses), set(losses.values())
    if values == {math.inf}:
        raise ValueError(f"A short run must end with a finite loss: got none at {rates}. Look at the task.")
    if len(values) == 1:
        raise ValueError(
            f"Rates must make a difference: got the loss {values.pop():g} at each of {rates}. Look whether the loss "
            "depends on the model's parameters."
        )


def _rate(place: int) -> float:
    """Round rates by number: 0 is 1, 1 is 2, 2 is 5, 3 is 10, -1 is 0.5."""
    exponent, digit = divmod(place, len(_DIGITS))
    return float(f"{_DIGITS[digit]}e{exponent}")


def _places(low: float, high: float) -> range:
    """The numbers of round rates from `low` to `high`."""
    around = range(_nearest_place(low) - 1, _nearest_place(high) + 2)
    inside = [place for place in around if low <= _rate(place) <= high]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def _nearest_place(lr: float) -> int:
    around = range(3 * math.floor(math.log10(lr)) - 1, 3 * math.floor(math.log10(lr)) + 5)
    return min(around, key=lambda place: abs(math.log(_rate(place) / lr)))


def _range_test(
    run: Run, untrained: Run, build: Build, low: float, high: float, steps: int, advance: Callable[[], None]
) -> Iterator[tuple[float, float, float]]:
    """See `LrReport`; a loss judges the rates of the steps before it."""
    growth = (high / low) ** (1 / (steps - 1))
    training = Training(run, build, low, lambda at: growth**at)
    for at in range(steps):
        drawn = _random_states()
        loss = training.loss()
        after = _random_states()
        _set_random_states(drawn)  # both see one batch, also where a task draws it from torch's own generator
        with torch.no_grad():
            start = float(untrained.loss())
        _set_random_states(after)
        if at and not loss <= start + abs(start):  # a NaN is not
            return
        yield low * growth**at, loss, start
        training.step()
        advance()


def _random_states() -> list[Tensor]:
    """Of torch's own generators, the CPU's first."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else [])]


def _set_random_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def _guess(test: Sequence[tuple[float, float, float]]) -> float:
    """A quarter of the rate at which the smoothed gain over the untrained model is most."""
    half = max(1, len(test) // 20)
    gains = [start - loss for _, loss, start in test]
    smooth = [fmean(gains[max(0, at - half) : at + half + 1]) for at in range(len(gains))]
    return test[max(range(len(test)), key=smooth.__getitem__)][0] / 4


def _short_run(run: Run, build: Build, lr: float, steps: int, advance: Callable[[], None]) -> float:
    """The loss that a run is judged by; infinite if it is not finite."""
    losses = Training(run, build, lr, lambda at: lr_factor(at, steps)).take(steps, advance)
    if len(losses) < steps:
        return math.inf
    loss = fmean(losses[-max(1, steps // 10) :]) if run.held_out is None else judged(run)
    return loss if math.isfinite(loss) else math.inf


def _search(judge: Callable[[int], float], start: int, places: range, runs: int) -> dict[int, float]:
    """Losses by place: from a start downhill by long strides, then by short ones, until the least is enclosed."""
    known = {start: judge(start)}
    for stride in (len(_DIGITS), 1):
        while len(known) < runs:
            best = min(known, key=known.__getitem__)
            around = (near for near in (best + stride, best - stride) if near in places and near not in known)
            wanted = next(around, None)
            if wanted is None:
                break
            known[wanted] = judge(wanted)
    return known
