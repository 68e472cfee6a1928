"""The run: arguments, measures in turn, one row per arm and dtype, and the three files."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tests.benchmarks import report
from tests.benchmarks.arms import ARMS, DTYPES, REFERENCE, SHAPES
from tests.benchmarks.measure import Options
from tests.benchmarks.turns import measure_memory, measure_times

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write `bench.txt`, `bench.json` and `bench.png`; returns the exit code."""
    given = _parser().parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"settings": _settings(given), "machine": _machine(), "dtypes": {}}
    dtypes = list(DTYPES) if given.dtype == "both" else [given.dtype]
    with Console(stderr=True).status("Starting") as status:
        for dtype in dtypes:
            options = Options(given.scale, dtype, given.threads, given.cold)
            result["dtypes"][dtype] = _measured(given, options, status.update)
    (given.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    report.show(result, given.out)
    print(f"Wrote bench.txt, bench.json and bench.png to {given.out}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--scale", choices=SHAPES, default="33m", help="how large the parameters are (33m)")
    parser.add_argument("--dtype", choices=[*DTYPES, "both"], default="both", help="of parameters and gradients (both)")
    parser.add_argument("--threads", type=_positive, default=2, metavar="N", help="of every arm (2)")
    parser.add_argument("--rounds", type=_positive, default=9, metavar="N", help="turns that each arm takes (9)")
    parser.add_argument("--arms", type=_names, default=list(ARMS), metavar="A,B", help=f"of {', '.join(ARMS)} (all)")
    parser.add_argument("--limit", type=_positive, default=900, metavar="S", help="seconds that a measure may take")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out transient bytes")
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="do not time compilation from cold caches")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-out"), metavar="FOLDER", help="for the files (bench-out)"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1: got {text!r}")
    return int(text)


def _names(text: str) -> list[str]:
    for name in (names := text.split(",")):
        if name not in ARMS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(ARMS)}: got {name!r}")
    return names


def _settings(given: argparse.Namespace) -> Row:
    own = {key: getattr(given, key) for key in ("scale", "threads", "rounds", "arms", "memory", "cold")}
    return own | {"reference": REFERENCE, "steps": "a turn is the median of the steps that fit in 50 ms, at most 20"}


def _machine() -> Row:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return versions | {"cores": os.cpu_count(), "load": os.getloadavg()[0], "capability": _capability()}


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()


def _measured(given: argparse.Namespace, options: Options, say: Any) -> dict[str, Any]:
    """One dtype: the yardstick of memory speed, and a row per arm, measured or with its reason."""
    refusals = {name: ARMS[name].refusal(given.scale) for name in given.arms}
    running = [name for name, refusal in refusals.items() if refusal is None]
    times = measure_times(running, options, given.rounds, given.limit, say)
    memory = measure_memory(running, options, given.limit, say) if given.memory else {}
    copied = None if "reason" in times["copy"] else _speed(times["copy"])
    rows = {}
    for name, refusal in refusals.items():
        own = {"reason": refusal} if refusal else times[name]
        head = {"label": ARMS[name].label, "family": ARMS[name].family, "version": ARMS[name].version()}
        rows[name] = head | _row(own, times.get(REFERENCE, {}), memory.get(name, {}), copied)
    return {"copy_bytes_per_s": copied, "arms": rows}


def _speed(copy: Row) -> float:
    """Bytes per second, read and written ones counted."""
    return float(copy["copied_bytes"] / statistics.median(copy["step_s"]))


def _row(own: Row, reference: Row, memory: Row, copied: float | None) -> Row:
    """What table, JSON and plot hold of an arm."""
    if "reason" in own:
        return {"reason": own["reason"]}
    entries, step = own["parameters"], own["step_s"]
    moved = 3 * own["param_bytes"] + 2 * own["state_bytes"]  # gradient read, parameter and state read and written
    row = {
        "parameters": entries,
        "step_ns": spread([1e9 * s / entries for s in step]),
        "first_step_s": spread(own["first_step_s"]),
        "first_step_in_steps": statistics.median(own["first_step_s"]) / statistics.median(step),
        "construct_s": spread(own["construct_s"]),
        "one_time_as_found_s": own["one_time_as_found_s"],
        "state_bytes_per_param": own["state_bytes"] / entries,
        "floor_ns": None if copied is None else 1e9 * moved / copied / entries,
        **{key: value for key, value in memory.items() if key not in ("reason", "reasons")},
        "memory_reasons": memory.get("reasons", []),
    }
    if reference.get("step_s") and "reason" not in reference:
        row["ratio"] = spread([s / r for s, r in zip(step, reference["step_s"], strict=True)])
    return row


def spread(values: list[float]) -> Row:
    """Median, smallest, largest and all."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}
