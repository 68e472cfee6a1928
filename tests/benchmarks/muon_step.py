"""Seconds of a step of GefenMuon by those of torch's Muon and fused AdamW: `python -m tests.benchmarks.muon_step`."""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from gefen_nn import GefenMuon, route
from gefen_nn.demo_model import Decoder
from gefen_nn.demo_train import torch_threads

_BETAS, _DECAY = (0.9, 0.99), 0.1


def torch_hybrid(model: nn.Module, lr: float, *, betas: tuple[float, float]) -> list[torch.optim.Optimizer]:
    """`torch.optim.Muon` for the matrices that `route` finds, if they have two axes, and fused AdamW for all else."""
    labels = route(model).labels
    taken = {name: labels[name] == "muon" and p.dim() == 2 for name, p in model.named_parameters()}
    parts = [[p for name, p in model.named_parameters() if taken[name] is own] for own in (True, False)]
    muon = torch.optim.Muon(parts[0], lr, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(parts[1], lr, betas=betas, weight_decay=_DECAY, fused=True)]


def step_ratios(rounds: int, steps: int = 10) -> list[float]:
    """The two take turns on the demo's model; the first round does not count."""
    models = [Decoder(), Decoder()]
    for model in models:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
    both = [
        [GefenMuon(models[0], 1e-3, betas=_BETAS, weight_decay=_DECAY)],
        torch_hybrid(models[1], 1e-3, betas=_BETAS),
    ]
    turns = [[_seconds(optimizers, steps) for optimizers in both] for _ in range(rounds + 1)]
    return [ours / theirs for ours, theirs in turns[1:]]


def _seconds(optimizers: Sequence[torch.optim.Optimizer], steps: int) -> float:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.muon_step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns that each takes (15)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (2)")
    given = parser.parse_args()
    with torch_threads(given.threads):
        ratios = step_ratios(given.rounds)
    print(
        f"A GefenMuon step takes {statistics.median(ratios):.3f} of torch's Muon + fused AdamW "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds, {given.threads} threads)."
    )


if __name__ == "__main__":
    main()
