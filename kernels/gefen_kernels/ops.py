"""The choice of a back end by device.

A back end is a module with the names of the reference, as far as it speeds them up, and `gefen_step`, the whole step in
place. Set the environment variable `GEFEN_REFERENCE=1` to do without.
"""

import functools
import importlib
import importlib.util
import os
import time
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gefen_kernels import moment as plain
from gefen_kernels import reference

_BACK_ENDS = {"cpu": ("numba", "gefen_kernels.cpu"), "cuda": ("triton", "gefen_kernels.triton_step")}


def back_end(device: torch.device) -> ModuleType | None:
    """The module that steps tensors of a device; None where only the reference can."""
    if os.environ.get("GEFEN_REFERENCE", "0") not in ("", "0"):
        return None
    return _load(*_BACK_ENDS[device.type]) if device.type in _BACK_ENDS else None


def missing(device: torch.device) -> str | None:
    """The package for want of which tensors of a device take the reference; None if it is there, or not asked for."""
    needs = _BACK_ENDS.get(device.type, (None, ""))[0]
    asked = os.environ.get("GEFEN_REFERENCE", "0") not in ("", "0")
    return None if asked or needs is None or back_end(device) is not None else needs


def warm_up() -> float:
    """Let the CPU's back end compile, or load what an earlier process compiled, before anything is timed.

    Returns:
        The seconds that it took.
    """
    start, module = time.perf_counter(), back_end(torch.device("cpu"))
    if module is not None:
        module.warm_up()
        x, codes = torch.zeros(2, 2, device="cpu"), torch.full((2, 2), 128, dtype=torch.uint8, device="cpu")
        moment(x, codes, x[:, :1], torch.linspace(-1.0, 1.0, 256, device="cpu"), 0.9, 0.1, block=2)
        descend(x, x.clone(), 1.0, 0.1, None)
        random_words(0, torch.zeros((), dtype=torch.int64, device="cpu"), (2,), x.device)
        normalize = loops("normalize", x[None])
        if normalize is not None:
            normalize.normalized(x[None], 1e-7)
    return time.perf_counter() - start


def moment(
    g: Tensor,
    codes: Tensor,
    absmax: Tensor,
    codebook: Tensor,
    decay: float | Tensor,
    rest: float | Tensor,
    *,
    block: int,
    start: int = 1,
    ties: reference.Ties = "zero",
    drive: plain.Drive = "m",
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gefen_kernels.moment.moment`, by a back end where there is one that takes these tensors."""
    given = (g, codes, absmax, codebook, decay, rest)
    module = loops("moment", *(x for x in given if isinstance(x, Tensor))) or plain
    return module.moment(*given, block=block, start=start, ties=ties, drive=drive, out=out)  # type: ignore[no-any-return]


def descend(param: Tensor, direction: Tensor, scale: float, step: float, decay: float | None) -> None:
    """`gefen_kernels.moment.descend`, by a back end where there is one that takes these tensors."""
    (loops("descent", param, direction) or plain).descend(param, direction, scale, step, decay)


def random_words(
    seed: int, count: Tensor, shape: Sequence[int], device: torch.device, part: reference.Part = None
) -> Tensor:
    """`reference.random_words`, by a back end where there is one for the device."""
    module = (loops("words", count) if device.type == "cpu" else None) or reference
    return module.random_words(seed, count, shape, device, part)  # type: ignore[no-any-return]


def loops(name: str, *tensors: Tensor) -> ModuleType | None:
    """The loops of this name, if they take these tensors."""
    if torch.compiler.is_compiling() or tensors[0].device.type != "cpu" or back_end(tensors[0].device) is None:
        return None
    module = _load("numba", f"gefen_kernels.cpu_{name}")
    return module if module is not None and module.supports(*tensors) else None


@functools.lru_cache
def _load(needs: str, name: str) -> ModuleType | None:
    if importlib.util.find_spec(needs) is None:
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:  # there, but not for this numpy or this torch
        warnings.warn(f"{needs} cannot be imported, so steps are slow: {error}", stacklevel=2)
        return None
