"""The picture of a search for a learning rate: the range test to the left, the short runs to the right."""

import math
from pathlib import Path
from typing import Any

from gefen_nn.console import new_figure
from gefen_nn.lr_finder import LrReport

_BLUE, _ORANGE = "#0072b2", "#d55e00"


def draw(report: LrReport, path: Path) -> None:
    """Write the picture.

    Args:
        report: of `lr_find`.
        path: a file whose suffix says the format.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    tested = [(lr, loss) for lr, loss, _ in report.range_test]
    _line(left, tested, "Range test: training loss, the rate grows from step to step", "-")
    left.plot([row[0] for row in report.range_test], [row[2] for row in report.range_test], color="#bbbbbb", zorder=0)
    left.annotate("grey: the untrained model", (0.02, 0.02), xycoords="axes fraction", color="#888888")
    ended = [(lr, loss) for lr, loss in report.sweep if math.isfinite(loss)]
    _line(right, ended, f"{report.judged_by.capitalize()} after {report.steps} steps", "o-")
    right.set_xticks([lr for lr, _ in report.sweep], [f"{lr:g}" for lr, _ in report.sweep])
    right.minorticks_off()
    for lr, loss in report.sweep:
        if not math.isfinite(loss):
            right.axvline(lr, color=_ORANGE, linestyle=":", label="diverged")
    for axes in (left, right):
        axes.axvline(report.suggestion, color=_ORANGE, label=f"suggested: {report.suggestion:g}")
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _line(axes: Any, points: Any, title: str, form: str) -> None:
    axes.plot(*zip(*points, strict=True), form, color=_BLUE)
    axes.set_xscale("log")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("learning rate")
    axes.spines[["top", "right"]].set_visible(False)
