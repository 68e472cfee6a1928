"""What an optimizer refuses before a step, and warns of before the first."""

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gefen_fn.scalar import came, squares_are_finite
from gefen_fn.shards import local
from gefen_fn.tree import StructureError, check_floating
from gefen_kernels import ops

_MAY_BE_NONE = ("foreach", "fused")  # then the optimizer chooses


def check_flags(**flags: Any) -> None:
    """Raise `ValueError` for a flag that is no bool, as "no" is none, which would switch it on."""
    for name, flag in flags.items():
        if not isinstance(flag, bool) and not (flag is None and name in _MAY_BE_NONE):
            wanted = "True, False or None" if name in _MAY_BE_NONE else "True or False"
            raise ValueError(f"`{name}` must be {wanted}: got {came(flag)}. Pass a bool.")


def as_path(path: Any) -> Path:
    """The path of a file or folder; raise `TypeError` for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`path` must be text or a path: got a {type(path).__name__}. Name a file or folder.")
    return Path(path)


def check_gradients(grads: Mapping[str, Tensor | None], params: Mapping[str, Tensor], finite: bool) -> None:
    """Refuse gradients that no step could take.

    Args:
        grads: by name.
        params: by name.
        finite: refuse those of which this member's part is not finite too, which reads it on the host.

    Raises:
        StructureError: for one that is sparse, complex or of another shape.
        RuntimeError: for one that is not finite, if asked for.
    """
    given = {name: g for name, g in grads.items() if g is not None}
    for name, g in given.items():
        try:
            check_floating(g, params[name])
        except StructureError as error:
            raise StructureError(f"Gradient of {name!r}: {error}") from error
    bad = [n for n, g in given.items() if not squares_are_finite(local(g))] if finite else []
    if bad:
        raise RuntimeError(f"Gradients must be finite (error_if_nonfinite=True): got {bad}. Nothing was changed.")


def warn_if_slow(devices: Iterable[torch.device]) -> None:
    """Warn the caller's caller where the back end of a device is not installed."""
    for needs in {ops.missing(device) for device in devices} - {None}:
        warnings.warn(
            f"{needs} is not installed, so steps take the pure path, some 20 times slower. "
            "Install gefen-fn with the extra `cpu` or `gpu`, or pass fused=False.",
            stacklevel=3,
        )
