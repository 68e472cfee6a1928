"""What a section finds, line by line; and how two results differ."""

import contextlib
import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Found = Mapping[str, Tensor]


class Skip(Exception):
    """A check cannot be made here, with the reason; it counts as not run."""


class Checks:
    """The checks of a section, each written as soon as it is made.

    Args:
        path: a file of JSON lines.
        dry: tiny sizes on the CPU.
    """

    def __init__(self, path: Path, dry: bool) -> None:
        self._path, self.dry = path, dry
        self.device = torch.device("cpu" if dry else "cuda")

    def alone(self) -> None:
        """Settings of a process that makes these checks only: fresh memory is NaN, so that what nobody writes shows."""
        if self.dry:
            torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def note(self, **facts: Any) -> None:
        """Write facts that are no check, or a check's line."""
        with self._path.open("a") as file:
            file.write(json.dumps(facts, default=str) + "\n")

    def make(self, name: str, check: Callable[[], Mapping[str, Any]]) -> None:
        """Make a check: a mapping with "passed" (a bool; left out for a measurement) and what else to report."""
        try:
            facts = dict(check())
            passed = facts.pop("passed", None)
            outcome = "measured" if passed is None else "passed" if passed else "failed"
            self.note(name=name, outcome=outcome, **facts)
        except Skip as skip:
            self.note(name=name, outcome="not run", reason=str(skip))
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            self.note(name=name, outcome="failed", reason=f"{type(error).__name__}: {lines[0] if lines else ''}")


def kernels(checks: Checks, interpreted: Any, compiled: Any) -> Any:
    """The module of kernels that this run checks."""
    return interpreted if checks.dry else compiled


class OnDevice:
    """A module whose functions take CPU tensors and give them back, but compute on a device; strides are kept."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The function, on the device."""

        def call(*args: Any, **options: Any) -> Any:
            moved = {key: there(x, self._device) for key, x in options.items()}
            out = getattr(self._module, name)(*(there(x, self._device) for x in args), **moved)
            return tuple(x.cpu() for x in out) if isinstance(out, tuple) else out.cpu()

        return call


def there(x: Any, device: torch.device) -> Any:
    """A tensor on a device with the strides and the memory around it that it has here; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def named(x: Any) -> Found:
    """One tensor or several by number."""
    return dict(enumerate(x if isinstance(x, tuple) else (x,)))  # type: ignore[arg-type]  # numbers serve as names


def difference(got: Any, expected: Any) -> dict[str, Any]:
    """Whether two results have the same bits; else how many entries differ, by how many ulp or codes, and where."""
    ours, theirs = (x if isinstance(x, Mapping) else named(x) for x in (got, expected))
    if ours.keys() != theirs.keys():
        return {"passed": False, "reason": f"names differ: {sorted(map(str, ours.keys() ^ theirs.keys()))}"}
    entries, differing, where, largest = 0, 0, [], {"ulp": 0.0, "codes": 0.0}
    for name, a in ours.items():
        b = theirs[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return {"passed": False, "reason": f"{name}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"}
        unequal = _unequal(a, b)
        entries, differing = entries + a.numel(), differing + int(unequal.sum())
        if unequal.any():
            unit = "ulp" if a.is_floating_point() else "codes"
            largest[unit] = max(largest[unit], float(_distance(a, b)[unequal].max()))
            where.append(str(name))
    told = {unit: value for unit, value in largest.items() if value}
    return {"passed": not where, "entries": entries, "differing": differing, **told, **({"in": where} if where else {})}


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    kind = _BITS[a.element_size()] if a.is_floating_point() else a.dtype
    same = a.contiguous().view(kind) == b.contiguous().view(kind)
    return ~(same | (a.isnan() & b.isnan()))


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """In units of the last place, counted through the numbers between; infinite beside a NaN."""
    if not a.is_floating_point():
        return (a.to(torch.float64) - b.to(torch.float64)).abs()
    kind = _BITS[a.element_size()]
    places = [x.contiguous().view(kind).to(torch.int64) for x in (a, b)]
    lowest = torch.iinfo(kind).min
    ordered = [torch.where(x < 0, lowest - x, x).to(torch.float64) for x in places]
    return torch.where(a.isnan() != b.isnan(), math.inf, (ordered[0] - ordered[1]).abs())


def nearness(got: Found, expected: Found, start: Found, bound: float) -> dict[str, Any]:
    """`difference`, passed if parameters differ by at most `bound` of the way that they went from `start`."""
    found = difference(got, expected)
    if "reason" in found:
        return found
    far = {}
    for name, before in start.items():
        way = (expected[name].double() - before.double()).norm()
        far[name] = float((got[name].double() - expected[name].double()).norm() / way.clamp(min=1e-30))
    worst = max(far.values(), default=0.0)
    return found | {"passed": worst <= bound, "relative": worst, "bound": bound}


@contextlib.contextmanager
def stepping(module: Any, taken: list[int]) -> Iterator[None]:
    """Fused steps go to a module's kernels; the number of leaves of each is noted."""
    from gefen_kernels import ops

    run_step = module.run_step

    def stepped(plan: Any, grads: Sequence[Tensor], *args: Any, **options: Any) -> None:
        taken.append(len(grads))
        run_step(plan, grads, *args, **options)

    back_end = mock.Mock(wraps=module, run_step=stepped)
    with mock.patch.object(ops, "back_end", lambda device: back_end):
        yield
