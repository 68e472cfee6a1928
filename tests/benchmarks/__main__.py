"""Time what the library claims, each pair in turn in one run: `make bench`."""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from gefen_fn import learn_codebook
from gefen_nn import Gefen

SHAPES = [(512, 512)] * 4 + [(1408, 512), (512, 1408), (300, 300)] + [(512,)] * 8


def parameters() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.randn(s)) for s in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def seconds(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def in_turn(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every arm in every round; each arm runs once before, unmeasured."""
    for f in arms.values():
        f()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, f in arms.items():
            times[name].append(1e3 * seconds(f))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    counts = torch.randint(1, 1000, (4096,), generator=torch.Generator().manual_seed(0))
    arms = {
        "AdamW(fused=True) step": torch.optim.AdamW(parameters(), fused=True).step,
        "Gefen step, reference": Gefen(parameters()).step,
        "codebook, symmetric": lambda: learn_codebook(counts),
        "codebook, published": lambda: learn_codebook(counts, zero=False, symmetric=False),
    }
    times = in_turn(arms, arguments.rounds)
    rows = {k: {"median_ms": statistics.median(v), "min_ms": min(v), "max_ms": max(v)} for k, v in times.items()}
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "threads": arguments.threads, "rows": rows}))
        return
    for name, row in rows.items():
        print(f"{name:26s} median {row['median_ms']:9.2f} ms   ({row['min_ms']:.2f} to {row['max_ms']:.2f})")


if __name__ == "__main__":
    main()
