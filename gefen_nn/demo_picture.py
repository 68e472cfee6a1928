"""The demo's picture: loss curves to the left, memory and time of the optimizers as bars to the right."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
except ImportError as error:
    raise ImportError(f"`gefen demo` draws with matplotlib: {error}. Run `pip install 'gefen-fn[demo]'`.") from error

from gefen_nn.curves import smoothed

# From Okabe and Ito's palette for the colour-blind; they differ in lightness too, for those who print in grey.
_COLORS = {"adamw": "#d55e00", "gefen": "#0072b2", "gefen_muon": "#009e73"}
# The first two curves often lie on each other: the wide one is drawn first and shows on both sides of the narrow one,
# and a validation point of the first is a ring around the second's.
_WIDTHS = {"adamw": 6.0, "gefen": 1.8, "gefen_muon": 2.6}
_POINTS: dict[str, dict[str, Any]] = {
    "adamw": {"marker": "o", "markersize": 11, "markerfacecolor": "white", "markeredgewidth": 2.2},
    "gefen": {"marker": "o", "markersize": 5.5},
    "gefen_muon": {"marker": "D", "markersize": 6.5},
}
_GREY = "#555555"
_LABEL_HEIGHT = 0.13  # of the frame: what two lines of a curve's label take


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the picture.

    Args:
        report: What `demo.json` holds.
        path: The PNG to write, 1800 x 750.
    """
    picture(report).savefig(path, dpi=150)


def picture(report: dict[str, Any]) -> Figure:
    """Draws loss, state bytes and optimizer time.

    Args:
        report: What `demo.json` holds.

    Returns:
        A figure made to be read at 1200 x 500.
    """
    figure = Figure(figsize=(12, 5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    figure.suptitle(_headline(report), fontsize=15, fontweight="bold", x=0.012, ha="left")
    curves, memory, times = figure.subplots(1, 3, width_ratios=(3, 1, 1))
    _draw_losses(curves, report)
    rows = report["optimizers"]
    _draw_bars(memory, rows, "state_bytes_per_param", "Optimizer state,\nbytes per parameter", "{:.2f}")
    _draw_bars(times, rows, "optimizer_ms", "Optimizer time,\nmilliseconds", "{:.1f}")
    memory.set_xlabel(_saving(rows))
    *steps, last = (f"{row['step_ms']:.0f}" for row in rows.values())
    times.set_xlabel(f"of {', '.join(steps)} and {last} ms a step" if steps else f"of {last} ms a step")
    return figure


def _headline(report: dict[str, Any]) -> str:
    data = f"{report['data']['name']} ({report['data']['train_bytes'] / 1e6:.1f} MB)"
    millions = f"{report['parameters'] / 1e6:.2f}M"
    return f"A decoder of {millions} parameters, trained {report['settings']['steps']:,} steps on {data}"


def _saving(rows: dict[str, dict[str, Any]]) -> str:
    least, *_, most = sorted(rows.values(), key=lambda row: row["state_bytes_per_param"]) * 2
    ratio = most["state_bytes_per_param"] / least["state_bytes_per_param"]
    return f"{least['label']}: {ratio:.1f} times less" if len(rows) > 1 else ""


def _draw_losses(axes: Axes, report: dict[str, Any]) -> None:
    steps = report["settings"]["steps"]
    half = max(1, min(steps // 20, 50))
    for name, row in report["optimizers"].items():
        color = _COLORS[name]
        axes.plot(row["losses"], color=color, linewidth=0.6, alpha=0.4)
        axes.plot(smoothed(row["losses"], half), color=color, linewidth=_WIDTHS[name], solid_capstyle="round")
        at, losses = zip(*row["validation"], strict=True)
        axes.plot(at, losses, linewidth=0, color=color, clip_on=False, zorder=3, **_POINTS[name])
    title = "Loss, nats per byte, each at a learning rate near its best"
    axes.set_title(title, loc="left", pad=25)  # the legend stands between it and the frame
    axes.set_xlabel("steps taken")
    axes.set_xlim(0, steps)
    axes.set_ylim(_loss_range([row["losses"][steps // 20 :] for row in report["optimizers"].values()]))
    axes.locator_params(axis="y", prune="lower")  # or its label may touch the first one of the steps
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    _label_ends(axes, report["optimizers"])
    _mark_resume(axes, report["resume"], report.get("move"))
    _explain(axes, 2 * half + 1)


def _loss_range(curves: list[list[float]]) -> tuple[float, float]:
    # The first fall is left above the frame, or all else would lie flat; below there is room for the resume's note.
    low, high = min(map(min, curves)), max(map(max, curves))
    return low - 0.2 * (high - low), high


def _label_ends(axes: Axes, rows: dict[str, dict[str, Any]]) -> None:
    ordered = sorted(rows.values(), key=lambda row: float(row["validation_loss"]))
    low, high = axes.get_ylim()
    heights = [(row["validation_loss"] - low) / (high - low) for row in ordered]
    names = {row["label"]: name for name, row in rows.items()}
    for row, height in zip(ordered, _apart(heights, _LABEL_HEIGHT), strict=True):
        text = f"{row['label']}\n{row['validation_loss']:.3f}"
        at, color = (row["validation"][-1][0], height), _COLORS[names[row["label"]]]
        style: dict[str, Any] = {"color": color, "fontweight": "bold", "fontsize": 12, "va": "center"}
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(text, at, (10, 0), linespacing=1.1, **place, **style)


def _apart(heights: list[float], gap: float) -> list[float]:
    """Ascending heights moved `gap` apart, as little as possible in the mean square: an isotonic regression."""
    rest = [height - index * gap for index, height in enumerate(heights)]
    ends = range(len(rest))
    fitted = [max(min(fmean(rest[a : b + 1]) for b in ends[i:]) for a in ends[: i + 1]) for i in ends]
    return [height + index * gap for index, height in enumerate(fitted)]


def _mark_resume(axes: Axes, resume: dict[str, Any], move: dict[str, Any] | None) -> None:
    axes.axvline(resume["step"], color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    outcome = "same bits" if resume["equal"] else "OTHER BITS"
    _note(axes, resume["step"], f"{resume['label']} stopped here, resumed\nin a new process: {outcome}", "right")
    if move:
        outcome = "same bits" if move["equal"] and move["continued"] else "NOT THE SAME"
        _note(axes, resume["step"], f"and on 2 processes, saved,\nresumed on 3: {outcome}", "left")


def _note(axes: Axes, at: int, text: str, side: str) -> None:
    """Text that ends or begins at a step, at the bottom of the frame."""
    style: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
    style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # no line of the grid through the words
    axes.annotate(text, (at, 0.02), (-7 if side == "right" else 7, 0), ha=side, va="bottom", **style)


def _explain(axes: Axes, window: int) -> None:
    styles: dict[str, dict[str, Any]] = {
        "training, each step": {"linewidth": 0.8, "alpha": 0.5},
        f"training, mean of {window} steps": {"linewidth": 3},
        "validation, held-out files": {"linewidth": 0, "marker": "o", "markersize": 8},
    }
    lines = [Line2D([], [], color=_GREY, label=label, **style) for label, style in styles.items()]
    axes.legend(handles=lines, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0)


def _draw_bars(axes: Axes, rows: dict[str, dict[str, Any]], key: str, title: str, form: str) -> None:
    values = [row[key] for row in rows.values()]
    labels = [row["label"].replace("GefenMuon", "Gefen-\nMuon") for row in rows.values()]
    drawn = axes.bar(labels, values, color=[_COLORS[name] for name in rows], width=0.7)
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3, fontsize=13, fontweight="bold")
    axes.set_title(title, loc="left")
    axes.set_xlim(-0.5, max(1.5, len(rows) - 0.5))
    axes.set_ylim(0, 1.15 * max(values))
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=12)
