"""Random words on the CPU, for what is rounded at random by plain torch."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gefen_kernels import reference
from gefen_kernels.cpu_loops import kept
from gefen_kernels.cpu_random import EXTRA, draw
from gefen_kernels.cpu_threads import Ints, share
from gefen_kernels.cpu_vectors import after, integers, long_words

_RUN = 1 << 10  # words in scratch at one time


def supports(count: Tensor) -> bool:
    """Whether the count can be read: a plain CPU tensor that neither torch.func nor a dispatch mode follows."""
    followed = torch._C._functorch.is_functorch_wrapped_tensor(count) or torch._C._len_torch_dispatch_stack() > 0
    return type(count) is Tensor and count.device.type == "cpu" and not followed


def random_words(
    seed: int, count: Tensor, shape: Sequence[int], device: torch.device | str, part: reference.Part = None
) -> Tensor:
    """See `reference.random_words`; takes what `supports` says."""
    if part is None:
        size = math.prod(shape)
        return random_words(seed, count, (size,), device, ((size,), (0,))).view(tuple(shape))
    out, length = torch.empty(tuple(shape), dtype=torch.int64, device=device), shape[-1]
    key, t = np.uint64(seed).astype(np.int64), int(count)
    firsts = reference.flat_index((*shape[:-1], 1), *part, device).flatten().tolist() if out.numel() else []
    rows = [(first, n * length) for n, first in enumerate(firsts)]
    runs = [(first + k, at + k, min(_RUN, length - k)) for first, at in rows for k in range(0, length, _RUN)]
    tasks = np.array(runs, np.int64).reshape(-1, 3)

    def work(own: Ints) -> None:
        write(own, key, t, out.data_ptr(), np.empty(_RUN + EXTRA, np.float32))

    if runs:
        share(work, tasks, tasks[:, 2] // 8)  # a whole step takes some eight times as long
    return out


@kept
def write(source):
    """Runs of words.

    Args:
        source: the checksum that `kept` gives; the others are those of the loop.
        tasks: int64 `[n, 3]`: the first entry in the leaf, where it is written, and how many.
        seed: the key.
        t: the count.
        out: address of int64.
        scratch: fp32 `[_RUN + EXTRA]`.
    """

    def run(tasks, seed, t, out, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        room = long_words(scratch.ctypes.data)
        for n in range(tasks.shape[0]):
            task = integers(tasks.ctypes.data + 24 * n)
            own, to = draw(seed, t, task[0], task[2], room), after(integers(out), task[1])
            for j in range(task[2]):
                to[j] = own[j]

    return run
