"""What is measured of one arm, inside a process of its own.

*Step*: seconds of `optimizer.step()` with fixed gradients. *First step*: the same of a fresh optimizer, after an
earlier one in the process has had all code compiled; what that cost is reported beside it, as one-time code. *State*:
the distinct storages that hang on `optimizer.state`. *Transient*: the peak resident memory of the process during one
step above what it held before, as the kernel counts it, so that scratch of any library is counted.
"""

import ctypes
import gc
import math
import os
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gefen_nn.optimizer_bytes import state_bytes
from tests.benchmarks import arms
from tests.benchmarks.arms import ARMS, DTYPES, EMBEDDINGS, SHAPES, Arm

_TURN_SECONDS = 0.05  # a turn has as many steps as fit in here, at least one
_CACHES = ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


class Options(NamedTuple):
    """What a measuring process is told.

    Attributes:
        scale: a key of `SHAPES`.
        dtype: of parameters and gradients, a key of `DTYPES`.
        threads: of torch, OpenMP and numba.
        cold: start the memory measure without cached code, to time its compilation.
        embedding: which of the scale's embeddings memory is measured with.
    """

    scale: str
    dtype: str
    threads: int
    cold: bool
    embedding: int = 0


def serve(pipe: Connection, task: str, name: str, options: Options) -> None:
    """Run a task and answer through the pipe: `("ok", value)`, or `("failed", reason)` and no more.

    Args:
        pipe: to the process that conducts.
        task: a key of `_TASKS`.
        name: a key of `ARMS`, or what the task makes of it.
        options: of the run.
    """
    _silence()
    gc.freeze()  # what is imported stays: a collection need not look at it
    threads = str(options.threads)
    os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, NUMBA_NUM_THREADS=threads)
    torch.set_num_threads(options.threads)
    try:
        _TASKS[task](pipe, name, options)
    except EOFError:  # the conductor is gone
        return
    except Exception as error:
        lines = str(error).strip().splitlines()
        pipe.send(("failed", f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"))


def _silence() -> None:
    """What packages print when imported or stepped belongs in no table."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _build(arm: Arm, named: list[Any]) -> torch.optim.Optimizer:
    if arm.folder is not None and str(arm.folder) not in sys.path:
        sys.path.insert(0, str(arm.folder))
    return arm.build(named)


def seconds(f: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def _time(pipe: Connection, name: str, options: Options) -> None:
    """First steps, then one turn of steps whenever asked."""
    named = arms.parameters(SHAPES[options.scale], DTYPES[options.dtype])
    facts, optimizer = _first_steps(ARMS[name], named)
    pipe.send(("ok", facts))
    _take_turns(pipe, optimizer.step)


def _first_steps(arm: Arm, named: list[Any]) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    as_found = seconds(_build(arm, named).step)
    built: list[float] = []
    first: list[float] = []
    while len(first) < 3 and sum(first) < 5:
        gc.collect()
        start = time.perf_counter()
        optimizer = _build(arm, named)
        built.append(time.perf_counter() - start)
        first.append(seconds(optimizer.step))
    facts = {
        "construct_s": built,
        "first_step_s": first,
        "one_time_as_found_s": max(0.0, as_found - statistics.median(first)),
        "state_bytes": state_bytes(optimizer),
        "param_bytes": sum(p.nbytes for _, p in named),
        "parameters": sum(p.numel() for _, p in named),
    }
    return facts, optimizer


def _take_turns(pipe: Connection, step: Callable[[], object]) -> None:
    """Answer every message with the median seconds of a few steps; before the first turn comes a warm-up."""
    last = 0.0
    while pipe.recv() == "turn":
        last = last or seconds(step)
        steps = max(1, min(20, math.ceil(_TURN_SECONDS / max(last, 1e-6))))
        last = statistics.median(seconds(step) for _ in range(steps))
        pipe.send(("ok", last))


def _copy(pipe: Connection, name: str, options: Options) -> None:
    """The yardstick of memory speed: a copy between two buffers."""
    entries = (1 << 26) if options.scale == "33m" else (1 << 22)
    source, target = torch.ones(entries), torch.zeros(entries)
    pipe.send(("ok", {"copied_bytes": source.nbytes + target.nbytes}))
    _take_turns(pipe, lambda: target.copy_(source))


def _memory(pipe: Connection, name: str, options: Options) -> None:
    """One-time code from cold caches, then resident and transient bytes of one tied embedding."""
    data = _status("self/status", "VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (data + _status("meminfo", "MemAvailable") * 7 // 10,) * 2)
    with tempfile.TemporaryDirectory() as folder:
        if options.cold:
            os.environ.update(dict.fromkeys(_CACHES, folder))
        small = arms.parameters(SHAPES["small"], DTYPES[options.dtype])
        first, second = (seconds(_build(ARMS[name], small).step) for _ in range(2))
        facts = _embedding_bytes(ARMS[name], options)
    one_time = {"one_time_cold_s": max(0.0, first - second)} if options.cold else {}
    pipe.send(("ok", facts | one_time))


def _embedding_bytes(arm: Arm, options: Options) -> dict[str, Any]:
    shape = EMBEDDINGS[options.scale][options.embedding]
    named = arms.parameters([shape], DTYPES[options.dtype])
    entries = sum(p.numel() for _, p in named)
    empty = _resident()
    optimizer = _build(arm, named)
    start = time.perf_counter()
    first = _peak_above(optimizer.step)
    again = 2 if time.perf_counter() - start < 30 else 1
    resident = _resident()
    later = max(_peak_above(optimizer.step)[0] for _ in range(again))
    return {
        "embedding": " x ".join(map(str, shape)),
        "resident_bytes_per_param": (resident - empty) / entries,
        "first_transient_bytes_per_param": max(0, first[1] - resident) / entries,
        "transient_bytes_per_param": later / entries,
    }


def _peak_above(f: Callable[[], object]) -> tuple[int, int]:
    """The peak of resident bytes during a call: above what was there before, and as it is."""
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew
    f()
    peak = _status("self/status", "VmHWM")
    return max(0, peak - before), peak


def _resident() -> int:
    """Resident bytes, after what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("self/status", "VmRSS")


def _status(file: str, key: str) -> int:
    """Bytes that the kernel tells."""
    found = re.search(rf"{key}:\s+(\d+) kB", (Path("/proc") / file).read_text())
    if found is None:
        raise OSError(f"/proc/{file} must tell `{key}`: it does not. Measure memory on Linux")
    return 1024 * int(found[1])


_TASKS = {"time": _time, "copy": _copy, "memory": _memory}
