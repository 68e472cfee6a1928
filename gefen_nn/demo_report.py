"""How the demo shows itself: the progress bars, the picture and the closing table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:
    raise ImportError(
        f"`gefen demo` draws with matplotlib and rich: {error}. Run `pip install 'gefen-fn[demo]'`."
    ) from error

_COLORS = {"adamw": "#7f7f7f", "gefen": "#d62728"}


def progress_bars() -> Progress:
    """Bars on the error stream, so that standard output stays machine-readable.

    Returns:
        A progress display whose tasks carry the fields `loss` (nats per byte) and `speed` (tokens per second).
    """
    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws loss curves and memory bars.

    Args:
        report: What `demo.json` holds.
        path: The PNG to write.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 1))
    _draw_losses(curves, report)
    _draw_memory(bars, report["optimizers"])
    figure.savefig(path, dpi=120)


def show(report: dict[str, Any]) -> None:
    """Prints the closing table and the outcome of the resumed run on standard output.

    Args:
        report: What `demo.json` holds.
    """
    console = Console()
    console.print(_table(report))
    resume = report["resume"]
    outcome = "equals the uninterrupted run to the bit" if resume["equal"] else "DIFFERS from the uninterrupted run"
    console.print(f"Resumed {resume['label']} from step {resume['step']} in a new process: {outcome}.")
    console.print(
        f"Before, the CPU's loops were compiled or loaded in {report['compile_s']:.1f} s (compiled once a machine)."
    )


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=f"{report['parameters']:,} parameters, {report['settings']['steps']} steps")
    table.add_column("optimizer")
    for heading in ("validation loss", "state bytes/param", "step ms", "optimizer ms", "first step ms"):
        table.add_column(heading, justify="right")
    for row in report["optimizers"].values():
        loss, memory = f"{row['validation_loss']:.4f}", f"{row['state_bytes_per_param']:.3f}"
        times = (f"{row[key]:.0f}" for key in ("step_ms", "optimizer_ms", "first_step_ms"))
        table.add_row(row["label"], loss, memory, *times)
    return table


def _draw_losses(axes: Axes, report: dict[str, Any]) -> None:
    for name, row in report["optimizers"].items():
        axes.plot(range(1, len(row["losses"]) + 1), row["losses"], color=_COLORS[name], label=row["label"], linewidth=1)
    resume = report["resume"]
    steps = range(resume["step"] + 1, report["settings"]["steps"] + 1)
    axes.plot(steps, resume["losses"], "k:", linewidth=1.5, label=f"{resume['label']}, resumed")
    axes.set(xlabel="step", ylabel="training loss, nats per byte", title="Loss")
    axes.legend(frameon=False)


def _draw_memory(axes: Axes, rows: dict[str, dict[str, Any]]) -> None:
    values = [row["state_bytes_per_param"] for row in rows.values()]
    drawn = axes.bar([row["label"] for row in rows.values()], values, color=[_COLORS[name] for name in rows])
    axes.bar_label(drawn, fmt="%.2f")
    axes.set(ylabel="bytes per parameter", title="Optimizer state")
