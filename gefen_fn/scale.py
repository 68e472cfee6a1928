"""Scaling, decay, momentum and averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.base import (
    EmptyState,
    GradientTransformation,
    OptState,
    Params,
    Recipe,
    ScalarOrSchedule,
    Schedule,
    Updates,
    made,
)
from gefen_fn.combine import Mask, masked
from gefen_fn.inject import takes_schedules
from gefen_fn.scalar import (
    Scalar,
    bias_correction,
    check_decay,
    check_dtype,
    check_nonnegative,
    check_number,
    check_state,
    is_schedule,
    moving_average,
    multiply,
    new_count,
    per_leaf,
    rounded,
    wide_dtype,
)
from gefen_fn.shards import like_piece, local
from gefen_fn.tree import (
    Tree,
    check_floating,
    check_leaves,
    check_tensors,
    map_update,
    tree_leaves,
    tree_map,
    tree_parts,
    tree_structure,
    tree_unflatten,
)

TreeRule = Callable[..., Updates]


class ScaleByScheduleState(NamedTuple):
    """`count`: 0-dim int32, calls so far."""

    count: Tensor  # type: ignore[assignment]  # a field may not share the name of a tuple's method


class TraceState(NamedTuple):
    """`trace`: momentum, one leaf per parameter."""

    trace: Tree


class EmaState(NamedTuple):
    """`count`: int32 per leaf, updates of that leaf; `ema`: the average."""

    count: Tree
    ema: Tree


class ZeroNansState(NamedTuple):
    """`found_nan`: 0-dim bool per leaf, whether the last update held a NaN."""

    found_nan: Tree


def by_scalar(
    name: str, value: Any, rule: TreeRule, *, wants: Sequence[str] = (), **options: Any
) -> GradientTransformation:
    """The transform `rule(updates, value, params)`, called `name(value, **options)`.

    `rule` is also given those extra arguments of `update` that it `wants`, by name, where they are there.

    A callable `value` is a schedule of the calls so far, from 0.
    """

    def init(params: Params) -> OptState:
        check_tensors(params)
        agree.make_groups(tree_leaves(params))  # a rule may add over all members
        return ScaleByScheduleState(new_count()) if is_schedule(value) else EmptyState()

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        wanted = {key: extra[key] for key in wants if key in extra}
        if not is_schedule(value):
            check_state(state, EmptyState)
            return rule(updates, value, params, **wanted), state
        check_state(state, ScaleByScheduleState)
        return rule(updates, value(state.count), params, **wanted), ScaleByScheduleState(state.count + 1)

    return made(Recipe(name, (value,), options), init, update)


def map_scalar(f: Callable[..., Tensor], updates: Updates, value: Any, *rest: Tree) -> Updates:
    """Map `f(u, s, *rest)` with `s` the leaf's own scalar out of `value`, and `rest` tensors of the leaf's shape.

    Of a sharded leaf `f` is given the plain tensors of its part.
    """

    def leaf(u: Tensor, s: Scalar, *others: Tensor) -> Tensor:
        check_floating(u)
        for x in others:
            check_floating(x, u)
        return like_piece(f(local(u), s, *map(local, others)), u)

    return tree_map(leaf, updates, per_leaf(value, updates), *rest)


def by_leaf(f: Callable[[Tensor, Scalar], Tensor]) -> TreeRule:
    """The rule that maps `f(u, s)` over the leaves; it does not look at params."""
    return lambda updates, value, params: map_scalar(f, updates, value)


def _ascend(u: Tensor, s: Scalar) -> Tensor:
    return multiply(s, u)


def _descend(u: Tensor, s: Scalar) -> Tensor:
    return multiply(-s, u)


def scale(step_size: Scalar | Tree) -> GradientTransformation:
    """Multiply the updates by `step_size`, keeping their dtype.

    Args:
        step_size: a number, a 0-dim tensor, or a tree of those, one per leaf.

    Raises:
        ValueError: if a number is not finite.

    Example:
        >>> tx = scale({"w": 1.0, "b": 0.5})  # a factor for each leaf
        >>> grads = {"w": torch.ones(2), "b": torch.ones(2)}
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([1., 1.]), 'b': tensor([0.5000, 0.5000])}
    """
    check_number(step_size, math.isfinite, "-inf < step_size < inf", "A factor below 0 turns the sign.")
    return by_scalar("scale", step_size, by_leaf(_ascend))


def scale_by_learning_rate(learning_rate: ScalarOrSchedule | Tree, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiply the updates by `-learning_rate`, which turns a gradient into a step of descent.

    Args:
        learning_rate: a number >= 0, a 0-dim tensor, a schedule of the calls so far, or a tree of scalars per leaf.
        flip_sign: False multiplies by `+learning_rate`.

    Raises:
        ValueError: if a number is negative or not finite.

    Example:
        >>> tx = scale_by_learning_rate(linear_schedule(1.0, 0.0, transition_steps=4))
        >>> state = tx.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     updates, state = tx.update(torch.ones(1), state)
        ...     print(updates.item())
        -1.0
        -0.75
        -0.5
    """
    check_nonnegative("learning_rate", learning_rate)
    rule = by_leaf(_descend if flip_sign else _ascend)
    return by_scalar("scale_by_learning_rate", learning_rate, rule, flip_sign=flip_sign)


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiply the updates by `step_size_fn(count)`, `count` being the calls so far: 0 at the first.

    Raises:
        TypeError: if `step_size_fn` is not callable.

    Example:
        >>> tx = scale_by_schedule(lambda count: 0.5**count)
        >>> g, state = torch.ones(1), tx.init(torch.zeros(1))
        >>> first, state = tx.update(g, state)
        >>> second, state = tx.update(g, state)
        >>> first, second, int(state.count)
        (tensor([1.]), tensor([0.5000]), 2)
    """
    if not callable(step_size_fn):
        raise TypeError(
            f"step_size_fn must be callable: got {type(step_size_fn).__name__}. For a constant use `scale`."
        )
    return by_scalar("scale_by_schedule", step_size_fn, by_leaf(_ascend))


def add_decayed_weights(
    weight_decay: ScalarOrSchedule | Tree = 0.0, mask: Mask | None = None
) -> GradientTransformation:
    """Add `weight_decay * p` to the updates: decoupled weight decay (arXiv 1711.05101) when it stands after Adam.

    Args:
        weight_decay: a number >= 0, a 0-dim tensor, a schedule, or a tree of scalars per leaf.
        mask: a tree of bools, or a function of params that makes one; False leaves a parameter undecayed.

    Raises:
        ValueError: if a number is negative, or if `update` is called without params.

    Example:
        >>> tx, p = add_decayed_weights(0.1), torch.tensor([5.0, -5.0])
        >>> updates, state = tx.update(torch.ones(2), tx.init(p), p)
        >>> updates
        tensor([1.5000, 0.5000])
    """
    check_nonnegative("weight_decay", weight_decay)
    tx = by_scalar("add_decayed_weights", weight_decay, _decay_rule)
    return tx if mask is None else masked(tx, mask)


def _decay_rule(updates: Updates, weight_decay: Any, params: Params | None) -> Updates:
    return map_scalar(_decay_leaf, updates, weight_decay, need_params(params, "add_decayed_weights"))


def _decay_leaf(u: Tensor, s: Scalar, p: Tensor) -> Tensor:
    wide = wide_dtype(u.dtype)
    return (u.to(wide) + p.to(wide) * rounded(s, wide)).to(u.dtype)


def need_params(params: Params | None, name: str) -> Params:
    """Return `params`, or raise `ValueError` naming the transform that reads them."""
    if params is None:
        raise ValueError(f"{name} reads the parameters: got params=None. Call `update(updates, state, params)`.")
    return params


def moments(params: Params, dtype: torch.dtype | None) -> Tree:
    """Zeros like every parameter, in `dtype` or fp32; on meta parameters they are meta too.

    Raises:
        StructureError: if a leaf is not a dense floating-point tensor.
    """
    check_leaves(params)
    return tree_map(lambda p: torch.zeros_like(p, dtype=dtype or torch.float32, requires_grad=False), params)


def counts(params: Params) -> Tree:
    """A fresh count for every parameter; no two share a tensor."""
    return tree_map(lambda _: new_count(), params)


@takes_schedules
def trace(
    decay: Scalar | Tree, nesterov: bool = False, accumulator_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Momentum: `t <- g + decay * t`; the update is `t`, or `g + decay * t` with Nesterov's look-ahead.

    Args:
        decay: in [0, 1); a number, a 0-dim tensor, a tree of those per leaf, or a schedule.
        nesterov: use the look-ahead form.
        accumulator_dtype: dtype that stores the trace, fp32 if None. Updates are fp32 in any case.

    Raises:
        ValueError: if `decay` is out of range, or the dtype is no floating one.

    Example:
        >>> tx = trace(0.5)
        >>> state = tx.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     updates, state = tx.update(torch.ones(1), state)
        >>> updates  # 1 + 1/2 + 1/4
        tensor([1.7500])
    """
    check_decay("decay", decay)
    check_dtype("accumulator_dtype", accumulator_dtype)

    def init(params: Params) -> TraceState:
        return TraceState(moments(params, accumulator_dtype))

    def leaf(u: Tensor, t: Tensor, d: Scalar) -> tuple[Tensor, Tensor]:
        check_floating(t, u)
        new = u.float() + t.float() * rounded(d)
        return u.float() + new * rounded(d) if nesterov else new, new.to(t.dtype)

    def update(
        updates: Updates, state: TraceState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, TraceState]:
        check_state(state, TraceState)
        out, new = map_update(leaf, updates, state, per_leaf(decay, updates))
        return out, TraceState(*new)

    return made(Recipe("trace", (decay,), {"nesterov": nesterov, "accumulator_dtype": accumulator_dtype}), init, update)


@takes_schedules
def ema(
    decay: Scalar | Tree, debias: bool = True, accumulator_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Exponential moving average of the updates: `e <- decay * e + (1 - decay) * g`.

    Args:
        decay: in [0, 1); a number, a 0-dim tensor, a tree of those per leaf, or a schedule.
        debias: divide by `1 - decay**t`, with `t` the leaf's own count of updates.
        accumulator_dtype: dtype that stores the average, fp32 if None. Updates are fp32 in any case.

    Raises:
        ValueError: if `decay` is out of range, or the dtype is no floating one.

    Example:
        >>> tx, plain = ema(0.9), ema(0.9, debias=False)
        >>> g = torch.tensor([2.0])
        >>> tx.update(g, tx.init(g))[0], plain.update(g, plain.init(g))[0]
        (tensor([2.]), tensor([0.2000]))
    """
    check_decay("decay", decay)
    check_dtype("accumulator_dtype", accumulator_dtype)

    def init(params: Params) -> EmaState:
        return EmaState(counts(params), moments(params, accumulator_dtype))

    def leaf(u: Tensor, count: Tensor, e: Tensor, d: Scalar) -> tuple[Tensor, Tensor, Tensor]:
        check_floating(e, u)
        count, new = count + 1, moving_average(d, e, u)
        return new / bias_correction(d, count) if debias else new, count, new.to(e.dtype)

    def update(
        updates: Updates, state: EmaState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, EmaState]:
        check_state(state, EmaState)
        out, new = map_update(leaf, updates, state, per_leaf(decay, updates))
        return out, EmaState(*new)

    return made(Recipe("ema", (decay,), {"debias": debias, "accumulator_dtype": accumulator_dtype}), init, update)


def zero_nans() -> GradientTransformation:
    """Replace NaN entries by 0, and remember per leaf whether there were any; infinities pass.

    Example:
        >>> tx = zero_nans()
        >>> updates, state = tx.update(torch.tensor([1.0, torch.nan]), tx.init(torch.zeros(2)))
        >>> updates, state.found_nan
        (tensor([1., 0.]), tensor(True))
    """

    def init(params: Params) -> ZeroNansState:
        check_tensors(params)
        agree.make_groups(tree_leaves(params))
        return ZeroNansState(tree_map(lambda p: torch.zeros((), dtype=torch.bool, device=p.device), params))

    def leaf(u: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(u.isnan(), torch.zeros_like(u), u), u.isnan().any()

    def update(
        updates: Updates, state: ZeroNansState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, ZeroNansState]:
        check_state(state, ZeroNansState)
        out, (found,) = map_update(leaf, updates, state)
        return out, ZeroNansState(_found_anywhere(updates, found))

    return made(Recipe("zero_nans"), init, update)


def _found_anywhere(updates: Updates, found: Tree) -> Tree:
    """`found` of this member's parts, or any other's; a leaf that is `None` here keeps its own."""
    leaves, flags = tree_leaves(updates), tree_parts(updates, found)
    group = agree.group_of(leaves)
    if group is None:
        return found
    pairs = list(zip(leaves, flags, strict=True))
    here = torch.tensor([u is not None and bool(flag) for u, flag in pairs], device="cpu")
    rows = zip(agree.any_member(here, group), pairs, strict=True)
    return tree_unflatten(tree_structure(updates), [f if u is None else x.to(f.device) for x, (u, f) in rows])
