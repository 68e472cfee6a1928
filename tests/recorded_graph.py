"""A CUDA graph's stand-in on the CPU: what a call does to tensors is recorded, and done again without the call."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Graph(TorchDispatchMode):
    """Record a call, which is done once; `replay` does its operations and kernels again on the same tensors.

    What the host reads of a tensor fails the call, as while a GPU records, but for tensors that lie on the host.

    Args:
        call: takes no argument.
        hosted: what the host may read.
        kernels: `(module, name)` of functions that are no operations of torch.
    """

    def __init__(self, call: Callable[[], Any], hosted: list[Tensor], kernels: list[tuple[Any, str]]) -> None:
        super().__init__()
        self._hosted, self._steps = list(hosted), list[Callable[[], Any]]()
        with contextlib.ExitStack() as stack:
            stack.enter_context(captured())
            for module, name in kernels:
                stack.enter_context(mock.patch.object(module, name, self._kernel(getattr(module, name))))
            stack.enter_context(self)
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors((args, kwargs))
        on_host = bool(given) and all(any(x is y for y in self._hosted) for x in given)
        if func._schema.name in _READS and not on_host:
            raise RuntimeError(f"the host reads a tensor: {func}")
        out = func(*args, **(kwargs or {}))
        self._hosted += tensors(out) if on_host else []
        self._note(lambda: func(*args, **(kwargs or {})), given, out)
        return out

    def _kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                out = function(*args, **options)
            self._note(lambda: function(*args, **options), tensors((args, options)), out)
            return out

        return run

    def _note(self, call: Callable[[], Any], given: list[Tensor], out: Any) -> None:
        """Keep a call with what it returned; its next results go where the first ones lie, if they are new tensors."""
        known = {x.untyped_storage().data_ptr() for x in given}
        fresh = [x.untyped_storage().data_ptr() not in known for x in tensors(out)]

        def again() -> None:
            for old, new, moves in zip(tensors(out), tensors(call()), fresh, strict=True):
                if moves:
                    old.copy_(new)

        self._steps.append(again)

    @torch.no_grad()
    def replay(self) -> None:
        """Do it again."""
        for step in self._steps:
            step()


def captured() -> contextlib.AbstractContextManager[Any]:
    """CUDA says that it records."""
    return mock.patch.multiple(torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: True)
