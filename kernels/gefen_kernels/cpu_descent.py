"""A parameter's step along a direction, in place, on the CPU: each of the two is read from memory once."""

import numpy as np
import torch
from torch import Tensor

from gefen_kernels.cpu_loops import F32, FP32, KINDS, kept, load, store
from gefen_kernels.cpu_threads import Ints, share
from gefen_kernels.cpu_vectors import after, floats

_RUN = 1024  # entries in scratch at one time
_TASK = 1 << 17  # entries of a task: small enough to share out, large enough to be worth the call


def supports(param: Tensor, direction: Tensor) -> bool:
    """Whether the loop can take these: dtypes it knows, on the CPU, the parameter contiguous."""
    known = param.dtype in KINDS and direction.dtype in KINDS
    return known and param.device.type == direction.device.type == "cpu" and param.is_contiguous()


def descend(param: Tensor, direction: Tensor, scale: float, step: float, decay: float | None) -> None:
    """See `gefen_kernels.moment.descend`; takes what `supports` says."""
    direction = direction.resolve_neg().contiguous()
    numbers = F32(scale), F32(step), F32(0.0 if decay is None else decay)
    lie = (param.data_ptr(), KINDS[param.dtype], direction.data_ptr(), KINDS[direction.dtype], decay is not None)
    total = param.numel()

    def work(part: Ints) -> None:
        move(lie, numbers, part[0, 0], part[-1, 1], np.empty(2 * _RUN, np.float32))

    tasks = np.array([(first, min(first + _TASK, total)) for first in range(0, total, _TASK)], np.int64)
    if total:
        share(work, tasks, (tasks[:, 1] - tasks[:, 0]) // 16)  # a whole step takes some sixteen times as long
    torch.autograd.graph.increment_version(param)


@kept
def move(source):
    """Entries `first..last`.

    Args:
        source: the checksum that `kept` gives; the others are those of the loop.
        lie: address and kind of the parameter and of the direction, and whether the parameter decays.
        numbers: `(scale, step, decay)`, fp32.
        first: the first entry.
        last: one past the last.
        scratch: fp32 `[2 * _RUN]`.
    """

    def run(lie, numbers, first, last, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        param, param_kind, direction, direction_kind, decays = lie
        scale, step, decay = numbers
        d = floats(scratch.ctypes.data)
        for left in range(first, last, _RUN):
            count = min(_RUN, last - left)
            p = floats(param + 4 * left) if param_kind == FP32 else after(d, _RUN)
            load(direction_kind, direction, left, count, d)
            if param_kind != FP32:
                load(param_kind, param, left, count, p)
            if decays:
                for j in range(count):
                    p[j] = p[j] + (d[j] * scale + p[j] * decay) * step
            else:
                for j in range(count):
                    p[j] = p[j] + d[j] * scale * step
            if param_kind != FP32:
                store(param_kind, param, left, count, p)

    return run
