"""Hooks and closure of a step; the optimizer runs hooks itself, so that a failure can be told to the group.

A hook sees `args` and `kwargs` of the call as torch's do: the optimizer and then the closure if there is one, by
position however it was given; and the extra arguments by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as torch_optimizer

Closure = Callable[[], Any]


class Call(NamedTuple):
    """What a step is called with, the optimizer first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, closure: Closure | None, extra: Mapping[str, Any]) -> "Call":
        """The call of `optimizer.step(closure, **extra)`."""
        return cls((optimizer,) if closure is None else (optimizer, closure), dict(extra))

    def bound(self) -> tuple[Closure | None, dict[str, Any]]:
        """The closure and the extra arguments.

        Raises:
            TypeError: if these are no arguments of a step, as hooks may return anything.
        """
        return _step(*self.args, **self.kwargs)


def _step(optimizer: Any, closure: Any = None, **extra: Any) -> tuple[Closure | None, dict[str, Any]]:
    """A step's signature, by which Python sorts arguments."""
    return closure, extra


def run_pre_hooks(optimizer: torch.optim.Optimizer, given: Call) -> Call:
    """Run global and own hooks before a step, as torch does; return what the step is called with, which they replace.

    Raises:
        RuntimeError: if a hook returns something else than None or `(args, kwargs)` with the optimizer in `args`.
    """
    every = torch_optimizer._global_optimizer_pre_hooks.values()
    for hook in (*every, *optimizer._optimizer_step_pre_hooks.values()):
        result = hook(optimizer, given.args, given.kwargs)
        if result is not None:
            given = _given_by(optimizer, result)
    return given


def _given_by(optimizer: torch.optim.Optimizer, result: Any) -> Call:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(
            f"A pre-hook of a step must return None or (args, kwargs): got {type(result).__name__}. Return None."
        )
    args, kwargs = result
    if not args or args[0] is not optimizer:
        came = f"a {type(args[0]).__name__} there" if args else "no arguments"
        raise RuntimeError(
            f"`args` that a pre-hook returns must begin with the optimizer: got {came}. Return those that it was given."
        )
    return Call(tuple(args), dict(kwargs))


def run_post_hooks(optimizer: torch.optim.Optimizer, given: Call) -> None:
    """Run own and global hooks after a step."""
    every = torch_optimizer._global_optimizer_post_hooks.values()
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *every):
        hook(optimizer, given.args, given.kwargs)


def call(closure: Closure | None) -> Any:
    """What a closure returns, called with gradients enabled; None without one.

    Raises:
        TypeError: if it is no function.
    """
    if closure is None:
        return None
    if not callable(closure):
        raise TypeError(
            f"`closure` must be a function that returns the loss: got {closure!r}. "
            "Call `step()`, or give extra arguments by name."
        )
    with torch.enable_grad():
        return closure()
