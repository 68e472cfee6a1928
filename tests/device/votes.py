"""Votes of two processes: none while a graph is captured (item 35), records where a group can send them (item 34).

With one card both processes share it and vote over gloo; the groups of NCCL need two cards, and are not run without.
"""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from gefen_fn import Scope
from gefen_nn import Gefen
from tests.device.checks import Checks, Skip
from tests.distributed.counting import counted

_SHAPES = {"up": (96, 64), "bias": (96,)}


def votes(checks: Checks) -> None:
    """Two processes on one card, then on two."""
    kind = checks.device.type
    checks.make("35 no collective while a step is captured", lambda: _both(_captured, kind))
    for offloaded in (False, True):
        where = "shards on the host" if offloaded else "shards on the cards"
        checks.make(f"34 votes in a group of NCCL, {where}", lambda o=offloaded: _two_cards(o))


def _two_cards(offloaded: bool) -> dict[str, Any]:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        raise Skip("two cards are needed")
    return _both(_over_nccl, offloaded)


def _both(case: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Run a case in two processes; it passes if it does in both."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        meet = f"file://{Path(folder) / 'meet'}"
        workers = [context.Process(target=_work, args=(case, r, meet, pipes[r][1], args)) for r in range(2)]
        for worker in workers:
            worker.start()
        answers = [end.recv() if end.poll(120) else "no answer" for end, _ in pipes]
        for worker in workers:
            worker.kill()
            worker.join()
    return {"passed": answers == [True, True], "answers": answers}


def _work(case: Callable[..., Any], rank: int, meet: str, end: Connection, args: Any) -> None:
    try:
        end.send(case(rank, meet, *args))
    except Exception as error:  # told to the parent, whatever it is
        end.send(f"{type(error).__name__}: {error}")


def _captured(rank: int, meet: str, kind: str) -> bool:
    """Whether an uncaptured step asks the other process, and a captured one nobody."""
    dist.init_process_group("cpu:gloo", init_method=meet, rank=rank, world_size=2)
    params = {k: Parameter(torch.ones(shape, device=kind)) for k, shape in _SHAPES.items()}
    scope = Scope("both", (0, 1), dist.group.WORLD, "cpu")
    optimizer = Gefen(list(params.items()), codebook=scope, capturable=kind == "cuda")
    for i, p in enumerate(params.values()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * rank + i)).to(kind)
    optimizer.step()
    with counted() as asked:
        optimizer.step()
    with counted() as alone, _capture(kind):
        optimizer.step()
    return bool(asked) and not alone


@contextlib.contextmanager
def _capture(kind: str) -> Iterator[None]:
    """A graph is captured; without a card it is said that one is."""
    if kind == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield
    else:
        with mock.patch("gefen_nn.control.capturing", lambda: True):
            yield


def _over_nccl(rank: int, meet: str, offloaded: bool) -> bool:
    """Whether a failure on one member is told to the other in a group that serves cards alone."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=2)
    mesh, home = DeviceMesh("cuda", [0, 1]), "cpu" if offloaded else "cuda"
    params = {k: _sharded(torch.ones(48, *shape[1:], device=home), mesh) for k, shape in _SHAPES.items()}
    optimizer = Gefen(list(params.items()))
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()

    def closure() -> None:
        if rank == 1:
            raise OSError("the disk is full")

    try:
        optimizer.step(closure)
    except RuntimeError as error:
        return type(error).__name__ == "GroupFailure"
    return False


def _sharded(part: Tensor, mesh: DeviceMesh) -> Parameter:
    return Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
