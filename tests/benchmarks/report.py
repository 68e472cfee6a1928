"""How a run shows itself: a table per dtype, as text and on the screen, and a picture."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]

_COLORS = {"ours": "#d62728", "torch": "#7f7f7f", "peer": "#1f77b4"}
_FAMILIES = {"ours": "ours", "torch": "torch", "peer": "peers"}
_COLUMNS = (
    ("step, ns/param", "median (min..max)"),
    ("x AdamW fused", "median (min..max)"),
    ("at copy speed", "ns/param"),
    ("first step", "s (steps)"),
    ("build", "s"),
    ("one-time code", "s, cold / as found"),
    ("state", "B/param"),
    ("transient", "B/param, step / first"),
)
_NOTES = """\
All arms take turns in one run, each in a process of its own; the ratio is taken round by round.
Step: optimizer.step() alone. First step: of a fresh optimizer, calibration included, compiled code ready; build: its
constructor. One-time code: what the very first step of a process took more, from cold caches and as they were found.
At copy speed: gradient once, parameter and state twice (read, written), at the speed of a copy in the same rounds.
State: distinct storages on optimizer.state. Transient: peak resident memory of the process during one step above what
it held before, with one tied embedding, in a process of its own; "first" is above what stays after the first step.
A megabyte or two of it is noise.
"""


def show(result: dict[str, Any], out: Path) -> None:
    """Print the tables; write them to `bench.txt` and the picture to `bench.png`.

    Args:
        result: what `bench.json` holds.
        out: an existing folder.
    """
    with (out / "bench.txt").open("w") as file:
        for console in (Console(file=file, width=170), _screen()):
            for dtype, measured in result["dtypes"].items():
                console.print(_table(dtype, measured, result))
            console.print(_NOTES, soft_wrap=True, highlight=False)
    _draw(result, out / "bench.png")


def _screen() -> Console:
    """Standard output; wide enough for the table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


def _table(dtype: str, measured: dict[str, Any], result: dict[str, Any]) -> Table:
    rows, settings = measured["arms"].values(), result["settings"]
    entries = next((row["parameters"] for row in rows if "parameters" in row), 0)
    title = f"{dtype}: {entries:,} parameters, {settings['threads']} threads, {settings['rounds']} rounds"
    table = Table(title=title, caption_justify="left")
    table.add_column("optimizer")
    for heading, unit in _COLUMNS:
        table.add_column(f"{heading}\n{unit}", justify="right")
    for row in rows:
        name = f"{row['label']} {row['version'] or ''}".strip()
        table.add_row(name, *(_cells(row) if "reason" not in row else ["not measured"]))
    table.caption = Text("\n".join(_reasons(rows)))
    return table


def _reasons(rows: Iterable[Row]) -> Iterator[str]:
    """Why something was not measured."""
    for row in rows:
        if "reason" in row:
            yield f"{row['label']}: {row['reason']}"
        yield from (f"{row['label']}, memory with {reason}" for reason in row.get("memory_reasons", []))


def _cells(row: Row) -> list[str]:
    ratio, first = row.get("ratio"), row["first_step_s"]["median"]
    transient = (row.get(f"{kind}transient_bytes_per_param") for kind in ("", "first_"))
    return [
        _spread(row["step_ns"]),
        _spread(ratio) if ratio else "-",
        _number(row["floor_ns"]),
        f"{first:.3f} ({row['first_step_in_steps']:.1f})",
        f"{row['construct_s']['median']:.3f}",
        f"{_number(row.get('one_time_cold_s'), 1)} / {row['one_time_as_found_s']:.1f}",
        _number(row["state_bytes_per_param"], 3),
        " / ".join(_number(value, 3) for value in transient),
    ]


def _spread(values: Row) -> str:
    return f"{_three(values['median'])} ({_three(values['min'])}..{_three(values['max'])})"


def _three(value: float) -> str:
    """About three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _draw(result: dict[str, Any], path: Path) -> None:
    dtypes = result["dtypes"]
    height = 1.4 + 0.42 * max(len(measured["arms"]) for measured in dtypes.values())
    figure = Figure(figsize=(14, height * len(dtypes) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    settings, machine = result["settings"], result["machine"]
    run = f"{settings['threads']} threads, {settings['rounds']} rounds in turn, torch {machine['torch']}"
    figure.suptitle(
        f"One optimizer step, {settings['scale']}: {run}\nbar: median, whiskers: min and max, black: at copy speed"
    )
    axes = figure.subplots(len(dtypes), 3, width_ratios=(5, 3, 3), sharey="row", squeeze=False)
    for (dtype, measured), (times, state, transient) in zip(dtypes.items(), axes, strict=True):
        rows = list(measured["arms"].values())
        _draw_times(times, rows, dtype)
        _draw_bars(state, rows, "state_bytes_per_param", "state, bytes/param")
        _draw_bars(transient, rows, "transient_bytes_per_param", "transient, bytes/param")
    figure.savefig(path, dpi=120)


def _draw_times(axes: Axes, rows: list[Row], dtype: str) -> None:
    """Horizontal bars on a log scale, with the spread, the floor and each failed arm's reason."""
    measured = [row for row in rows if "step_ns" in row]
    smallest = min((min(row["step_ns"]["min"], row["floor_ns"] or math.inf) for row in measured), default=1.0) / 1.5
    axes.set_xscale("log")
    for y, row in enumerate(rows):
        if "step_ns" in row:
            _draw_time(axes, y, row)
        else:
            axes.text(smallest * 1.1, y, _short(row["reason"]), va="center", fontsize=8, style="italic", color="0.4")
    largest = max((row["step_ns"]["max"] for row in measured), default=10.0)
    axes.set_xlim(smallest, largest * (largest / smallest) ** 0.35)  # room for the labels
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(f"{dtype}: step, ns/param (log scale) and multiple of AdamW fused", fontsize=10)
    axes.grid(axis="x", alpha=0.3)


def _draw_time(axes: Axes, y: int, row: Row) -> None:
    step, color = row["step_ns"], _COLORS[row["family"]]
    below, above = step["median"] - step["min"], step["max"] - step["median"]
    axes.barh(y, step["median"], color=color, xerr=[[below], [above]], ecolor="0.2", capsize=3)
    if row["floor_ns"] is not None:
        axes.plot([row["floor_ns"]] * 2, [y - 0.4, y + 0.4], color="black", linewidth=2)
    ratio = f"  {_three(row['ratio']['median'])}x" if "ratio" in row else ""
    axes.text(step["max"] * 1.15, y, f"{_three(step['median'])}{ratio}", va="center", fontsize=9)


def _draw_bars(axes: Axes, rows: list[Row], key: str, title: str) -> None:
    """Horizontal bars on a linear scale."""
    for y, row in enumerate(rows):
        if row.get(key) is not None:
            bar = axes.barh(y, row[key], color=_COLORS[row["family"]])
            axes.bar_label(bar, fmt="%.2f", padding=3, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)


def _short(reason: str, most: int = 90) -> str:
    return reason if len(reason) <= most else f"{reason[: most - 3]}..."
