"""What a run stands on: the card, its driver, versions."""

import importlib.metadata
import platform
import subprocess

import torch

from tests.device.checks import Checks

_PACKAGES = ("torch", "triton", "optree", "numpy", "numba", "gefen-x")


def facts(checks: Checks) -> None:
    """Note the facts; the first multiplication on the card is the only check."""
    checks.note(python=platform.python_version(), versions={name: _version(name) for name in _PACKAGES})
    here = torch.cuda.is_available()
    checks.note(cuda=torch.version.cuda if here else None, device="no CUDA device", driver="none")
    if here and not checks.dry:
        own = torch.cuda.get_device_properties(0)
        checks.note(device=own.name, memory=own.total_memory, multiprocessors=own.multi_processor_count)
        checks.note(capability=torch.cuda.get_device_capability(), driver=_driver())
        checks.make("the card multiplies", lambda: {"passed": float(torch.full((8,), 3.0, device="cuda").sum()) == 24})


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
