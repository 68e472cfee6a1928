"""How a comparison shows itself: as a table, as JSON, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gefen_fn.text import table
from gefen_nn import console
from gefen_nn.compare import Comparison
from gefen_nn.compare_marks import MARKS
from gefen_nn.compare_picture import draw
from gefen_nn.compare_run import Cell, Outcome
from gefen_nn.compare_stats import ArmResult, Losses, rows_of


def publish(
    comparison: Comparison, found: Mapping[Cell, Outcome], out: Path, *, jump: float, as_json: bool = False
) -> None:
    """Prints a comparison, and writes `compare.txt`, `compare.json` and `compare.png`.

    Args:
        comparison: What was compared.
        found: The outcomes of all its cells.
        out: An existing folder.
        jump: Rise of the training loss from which a run is said to jump.
        as_json: Print JSON instead of the table.

    Raises:
        ImportError: If matplotlib is not installed; all else is done then.
    """
    rows = rows_of(comparison, found)
    shown = text(comparison, rows, jump)
    values = console.as_json(plain(comparison, rows, found, jump), indent=1)
    (out / "compare.txt").write_text(shown + "\n")
    (out / "compare.json").write_text(values + "\n")
    print(values if as_json else shown)
    draw(comparison, rows, out / "compare.png")


def text(comparison: Comparison, rows: Sequence[ArmResult], threshold: float) -> str:
    """The table and how to read it.

    Args:
        comparison: What was compared.
        rows: See `compare_stats.rows_of`.
        threshold: Rise from which a run is said to jump.

    Returns:
        Lines.
    """
    first, shared = comparison.arms[0], rows[0].shared.lr
    at = [f"at {shared:g}", f"from {first}", "jumps"], [f"at {2 * shared:g}", f"from {first}", "not worse", "jumps"]
    head = ["arm", "seeds", "best lr", "loss there", "range", *at[0], *at[1], "bytes/param", "optimizer ms"]
    return "\n".join(
        [
            f"{comparison.task}: held-out loss after {comparison.steps} steps, mean over seeds",
            table([head, *(_cells(row, threshold) for row in rows)]),
            f"from {first}: mean difference of the same seeds +- its standard error. not worse: seeds no higher than "
            f"{first}'s.",
            f"jumps: runs whose training loss rose by {threshold:g} or more, or that left the finite numbers.",
            *(_equal(row) for row in rows if len(set(row.sweep.values())) == 1 < len(row.sweep)),
        ]
    )


def _equal(row: ArmResult) -> str:
    """What is said of an arm whose rates made no difference."""
    if _ended(row):
        return f"{row.arm}: every rate came to the same loss, so none is best. Does the loss depend on the model?"
    return f"{row.arm}: diverged at every rate, so none is best."


def _ended(row: ArmResult) -> bool:
    return any(map(math.isfinite, row.sweep.values()))


def _cells(row: ArmResult, threshold: float) -> list[str]:
    own, shared, twice = row.own, row.shared, row.twice
    seeds = len(own.by_seed)
    return [
        row.arm,
        str(seeds),
        f"{own.lr:g}" if _ended(row) else "none",
        _loss(own.mean),
        f"{_loss(min(own.by_seed))} to {_loss(max(own.by_seed))}",
        _loss(shared.mean),
        _difference(shared),
        f"{shared.jumps(threshold)}/{seeds}",
        _loss(twice.mean),
        _difference(twice),
        f"{twice.not_worse()}/{seeds}",
        f"{twice.jumps(threshold)}/{seeds}",
        f"{row.state_bytes_per_param:.3f}",
        f"{row.optimizer_ms:.2f}",
    ]


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _difference(losses: Losses) -> str:
    if not math.isfinite(losses.difference):
        return "diverged"
    error = "" if math.isnan(losses.error) else f" +-{losses.error:.3f}"
    return f"{losses.difference:+.3f}{error}"


def plain(
    comparison: Comparison, rows: Sequence[ArmResult], found: Mapping[Cell, Outcome], threshold: float
) -> dict[str, Any]:
    """A comparison as JSON has it: no infinite numbers.

    Args:
        comparison: What was compared.
        rows: See `compare_stats.rows_of`.
        found: The outcomes, whose versions are listed.
        threshold: Rise from which a run is said to jump.

    Returns:
        Numbers, strings, lists and dictionaries.
    """
    versions: list[dict[str, Any]] = []
    for outcome in found.values():
        known = {k: v for k, v in outcome.provenance.items() if k not in (*MARKS, "ended", "load")}
        versions += [] if known in versions else [known]
    arms = {row.arm: _plain_row(row, threshold) for row in rows}
    told: dict[str, Any] = console.plain(
        {"comparison": comparison._asdict(), "jump": threshold, "made_by": versions, "arms": arms}
    )
    return told


def _plain_row(row: ArmResult, threshold: float) -> dict[str, Any]:
    judged = {name: _plain_losses(getattr(row, name), threshold) for name in ("own", "shared", "twice")}
    return {**row._asdict(), **judged, "sweep": {f"{lr:g}": loss for lr, loss in row.sweep.items()}}


def _plain_losses(losses: Losses, threshold: float) -> dict[str, Any]:
    known = ("lr", "by_seed", "differences", "rises", "mean", "difference", "error")
    counts = {"not_worse": losses.not_worse(), "jumps": losses.jumps(threshold)}
    return {**{name: getattr(losses, name) for name in known}, **counts}
