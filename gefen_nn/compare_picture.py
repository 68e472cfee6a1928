"""The picture of a comparison: the sweeps to the left, then all seeds at the shared rates, then the bytes of state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gefen_nn.compare import Comparison
from gefen_nn.compare_stats import ArmResult, Losses
from gefen_nn.console import new_figure

# From Okabe and Ito's palette for the colour-blind; markers tell on where its seven are used up.
_COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = "os^Dvp*X"
_WORST = (
    1.5  # losses are shown up to the best, and so many times the way from there to the first arm's at twice its rate
)


def draw(comparison: Comparison, rows: Sequence[ArmResult], path: Path) -> None:
    """Writes the picture.

    Args:
        comparison: What was compared.
        rows: See `compare_stats.rows_of`.
        path: A file whose suffix says the format.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    picture(comparison, rows).savefig(path, dpi=120)


def picture(comparison: Comparison, rows: Sequence[ArmResult]) -> Any:
    """Draws a comparison.

    Args:
        comparison: What was compared.
        rows: See `compare_stats.rows_of`.

    Returns:
        A matplotlib figure.
    """
    figure = new_figure(15, max(4.5, 1.8 + 0.3 * len(rows)))
    title = f"{comparison.task}: held-out loss after {comparison.steps} steps"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    curves, shared, twice, memory = figure.subplots(1, 4, width_ratios=(3, 2, 2, 1))
    low, high = _range(rows)
    _draw_sweeps(curves, rows, (low, high))
    lr = rows[0].shared.lr
    _draw_seeds(shared, rows, [row.shared for row in rows], f"every seed at lr {lr:g}", (low, high))
    _draw_seeds(twice, rows, [row.twice for row in rows], f"at twice that, {2 * lr:g}", (low, high))
    shared.set_yticks(range(len(rows)), [row.arm for row in rows])
    _draw_bytes(memory, rows)
    return figure


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLORS[index % len(_COLORS)], "marker": _MARKERS[index // len(_COLORS) % len(_MARKERS)]}


def _range(rows: Sequence[ArmResult]) -> tuple[float, float]:
    """Limits of the losses: what is far above is cut off, or all else would lie on a line."""
    judged = [losses for row in rows for losses in (row.own, row.shared, row.twice)]
    ended = [loss for losses in judged for loss in losses.by_seed if math.isfinite(loss)] or [0.0]
    first = [loss for losses in (rows[0].shared, rows[0].twice) for loss in losses.by_seed if math.isfinite(loss)]
    best, far = min(ended), max(first, default=max(ended))
    return best - 0.05 * (far - best), best + max(_WORST * (far - best), 1e-3)


def _draw_sweeps(axes: Any, rows: Sequence[ArmResult], limits: tuple[float, float]) -> None:
    for index, row in enumerate(rows):
        axes.plot(row.sweep.keys(), row.sweep.values(), label=row.arm, linewidth=1.2, markersize=5, **_style(index))
    tried = sorted({lr for row in rows for lr in row.sweep})
    axes.set_xscale("log")
    axes.set_xticks(tried, [f"{lr:g}" for lr in tried], rotation=45, fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_ylim(limits)
    axes.set_xlabel("learning rate")
    axes.set_title("the first seed over the rates", loc="left", fontsize=10)
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_seeds(
    axes: Any, rows: Sequence[ArmResult], judged: Sequence[Losses], title: str, limits: tuple[float, float]
) -> None:
    high = limits[1]
    for index, losses in enumerate(judged):
        shown = [min(loss, high) for loss in losses.by_seed]  # beyond the frame: at its edge
        axes.plot(shown, [index] * len(shown), linestyle="", markersize=5, alpha=0.7, clip_on=False, **_style(index))
        axes.plot(min(losses.mean, high), index, marker="|", markersize=16, color=_style(index)["color"])
    if all(map(math.isfinite, judged[0].by_seed)):
        axes.axvline(min(judged[0].mean, high), color="#999999", linestyle=":", zorder=0)
    axes.set_xlim(limits)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [])
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bytes(axes: Any, rows: Sequence[ArmResult]) -> None:
    values = [row.state_bytes_per_param for row in rows]
    bars = axes.barh(range(len(rows)), values, color=[_style(index)["color"] for index in range(len(rows))])
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    axes.set_xlim(0, 1.25 * max(values) or 1.0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.set_title("state, bytes/param", loc="left", fontsize=10)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
