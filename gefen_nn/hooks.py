"""Hooks and closure of a step; the optimizer runs hooks itself, so that a failure can be told to the group."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

Closure = Callable[[], Any]


Given = tuple[Closure | None, dict[str, Any]]  # the closure and the extra arguments of a step


def run_pre_hooks(optimizer: torch.optim.Optimizer, closure: Closure | None, extra: Mapping[str, Any]) -> Given:
    """Run global and own hooks before a step, as torch does; return what the step was given, which a hook may replace.

    Raises:
        RuntimeError: if a hook returns something else than None or `(args, kwargs)`.
    """
    every, given = torch_optimizer._global_optimizer_pre_hooks.values(), dict(extra)
    for hook in (*every, *optimizer._optimizer_step_pre_hooks.values()):
        result = hook(optimizer, (closure,), given)
        if result is not None:
            closure, given = _given_by(result)
    return closure, given


def _given_by(result: Any) -> Given:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(
            f"A pre-hook of a step must return None or (args, kwargs): got {type(result).__name__}. Return None."
        )
    args, kwargs = result
    closure: Closure | None = args[0] if args else kwargs.get("closure")
    return closure, {name: value for name, value in kwargs.items() if name != "closure"}


def run_post_hooks(optimizer: torch.optim.Optimizer, closure: Closure | None, extra: Mapping[str, Any]) -> None:
    """Run own and global hooks after a step."""
    every = torch_optimizer._global_optimizer_post_hooks.values()
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *every):
        hook(optimizer, (closure,), dict(extra))


def call(closure: Closure | None) -> Any:
    """What a closure returns, called with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
