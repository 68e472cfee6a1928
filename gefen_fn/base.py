"""The grammar: what a gradient transformation is, and the smallest ones.

Names, argument order and sign follow optax: updates flow through `update`, the learning-rate stage negates them, and
`apply_updates` adds them to the parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gefen_fn.exchange import Later, finish
from gefen_fn.scalar import Scalar, check_scalar, check_state, exact, rounded, wide_dtype
from gefen_fn.tree import StructureError, Tree, check_floating, check_tensors, tree_leaves, tree_map, tree_parts

Params = Tree
Updates = Tree
OptState = Any
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


_CONTRACT = "A transform's update must be `update(updates, state, params=None, **extra) -> (updates, state)`"
Waits = tuple[Updates, OptState] | Later[tuple[Updates, OptState]]


class StartFn(Protocol):
    """`start(updates, state, params=None, **extra) -> (updates, state)`, or a `Later` of them."""

    def __call__(self, updates: Updates, state: OptState, params: Params | None = None, **extra: Any) -> Waits:
        """Transform the updates as far as it goes without other members."""


class GradientTransformation(NamedTuple):
    """A pair of pure functions, `init(params)` and `update(updates, state, params=None, **extra)`.

    A NamedTuple, so `init, update = tx` works. Extra arguments that a transform does not want are ignored.

    Example:
        >>> def update(updates, state, params=None, **extra):
        ...     return tree_map(torch.sign, updates), state
        >>> tx = chain(GradientTransformation(lambda params: EmptyState(), update), scale(-0.1))
        >>> updates, state = tx.update(torch.tensor([3.0, -4.0]), tx.init(torch.zeros(2)))
        >>> updates
        tensor([-0.1000,  0.1000])
    """

    init: InitFn
    update: UpdateFn

    def __repr__(self) -> str:
        """The expression that built this transform, when its constructor recorded one."""
        recipe = getattr(self.update, "recipe", None)
        return "GradientTransformation(init, update)" if recipe is None else write(recipe)


GradientTransformationExtraArgs = GradientTransformation


def check_transform(tx: Any) -> None:
    """Raise `TypeError` unless `tx` is a pair of functions."""
    if not (isinstance(tx, tuple) and len(tx) == 2 and all(map(callable, tx))):
        raise TypeError(
            f"A transform must be a pair (init, update): got {type(tx).__name__}. "
            "Call the constructor, as in `chain(scale(0.1))`, and unpack lists with `*`."
        )


def with_extra_args_support(tx: GradientTransformation) -> GradientTransformationExtraArgs:
    """Return `tx`: every transform here ignores extra arguments it does not want. Kept for optax recipes.

    Example:
        >>> tx = adam(1e-3)
        >>> with_extra_args_support(tx) is tx
        True
    """
    return tx


class Recipe(NamedTuple):
    """How a transform was made, for code that reads expressions; it lies at `update.recipe`.

    Attributes:
        name: the constructor's name.
        args: its positional arguments, inner transforms among them.
        kwargs: its named arguments.
        marked: of `inject_hyperparams`: builds the inner transform with a `Hyperparameter` in the place of each value.
        inner: likewise: that transform of the values as they were given.
        needs: extra arguments without which `update` refuses.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    marked: Callable[[], GradientTransformation] | None = None
    inner: GradientTransformation | None = None
    needs: tuple[str, ...] = ()


def made(recipe: Recipe, init: InitFn, update: UpdateFn) -> GradientTransformation:
    """Build a transform that carries its recipe; its text is written only when somebody looks."""
    update.recipe = recipe  # type: ignore[attr-defined]
    return GradientTransformation(init, update)


def made_in_rounds(recipe: Recipe, init: InitFn, start: StartFn) -> GradientTransformation:
    """Build a transform whose update may wait for other members of a process group.

    Args:
        recipe: how it was made.
        init: as of any transform.
        start: `update`, but for a `Later` where it waits. It is kept at `update.start`, so that what is around the
            transform can put several that wait into the same rounds; `update` itself waits.
    """

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        return finish(start(updates, state, params, **extra))

    update.start = start  # type: ignore[attr-defined]
    return made(recipe, init, update)


def started(
    tx: GradientTransformation, updates: Updates, state: OptState, params: Params | None = None, **extra: Any
) -> Waits:
    """`tx.update`, as far as it goes without other members; all of it if `tx` was not made in rounds.

    Raises:
        StructureError: if an update of somebody's own does not take or return what an `UpdateFn` does.
    """
    update = tx.update
    if not hasattr(update, "recipe"):
        return _checked(update, updates, state, params, extra)
    start: StartFn = getattr(update, "start", update)
    return start(updates, state, params, **extra)


def updated(
    tx: GradientTransformation, updates: Updates, state: OptState, params: Params | None = None, **extra: Any
) -> tuple[Updates, OptState]:
    """`tx.update`, checked as `started` does."""
    return finish(started(tx, updates, state, params, **extra))


def _checked(
    update: UpdateFn, updates: Updates, state: OptState, params: Params | None, extra: Mapping[str, Any]
) -> tuple[Updates, OptState]:
    try:
        out = update(updates, state, params, **extra)
    except TypeError as error:
        if _takes(update, extra):
            raise
        raise StructureError(
            f"{_CONTRACT}: got {_called(update)}, which does not take them ({error}). Add them."
        ) from error
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        came = (
            f"a {type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else f"one {type(out).__name__}"
        )
        raise StructureError(f"{_CONTRACT}: got {came} from {_called(update)}. Return both.")
    return out[0], out[1]


def _takes(update: UpdateFn, extra: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(update).bind(None, None, None, **extra)
    except (TypeError, ValueError):  # it does not, or nothing is known of it
        return False
    return True


def _called(update: UpdateFn) -> str:
    return f"`{getattr(update, '__qualname__', type(update).__name__)}`"


def write(recipe: Recipe) -> str:
    """The expression of a recipe as text; tensors are not read."""
    named = [f"{name}={_show(value)}" for name, value in recipe.kwargs.items()]
    return f"{recipe.name}({', '.join([*map(_show, recipe.args), *named])})"


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_show(x)}" for key, x in value.items()) + "}"
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (tuple, str)) or not callable(value):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__name__))


class EmptyState(NamedTuple):
    """The state of a transform that keeps none."""


class MaskedNode(NamedTuple):
    """Stands where `masked` hides a leaf; a tree without leaves."""


def stateless(f: Callable[[Updates, Params | None], Updates]) -> GradientTransformation:
    """Make a transform of a function of `(updates, params)`.

    Args:
        f: maps the tree of updates (and params, or None) to a tree of updates.

    Example:
        >>> centre = stateless(lambda updates, params: tree_map(lambda u: u - u.mean(), updates))
        >>> tx = chain(centre, sgd(1.0))
        >>> tx.update(torch.tensor([1.0, 3.0]), tx.init(torch.zeros(2)))[0]
        tensor([ 1., -1.])
    """
    return _stateless(f, Recipe("stateless", (f,)))


def _stateless(f: Callable[[Updates, Params | None], Updates], recipe: Recipe) -> GradientTransformation:
    def init(params: Params) -> EmptyState:
        check_tensors(params)
        return EmptyState()

    def update(
        updates: Updates, state: EmptyState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        check_state(state, EmptyState)
        return f(updates, params), state

    return made(recipe, init, update)


def identity() -> GradientTransformation:
    """Return the updates unchanged.

    Example:
        >>> max_delta = None
        >>> chain(identity() if max_delta is None else clip(max_delta), scale(-0.1))
        chain(identity(), scale(-0.1))
    """
    return _stateless(lambda updates, params: updates, Recipe("identity"))


def set_to_zero() -> GradientTransformation:
    """Replace every update by zeros, which freezes its parameter.

    Example:
        >>> tx = partition({"train": sgd(0.1), "freeze": set_to_zero()}, {"w": "train", "b": "freeze"})
        >>> grads = {"w": torch.ones(2), "b": torch.ones(2)}
        >>> tx.update(grads, tx.init(grads))[0]
        {'w': tensor([-0.1000, -0.1000]), 'b': tensor([0., 0.])}
    """

    def zeros(updates: Updates, params: Params | None) -> Updates:
        check_tensors(updates)
        return tree_map(torch.zeros_like, updates)

    return _stateless(zeros, Recipe("set_to_zero"))


def add_rounded(p: Tensor, u: Tensor) -> Tensor:
    """`p + u` in fp32 (float64 for float64 `p`), rounded once to the dtype of `p`."""
    wide = wide_dtype(p.dtype)
    return (p.to(wide) + u.to(wide)).to(p.dtype)


def apply_updates(params: Params, updates: Updates) -> Params:
    """Add `updates` to `params`.

    The sum is taken in fp32 (float64 for float64 parameters) and rounded once to the parameter's dtype. A `None` update
    leaves its parameter as it is. With parameters that require a gradient call it under `torch.no_grad()` (or detach
    them first, or take gradients by `torch.func.grad`): else each result drags the graph of all steps before along.

    Raises:
        StructureError: if the trees or the shapes of two leaves differ.

    Example:
        >>> params = {"w": torch.ones(2), "b": torch.ones(1)}
        >>> apply_updates(params, {"w": torch.tensor([0.5, -0.5]), "b": None})
        {'w': tensor([1.5000, 0.5000]), 'b': tensor([1.])}
    """

    def add(u: Tensor | None, p: Tensor | None) -> Tensor | None:
        if p is None:
            return None
        check_floating(p if u is None else u, p)
        return p if u is None else add_rounded(p, u)

    return tree_map(add, updates, params, skip_none=False)


def write_updates(params: Params, updates: Updates) -> None:
    """`apply_updates` in place; call it without autograd."""
    for u, p in zip(tree_leaves(updates), tree_parts(updates, params), strict=True):
        if u is not None and p is not None:
            p.copy_(add_rounded(p, u))


def incremental_update(new_tensors: Params, old_tensors: Params, step_size: Scalar) -> Params:
    """Polyak average: `step_size * new + (1 - step_size) * old`, leaf by leaf, rounded once to the dtype of `old`.

    Raises:
        StructureError: if the trees or the shapes of two leaves differ.
        ValueError: if `step_size` is no number.

    Example:
        >>> average, params = {"w": torch.tensor(0.0)}, {"w": torch.tensor(1.0)}
        >>> incremental_update(params, average, step_size=0.25)
        {'w': tensor(0.2500)}
    """
    check_scalar("step_size", step_size, "It is the share of what is new: 0.001 averages long.")

    def mix(new: Tensor, old: Tensor) -> Tensor:
        check_floating(old, new)
        wide, rest = wide_dtype(old.dtype), rounded(1.0 - exact(step_size), wide_dtype(old.dtype))
        return (new.to(wide) * rounded(step_size, wide) + old.to(wide) * rest).to(old.dtype)

    return tree_map(mix, new_tensors, old_tensors)
