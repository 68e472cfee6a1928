"""Hyperparameters: numbers, 0-dim tensors, schedules, or trees of those per leaf.

Scalars are float64 and are rounded once, where they meet a tensor. No function here reads a tensor on the host, so a
transform may be built from traced scalars inside `torch.compile` and `torch.vmap`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gefen_fn.tree import StructureError, Tree, broadcast

Scalar = float | Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in: float64 for float64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact(s: Scalar) -> Scalar:
    """`s` in float64."""
    return s.to(torch.float64) if isinstance(s, Tensor) else float(s)


def rounded(s: Scalar, dtype: torch.dtype = torch.float32) -> Scalar:
    """`s` rounded to `dtype`; a Python float is rounded by the operation that takes it."""
    return s.to(dtype) if isinstance(s, Tensor) else s


def multiply(s: Scalar, x: Tensor) -> Tensor:
    """`s * x` in fp32 (float64 for float64 `x`), rounded once to the dtype of `x`."""
    wide = wide_dtype(x.dtype)
    return (x.to(wide) * rounded(s, wide)).to(x.dtype)


def moving_average(decay: Scalar, old: Tensor, new: Tensor) -> Tensor:
    """`decay * old + (1 - decay) * new` in fp32; `1 - decay` is taken in float64."""
    return old.float() * rounded(decay) + new.float() * rounded(1.0 - exact(decay))


def bias_correction(decay: Scalar, count: Tensor) -> Tensor:
    """`1 - decay**count` as a 0-dim fp32 tensor, computed in float64 (arXiv 1412.6980, section 3)."""
    power: Tensor = exact(decay) ** count.to(torch.float64)
    return (1.0 - power).to(torch.float32)


def per_leaf(value: Any, tree: Tree) -> Tree:
    """`value` at every leaf of `tree`, a number as one 0-dim float64 tensor.

    A tensor, because Dynamo cannot rebuild a dict whose leaves are all Python numbers.
    """
    number = isinstance(value, (int, float))
    return broadcast(torch.tensor(value, dtype=torch.float64, device="cpu") if number else value, tree)


def new_count() -> Tensor:
    """A fresh 0-dim int32 zero on the CPU."""
    return torch.zeros((), dtype=torch.int32, device="cpu")


def _check(value: Any, holds: Callable[[float], bool], rule: str, fix: str) -> None:
    if isinstance(value, (int, float)) and not holds(value):
        raise ValueError(f"{rule} must hold: got {value!r}. {fix}")


def check_decay(name: str, value: Any) -> None:
    """Raise `ValueError` unless `0 <= value < 1`; tensors, trees and schedules pass unread."""
    _check(value, lambda v: 0 <= v < 1, f"0 <= {name} < 1", "A decay near 1 averages longer; 0.9 is usual.")


def check_nonnegative(name: str, value: Any) -> None:
    """Raise `ValueError` unless `0 <= value < inf`; tensors, trees and schedules pass unread."""
    fix = "Give the size only; `scale_by_learning_rate` applies the sign."
    _check(value, lambda v: 0 <= v < float("inf"), f"0 <= {name} < inf", fix)


def check_positive(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value > 0`; tensors, trees and schedules pass unread."""
    _check(value, lambda v: v > 0, f"{name} > 0", "Leave this stage out of the chain to switch it off.")


def check_state(state: Any, kind: type) -> None:
    """Raise `StructureError` unless `state` is of the transform's own kind."""
    if not isinstance(state, kind):
        raise StructureError(
            f"State must be a {kind.__name__}: got {type(state).__name__}. "
            "Call `update(updates, state, params)` in this order, with the state that this transform's `init` made."
        )
