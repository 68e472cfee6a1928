"""Matrices divided by their Frobenius norms and rounded to bf16, on the CPU, with nothing in between in memory."""

import numpy as np
import torch
from torch import Tensor

from gefen_kernels.cpu_loops import BF16, F32, KINDS, from_bf16, kept, load, store, to_bf16
from gefen_kernels.cpu_threads import Ints, share
from gefen_kernels.cpu_vectors import floats

_RUN = 1024  # entries in scratch at one time
_LANES = 32  # sums that run side by side
_TASK = 1 << 17  # entries of a task: small enough to share out, large enough to be worth the call


def supports(x: Tensor) -> bool:
    """Whether the loops can read it: a plain CPU tensor that neither torch.func nor autograd follows."""
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in KINDS and x.numel() > 0
    return plain and not x.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def normalized(x: Tensor, eps: float) -> Tensor:
    """`x / max(norm, eps)` of each matrix `[N, R, C]`, x and its norm as rounded to bf16: bf16 in the layout of x.

    The squares are added in float64 in one order, whatever the number of threads.
    """
    if x.mT.is_contiguous() and not x.is_contiguous():
        return normalized(x.mT, eps).mT
    x = x.resolve_neg().contiguous()
    out, size, kind = torch.empty_like(x, dtype=torch.bfloat16), x[0].numel(), KINDS[x.dtype]
    pieces = [(n, first, min(first + _TASK, size)) for n in range(len(x)) for first in range(0, size, _TASK)]
    tasks = np.array([(n * size + first, n * size + last, n) for n, first, last in pieces], np.int64)
    weights = (tasks[:, 1] - tasks[:, 0]) // 8  # a whole step takes some eight times as long as either pass

    def add(part: Ints) -> list[float]:
        scratch = np.empty(_RUN, np.float32)
        return [float(squares(x.data_ptr(), kind, first, last, scratch)) for first, last, _ in part]

    sums = np.concatenate(share(add, tasks, weights))
    norms = np.sqrt(np.bincount(tasks[:, 2], sums, len(x))).astype(np.float32)
    divisors = np.maximum(norms, np.float32(eps))

    def write(part: Ints) -> None:
        scratch = np.empty(_RUN, np.float32)
        for first, last, n in part:
            divide(x.data_ptr(), kind, out.data_ptr(), first, last, divisors[n], scratch)

    share(write, tasks, weights)
    return out


@kept
def squares(source):
    """The sum of squares of entries `first..last` as rounded to bf16, in float64.

    Args:
        source: the checksum that `kept` gives; the others are those of the loop.
        x: address of the entries.
        kind: their dtype.
        first: the first entry.
        last: one past the last.
        scratch: fp32 `[_RUN]`.
    """

    def run(x, kind, first, last, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return 0.0
        room, lanes = floats(scratch.ctypes.data), np.zeros(_LANES)
        for left in range(first, last, _RUN):
            count = min(_RUN, last - left)
            load(kind, x, left, count, room)
            for j in range(count):
                room[j] = from_bf16(to_bf16(room[j]))
            for j in range(count, -(-count // _LANES) * _LANES):
                room[j] = F32(0)
            for j in range(0, count, _LANES):
                for k in range(_LANES):
                    lanes[k] += np.float64(room[j + k]) * np.float64(room[j + k])
        return lanes.sum()

    return run


@kept
def divide(source):
    """Entries `first..last`, rounded to bf16, divided, and rounded again.

    Args:
        source: the checksum that `kept` gives; the others are those of the loop.
        x: address of the entries.
        kind: their dtype.
        out: address of as many of bf16.
        first: the first entry.
        last: one past the last.
        divisor: fp32.
        scratch: fp32 `[_RUN]`.
    """

    def run(x, kind, out, first, last, divisor, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        room = floats(scratch.ctypes.data)
        for left in range(first, last, _RUN):
            count = min(_RUN, last - left)
            load(kind, x, left, count, room)
            for j in range(count):
                room[j] = from_bf16(to_bf16(room[j])) / divisor
            store(BF16, out, left, count, room)

    return run
