"""Step times in turn in one process, with what a step moves, launches and takes of memory.

*Step*: the time between two events around some steps, over their number, so host time counts where the card waits for
it. *Host*: seconds until a step has returned. *Kernels*: what the card was busy in one step, by the profiler. *Moved*:
gradient read, parameter and state read and written once. *Transient*: peak of allocated bytes in a step above those
before it.
"""

import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from gefen_fn import Block, Factored, chain, clip_by_global_norm, gefen, inject_hyperparams
from gefen_kernels import triton_norm, triton_stats, triton_update
from gefen_nn import Gefen, TransformOptimizer
from tests.benchmarks import arms
from tests.benchmarks.arms import OPTIONS, SHAPES, Shapes
from tests.benchmarks.measure import state_bytes
from tests.device.checks import DTYPES, Checks, Skip

_TURN_MS, _ROUNDS = 20.0, 15
_COPIED = 1 << 30
_KERNELS = {name for m in (triton_norm, triton_stats, triton_update) for name in vars(m) if name.endswith("_kernel")}

# One layer of Llama-3.2-1B is 60.8M parameters; with its tied embedding 1.24B in all.
_LAYER = [
    (2048, 2048),
    (512, 2048),
    (512, 2048),
    (2048, 2048),
    (8192, 2048),
    (8192, 2048),
    (2048, 8192),
    (2048,),
    (2048,),
]
WORKLOADS: dict[str, Shapes] = {
    "33m": SHAPES["33m"],  # with 300 small leaves
    "1b": [(128256, 2048), *_LAYER * 16, (2048,)],
    "small leaves": [(1024,), (64, 256)] * 150,
}

Build = Callable[[list[Any]], torch.optim.Optimizer]


class ClippedAdamW(torch.optim.AdamW):
    """AdamW after `clip_grad_norm_`, in one step."""

    def step(self, closure: Any = None) -> Any:
        """Clip, then step."""
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0, foreach=True)
        return super().step(closure)


def _clipped(**options: Any) -> Build:
    def rule(learning_rate: Any) -> Any:
        return chain(clip_by_global_norm(1.0), gefen(learning_rate, weight_decay=0.01, **options))

    return lambda named: TransformOptimizer(named, inject_hyperparams(rule)(1e-3))


def _ours(**options: Any) -> Build:
    return lambda named: Gefen(named, **OPTIONS, **options)


def _adamw(named: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(arms.tensors(named), **OPTIONS, fused=True)


BUILDS: dict[str, tuple[str, Build]] = {
    "AdamW fused bf16": ("bf16", _adamw),
    "AdamW fused fp32": ("fp32", _adamw),
    "Gefen bf16": ("bf16", _ours()),
    "Gefen fp32": ("fp32", _ours()),
    "Gefen Block bf16": ("bf16", _ours(second_moment=Block())),
    "Gefen one tile bf16": ("bf16", _ours(second_moment=Factored())),
    "AdamW fused clipped bf16": ("bf16", lambda named: ClippedAdamW(arms.tensors(named), **OPTIONS, fused=True)),
    "Gefen clipped bf16": ("bf16", _clipped()),
    "Gefen one tile clipped bf16": ("bf16", _clipped(second_moment=Factored())),
    "Gefen stochastic bf16": ("bf16", _ours(stochastic_rounding=True)),
}
GOALS = {
    "Gefen bf16": "AdamW fused bf16",
    "Gefen fp32": "AdamW fused fp32",
    "Gefen Block bf16": "AdamW fused bf16",
    "Gefen clipped bf16": "AdamW fused clipped bf16",
    "Gefen stochastic bf16": "AdamW fused bf16",
}


@dataclass
class Player:
    """An optimizer with its parameters, and what was measured of it."""

    name: str
    named: list[Any]
    optimizer: torch.optim.Optimizer
    facts: dict[str, Any]
    steps: int = 1
    failure: str = ""
    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """Time some steps."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        for _ in range(self.steps):
            self.optimizer.step()
        end.record()
        self.host_ms.append(1e3 * (time.perf_counter() - start) / self.steps)
        torch.cuda.synchronize()
        self.ms.append(begin.elapsed_time(end) / self.steps)


def times(checks: Checks, workload: str) -> None:
    """Every arm on one workload: prepared one by one, then in turn, then profiled."""
    torch.use_deterministic_algorithms(False)
    copied = copy_speed()
    checks.note(copy_bytes_per_s=copied, workload=workload)
    players: dict[str, Player] = {}

    def prepared(name: str) -> dict[str, Any]:
        players[name] = prepare(name, WORKLOADS[workload])
        return {"prepared in s": players[name].facts["first step as found s"]}

    for name in BUILDS:
        checks.make(f"{workload}: {name} takes its first steps", lambda n=name: prepared(n))
    play(checks, workload, players, copied)
    for ours, theirs in GOALS.items():
        checks.make(f"{workload}: {ours} is faster than {theirs}", lambda a=ours, b=theirs: _faster(players, a, b))
    for name in ("Gefen bf16", "Gefen fp32", "Gefen Block bf16"):
        checks.make(f"{workload}: {name} has at most 3 kernels of ours", lambda n=name: _few(players, n))
        checks.make(
            f"{workload}: {name} takes at most 0.1 B/param beside its state", lambda n=name: _thrifty(players, n)
        )


def _player(players: Mapping[str, Player], name: str, fact: str) -> Player:
    """A player that was measured.

    Raises:
        Skip: if it was not, which another check says.
    """
    player = players.get(name)
    if player is None or player.failure or fact not in player.facts:
        raise Skip(f"{name} was not measured")
    return player


def _faster(players: Mapping[str, Player], ours: str, theirs: str) -> dict[str, Any]:
    pair = [_player(players, name, "parameters").ms for name in (ours, theirs)]
    ratios = [a / b for a, b in zip(*pair, strict=True)]
    return {"passed": statistics.median(ratios) < 1, "ratio": spread(ratios)}


def _few(players: Mapping[str, Player], name: str) -> dict[str, Any]:
    found = _player(players, name, "launches").facts["launches"]
    own = sum(n for kernel, n in found["names"].items() if kernel in _KERNELS)
    return {"passed": 0 < own <= 3, "ours": own, **found}


def _thrifty(players: Mapping[str, Player], name: str) -> dict[str, Any]:
    found = _player(players, name, "transient B/param").facts["transient B/param"]
    return {"passed": found <= 0.1, "B/param": found}


def copy_speed() -> float:
    """Bytes per second of a copy on the card, read and written ones counted."""
    source, target = (torch.empty(_COPIED // 4, device="cuda").normal_() for _ in range(2))
    found = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return 2 * _COPIED / (statistics.median(found[5:]) * 1e-3)


def parameters(shapes: Shapes, dtype: torch.dtype) -> list[tuple[str, Parameter]]:
    """Named parameters on the card with gradients, the same numbers for every arm."""
    source, out = torch.Generator("cuda").manual_seed(0), []
    for n, shape in enumerate(shapes):
        p = Parameter(torch.empty(shape, dtype=dtype, device="cuda").normal_(0, 0.02, generator=source))
        p.grad = torch.empty(shape, dtype=dtype, device="cuda").normal_(0, 1e-3, generator=source)
        out.append((f"p{n}", p))
    return out


def prepare(name: str, shapes: Shapes, build: Build | None = None, dtype: str = "bf16") -> Player:
    """First steps: one that compiles what is to be compiled, one of a fresh optimizer; then some to warm up."""
    dtype, build = (dtype, build) if build else BUILDS[name]
    named = parameters(shapes, DTYPES[dtype])
    found = seconds(build(named).step)
    gc.collect()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    optimizer = build(named)
    torch.cuda.synchronize()
    built = time.perf_counter() - start
    first, first_peak = peak(lambda: seconds(optimizer.step))
    for _ in range(2):
        optimizer.step()
    once, later_peak = peak(lambda: seconds(optimizer.step))
    entries = sum(p.numel() for _, p in named)
    facts = {
        "parameters": entries,
        "leaves": len(shapes),
        "first step as found s": found,
        "first step s": first,
        "build s": built,
        "state B/param": state_bytes(optimizer) / entries,
        "first transient B/param": first_peak / entries,
        "transient B/param": later_peak / entries,
        "moved": 3 * sum(p.nbytes for _, p in named) + 2 * state_bytes(optimizer),
    }
    return Player(name, named, optimizer, facts, max(1, min(20, math.ceil(_TURN_MS / max(1e3 * once, 1e-3)))))


def seconds(f: Callable[[], object]) -> float:
    """Seconds until the card has done what a call asks."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(f: Callable[[], float]) -> tuple[float, int]:
    """What a call returns, and the peak of allocated bytes above those before; what it keeps of them not counted."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = f()
    kept = max(0, torch.cuda.memory_allocated() - before)
    return value, torch.cuda.max_memory_allocated() - before - kept


def play(checks: Checks, workload: str, players: Mapping[str, Player], copied: float) -> None:
    """Rounds in which each takes its turn, another one first in each; then one step of each is profiled."""
    order = list(players.values())
    for n in range(_ROUNDS):
        for player in order[n % len(order) :] + order[: n % len(order)]:
            try:
                player.turn()
            except Exception as error:  # costs this arm only
                player.failure = f"{type(error).__name__}: {error}"
        order = [player for player in order if not player.failure]
    for name, player in players.items():
        checks.make(f"{workload}: a step of {name}, profiled", lambda p=player: _profiled(p))
        checks.make(f"{workload}: {name}", lambda p=player: row(p, copied))


def _profiled(player: Player) -> dict[str, Any]:
    if player.failure:
        raise Skip(player.failure)
    player.facts["launches"] = launches(player.optimizer.step)
    return dict(player.facts["launches"])


def launches(step: Callable[[], object]) -> dict[str, Any]:
    """What one step has the card do: kernels by name, copies, and their time."""
    kinds = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in kinds]
    out: dict[str, Any] = {word: sum(kinds[e["cat"]] == word for e in events) for word in kinds.values()}
    names: dict[str, int] = {}
    for e in events:
        key = e["name"][:60]
        names[key] = names.get(key, 0) + 1
    return out | {"busy_ms": sum(e["dur"] for e in events) / 1e3, "names": names}


def row(player: Player, copied: float) -> dict[str, Any]:
    """What the report's table holds of an arm."""
    if player.failure:
        raise RuntimeError(player.failure)
    facts, ms = player.facts, statistics.median(player.ms)
    busy = facts.get("launches", {}).get("busy_ms")
    return {
        "row": True,
        "ms": spread(player.ms),
        "host_ms": spread(player.host_ms),
        "kernels_ms": busy,
        "of_copy": facts["moved"] / (ms * 1e-3) / copied,
        "kernels_of_copy": facts["moved"] / (busy * 1e-3) / copied if busy else None,
        "moved_B_per_param": facts["moved"] / facts["parameters"],
        "first_step_in_steps": facts["first step s"] * 1e3 / ms,
        **{key.replace(" ", "_"): value for key, value in facts.items() if key != "moved"},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
