"""The log of a comparison: one JSON line a run, so that a sweep may be stopped at any time and carried on."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gefen_nn.compare_run import Cell, Outcome

_CELL = Cell._fields
_REST = tuple(name for name in Outcome._fields if name != "cell")


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _is_whole(x: Any) -> bool:
    return _is_number(x) and isinstance(x, int) and x >= 0


def _is_amount(x: Any) -> bool:
    return _is_number(x) and x >= 0


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "task": (lambda x: isinstance(x, str), "a string"),
    "arm": (lambda x: isinstance(x, str), "a string"),
    "lr": (lambda x: _is_number(x) and x > 0, "a number above 0"),
    "seed": (_is_whole, "an integer from 0"),
    "steps": (lambda x: _is_whole(x) and x > 0, "an integer from 1"),
    "held_out": (lambda x: x is None or _is_number(x), "a number or null"),
    "losses": (lambda x: isinstance(x, list) and all(map(_is_number, x)), "a list of numbers"),
    "parameters": (lambda x: _is_whole(x) and x > 0, "an integer from 1"),
    "state_bytes": (_is_whole, "an integer from 0"),
    "seconds": (_is_amount, "a number from 0"),
    "optimizer_ms": (_is_amount, "a number from 0"),
    "provenance": (lambda x: isinstance(x, dict), "an object"),
}


def read(path: Path) -> dict[Cell, Outcome]:
    """The runs of a log by cell; of several runs of a cell the last.

    Args:
        path: The log; none there is an empty log. A last line without its end, which a stopped sweep may leave, is
            passed over.

    Returns:
        The outcomes in the order of the file.

    Raises:
        ValueError: For a line that is no run, naming it.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found = [_outcome(line, f"{path}, line {at}") for at, line in enumerate(lines, 1)]
    return {outcome.cell: outcome for outcome in found}


def append(path: Path, outcome: Outcome) -> None:
    """Adds a run; the line is on the disk when this returns.

    Several processes may add to one log: each has it to itself meanwhile, where the system locks files.

    Args:
        path: The log, made if missing.
        outcome: The run.
    """
    with path.open("a+b") as file:
        _lock(file)
        file.truncate(_whole(path.read_bytes()))
        file.write((line(outcome) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def line(outcome: Outcome) -> str:
    """A run as JSON.

    Args:
        outcome: The run.

    Returns:
        One line without its end.
    """
    rest = {name: getattr(outcome, name) for name in _REST}
    return json.dumps({**outcome.cell._asdict(), **rest}, allow_nan=False)


def _lock(file: BinaryIO) -> None:
    """Waits until no other process has the file; it is free again when it is closed."""
    with contextlib.suppress(ImportError, OSError):  # Windows has none, nor have some file systems
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _whole(content: bytes) -> int:
    """Length of the lines that have their end."""
    return content.rfind(b"\n") + 1


def _outcome(text: bytes, where: str) -> Outcome:
    try:
        entry: dict[str, Any] = json.loads(text.decode())
        _check(entry)
        return Outcome(Cell(*(entry[name] for name in _CELL)), *(entry[name] for name in _REST))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"A log must hold one run a line: {where} is none ({type(error).__name__}: {error}). Remove that line, or "
            "name another folder."
        ) from error


def _check(entry: Mapping[str, Any]) -> None:
    for name, (fits, kind) in _KINDS.items():
        if not fits(entry[name]):
            raise ValueError(f"{name} must be {kind}, got {str(entry[name])[:40]!r}")
    losses, steps = len(entry["losses"]), entry["steps"]
    if losses > steps or (losses < steps and entry["held_out"] is not None):
        raise ValueError(f"a run of {steps} steps that came to its end must have as many losses, got {losses}")
