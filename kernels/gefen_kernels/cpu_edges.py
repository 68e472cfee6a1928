"""Sums of squares over strips of rows on the CPU: what a shard tells the other holders of a tile that an edge cuts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gefen_kernels import cpu_leaf
from gefen_kernels.cpu_loops import F32, FEW, I64, KINDS, add_squares, close_rows, kept
from gefen_kernels.cpu_threads import Ints, share
from gefen_kernels.cpu_vectors import RUN, after, floats, integers
from gefen_kernels.step import STRIP

_WIDE = 4096  # columns of a task, read together: pages are dearer than the cache
_LEVELS = STRIP.bit_length()


class SumPlan(NamedTuple):
    """What does not change from step to step.

    Attributes:
        shapes: of each gradient's sums.
        table: int64 `[leaves, FIELDS]`, see `cpu_leaf`; only what tells of the gradient is filled in.
        tasks: int64 `[tasks, 6]`, see `add_strips`.
    """

    shapes: list[tuple[int, int]]
    table: Ints
    tasks: Ints


def plan_sums(grads: Sequence[Tensor], strips: Sequence[Sequence[tuple[int, int]]]) -> SumPlan:
    """Lay out strips of gradients `[R, C]`, each with its first row and its rows: a power of two, `STRIP` at most."""
    table = np.zeros((len(grads), cpu_leaf.FIELDS), np.int64)
    table[:, cpu_leaf.GRAD_KIND] = [KINDS[g.dtype] for g in grads]
    table[:, cpu_leaf.COLUMNS] = [g.shape[1] for g in grads]
    tasks, out = [], 0
    for n, (g, own) in enumerate(zip(grads, strips, strict=True)):
        columns = g.shape[1]
        for first, rows in own:
            for left in range(0, columns, _WIDE):
                tasks.append((n, first, rows, left, min(left + _WIDE, columns), out + left))
            out += columns
    shapes = [(len(own), g.shape[1]) for g, own in zip(grads, strips, strict=True)]
    return SumPlan(shapes, table, np.array(tasks, np.int64).reshape(-1, 6))


def run_sums(plan: SumPlan, grads: Sequence[Tensor], scale: Tensor | None = None) -> list[Tensor]:
    """`reference.strip_sums` of each gradient of a plan, of the planned shapes and dtypes.

    Args:
        plan: made by `plan_sums`.
        grads: as planned.
        scale: 0-dim fp32: each gradient is multiplied by it first, and rounded to its dtype; None for 1.

    Returns:
        fp32 `[strips, C]` for each.
    """
    read = [g.resolve_neg().contiguous() for g in grads]
    plan.table[:, cpu_leaf.GRAD] = [g.data_ptr() for g in read]
    numbers = np.zeros((1, cpu_leaf.SCALARS), np.float32)
    numbers[:, cpu_leaf.GRAD_SCALE] = 1.0 if scale is None else float(scale)
    out = torch.empty(sum(rows * columns for rows, columns in plan.shapes), dtype=torch.float32, device="cpu")
    options, tasks = (False, scale is not None, False), plan.tasks

    def work(part: Ints) -> None:
        add_strips(part, plan.table, numbers, options, out.numpy(), np.empty((_LEVELS * _WIDE + (FEW + 1) * RUN), F32))

    if len(tasks):
        share(work, tasks, tasks[:, 2] * (tasks[:, 4] - tasks[:, 3]))
    parts = torch.split(out, [rows * columns for rows, columns in plan.shapes])
    return [part.view(shape) for part, shape in zip(parts, plan.shapes, strict=True)]


@kept
def add_strips(source):
    """Add the squares of strips of rows, by the tree over rows.

    Args:
        source: the checksum that `kept` gives; the others are those of the sums.
        tasks: int64 `[n, 6]`: leaf, first row, rows, first and last column, and where in `out` the sums begin.
        table: int64 `[leaves, FIELDS]`.
        scalars: fp32 `[1, 10]`.
        options: `(negate, scaled, from_stored)`.
        out: fp32, the sums.
        scratch: fp32: the levels of the tree, and `FEW + 1` runs.
    """

    def run(tasks, table, scalars, options, out, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        levels = scratch.ctypes.data
        work = after(floats(levels), _LEVELS * _WIDE)
        few, own, sums = after(work, RUN), floats(scalars.ctypes.data), floats(out.ctypes.data)
        for n in range(tasks.shape[0]):
            task = integers(tasks.ctypes.data + 48 * n)
            leaf = integers(table.ctypes.data + 8 * cpu_leaf.FIELDS * task[0])
            first, rows, start, stop = task[1], task[2], task[3], task[4]
            stride = 4 * (stop - start)
            for above in range(0, rows, FEW):
                number = min(FEW, rows - above)
                for left in range(start, stop, RUN):
                    count = min(RUN, stop - left)
                    x, pitch = cpu_leaf.load_rows(leaf, own, options, first + above, number, left, count, few)
                    add_squares(x, pitch, number, above, count, I64(levels) + 4 * (left - start), stride, work)
            for left in range(start, stop, RUN):
                count = min(RUN, stop - left)
                close_rows(rows, count, I64(levels) + 4 * (left - start), stride, after(sums, task[5] + left - start))

    return run
