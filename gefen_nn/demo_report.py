"""What the demo prints: the progress bars and the closing table."""

from __future__ import annotations

from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:
    raise ImportError(f"`gefen demo` prints with rich: {error}. Run `pip install 'gefen-fn[demo]'`.") from error

_NOTES = {
    "gefen": "Gefen: 1-byte codes with fp32 scales; vectors and small leaves stay fp32.",
    "gefen_muon": "GefenMuon: Muon with such codes for the blocks' matrices, Gefen for all else.",
}


def announce(line: str) -> None:
    """Prints a line on the error stream, so that standard output stays machine-readable.

    Args:
        line: What to say.
    """
    Console(stderr=True, soft_wrap=True).print(line, highlight=False)


def progress_bars() -> Progress:
    """Bars on the error stream, beside what is announced.

    Returns:
        A progress display whose tasks carry the fields `loss` (nats per byte) and `speed` (tokens per second).
    """
    return Progress(
        TextColumn("{task.description:<17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def show(report: dict[str, Any]) -> None:
    """Prints the closing table and how the resumed runs ended on standard output.

    Args:
        report: What `demo.json` holds.
    """
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(report), soft_wrap=False)
    resume = report["resume"]
    outcome = "equals the uninterrupted run to the bit" if resume["equal"] else "DIFFERS from the uninterrupted run"
    console.print(f"Resumed {resume['label']} from step {resume['step']} in a new process: {outcome}.")
    if "move" in report:
        console.print(f"Trained on by 2 processes under FSDP2, saved, loaded by 3: {_moved(report['move'])}.")
    console.print(f"The CPU's loops took {report['compile_s']:.1f} s before, to compile (once a machine) or to load.")


def _moved(move: dict[str, Any]) -> str:
    state = "state equal to the bit" if move["equal"] else "OTHER STATE"
    losses = f"losses within {move['difference']:.0e} of those of the 2"
    return f"{state}, {losses}" if move["continued"] else f"{state}, {losses}, which is TOO FAR"


def _table(report: dict[str, Any]) -> Table:
    data = report["data"]
    title = f"{report['parameters']:,} parameters, {report['settings']['steps']} steps"
    train, held_out = (f"{data[key] / 1e6:.1f} MB" for key in ("train_bytes", "validation_bytes"))
    text = f"Text: {data['name']}, {train} to train on, {held_out} held out."
    notes = [_NOTES[name] for name in report["optimizers"] if name in _NOTES]
    table = Table(title=title, caption="\n".join([text, *notes]), caption_justify="left")
    table.add_column("optimizer")
    for heading in (
        "lr",
        "held-out loss",
        "state bytes per param",
        "step ms",
        "optimizer ms",
        "first step ms",
    ):
        table.add_column(heading, justify="right")
    for row in report["optimizers"].values():
        loss, memory = f"{row['validation_loss']:.4f}", f"{row['state_bytes_per_param']:.3f}"
        times = (f"{row[key]:.0f}" for key in ("step_ms", "optimizer_ms", "first_step_ms"))
        table.add_row(row["label"], f"{row['lr']:g}", loss, memory, *times)
    return table
