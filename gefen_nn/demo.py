"""`gefen demo`: trains a small decoder with each optimizer, stops, resumes in a new process, and reports."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gefen_kernels.ops import warm_up
from gefen_nn import console
from gefen_nn.demo_data import Text, standard_library_text
from gefen_nn.demo_picture import draw
from gefen_nn.demo_report import announce, progress_bars, show
from gefen_nn.demo_train import (
    LABELS,
    RATES,
    Run,
    Settings,
    load_run,
    same_bits,
    torch_threads,
    validation_steps,
    write_atomically,
)
from gefen_nn.demo_world import AFTER, BEFORE, change_world, start
from gefen_nn.optimizer import TransformOptimizer

_DATA = "Python's standard library"
_CHECKPOINT = "half-way.pt"
_SHARED = f"saved-by-{BEFORE}"


def run_demo(names: Sequence[str], settings: Settings, out: Path, *, as_json: bool = False) -> bool:
    """Trains, resumes, changes worlds, compares; writes `demo.json`, `demo.png` and the checkpoints into `out`.

    Args:
        names: Optimizers, keys of `OPTIMIZERS`; the last one is resumed, also on more processes unless it is torch's.
        settings: Steps, seed and sizes; `steps >= 2`.
        out: Folder for the results, made if missing.
        as_json: Print the report as JSON instead of a table.

    Returns:
        Whether the resumed run equals the uninterrupted one to the bit, and the move to more processes lost nothing.

    Raises:
        RuntimeError: If a resuming process fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    compiling = warm_up()
    text = standard_library_text()
    runs = {name: Run(name, settings) for name in names}
    resumed = runs[names[-1]]
    checkpoint = out / _CHECKPOINT
    announce(f"Training on {_DATA}, {text.train.numel() / 1e6:.1f} MB of text, {settings.steps} steps each.")
    with torch_threads(settings.threads):
        _train(list(runs.values()), text, save=(resumed, checkpoint))
    report = {**_report(runs, text), "compile_s": compiling}
    report["resume"] = _resume_elsewhere(resumed, checkpoint)
    outcomes = [report["resume"]["equal"]]
    if isinstance(resumed.optimizer, TransformOptimizer):
        announce(f"Moving {LABELS[resumed.name]} from {BEFORE} processes to {AFTER}, under FSDP2.")
        report["move"] = change_world(checkpoint, out / _SHARED)
        outcomes += [report["move"]["equal"], report["move"]["continued"]]
    _publish(report, out, as_json)
    return all(outcomes)


def resume_demo(checkpoint: Path, out: Path) -> None:
    """Loads a checkpoint, trains to the end and saves what the parent process compares.

    Args:
        checkpoint: Written by `run_demo` half-way.
        out: File for the final parameters and optimizer state (`tensors`) and the losses of the steps taken (`losses`).
    """
    run = load_run(checkpoint)
    with torch_threads(run.settings.threads):
        _train([run], standard_library_text(), label="{} resumed")
    write_atomically(out, {"tensors": run.final_tensors(), "losses": run.losses})


def _train(runs: list[Run], text: Text, *, save: tuple[Run, Path] | None = None, label: str = "{}") -> None:
    # Runs take turns at each step, so that a busy machine slows all of them alike.
    # A resumed run is not judged on its way: the uninterrupted one was, and must still have the same bits.
    settings, first = runs[0].settings, runs[0].step
    judged = validation_steps(settings.steps) if save else set()
    with progress_bars() as bars:
        fields: dict[str, Any] = {"total": settings.steps, "completed": first, "loss": float("nan"), "speed": 0.0}
        tasks = [bars.add_task(label.format(LABELS[run.name]), **fields) for run in runs]
        for step in range(first, settings.steps):
            if save and step == settings.steps // 2:
                save[0].save(save[1])
            for run, task in zip(runs, tasks, strict=True):
                loss = run.train_step(text)
                bars.update(task, advance=1, loss=loss, speed=_tokens_per_second(run))
                if run.step in judged:
                    run.validate(text)


def _tokens_per_second(run: Run) -> float:
    recent = run.step_seconds[-20:]
    return run.settings.batch * run.settings.context * len(recent) / sum(recent)


def _report(runs: dict[str, Run], text: Text) -> dict[str, Any]:
    first = next(iter(runs.values()))
    data = {"name": _DATA, "train_bytes": text.train.numel(), "validation_bytes": text.validation.numel()}
    return {
        "parameters": first.parameter_count(),
        "settings": first.settings._asdict(),
        "data": data,
        "torch": torch.__version__,
        "optimizers": {name: _row(run) for name, run in runs.items()},
    }


def _row(run: Run) -> dict[str, Any]:
    return {
        "label": LABELS[run.name],
        "lr": RATES[run.name],
        "validation_loss": run.validation[-1][1],
        "state_bytes_per_param": run.state_bytes() / run.parameter_count(),
        "step_ms": 1e3 * median(run.step_seconds),
        "optimizer_ms": 1e3 * median(run.optimizer_seconds),
        "first_step_ms": 1e3 * run.step_seconds[0],
        "losses": run.losses,
        "validation": run.validation,
    }


def _resume_elsewhere(run: Run, checkpoint: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "resumed.pt"
        _call_resume(checkpoint, result)
        resumed = torch.load(result, weights_only=True)
    step = run.settings.steps // 2
    same_losses = resumed["losses"] == run.losses[step:]
    equal = same_losses and same_bits(resumed["tensors"], run.final_tensors())
    return {"label": LABELS[run.name], "step": step, "equal": equal, "losses": resumed["losses"]}


def _call_resume(checkpoint: Path, result: Path) -> None:
    code = start("demo-resume", checkpoint, result).wait()
    if code:
        raise RuntimeError(f"`demo-resume` must exit with 0: got {code}. Its message stands above; fix it and rerun.")


def _publish(report: dict[str, Any], out: Path, as_json: bool) -> None:
    (out / "demo.json").write_text(console.as_json(report, indent=1) + "\n")
    draw(report, out / "demo.png")
    if as_json:
        print(console.as_json(report))
        return
    show(report)
    megabytes = (out / _CHECKPOINT).stat().st_size / 1e6
    shared = f", and the checkpoint of {BEFORE} processes, {_SHARED}," if "move" in report else ""
    print(f"Wrote demo.png, demo.json, the checkpoint {_CHECKPOINT} ({megabytes:.1f} MB){shared} to {out}.")
