"""The threads of the CPU back end: tasks of unlike weight, shared out."""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

TASK = 1 << 17  # entries of a task: small enough to share out, large enough to be worth the call
_ALONE = 1 << 18  # entries that one thread does sooner than two

Ints = npt.NDArray[np.int64]


def share(work: Callable[[Ints], Any], tasks: Ints, weights: Ints) -> list[Any]:
    """Call `work` on parts of the tasks, on as many threads as torch uses; return its results in order.

    Each part is a like share of what is left, so that few parts keep all threads busy to the end.

    Args:
        work: what to call.
        tasks: one task a row.
        weights: about how many entries each task has.
    """
    done = np.cumsum(weights)
    ending = not threading.main_thread().is_alive()  # no thread may be started then
    threads = min(torch.get_num_threads(), len(tasks)) if done[-1] > _ALONE and not ending else 1
    if threads == 1:
        return [work(tasks)]
    left = [done[-1]]
    while left[-1] > TASK:
        left.append(left[-1] * (1 - 0.5 / threads))
    cuts = np.unique(np.searchsorted(done, done[-1] - left[1:]) + 1)
    parts = enumerate(np.split(tasks, cuts[cuts < len(tasks)]))

    def some() -> dict[int, Any]:
        return {n: work(part) for n, part in parts}  # each thread draws from the one iterator

    calls = [_pool(os.getpid(), threads - 1).submit(some) for _ in range(threads - 1)]
    results = some()
    for call in calls:
        results |= call.result()
    return [results[n] for n in sorted(results)]


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that wait for work: to start them costs more than to step a small model. A forked child has none."""
    return ThreadPoolExecutor(threads, "gefen")
