"""Long-lived worker processes: one pool for each world size runs all cases, because starting one takes seconds.

A case is a function at the top of a module, called in every worker as `case(rank, *args)`; the pool returns what each
returned. Workers meet through a file, speak gloo, and have a deadline.
"""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

START_SECONDS = 60.0
GROUP_SECONDS = 20.0


class WorkerFailure(AssertionError):
    """A worker raised, died or missed its deadline."""


class Pool:
    """`world` processes of one default group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._workers = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (rank, world, os.path.join(self._folder.name, "meet"), theirs)
            worker = context.Process(target=_work, args=args, daemon=True)
            worker.start()
            theirs.close()
            self._ends.append(ours)
            self._workers.append(worker)
        self._collect(START_SECONDS)

    def run(self, case: Callable[..., Any], *args: Any, seconds: float = 30.0) -> list[Any]:
        """Call `case(rank, *args)` in every worker, and return their results by rank.

        Raises:
            WorkerFailure: with every failing worker's traceback; the pool is broken if one did not answer.
        """
        for end in self._ends:
            end.send((case, args))
        return self._collect(seconds)

    @property
    def alive(self) -> bool:
        """Whether every worker can take a case."""
        return all(worker.is_alive() for worker in self._workers)

    def kill(self, rank: int) -> None:
        """End one worker as `kill -9` does."""
        self._workers[rank].kill()

    def close(self) -> None:
        """End the workers."""
        for end in self._ends:
            try:
                end.send(None)
            except OSError:  # the worker is gone already, as it was to be
                continue
        for worker in self._workers:
            worker.join(5)
            worker.kill()
        self._folder.cleanup()

    def _collect(self, seconds: float) -> list[Any]:
        answers: list[Any] = []
        failures = []
        for rank, end in enumerate(self._ends):
            answered = end.poll(seconds)
            try:
                failed, answer = end.recv() if answered else (True, f"no answer within {seconds} s")
            except EOFError:
                failed, answer = True, "the process died"
            if not answered:
                self._workers[rank].kill()
            answers.append(answer)
            if failed:
                failures.append(f"rank {rank}: {answer}")
        if failures:
            raise WorkerFailure("\n".join(failures))
        return answers


def _work(rank: int, world: int, meet: str, end: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    limit = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=limit)
    end.send((False, None))
    while (task := end.recv()) is not None:
        case, args = task
        try:
            end.send((False, case(rank, *args)))
        except BaseException:  # all that a case may raise is the test's to judge
            end.send((True, traceback.format_exc()))
    # gloo's threads can abort the process while the interpreter takes itself apart.
    os._exit(0)
