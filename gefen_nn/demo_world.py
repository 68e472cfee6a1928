"""The demo's last act: a checkpoint of one process is trained on by two, and theirs by three, under FSDP2."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gefen_nn.demo_data import standard_library_text
from gefen_nn.demo_train import Run, load_run, torch_threads
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.saves import load, save

BEFORE, AFTER = 2, 3
_STEPS = 2  # of the two processes before they save, and of both worlds after
_TOLERANCE = 1e-5  # relative; another number of processes adds up a batch's gradients in another order
_GROUP_SECONDS = 60.0
_DEADLINE_SECONDS = 180.0


def change_world(checkpoint: Path, saved: Path) -> dict[str, Any]:
    """Two processes go on from a checkpoint, save, and go on; three load what was saved, and take the same steps.

    Args:
        checkpoint: Written on one process by `Run.save` of a run whose optimizer is this package's.
        saved: The folder that the two save to.

    Returns:
        The `step` of the save; `equal`, whether three loaded the bits that two saved; the `losses` of both after it,
        the greatest relative `difference` between them, and `continued`, whether it is small.

    Raises:
        RuntimeError: If a process fails, or does not end in time.
    """
    two, three = (_run_world(world, checkpoint, saved) for world in (BEFORE, AFTER))
    pairs = zip(two["losses"], three["losses"], strict=True)
    difference = max(abs(expected - got) / expected for expected, got in pairs)
    return {
        "worlds": [BEFORE, AFTER],
        "step": two["step"],
        "equal": two["digest"] == three["digest"],
        "losses": [two["losses"], three["losses"]],
        "difference": difference,
        "continued": difference <= _TOLERANCE,
    }


def train_member(rank: int, world: int, checkpoint: Path, saved: Path, folder: Path) -> None:
    """Does the part of one process; the first writes `found.json`.

    Args:
        rank: This process's number.
        world: Of how many: `BEFORE` train and save, `AFTER` load.
        checkpoint: As for `change_world`.
        saved: As for `change_world`.
        folder: Where the processes of this world meet.
    """
    with torch_threads(1), _group(rank, world, folder) as mesh:
        run, text = load_run(checkpoint, mesh), standard_library_text()
        optimizer = cast(TransformOptimizer, run.optimizer)
        if world == AFTER:
            extra = load(saved, run.model, optimizer).extra
            run.scheduler.load_state_dict(extra["scheduler"])
            run.step = extra["step"]
        else:
            for _ in range(_STEPS):
                run.train_step(text)
            save(saved, run.model, optimizer, step=run.step, scheduler=run.scheduler.state_dict())
        found = {"step": run.step, "digest": _digest(run)}
        found["losses"] = [run.train_step(text) for _ in range(_STEPS)]
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found))


def start(*arguments: object) -> subprocess.Popen[bytes]:
    """Starts an inner subcommand of `gefen` in a new process, which finds the packages that this one found.

    Args:
        *arguments: The subcommand and what it takes.
    """
    command = [sys.executable, "-m", "gefen_nn.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _run_world(world: int, checkpoint: Path, saved: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        members = [start("demo-member", rank, world, checkpoint, saved, folder) for rank in range(world)]
        codes = _ends(members, time.monotonic() + _DEADLINE_SECONDS)
        if codes != [0] * world:
            raise RuntimeError(
                f"All {world} processes must exit with 0 within {_DEADLINE_SECONDS:.0f} s: got {codes}, None for one "
                "that had to be stopped. Their messages stand above; fix the first and rerun."
            )
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return found


def _ends(members: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit codes in order; None for a member that did not end by itself, or not before the deadline."""
    codes: list[int | None] = []
    try:
        for member in members:
            codes.append(member.wait(max(0.0, deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        codes += [member.poll() for member in members[len(codes) :]]
    finally:
        for member in members:
            member.kill()
            member.wait()
    return codes


@contextmanager
def _group(rank: int, world: int, folder: Path) -> Iterator[DeviceMesh]:
    """Processes that meet through a file, so that no port need be free."""
    limit, meet = timedelta(seconds=_GROUP_SECONDS), f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=limit)
    yield init_device_mesh("cpu", (world,))
    dist.barrier()  # no process leaves while another still listens to it


def _digest(run: Run) -> str:
    """A hash of all parameters and optimizer state, gathered whole."""
    digest = hashlib.sha256()
    for name, x in sorted(run.final_tensors().items()):
        whole = (x.full_tensor() if isinstance(x, DTensor) else x).detach().contiguous()
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
