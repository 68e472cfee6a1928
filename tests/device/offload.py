"""State in pinned host memory: steps that fetch it have the bits of others, memory is freed, and what it costs in time.

Without a card a stand-in takes the host's place, so that this runs.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gefen_fn import MultiSteps, adamw, flatten_state, gefen, inject_hyperparams, move_state, state_bytes
from gefen_fn.tree import tree_leaves
from gefen_nn import Gefen, GefenMuon, TransformOptimizer, offload, restore
from gefen_nn.offload import Host
from tests import test_triton_step as cases
from tests.device.checks import Checks, difference
from tests.device.parity_optimizer import clipped
from tests.stand import Stand

_SHAPES = {"embed": (1000, 256), "w": (512, 700), "conv": (64, 32, 3, 3), "experts": (3, 64, 96), "norm": (512,)}
_PAGE = 1 << 18
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Gefen": lambda named, **kw: Gefen(named, lr=1e-2, weight_decay=0.1, **kw),
    "Gefen, stochastic_rounding": lambda named, **kw: Gefen(named, lr=1e-2, stochastic_rounding=True, **kw),
    "clipped": clipped,
    "GefenMuon": lambda named, **kw: GefenMuon(named, lr=1e-2, **kw),
    "adamw": lambda named, **kw: TransformOptimizer(named, inject_hyperparams(adamw)(1e-2), **kw),
    "MultiSteps": lambda named, **kw: TransformOptimizer(named, MultiSteps(gefen(1e-2), 2), **kw),
}


def offloads(checks: Checks) -> None:
    """Bits of every optimizer, then moves, memory and time."""
    for name, build in _OPTIMIZERS.items():
        for dtype in (torch.float32,) if checks.dry else (torch.float32, torch.bfloat16):
            for fused in (None, False):
                words = f"{name} {dtype}, {'fused' if fused is None else 'pure'}: fetched, the bits of resident steps"
                checks.make(words, lambda b=build, d=dtype, f=fused: _same_bits(checks, b, d, f))
    checks.make("moved away, used, loaded there and moved back: the bits of one that stayed", lambda: _moved(checks))
    checks.make("a state tree there and back", lambda: _tree(checks))
    if not checks.dry:
        checks.make("memory that is freed, and what a step fetches at a time", _memory)
        checks.make("milliseconds of a step of 403M entries", _times)


def _host(checks: Checks) -> Host:
    host = Stand() if checks.dry else Host("cpu")
    host.page = _PAGE
    return host


def _made(checks: Checks, build: Callable[..., Any], dtype: torch.dtype, **options: Any) -> tuple[dict[str, Any], Any]:
    start = {k: cases.noise(shape, 50 + i, dtype) for i, (k, shape) in enumerate(_SHAPES.items())}
    named = {k: Parameter(x.to(checks.device, copy=True)) for k, x in start.items()}
    return named, build(list(named.items()), **options)


def _step(named: dict[str, Any], optimizer: Any, t: int) -> None:
    for i, p in enumerate(named.values()):
        p.grad = cases.noise(p.shape, 100 * t + i, p.dtype).to(p.device)
    optimizer.step()


def _found(named: dict[str, Any], optimizer: Any) -> dict[str, Tensor]:
    return {k: x.detach().cpu() for k, x in (named | flatten_state(optimizer.state_tree())).items()}


def _same_bits(checks: Checks, build: Callable[..., Any], dtype: torch.dtype, fused: bool | None) -> dict[str, Any]:
    results = []
    for host in (None, _host(checks)):
        named, optimizer = _made(checks, build, dtype, fused=fused)
        optimizer.keep_state(host)
        for t in range(5):
            _step(named, optimizer, t)
        results.append(_found(named, optimizer))
    return difference(*results)


def _moved(checks: Checks) -> dict[str, Any]:
    (stays, near), (moves, far) = (_made(checks, _OPTIMIZERS["Gefen"], torch.bfloat16) for _ in range(2))
    for t in range(6):
        if t == 2:
            far.keep_state(_host(checks)) if checks.dry else offload(far)
        if t == 4:
            far.load_state_dict(near.state_dict())
            kept = [x for leaves in far.state.values() for x in leaves.values() if x.ndim > 1]
            if not checks.dry and not all(x.is_pinned() for x in kept):
                return {"passed": False, "reason": "a load left the pinned memory"}
        if t == 5:
            restore(far)
        _step(stays, near, t)
        _step(moves, far, t)
    return difference(_found(stays, near), _found(moves, far))


def _tree(checks: Checks) -> dict[str, Any]:
    named, optimizer = _made(checks, _OPTIMIZERS["Gefen"], torch.float32)
    _step(named, optimizer, 0)
    state = optimizer.state_tree()
    away = move_state(state, "cpu")
    there = all(x.device.type == "cpu" for x in tree_leaves(away) if x is not None)
    found = difference(flatten_state(state), flatten_state(move_state(away, checks.device)))
    return found | {"passed": found["passed"] and there}


def _large(leaves: int) -> tuple[dict[str, Any], Any]:
    named = {f"w{i}": Parameter(torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")) for i in range(leaves)}
    optimizer = Gefen(named.items(), lr=1e-2)
    for p in named.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return named, optimizer


def _memory() -> dict[str, Any]:
    _named, optimizer = _large(12)
    size, full = state_bytes(optimizer.state_tree()), torch.cuda.memory_allocated()
    offload(optimizer)
    freed = full - torch.cuda.memory_allocated()
    host = Host("cpu")
    host.page = 1
    optimizer.keep_state(host)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    most, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    passed = freed > 0.95 * size and most < 4.2 * size / 12 and left < size / 100
    return {"passed": passed, "state": size, "freed": freed, "most_of_a_step": most, "left_by_a_step": left}


def _times() -> dict[str, Any]:
    _named, optimizer = _large(24)
    size, found = state_bytes(optimizer.state_tree()), {}
    for name, change in (("resident", lambda _: None), ("fetched", offload), ("resident again", restore)):
        change(optimizer)
        optimizer.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            optimizer.step()
        torch.cuda.synchronize()
        found[name] = round((time.perf_counter() - start) * 200, 2)
    return found | {"gigabytes_per_second_each_way": round(size / found["fetched"] / 1e6, 1)}
