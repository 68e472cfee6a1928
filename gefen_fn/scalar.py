"""Hyperparameters: numbers, 0-dim tensors, schedules, or trees of those per leaf.

Scalars are float64 and are rounded once, where they meet a tensor. No function here reads a tensor on the host, so a
transform may be built from traced scalars inside `torch.compile` and `torch.vmap`.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gefen_fn.tree import StructureError, Tree, broadcast, tree_leaves

Scalar = float | Tensor

WRITE_A_FLOAT = "Write a float; YAML reads 1e-3 as a string, 1.0e-3 not."


@dataclass(frozen=True)
class Hyperparameter:
    """Stands in a recipe for the value that the state holds under this name."""

    name: str

    def __bool__(self) -> bool:
        """Refuse: whether the value is zero changes from step to step."""
        raise TypeError(f"`{self.name}` is injected and has no value yet: got it as a condition. Pass it on.")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in: float64 for float64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(s: Scalar) -> Scalar:
    """`s` in float64."""
    return s.to(torch.float64) if isinstance(s, Tensor) else float(s)


def scalar_on(value: Scalar, device: torch.device) -> Tensor:
    """A number or a 0-dim tensor as a 0-dim float64 tensor on a device, without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64, non_blocking=device.type != "cpu")
    return torch.full((), value, dtype=torch.float64, device=device)


def rounded(s: Scalar, dtype: torch.dtype = torch.float32) -> Scalar:
    """`s` rounded to `dtype`; a Python float is rounded by the operation that takes it."""
    return s.to(dtype) if isinstance(s, Tensor) else s


def squares_are_finite(x: Tensor) -> Tensor:
    """Whether the fp32 squares of all entries are finite, a 0-dim bool: 2e19 is finite, its square is not."""
    return torch.isfinite(x.float().square().sum(dtype=torch.float64))


def multiply(s: Scalar, x: Tensor) -> Tensor:
    """`s * x` in fp32 (float64 for float64 `x`), rounded once to the dtype of `x`."""
    wide = wide_dtype(x.dtype)
    return (x.to(wide) * rounded(s, wide)).to(x.dtype)


def moving_average(decay: Scalar, old: Tensor, new: Tensor) -> Tensor:
    """`decay * old + (1 - decay) * new` in fp32; `1 - decay` is taken in float64."""
    return old.float() * rounded(decay) + new.float() * rounded(1.0 - exact(decay))


def bias_correction(decay: Scalar, count: Scalar) -> Scalar:
    """`1 - decay**count` from float64 to fp32, a tensor if one of them is (arXiv 1412.6980, section 3)."""
    return rounded(1.0 - exact(decay) ** exact(count))


def root_correction(decay: Scalar, count: Scalar) -> Scalar:
    """`sqrt(1 - decay**count)` from float64 to fp32, a tensor if one of them is."""
    square = 1.0 - exact(decay) ** exact(count)
    return rounded(square.sqrt() if isinstance(square, Tensor) else math.sqrt(square))


def smaller(a: Scalar, b: Scalar) -> Scalar:
    """The smaller one."""
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def per_leaf(value: Any, tree: Tree) -> Tree:
    """`value` at every leaf of `tree`, a number as one 0-dim float64 tensor.

    A tensor, because Dynamo cannot rebuild a dict whose leaves are all Python numbers.
    """
    number = isinstance(value, (int, float))
    return broadcast(torch.tensor(value, dtype=torch.float64, device="cpu") if number else value, tree)


def under_vmap() -> bool:
    """Whether torch.vmap is batching this call, so that no value can be read; not to be asked while compiling."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def capturing() -> bool:
    """Whether a CUDA graph is recording this call, so that no value can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def new_count() -> Tensor:
    """A fresh 0-dim int32 zero on the CPU."""
    return torch.zeros((), dtype=torch.int32, device="cpu")


def is_schedule(value: Any) -> bool:
    """Whether a hyperparameter is a function of the calls so far."""
    # A compiled graph cannot ask a container whether it is callable.
    return not isinstance(value, (dict, list, tuple, Tensor, type)) and callable(value)


def is_number(x: Any) -> bool:
    """Whether `x` is a real number that a float64 can hold, or a 0-dim tensor of such; a bool is none."""
    if isinstance(x, Tensor):
        return x.ndim == 0 and x.dtype != torch.bool and not x.is_complex()
    return isinstance(x, Real) and not isinstance(x, bool) and not _is_too_large(x)


def _is_too_large(x: Any) -> bool:
    return isinstance(x, int) and abs(x) > sys.float_info.max


def came(x: Any) -> str:
    """What came in the place of a number, in an error's words."""
    if isinstance(x, str):
        return f"a string, {x!r}"
    return "an int beyond the range of float64" if _is_too_large(x) else repr(x)


def check_number(value: Any, holds: Callable[[float], bool], rule: str, fix: str) -> None:
    """Refuse a hyperparameter that is no number, 0-dim tensor, schedule or tree of those, or a number out of range.

    Args:
        value: the argument; tensors and schedules are not read.
        holds: what a number must satisfy.
        rule: the same in words, with the argument's name.
        fix: what to do.

    Raises:
        ValueError: if it is none, or does not hold.
    """
    if is_schedule(value) or isinstance(value, Hyperparameter):
        return
    for x in [value] if value is None else (x for x in tree_leaves(value) if x is not None):
        fits = isinstance(x, (int, float, Tensor)) and is_number(x) and (isinstance(x, Tensor) or holds(x))
        if not fits:
            way = WRITE_A_FLOAT if isinstance(x, str) else fix
            raise ValueError(
                f"{rule} must hold for a number, a 0-dim tensor, a schedule or a tree of those: got {came(x)}. {way}"
            )


def check_scalar(name: str, value: Any, fix: str, least: float = -math.inf) -> None:
    """Refuse what is no finite number or 0-dim tensor; a schedule and a tree are none.

    Args:
        name: of the argument.
        value: the argument; a tensor is not read.
        fix: what to do.
        least: the least number.

    Raises:
        ValueError: naming the argument.
    """
    if is_number(value) and (isinstance(value, Tensor) or (math.isfinite(value) and value >= least)):
        return
    wanted = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
    way = WRITE_A_FLOAT if isinstance(value, str) else fix
    raise ValueError(f"`{name}` must be {wanted} or a 0-dim tensor: got {came(value)}. {way}")


def check_decay(name: str, value: Any) -> None:
    """Raise `ValueError` unless `0 <= value < 1`."""
    fix = "A decay near 1 averages longer; 0.9 is usual."
    check_number(value, lambda v: 0 <= v < 1, f"0 <= {name} < 1", fix)


def check_nonnegative(name: str, value: Any) -> None:
    """Raise `ValueError` unless `0 <= value < inf`."""
    fix = "Give the size only; `scale_by_learning_rate` applies the sign."
    check_number(value, lambda v: 0 <= v < math.inf, f"0 <= {name} < inf", fix)


def check_positive(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value > 0`."""
    fix = "Leave this stage out of the chain to switch it off."
    check_number(value, lambda v: v > 0, f"{name} > 0", fix)


def check_int(name: str, value: Any, least: int, fix: str) -> None:
    """Raise `ValueError` unless `value` is an int of at least `least`."""
    if type(value) is bool or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an int of at least {least}: got {value!r}. {fix}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ValueError` unless `value` is one of the choices; the first is the default."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {choices}: got {value!r}. Use {choices[0]!r}.")


def check_dtype(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is `None` or a floating dtype."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"`{name}` must be a floating dtype: got {value!r}. Use torch.bfloat16, or None for fp32.")


def check_state(state: Any, kind: type) -> None:
    """Raise `StructureError` unless `state` is of the transform's own kind."""
    if not isinstance(state, kind):
        raise StructureError(
            f"State must be a {kind.__name__}: got {type(state).__name__}. "
            "Call `update(updates, state, params)` in this order, with the state that this transform's `init` made."
        )
