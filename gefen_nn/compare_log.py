"""The log of a comparison: one JSON line a run, so that a sweep may be stopped at any time and carried on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gefen_nn.compare_run import Cell, Outcome

_CELL = Cell._fields
_REST = tuple(name for name in Outcome._fields if name != "cell")


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
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [_outcome(line, f"{path}, line {at}") for at, line in enumerate(lines, 1)]
    return {outcome.cell: outcome for outcome in found}


def append(path: Path, outcome: Outcome) -> None:
    """Adds a run; the line is on the disk when this returns.

    Args:
        path: The log, made if missing.
        outcome: The run.
    """
    with path.open("a+b") as file:
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


def _whole(content: bytes) -> int:
    """Length of the lines that have their end."""
    return content.rfind(b"\n") + 1


def _outcome(text: str, where: str) -> Outcome:
    try:
        entry: dict[str, Any] = json.loads(text)
        return Outcome(Cell(*(entry[name] for name in _CELL)), *(entry[name] for name in _REST))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"A log must hold one run a line: {where} is none ({type(error).__name__}: {error}). Remove that line, or "
            "name another folder."
        ) from error
