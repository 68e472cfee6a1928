"""A number that the transforms of members have in common if they are the same transform.

Compared are the arguments of every stage, to the bit: numbers, text, tensors, policies, and functions by their code and
the plain values that they close over. Left out is what may differ between members: the values that groups carry, which
each vote compares by itself, scopes, what functions of the parameters close over, as a member's may have others, and
the number of a device. A rank that another function closes over is a plain value, and so tells members apart.
Not seen are globals that functions read, objects that they close over, and numbers that a factory computes with.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation
from gefen_fn.combine import recipe_of
from gefen_fn.inject import FUNCTIONS_OF_PARAMS
from gefen_fn.program import opened
from gefen_fn.scope import Scope
from gefen_fn.shards import is_sharded

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Tensor)
_FUNCTIONS = (FunctionType, MethodType, partial)
_OPEN = (*_PLAIN, *_FUNCTIONS, tuple, list, dict, set, frozenset)


def fingerprint(tx: GradientTransformation, carried: GradientTransformation) -> int:
    """The number, of 32 bits.

    Args:
        tx: the transform.
        carried: the injection in it whose values groups carry; any other transform if they carry none.
    """
    return zlib.crc32(_Writer(carried).transform(tx).encode())


class _Writer:
    """Writes values as text that is equal for equal values."""

    def __init__(self, carried: GradientTransformation, floats: bool = True) -> None:
        self._carried, self._floats = carried, floats
        self._begun: set[int] = set()  # of functions, which may close over themselves

    def transform(self, tx: GradientTransformation) -> str:
        """A transform by how it was made; one's own by its functions."""
        recipe = recipe_of(tx)
        if not hasattr(tx.update, "recipe"):
            return self.value(tuple(tx))
        left_out = set(getattr(tx.update, "hyperparams", ())) if tx.update is self._carried.update else set()
        kwargs = {name: x for name, x in recipe.kwargs.items() if name not in left_out}
        is_of_params = recipe.name in ("masked", "partition", "clip_by_qk")
        args = [self._argument(x, is_of_params and n == 1) for n, x in enumerate(recipe.args)]
        named = [f"{name}={self._argument(x, name in FUNCTIONS_OF_PARAMS)}" for name, x in kwargs.items()]
        inside = opened(recipe)
        computes = inside.error is not None
        inner = _Writer(self._carried, floats=False).value(recipe.inner) if computes else self.value(inside.tx)
        return f"{recipe.name}({', '.join([*args, *named])}) {inner}"

    def _argument(self, x: Any, of_params: bool) -> str:
        return self._code(x) if of_params and isinstance(x, FunctionType) else self.value(x)

    def value(self, x: Any) -> str:
        """An argument."""
        if isinstance(x, GradientTransformation):
            return self.transform(x)
        if isinstance(x, Tensor):
            return f"{x.dtype}{tuple(x.shape)}" + (f"{_sum(x)}" if self._floats or x.ndim else "")
        if isinstance(x, torch.device):
            return x.type  # members may hold devices of their own
        if isinstance(x, _PLAIN):
            return "float" if isinstance(x, float) and not self._floats else repr(x)
        if isinstance(x, Mapping):
            return f"{{{', '.join(sorted(f'{self.value(key)}: {self.value(own)}' for key, own in x.items()))}}}"
        if isinstance(x, (tuple, list)):
            return f"{type(x).__name__}[{', '.join(map(self.value, x))}]"
        if isinstance(x, (set, frozenset)):
            return f"{type(x).__name__}{sorted(map(self.value, x))}"
        return self._function(x) if isinstance(x, _FUNCTIONS) else self._object(x)

    def _function(self, x: Any) -> str:
        if id(x) in self._begun:
            return "itself"
        self._begun.add(id(x))
        if isinstance(x, partial):
            return f"partial{self.value((x.func, x.args, x.keywords))}"
        function = x.__func__ if isinstance(x, MethodType) else x
        held = [getattr(cell, "cell_contents", None) for cell in function.__closure__ or ()]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return f"{self._code(function)} {list(map(self._held, held))}"

    def _code(self, function: Callable[..., Any]) -> str:
        return f"{function.__qualname__} {self._instructions(function.__code__)}"

    def _instructions(self, code: CodeType) -> str:
        whole = _Writer(self._carried)  # a number in code is the same whatever a factory computes with
        constants = [self._instructions(x) if isinstance(x, CodeType) else whole.value(x) for x in code.co_consts]
        return f"{zlib.crc32(code.co_code)} {code.co_names} {constants}"

    def _object(self, x: Any) -> str:
        """A policy, or an argument of somebody's own: its type, and what it holds."""
        if isinstance(x, (type, Scope)) or type(x).__module__ == "builtins":
            return str(getattr(x, "__qualname__", type(x).__name__))
        own = {f.name: getattr(x, f.name) for f in fields(x)} if is_dataclass(x) else getattr(x, "__dict__", {})
        return f"{type(x).__qualname__}{ {name: self._held(value) for name, value in own.items()} }"

    def _held(self, x: Any) -> str:
        """What a function or an object holds: other objects, which may be anybody's, by their type alone."""
        return self.value(x) if isinstance(x, _OPEN) or is_dataclass(x) else type(x).__qualname__


def _sum(x: Tensor) -> int | None:
    """Of a tensor's bytes; None of one that has none, or of which each member has its own."""
    if x.is_meta or is_sharded(x):
        return None
    return zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
