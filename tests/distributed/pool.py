"""Long-lived worker processes: one pool for each world size runs all cases.

Workers are forked from a server that has imported everything, so that a pool whose workers are to be killed starts at
once. A case is a function at the top of a module, called in every worker as
`case(rank, *args)`; the pool returns what each returned. Workers meet through a file, speak gloo, and have a deadline.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

START_SECONDS = 60.0
GROUP_SECONDS = 20.0


class WorkerFailure(AssertionError):
    """A worker raised, died or missed its deadline."""


class Answer(NamedTuple):
    """What became of a case in one worker.

    Attributes:
        how: "returned", "raised", "died" or "late".
        value: what it returned, or a text that says more.
    """

    how: str
    value: Any


class Pool:
    """`world` processes of one default group, whose collectives end after `group_seconds`."""

    def __init__(self, world: int, group_seconds: float = GROUP_SECONDS) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        context = _server()
        self._ends: list[Connection] = []
        self._workers = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (rank, world, os.path.join(self._folder.name, "meet"), theirs, group_seconds)
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
        self.ask(case, *args)
        return self._collect(seconds)

    def ask(self, case: Callable[..., Any], *args: Any) -> None:
        """Begin a case in every worker, whose `answer`s are then to be collected."""
        for end in self._ends:
            end.send((case, args))

    def answer(self, rank: int, seconds: float) -> Answer:
        """What became of the case that one worker was asked for last; "late": it may still answer."""
        end = self._ends[rank]
        if not end.poll(max(seconds, 0.0)):
            return Answer("late", f"no answer within {seconds:.0f} s")
        try:
            failed, value = end.recv()
        except (EOFError, ConnectionResetError):
            return Answer("died", "the process died")
        return Answer("raised" if failed else "returned", value)

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
        answers = []
        for rank, worker in enumerate(self._workers):
            answers.append(self.answer(rank, seconds))
            if answers[-1].how == "late":
                worker.kill()
        failures = [f"rank {rank}: {x.value}" for rank, x in enumerate(answers) if x.how != "returned"]
        if failures:
            raise WorkerFailure("\n".join(failures))
        return [x.value for x in answers]


def _server() -> Any:
    """Where workers come from; it imports modules from where this process does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        multiprocessing.forkserver.ensure_running()
    return context


def _work(rank: int, world: int, meet: str, end: Connection, group_seconds: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.setdefault("LOCAL_RANK", str(rank))
    limit = timedelta(seconds=group_seconds)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=limit)
    try:
        end.send((False, None))
        _answer_all(rank, end)
    finally:  # gloo's threads can abort the process while the interpreter takes itself apart
        os._exit(0)


def _answer_all(rank: int, end: Connection) -> None:
    """Run cases until there is none, or nobody to ask."""
    with contextlib.suppress(EOFError, OSError):
        while (task := end.recv()) is not None:
            case, args = task
            try:
                end.send((False, case(rank, *args)))
            except BaseException:  # all that a case may raise is the test's to judge
                end.send((True, traceback.format_exc()))
