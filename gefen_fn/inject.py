"""Hyperparameters as state: any factory of transforms, with its numbers read from the state at each update."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from gefen_fn.base import (
    GradientTransformation,
    OptState,
    Params,
    Recipe,
    Schedule,
    Updates,
    Waits,
    made_in_rounds,
    started,
)
from gefen_fn.exchange import then
from gefen_fn.scalar import Hyperparameter, check_state, is_schedule, new_count
from gefen_fn.tree import StructureError

P = ParamSpec("P")
FUNCTIONS_OF_PARAMS = ("mask", "param_labels", "labels", "spec", "heads")


class InjectHyperparamsState(NamedTuple):
    """Calls so far (int32 scalar), the hyperparameters of the latest update, and the inner transform's state.

    A hyperparameter is a float64 scalar, or a tree of such scalars, one per leaf of the updates. A number or another
    0-dim tensor put in its place is one from the next update on.
    """

    count: Tensor  # type: ignore[assignment]  # a field may not share the name of a tuple's method
    hyperparams: dict[str, Any]
    inner_state: OptState


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: torch.dtype | None = None,
) -> Callable[..., GradientTransformation]:
    """Let a transform's hyperparameters be read from its state, where the caller may change them.

    Floats, 0-dim floating tensors and schedules are injected; ints, bools, strings, policies, masks and bigger tensors
    stay as they are. A schedule is evaluated at the number of calls so far, 0 at the first. The transform is built once
    from the numbers as they were given, so that its checks run now, and anew from the state's values by `init` and
    `update`.

    Args:
        inner_factory: builds a transform, such as `adamw`.
        static_args: names of arguments to leave alone. A function passed as `mask`, `param_labels` or `labels` is
            always left alone, being no schedule.
        hyperparam_dtype: dtype of the injected scalars; float64 by default, so that a float is kept exactly.

    Returns:
        A function of `inner_factory`'s arguments. The `update` of the transform it returns carries `hyperparams`, the
        names of the injected values that are no schedules, `defaults`, those of them given as numbers, and `rebuild`,
        which builds the inner transform with some of those values replaced.

    Raises:
        ValueError: if `static_args` names no argument of `inner_factory`.
        TypeError: if `inner_factory` is not a function, or the arguments do not fit it.
        StructureError: at update, if the state holds other hyperparameters.

    Example:
        >>> tx = inject_hyperparams(sgd)(0.1, momentum=0.9)
        >>> state = tx.init(torch.zeros(2))
        >>> state = tree_set(state, learning_rate=0.01)
        >>> updates, state = tx.update(torch.ones(2), state)
        >>> updates
        tensor([-0.0100, -0.0100])
    """
    if not callable(inner_factory):
        raise TypeError(
            f"The factory must be a function: got {type(inner_factory).__name__}. "
            "Pass the constructor and then its arguments, as in `inject_hyperparams(adamw)(1e-3)`."
        )
    signature = inspect.signature(inner_factory)
    static = (static_args,) if isinstance(static_args, str) else tuple(static_args)
    _check_names(static, signature)
    dtype = torch.float64 if hyperparam_dtype is None else hyperparam_dtype

    def build(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in _arguments(bound).items() if name not in static}
        schedules = {
            name: value for name, value in given.items() if is_schedule(value) and name not in FUNCTIONS_OF_PARAMS
        }
        numbers = {name: value for name, value in given.items() if _is_number(value)}
        factory = _Factory(inner_factory, bound)
        start = _scheduled(schedules, new_count(), dtype)
        recipe = factory.recipe((*schedules, *numbers), start)
        tx = _injected(factory, recipe, schedules, numbers, dtype)
        tx.update.rebuild = lambda values: factory({**start, **values})  # type: ignore[attr-defined]
        tx.update.hyperparams = tuple(numbers)  # type: ignore[attr-defined]
        tx.update.defaults = {k: v for k, v in numbers.items() if isinstance(v, float)}  # type: ignore[attr-defined]
        return tx

    return build


def takes_schedules(factory: Callable[P, GradientTransformation]) -> Callable[P, GradientTransformation]:
    """Let any hyperparameter of a factory be a schedule of the calls so far, 0 at the first.

    With a schedule among the arguments the result is `inject_hyperparams(factory)` over the schedules alone; without
    one it is the factory's own transform.
    """

    @functools.wraps(factory)
    def build(*args: P.args, **kwargs: P.kwargs) -> GradientTransformation:
        if not any(is_schedule(value) for value in (*args, *kwargs.values())):
            return factory(*args, **kwargs)
        given = inspect.signature(factory).bind(*args, **kwargs)
        scheduled = {name for name, x in given.arguments.items() if is_schedule(x)} - set(FUNCTIONS_OF_PARAMS)
        if not scheduled:
            return factory(*args, **kwargs)
        given.apply_defaults()
        static = [name for name in given.arguments if name not in scheduled]
        return inject_hyperparams(factory, static)(*args, **kwargs)

    return build


def _injected(
    factory: "_Factory", recipe: Recipe, schedules: dict[str, Schedule], numbers: dict[str, Any], dtype: torch.dtype
) -> GradientTransformation:
    def init(params: Params) -> InjectHyperparamsState:
        count = new_count()
        values = {name: _scalar(value, dtype) for name, value in numbers.items()}
        values |= _scheduled(schedules, count, dtype)
        return InjectHyperparamsState(count, values, factory(values).init(params))

    def start(updates: Updates, state: InjectHyperparamsState, params: Params | None = None, **extra: Any) -> Waits:
        check_state(state, InjectHyperparamsState)
        _check_values(state.hyperparams, {*schedules, *numbers})
        given = {name: _as_scalar(value, dtype) for name, value in state.hyperparams.items()}
        values = {**given, **_scheduled(schedules, state.count, dtype)}
        whole = started(factory(values), updates, state.inner_state, params, **extra)
        return then(whole, lambda out: (out[0], InjectHyperparamsState(state.count + 1, values, out[1])))

    return made_in_rounds(recipe, init, start)


def _scheduled(schedules: dict[str, Schedule], count: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: _scalar(f(count), dtype) for name, f in schedules.items()}


class _Factory:
    """A factory with all its arguments, some of which are replaced at each call."""

    def __init__(self, factory: Callable[..., GradientTransformation], bound: inspect.BoundArguments) -> None:
        self._factory, self._args, self._kwargs = factory, bound.args, bound.kwargs
        kinds = bound.signature.parameters.values()
        self._positional = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._shown = _arguments(bound)

    def recipe(self, injected: Iterable[str], start: dict[str, Any]) -> Recipe:
        """How the injection of these arguments was made; `start` replaces those of the transform as it was given."""
        name = getattr(self._factory, "__name__", type(self._factory).__name__)
        marks = {key: Hyperparameter(key) for key in injected}
        return Recipe(f"inject_hyperparams({name})", (), self._shown, lambda: self(marks), self(start))

    def __call__(self, values: dict[str, Any]) -> GradientTransformation:
        head = [values.get(name, arg) for name, arg in zip(self._positional, self._args, strict=False)]
        rest = {name: values.get(name, arg) for name, arg in self._kwargs.items()}
        return self._factory(*head, *self._args[len(head) :], **rest)


def _arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Every argument by name, those of `**kwargs` among them; `*args` have no names and stay out."""
    parameters = bound.signature.parameters
    var_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    plain = {name: value for name, value in bound.arguments.items() if parameters[name].kind not in var_kinds}
    return {**plain, **bound.kwargs}


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()
    return isinstance(value, float) or is_scalar


def _scalar(value: Any, dtype: torch.dtype) -> Tensor:
    """A fresh scalar: the caller's tensor is never shared with the state."""
    if isinstance(value, Tensor):
        return value.to(dtype, copy=True)
    return torch.tensor(value, dtype=dtype, device="cpu")


def _as_scalar(value: Any, dtype: torch.dtype) -> Any:
    """What the caller put into the state: a number becomes a scalar, a tree stays."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    return _scalar(value, dtype) if isinstance(value, (int, float)) else value


def _check_names(static: tuple[str, ...], signature: inspect.Signature) -> None:
    unknown = sorted(set(static) - set(signature.parameters))
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if unknown and not has_kwargs:
        raise ValueError(
            f"`static_args` must name arguments of the factory: got {unknown}. It has {list(signature.parameters)}."
        )


def _check_values(values: dict[str, Any], expected: set[str]) -> None:
    if set(values) != expected:
        raise StructureError(
            f"The state must hold the injected hyperparameters {sorted(expected)}: got {sorted(values)}. "
            "Replace values, but keep the names."
        )
