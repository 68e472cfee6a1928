"""Schedules: functions of the number of calls so far, 0 at the first.

A schedule takes an int and returns a float, or takes an integer tensor and returns a float64 tensor without reading
it on the host. Both give the same value. Signatures and meaning are optax's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import Schedule
from gefen_fn.scalar import Scalar, came, check_scalar, is_number


def _on_counts(name: str, f: Callable[[Tensor], Tensor]) -> Schedule:
    """A schedule of a function from float64 tensors to float64 tensors."""

    def schedule(count: Any) -> Any:
        if isinstance(count, Tensor):
            return f(count.to(torch.float64))
        return float(f(torch.tensor(count, dtype=torch.float64, device="cpu")))

    schedule.__name__ = name
    return schedule


def _check_steps(name: str, steps: Any, low: float) -> None:
    if not is_number(steps) or isinstance(steps, Tensor) or not steps >= low:
        rule = f"must be a number of steps{'' if low == -math.inf else f', at least {low}'}"
        raise ValueError(f"`{name}` {rule}: got {came(steps)}. Write an int; it counts the optimizer's steps.")


def _check_values(**values: Any) -> None:
    for name, value in values.items():
        check_scalar(name, value, "A schedule's values are floats.")


def constant_schedule(value: Scalar) -> Schedule:
    """`value` at every count.

    Raises:
        ValueError: if it is no finite number.

    Example:
        >>> warmup = linear_schedule(0.0, 1e-3, transition_steps=10)
        >>> schedule = join_schedules([warmup, constant_schedule(1e-3)], boundaries=[10])
        >>> schedule(5), schedule(500)
        (0.0005, 0.001)
    """
    _check_values(value=value)
    return _on_counts("constant_schedule", lambda count: torch.zeros_like(count) + value)


def linear_schedule(
    init_value: Scalar, end_value: Scalar, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """A straight line from `init_value` to `end_value`; see `polynomial_schedule`.

    Example:
        >>> schedule = linear_schedule(1.0, 0.0, transition_steps=4, transition_begin=2)
        >>> [schedule(count) for count in (0, 2, 3, 6, 100)]
        [1.0, 1.0, 0.75, 0.0, 0.0]
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def polynomial_schedule(
    init_value: Scalar, end_value: Scalar, power: Scalar, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """`(init_value - end_value) * (1 - c / transition_steps)**power + end_value`.

    Args:
        init_value: value until `transition_begin`.
        end_value: value from `transition_begin + transition_steps`.
        power: 1 is linear.
        transition_steps: length of the change in steps; 0 keeps `init_value` for ever.
        transition_begin: count at which the change begins; `c` counts from there.

    Raises:
        ValueError: if a number of steps is negative, or another argument no finite number.

    Example:
        >>> schedule = polynomial_schedule(1.0, 0.0, power=2, transition_steps=4)
        >>> [schedule(count) for count in range(5)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    _check_steps("transition_steps", transition_steps, 0)
    _check_steps("transition_begin", transition_begin, 0)
    _check_values(init_value=init_value, end_value=end_value, power=power)
    if transition_steps == 0:
        return constant_schedule(init_value)

    def value(count: Tensor) -> Tensor:
        left = 1.0 - torch.clamp(count - transition_begin, 0, transition_steps) / transition_steps
        return (init_value - end_value) * left**power + end_value

    return _on_counts("polynomial_schedule", value)


def cosine_decay_schedule(
    init_value: Scalar, decay_steps: int, alpha: Scalar = 0.0, exponent: Scalar = 1.0
) -> Schedule:
    """`init_value * ((1 - alpha) * cosine**exponent + alpha)`, half a period over `decay_steps` (arXiv 1608.03983).

    Args:
        init_value: value at 0.
        decay_steps: steps until the lowest value, which then stays.
        alpha: lowest value as a fraction of `init_value`.
        exponent: power of the cosine.

    Raises:
        ValueError: if `decay_steps` is below 1, or another argument no finite number.

    Example:
        >>> schedule = cosine_decay_schedule(1.0, decay_steps=100, alpha=0.1)
        >>> [round(schedule(count), 3) for count in (0, 50, 100, 1000)]
        [1.0, 0.55, 0.1, 0.1]
    """
    _check_steps("decay_steps", decay_steps, 1)
    _check_values(init_value=init_value, alpha=alpha, exponent=exponent)

    def value(count: Tensor) -> Tensor:
        cosine = 0.5 * (1.0 + torch.cos(math.pi * torch.clamp(count, max=decay_steps) / decay_steps))
        return init_value * ((1.0 - alpha) * cosine**exponent + alpha)

    return _on_counts("cosine_decay_schedule", value)


def exponential_decay(
    init_value: Scalar,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: Scalar | None = None,
) -> Schedule:
    """`init_value * decay_rate**(c / transition_steps)`.

    Args:
        init_value: value until `transition_begin`.
        transition_steps: steps after which the value has changed by `decay_rate`; 0 keeps `init_value`.
        decay_rate: > 0; 0 keeps `init_value`.
        transition_begin: count at which the change begins; `c` counts from there.
        staircase: change only at multiples of `transition_steps`.
        end_value: lower bound for `decay_rate < 1`, upper bound otherwise.

    Raises:
        ValueError: if a number of steps or `decay_rate` is negative, or another argument no finite number.

    Example:
        >>> smooth = exponential_decay(1.0, transition_steps=10, decay_rate=0.25)
        >>> stairs = exponential_decay(1.0, transition_steps=10, decay_rate=0.25, staircase=True)
        >>> [(smooth(count), stairs(count)) for count in (0, 5, 10)]
        [(1.0, 1.0), (0.5, 1.0), (0.25, 0.25)]
    """
    _check_steps("transition_steps", transition_steps, 0)
    _check_steps("transition_begin", transition_begin, 0)
    _check_values(init_value=init_value, decay_rate=decay_rate)
    if end_value is not None:
        _check_values(end_value=end_value)
    if not decay_rate >= 0:
        raise ValueError(f"decay_rate >= 0 must hold: got {decay_rate!r}. A rate below 1 decays.")
    if transition_steps == 0 or decay_rate == 0:
        return constant_schedule(init_value)
    bound = torch.maximum if decay_rate < 1 else torch.minimum

    def value(count: Tensor) -> Tensor:
        periods = torch.clamp(count - transition_begin, min=0) / transition_steps
        decayed = init_value * decay_rate ** (torch.floor(periods) if staircase else periods)
        return decayed if end_value is None else bound(decayed, _as_float64(end_value, decayed))

    return _on_counts("exponential_decay", value)


def piecewise_constant_schedule(
    init_value: Scalar, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """`init_value` times the scale of every boundary that the count has reached.

    Args:
        init_value: value before the first boundary.
        boundaries_and_scales: from count to factor >= 0.

    Raises:
        TypeError: if the boundaries are no dict.
        ValueError: if a count is no number, or a value or factor no finite one, or a factor is negative.

    Example:
        >>> schedule = piecewise_constant_schedule(1.0, {30: 0.5, 60: 0.5})
        >>> [schedule(count) for count in (29, 30, 60)]
        [1.0, 0.5, 0.25]
    """
    given = {} if boundaries_and_scales is None else boundaries_and_scales
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise TypeError(
            f"`boundaries_and_scales` must be a dict from count to factor: got a {kind}. Write {{30: 0.5}}."
        )
    _check_values(init_value=init_value)
    for boundary, scale in given.items():
        _check_steps("boundaries_and_scales", boundary, -math.inf)
        fix = "A factor multiplies the value; 0.1 divides it by ten."
        check_scalar(f"boundaries_and_scales[{boundary}]", scale, fix, least=0)
    steps = sorted(given.items())

    def value(count: Tensor) -> Tensor:
        out = torch.zeros_like(count) + init_value
        for boundary, scale in steps:
            out = torch.where(count >= boundary, out * scale, out)
        return out

    return _on_counts("piecewise_constant_schedule", value)


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another; each counts from the boundary at which it begins.

    Args:
        schedules: one more than `boundaries`.
        boundaries: counts at which the next schedule takes over, ascending.

    Raises:
        TypeError: if a schedule is not a function, or one of the arguments no list.
        ValueError: if the lengths do not fit, or the boundaries are no numbers that ascend.

    Example:
        >>> up, down = linear_schedule(0.0, 1.0, 10), cosine_decay_schedule(1.0, 10)
        >>> schedule = join_schedules([up, down], boundaries=[10])
        >>> [round(schedule(torch.tensor(count)).item(), 2) for count in (5, 10, 15)]
        [0.5, 1.0, 0.5]
    """
    for name, given in (("schedules", schedules), ("boundaries", boundaries)):
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise TypeError(f"`{name}` must be a list: got {came(given)}. Write [...] around it.")
    schedules, boundaries = list(schedules), list(boundaries)
    for boundary in boundaries:
        _check_steps("boundaries", boundary, 0)
    starts = [0, *boundaries]
    if not all(map(callable, schedules)):
        kinds = [type(f).__name__ for f in schedules]
        raise TypeError(f"Schedules must be functions of the count: got {kinds}. Use `constant_schedule(value)`.")
    if len(schedules) != len(starts) or sorted(starts) != starts:
        raise ValueError(
            f"Boundaries must ascend, one fewer than schedules: got {list(boundaries)} for {len(schedules)} schedules. "
            "Give the count at which each schedule after the first begins."
        )

    def schedule(count: Any) -> Any:
        if not isinstance(count, Tensor):
            last = max(sum(count >= boundary for boundary in boundaries), 0)
            return schedules[last](count - starts[last])
        out = _as_float64(schedules[0](count), count)
        for f, start in zip(schedules[1:], boundaries, strict=True):
            out = torch.where(count < start, out, _as_float64(f(count - start), count))
        return out

    schedule.__name__ = "join_schedules"
    return schedule


def _as_float64(value: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=like.device)


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A line up to `peak_value`, then a cosine down to `end_value`.

    Args:
        init_value: value at 0.
        peak_value: value at `warmup_steps`.
        warmup_steps: length of the line.
        decay_steps: length of the whole schedule, warm-up included.
        end_value: value from `decay_steps` on.
        exponent: power of the cosine.

    Raises:
        ValueError: if `decay_steps <= warmup_steps`, a number of steps is negative, or a value no finite number.

    Example:
        >>> schedule = warmup_cosine_decay_schedule(0.0, 1e-3, warmup_steps=100, decay_steps=1100)
        >>> [round(schedule(count), 6) for count in (0, 50, 100, 600, 1100)]
        [0.0, 0.0005, 0.001, 0.0005, 0.0]
        >>> tx = gefen(schedule)
    """
    _check_steps("warmup_steps", warmup_steps, 0)
    _check_steps("decay_steps", decay_steps, 1)
    _check_values(init_value=init_value, peak_value=peak_value, end_value=end_value, exponent=exponent)
    if not decay_steps > warmup_steps:
        raise ValueError(
            f"decay_steps > warmup_steps must hold: got {decay_steps!r} and {warmup_steps!r}. "
            "decay_steps is the length of the whole schedule, warm-up included."
        )
    alpha = 0.0 if peak_value == 0.0 else end_value / peak_value
    up = linear_schedule(init_value, peak_value, warmup_steps)
    return join_schedules(
        [up, cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)], [warmup_steps]
    )


def warmup_stable_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
) -> Schedule:
    """A line up to `peak_value`, a plateau, and a line down to `end_value` (arXiv 2405.18392).

    Args:
        init_value: value at 0.
        peak_value: value of the plateau.
        warmup_steps: length of the line up.
        stable_steps: length of the plateau.
        decay_steps: length of the line down, at least 1.
        end_value: value after it.

    Raises:
        ValueError: if a number of steps is negative, `decay_steps` is below 1, or a value no finite number.

    Example:
        >>> schedule = warmup_stable_decay_schedule(0.0, 1.0, warmup_steps=4, stable_steps=90, decay_steps=6)
        >>> [schedule(count) for count in (2, 4, 94, 97, 100)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _check_steps("warmup_steps", warmup_steps, 0)
    _check_steps("stable_steps", stable_steps, 0)
    _check_steps("decay_steps", decay_steps, 1)
    _check_values(init_value=init_value, peak_value=peak_value, end_value=end_value)
    up = linear_schedule(init_value, peak_value, warmup_steps)
    down = linear_schedule(peak_value, end_value, decay_steps)
    return join_schedules([up, constant_schedule(peak_value), down], [warmup_steps, warmup_steps + stable_steps])
