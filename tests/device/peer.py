"""gefen-x 0.5.0 as a black box, where its wheel was carried along: built beside the checks of parity, then timed."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.arms import OPTIONS
from tests.device.checks import Checks, Skip
from tests.device.timing import WORKLOADS, copy_speed, play, prepare, seconds

_VERSION = "0.5.0"


def _options() -> dict[str, dict[str, Any]]:
    return {"gefen-x fused": {"fused": True}, "gefen-x fused, Block": {"fused": True, "factored_v_2d": False}}


def _build(options: dict[str, Any]) -> Callable[[list[Any]], torch.optim.Optimizer]:
    def build(named: list[Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = importlib.import_module("gefen").Gefen(named, **OPTIONS, **options)
        return optimizer

    return build


def _need() -> None:
    """Skip without the package.

    Raises:
        Skip: if it is not there in this version.
    """
    found = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version("gefen-x")
    if found != _VERSION or importlib.util.find_spec("gefen") is None:
        raise Skip(f"gefen-x {_VERSION} is not there ({found}); run.sh says how its wheel is carried")


def build(checks: Checks) -> None:
    """Its first step, for which it compiles its kernels; they stay in torch's folder of extensions."""
    os.environ.setdefault("MAX_JOBS", "6")
    torch.use_deterministic_algorithms(False)

    def built() -> dict[str, Any]:
        _need()
        p = torch.nn.Parameter(torch.empty(512, 512, dtype=torch.bfloat16, device="cuda").normal_())
        p.grad = torch.full_like(p, 1e-3).normal_()
        return {"first step as found s": seconds(_build(_options()["gefen-x fused"])([("p", p)]).step)}

    checks.make("gefen-x builds its kernels and steps", built)


def times(checks: Checks) -> None:
    """Its steps in turn with ours and AdamW's, on 33M parameters with 300 small leaves."""
    torch.use_deterministic_algorithms(False)
    copied, players = copy_speed(), {}
    checks.note(copy_bytes_per_s=copied, workload="33m")

    def prepared(name: str, options: dict[str, Any] | None) -> dict[str, Any]:
        if options is not None:
            _need()
        players[name] = prepare(name, WORKLOADS["33m"], None if options is None else _build(options))
        return {"prepared in s": players[name].facts["first step as found s"]}

    for name, options in {"AdamW fused bf16": None, "Gefen bf16": None, **_options()}.items():
        checks.make(f"33m: {name} takes its first steps", lambda n=name, o=options: prepared(n, o))
    play(checks, "33m", players, copied)
