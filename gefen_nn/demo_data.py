"""The demo's text: the running Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """Bytes to learn from and bytes to be judged on, from different files; both uint8, 1-dim."""

    train: Tensor
    validation: Tensor


def standard_library_text(folder: Path | None = None, *, held_out_every: int = 10) -> Text:
    """Reads the modules at the top of the standard library, in the order of their names.

    Args:
        folder: Folder of `.py` files; the running interpreter's standard library if None.
        held_out_every: Every so many files, one goes to validation.

    Returns:
        About 4 MB of training and 0.5 MB of validation text for the standard library.

    Raises:
        FileNotFoundError: If the folder holds too few sources, as under a zipped or stripped Python.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    if len(files) < held_out_every:
        raise FileNotFoundError(
            f"the demo needs at least {held_out_every} .py files: got {len(files)} in the standard library's folder. "
            "Use a Python installed with its sources."
        )
    held_out = files[held_out_every - 1 :: held_out_every]
    return Text(_read([file for file in files if file not in held_out]), _read(held_out))


def batch_at(text: Tensor, step: int, *, seed: int, batch: int, context: int) -> Tensor:
    """The batch of one step: a function of `(seed, step)` alone, so that a resumed run sees the same bytes.

    Args:
        text: uint8 bytes, `[L]` with `L > context`.
        step: 0-based step.
        seed: Seed of the run.
        batch: Sequences N.
        context: Bytes T to predict in each.

    Returns:
        int64 bytes, `[N, T + 1]`.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(text.numel() - context, (batch, 1), generator=generator, device="cpu")
    return text[starts + torch.arange(context + 1, device="cpu")].long()


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
