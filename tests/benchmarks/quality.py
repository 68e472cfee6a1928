"""Validation loss of the demo's model under Muon and AdamW, each at its own best learning rate, and what a step costs.

`python -m tests.benchmarks.quality` takes about half an hour on one core. Each arm is trained at every learning rate of
its grid with the first seed, then at the best of them with the others; a file that is there already is carried on.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gefen_nn import Gefen, GefenMuon, route
from gefen_nn.demo_data import Text, batch_at, standard_library_text
from gefen_nn.demo_model import Decoder, next_byte_loss
from gefen_nn.demo_train import Settings, lr_factor, torch_threads

Build = Callable[[nn.Module, float], list[torch.optim.Optimizer]]
_OPTIONS: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1}


def torch_hybrid(model: nn.Module, lr: float, **options: Any) -> list[torch.optim.Optimizer]:
    """`torch.optim.Muon` for the matrices that `route` finds, and AdamW for all else."""
    labels = route(model).labels
    parts = [[p for name, p in model.named_parameters() if (labels[name] == "muon") is own] for own in (True, False)]
    muon = torch.optim.Muon(parts[0], lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(parts[1], lr, **_OPTIONS, **options)]


ADAM_RATES, MUON_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), (4e-3, 8e-3, 16e-3, 32e-3)
ARMS: dict[str, tuple[tuple[float, ...], Build]] = {
    "AdamW": (ADAM_RATES, lambda model, lr: [torch.optim.AdamW(model.parameters(), lr, **_OPTIONS)]),
    "Gefen": (ADAM_RATES, lambda model, lr: [Gefen(model.parameters(), lr, **_OPTIONS)]),
    "torch Muon + AdamW": (MUON_RATES, torch_hybrid),
    "dense Muon + AdamW": (
        MUON_RATES,
        lambda model, lr: [GefenMuon(model, lr, quantize=False, backup="adamw", **_OPTIONS)],
    ),
    "dense Muon + Gefen": (MUON_RATES, lambda model, lr: [GefenMuon(model, lr, quantize=False, **_OPTIONS)]),
    "GefenMuon": (MUON_RATES, lambda model, lr: [GefenMuon(model, lr, **_OPTIONS)]),
}


def trained(build: Build, lr: float, seed: int, steps: int, text: Text) -> float:
    """Train the demo's model and judge it on the held-out files, in nats per byte."""
    size = {"batch": Settings().batch, "context": Settings().context}
    torch.manual_seed(seed)
    model = Decoder(context=size["context"])
    optimizers = build(model, lr)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda at: lr_factor(at, steps)) for o in optimizers]
    for at in range(steps):
        next_byte_loss(model, batch_at(text.train, at, seed=seed, **size)).backward()
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
    with torch.no_grad():
        losses = [next_byte_loss(model, batch_at(text.validation, at, seed=0, **size)).item() for at in range(16)]
    return statistics.fmean(losses)


def measured(arms: Iterable[str], seeds: int, steps: int, path: Path) -> dict[str, Any]:
    """Losses by arm, learning rate and seed; written after each run."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    text = standard_library_text()

    def run(name: str, lr: float, seed: int) -> float:
        losses = found.setdefault(name, {}).setdefault(str(lr), {})
        if str(seed) not in losses:
            losses[str(seed)] = trained(ARMS[name][1], lr, seed, steps, text)
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}, lr {lr:g}, seed {seed}: {losses[str(seed)]:.4f}", flush=True)
        return float(losses[str(seed)])

    for name in arms:
        rates = ARMS[name][0]
        best = min(rates, key=lambda lr: run(name, lr, 0))
        for seed in range(1, seeds):
            run(name, best, seed)
    return found


def table(found: dict[str, Any]) -> str:
    """One line per arm: its best learning rate, the losses there, and those of the first seed at all rates."""
    lines = []
    for name, by_rate in found.items():
        best = min(by_rate, key=lambda lr: by_rate[lr]["0"])
        losses = list(by_rate[best].values())
        grid = ", ".join(f"{lr}: {by_rate[lr]['0']:.3f}" for lr in by_rate)
        ends = f"{statistics.fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}, {len(losses)} seeds)"
        lines.append(f"{name:<19} lr {best:<6} {ends}; seed 0: {grid}")
    return "\n".join(lines)


def step_ratios(rounds: int, steps: int = 10) -> list[float]:
    """Seconds of a GefenMuon step by those of torch's Muon and fused AdamW on the same split, in turns."""
    builds: list[Build] = [ARMS["GefenMuon"][1], lambda model, lr: torch_hybrid(model, lr, fused=True)]
    models = [Decoder(), Decoder()]
    for model in models:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
    both = [build(model, 1e-3) for build, model in zip(builds, models, strict=True)]
    turns = [[_seconds(optimizers, steps) for optimizers in both] for _ in range(rounds + 1)]
    return [ours / theirs for ours, theirs in turns[1:]]


def _seconds(optimizers: list[torch.optim.Optimizer], steps: int) -> float:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quality", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of each run (300)")
    parser.add_argument("--seeds", type=int, default=3, help="at the best learning rate (3)")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--rounds", type=int, default=15, help="of the comparison of times (15)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for quality.json (bench-out)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with torch_threads(2):
        ratios = step_ratios(given.rounds)
    print(
        f"A GefenMuon step takes {statistics.median(ratios):.3f} of torch's Muon + fused AdamW "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds, 2 threads).",
        flush=True,
    )
    with torch_threads(1):
        print(table(measured(given.arms, given.seeds, given.steps, given.out / "quality.json")))


if __name__ == "__main__":
    main()
