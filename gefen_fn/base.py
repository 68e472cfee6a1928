"""The grammar: what a gradient transformation is, and the smallest ones.

Names, argument order and sign follow optax: updates flow through `update`, the learning-rate stage negates them, and
`apply_updates` adds them to the parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gefen_fn.tree import Tree, check_floating, tree_map

Params = Tree
Updates = Tree
OptState = Any
Scalar = float | Tensor
Schedule = Callable[[Any], Any]
ScalarOrSchedule = Scalar | Schedule


class InitFn(Protocol):
    """`init(params) -> state`."""

    def __call__(self, params: Params, /) -> OptState:
        """Build the state; every shape in it is final."""


class UpdateFn(Protocol):
    """`update(updates, state, params=None, **extra) -> (updates, state)`."""

    def __call__(
        self, updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        """Transform the updates and return the next state; pure."""


class GradientTransformation(NamedTuple):
    """A pair of pure functions, `init(params)` and `update(updates, state, params=None, **extra)`.

    A NamedTuple, so `init, update = tx` works. Extra arguments that a transform does not want are ignored.
    """

    init: InitFn
    update: UpdateFn

    def __repr__(self) -> str:
        """The expression that built this transform, when its constructor recorded one."""
        expression = getattr(self.update, "expression", "GradientTransformation(init, update)")
        return str(expression() if callable(expression) else expression)


GradientTransformationExtraArgs = GradientTransformation


def with_extra_args_support(tx: GradientTransformation) -> GradientTransformationExtraArgs:
    """Return `tx`: every transform here ignores extra arguments it does not want. Kept for optax recipes."""
    return tx


def named(expression: str | Callable[[], str], init: InitFn, update: UpdateFn) -> GradientTransformation:
    """Build a transform whose `repr` is `expression`.

    A transform of transforms passes a function: their `repr` is then asked for only when somebody looks, so that a
    transform can be built inside a compiled region.
    """
    update.expression = expression  # type: ignore[attr-defined]
    return GradientTransformation(init, update)


class EmptyState(NamedTuple):
    """The state of a transform that keeps none."""


class MaskedNode(NamedTuple):
    """Stands where `masked` hides a leaf; a tree without leaves."""


def stateless(
    f: Callable[[Updates, Params | None], Updates], expression: str = "stateless(f)"
) -> GradientTransformation:
    """Make a transform of a function of `(updates, params)`.

    Args:
        f: maps the tree of updates (and params, or None) to a tree of updates.
        expression: what `repr` shows.
    """

    def init(params: Params) -> EmptyState:
        return EmptyState()

    def update(
        updates: Updates, state: EmptyState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        return f(updates, params), state

    return named(expression, init, update)


def identity() -> GradientTransformation:
    """Return the updates unchanged."""
    return stateless(lambda updates, params: updates, "identity()")


def set_to_zero() -> GradientTransformation:
    """Replace every update by zeros, which freezes its parameter."""
    return stateless(lambda updates, params: tree_map(torch.zeros_like, updates), "set_to_zero()")


def add_rounded(p: Tensor, u: Tensor) -> Tensor:
    """`p + u` in fp32 (float64 for float64 `p`), rounded once to the dtype of `p`."""
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    return (p.to(wide) + u.to(wide)).to(p.dtype)


def apply_updates(params: Params, updates: Updates) -> Params:
    """Add `updates` to `params`.

    The sum is taken in fp32 (float64 for float64 parameters) and rounded once to the parameter's dtype. A `None` update
    leaves its parameter as it is.

    Raises:
        StructureError: if the trees or the shapes of two leaves differ.
    """

    def add(u: Tensor | None, p: Tensor | None) -> Tensor | None:
        if u is None or p is None:
            return p
        check_floating(u, p)
        return add_rounded(p, u)

    return tree_map(add, updates, params, skip_none=False)


def incremental_update(new_tensors: Params, old_tensors: Params, step_size: Scalar) -> Params:
    """Polyak average: `step_size * new + (1 - step_size) * old`, leaf by leaf."""
    return tree_map(lambda new, old: step_size * new + (1.0 - step_size) * old, new_tensors, old_tensors)
