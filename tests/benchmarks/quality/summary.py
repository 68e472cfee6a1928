"""All arms on all tasks in one picture: how far each is from AdamW, in percent of AdamW's held-out loss."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from gefen_nn.compare_stats import ArmResult, Losses
from gefen_nn.console import new_figure

_LIMIT = 6.0  # percent; what is beyond stands at the edge with its number
_DEFAULT = "128x256 warm"
_OWN, _TWICE, _LEVEL = "#0072b2", "#d55e00", "#999999"


def draw(tasks: Mapping[str, Sequence[ArmResult]], path: Path) -> None:
    """Write the picture: a column for each task, a row for each arm, AdamW being the line at 0.

    Args:
        tasks: the arms of each, see `compare_stats.rows_of`; AdamW is the first.
        path: a file whose suffix says the format.
    """
    arms = {row.arm: row.state_bytes_per_param for rows in reversed(tasks.values()) for row in rows[1:]}
    names = sorted(arms, key=lambda name: _order(tasks, name))
    figure = new_figure(13, 1.3 + 0.26 * len(names))
    for axes, (task, rows) in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks.items(), strict=True):
        axes.axvline(0, color=_LEVEL, linewidth=1)
        for row in rows[1:]:
            at = names.index(row.arm)
            _point(axes, at - 0.15, row.shared, rows[0].shared.mean, color=_OWN, marker="o")
            _point(axes, at + 0.15, row.twice, rows[0].twice.mean, color=_TWICE, marker="D")
        _frame(axes, task, len(names))
        axes.set_yticks(range(len(names)), [])
    first = figure.axes[0]
    first.set_yticks(range(len(names)), [f"{name}  {arms[name]:.2f}" for name in names], fontsize=9)
    for label, name in zip(first.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == _DEFAULT else "normal")
    first.set_title("bytes/param  ", loc="left", x=0, ha="right", fontsize=8, color=_LEVEL)
    handles = [first.plot([], [], color=c, marker=m, linestyle="")[0] for c, m in ((_OWN, "o"), (_TWICE, "D"))]
    words = ["at AdamW's best rate", "at twice that rate"]
    figure.legend(handles, words, loc="outside lower right", ncols=2, frameon=False)
    figure.supxlabel("held-out loss beyond AdamW's, % (bars: two standard errors)", fontsize=9)
    figure.savefig(path, dpi=120)


def _order(tasks: Mapping[str, Sequence[ArmResult]], name: str) -> float:
    """Mean of an arm's differences at AdamW's best rate, over the tasks that it ran on."""
    found = [_percent(row.shared, rows[0].shared.mean) for rows in tasks.values() for row in rows if row.arm == name]
    return sum(found) / len(found)


def _percent(losses: Losses, first: float) -> float:
    return 100 * losses.difference / first


def _point(axes: Any, at: float, losses: Losses, first: float, **style: Any) -> None:
    value, error = _percent(losses, first), 200 * losses.error / first
    if abs(value) > _LIMIT or not isfinite(value):
        word, side = f"{value:+.0f}" if isfinite(value) else "diverged", -1 if value < 0 else 1
        axes.text(
            side * _LIMIT, at, word, ha="left" if side < 0 else "right", va="center", fontsize=7, color=style["color"]
        )
        return
    axes.plot([max(value - error, -_LIMIT), min(value + error, _LIMIT)], [at, at], color=style["color"], linewidth=1)
    axes.plot(value, at, markersize=4, **style)


def _frame(axes: Any, task: str, count: int) -> None:
    axes.set_title(task, fontsize=10, fontweight="bold")
    axes.set_xlim(-_LIMIT, _LIMIT)
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(axis="y", color="#eeeeee")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
