"""Steps that may not happen: accumulation over micro-steps, and refusal of non-finite gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.base import (
    GradientTransformation,
    OptState,
    Params,
    Recipe,
    Updates,
    Waits,
    check_transform,
    made_in_rounds,
    started,
)
from gefen_fn.exchange import then
from gefen_fn.scalar import capturing, check_int, check_state, new_count, squares_are_finite, under_vmap
from gefen_fn.shards import local
from gefen_fn.tree import Tree, check_floating, check_leaves, map_update, tree_leaves, tree_map

ShouldSkip = Callable[[Updates, Tensor, Params | None], tuple[Any, Tree]]


class MultiStepsState(NamedTuple):
    """Micro-steps since the last update and updates so far (int32 scalars), the inner state, and the accumulator.

    `acc_grads` and `acc_counts` (micro-steps with a gradient, per leaf) are empty if every step is an update.
    """

    mini_step: Tensor
    gradient_step: Tensor
    updated: Tensor
    inner_opt_state: OptState
    acc_grads: Tree
    acc_counts: Tree
    skip_state: Tree


class ApplyIfFiniteState(NamedTuple):
    """Non-finite steps in a row, whether the last was finite, non-finite steps in all, and the inner state."""

    notfinite_count: Tensor
    last_finite: Tensor
    total_notfinite: Tensor
    inner_state: OptState


def MultiSteps(  # optax's name
    opt: GradientTransformation,
    every_k_schedule: int | Callable[[Tensor], Any],
    use_grad_mean: bool = True,
    should_skip_update_fn: ShouldSkip | None = None,
) -> GradientTransformation:
    """Accumulate gradients over k micro-steps and call `opt` once with their mean, leaf by leaf.

    The sum is kept in fp32 (float64 for float64 leaves), divided by the number of micro-steps in which the leaf had
    a gradient, and passed on in that dtype. Between updates the updates are zero and `opt` is not called. With k = 1
    there is no accumulator.

    Optax's class of this name is a function here, and its result a transform like any other: `has_updated(state)` tells
    whether the latest micro-step called `opt`.

    Args:
        opt: the transform to call every k micro-steps.
        every_k_schedule: k >= 1, or a function of the updates done so far (int32 scalar).
        use_grad_mean: pass the mean; otherwise the sum.
        should_skip_update_fn: `(updates, gradient_step, params) -> (skip, skip_state)`; a skipped micro-step counts
            nothing and gives zero updates. On shards one member's `skip` is everybody's.

    Raises:
        TypeError: if `opt` is not a transform.
        ValueError: if k is not an int of at least 1.
        RuntimeError: at update under torch.vmap or torch.compile, unless k is the int 1 and nothing is skipped.

    Example:
        >>> tx = MultiSteps(sgd(1.0), every_k_schedule=2)
        >>> state = tx.init(torch.zeros(2))
        >>> nothing, state = tx.update(torch.tensor([1.0, 0.0]), state)
        >>> mean, state = tx.update(torch.tensor([3.0, 2.0]), state)
        >>> nothing, mean
        (tensor([0., 0.]), tensor([-2., -1.]))
    """
    check_transform(opt)
    if not callable(every_k_schedule):
        _check_k(every_k_schedule)
    every_step = every_k_schedule == 1

    def init(params: Params) -> MultiStepsState:
        sums = () if every_step else _zeros(params)
        counts = () if every_step else tree_map(lambda _: new_count(), params, skip_none=False)
        skip_state = ()
        if should_skip_update_fn is not None:
            agree.make_groups(tree_leaves(params))
            skip_state = should_skip_update_fn(tree_map(torch.zeros_like, params), new_count(), params)[1]
        return MultiStepsState(new_count(), new_count(), _flag(False), opt.init(params), sums, counts, skip_state)

    def step(updates: Updates, state: MultiStepsState, params: Params | None = None, **extra: Any) -> Waits:
        stepped = state._replace(
            mini_step=torch.zeros_like(state.mini_step),
            gradient_step=state.gradient_step + 1,
            updated=torch.ones_like(state.updated),
        )
        whole = started(opt, updates, state.inner_opt_state, params, **extra)
        return then(whole, lambda out: (out[0], stepped._replace(inner_opt_state=out[1])))

    def accumulate(updates: Updates, state: MultiStepsState, params: Params | None = None, **extra: Any) -> Waits:
        k = int(every_k_schedule(state.gradient_step)) if callable(every_k_schedule) else every_k_schedule
        _check_k(k)
        state = _add(updates, state)
        if int(state.mini_step) < k:
            return _zeros(updates), state._replace(updated=_flag(False))
        grads = _emit(updates, state, use_grad_mean)
        cleared = state._replace(
            acc_grads=tree_map(torch.zeros_like, state.acc_grads),
            acc_counts=tree_map(torch.zeros_like, state.acc_counts),
        )
        return step(grads, cleared, params, **extra)

    def start(updates: Updates, state: MultiStepsState, params: Params | None = None, **extra: Any) -> Waits:
        check_state(state, MultiStepsState)
        if every_step and should_skip_update_fn is None:
            return step(updates, state, params, **extra)
        _refuse_tracing("MultiSteps", "Keep it outside, or use every_k_schedule=1.")
        if should_skip_update_fn is not None:
            skip, skip_state = should_skip_update_fn(updates, state.gradient_step, params)
            state = state._replace(skip_state=skip_state)
            if _any_member(bool(skip), updates):
                return _zeros(updates), state._replace(updated=_flag(False))
        return (step if every_step else accumulate)(updates, state, params, **extra)

    options = {"use_grad_mean": use_grad_mean, "should_skip_update_fn": should_skip_update_fn}
    return made_in_rounds(Recipe("MultiSteps", (opt, every_k_schedule), options), init, start)


def has_updated(state: MultiStepsState) -> Tensor:
    """Whether the latest micro-step called the inner transform: a bool scalar.

    Raises:
        TypeError: if `state` is not the state of `MultiSteps`.

    Example:
        >>> tx = MultiSteps(adam(1e-3), every_k_schedule=2)
        >>> grads, state = torch.ones(3), tx.init(torch.zeros(3))
        >>> for _ in range(2):
        ...     updates, state = tx.update(grads, state)
        ...     print(bool(has_updated(state)))
        False
        True
    """
    if not isinstance(state, MultiStepsState):
        raise TypeError(f"`state` must be a MultiStepsState: got {type(state).__name__}. Pass the state of MultiSteps.")
    return state.updated


def apply_if_finite(inner: GradientTransformation, max_consecutive_errors: int) -> GradientTransformation:
    """Leave a step out if a gradient holds inf or NaN: zero updates, and the inner state as it was.

    Args:
        inner: the transform to guard.
        max_consecutive_errors: how many such steps in a row are left out; the next one is let through.

    Raises:
        TypeError: if `inner` is not a transform.
        ValueError: if `max_consecutive_errors` is not an int of at least 0.
        RuntimeError: at update under torch.vmap or torch.compile.

    Example:
        >>> tx = apply_if_finite(adam(1e-3), max_consecutive_errors=3)
        >>> updates, state = tx.update(torch.tensor([1.0, torch.inf]), tx.init(torch.zeros(2)))
        >>> updates, int(state.total_notfinite)
        (tensor([0., 0.]), 1)
    """
    check_transform(inner)
    check_int("max_consecutive_errors", max_consecutive_errors, 0, "0 lets all through.")

    def init(params: Params) -> ApplyIfFiniteState:
        agree.make_groups(tree_leaves(params))
        return ApplyIfFiniteState(new_count(), _flag(True), new_count(), inner.init(params))

    def start(updates: Updates, state: ApplyIfFiniteState, params: Params | None = None, **extra: Any) -> Waits:
        check_state(state, ApplyIfFiniteState)
        _refuse_tracing("apply_if_finite", "Keep it outside, or use zero_nans.")
        finite = _all_finite(updates)
        in_a_row = torch.zeros_like(state.notfinite_count) if finite else state.notfinite_count + 1
        total = state.total_notfinite + (not finite)
        new = ApplyIfFiniteState(in_a_row, _flag(finite), total, state.inner_state)
        if not finite and int(in_a_row) <= max_consecutive_errors:
            return _zeros(updates), new
        whole = started(inner, updates, state.inner_state, params, **extra)
        return then(whole, lambda out: (out[0], new._replace(inner_state=out[1])))

    return made_in_rounds(Recipe("apply_if_finite", (inner, max_consecutive_errors)), init, start)


def _add(updates: Updates, state: MultiStepsState) -> MultiStepsState:
    """One micro-step into the accumulator."""

    def add(u: Tensor, total: Tensor, count: Tensor) -> tuple[None, Tensor, Tensor]:
        check_floating(u, total)
        return None, total + u.to(total.dtype), count + 1

    _, (sums, counts) = map_update(add, updates, (state.acc_grads, state.acc_counts))
    return state._replace(mini_step=state.mini_step + 1, acc_grads=sums, acc_counts=counts)


def _emit(updates: Updates, state: MultiStepsState, mean: bool) -> Updates:
    """The accumulated gradients; `None` where no micro-step had one."""

    def emit(_: Tensor | None, total: Tensor | None, count: Tensor) -> Tensor | None:
        if total is None or int(count) == 0:
            return None
        return total / int(count) if mean else total

    return tree_map(emit, updates, state.acc_grads, state.acc_counts, skip_none=False)


def _zero(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32), requires_grad=False)


def _zeros(updates: Updates) -> Updates:
    check_leaves(updates)
    return tree_map(_zero, updates)


def _flag(value: bool) -> Tensor:
    return torch.tensor(value, device="cpu")


def _all_finite(updates: Updates) -> bool:
    """Whether no member has a part that is not; one read of the device for the whole tree."""
    check_leaves(updates)
    leaves = tree_leaves(updates)
    flags = [squares_are_finite(local(u)) for u in leaves if u is not None]
    finite = torch.stack([flag.to(flags[0].device) for flag in flags]).all() if flags else _flag(True)
    return not _any_member(not finite, updates)


def _any_member(here: bool, updates: Updates) -> bool:
    """Whether something holds here, or for another member that holds parts of these leaves."""
    return bool(agree.any_member(_flag(here), agree.group_of(tree_leaves(updates))))


def _check_k(k: Any) -> None:
    check_int("every_k_schedule", k, 1, "Use 1 to update at every step.")


def _refuse_tracing(name: str, fix: str) -> None:
    """Whether to step is read from tensors, which tracing, batching and capture cannot do."""
    compiling = torch.compiler.is_compiling()  # asked first: Dynamo cannot trace the questions for the others
    if compiling or under_vmap() or capturing():
        where = "torch.compile" if compiling else "torch.vmap" if under_vmap() else "graph capture"
        raise RuntimeError(f"`{name}` decides from values whether to step: got a call under {where}. {fix}")
