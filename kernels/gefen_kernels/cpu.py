"""The CPU back end: the whole step in place, each gradient read from memory once, on as many threads as torch uses.

It gives the reference's bits, NaNs' payloads and the order of a norm's float64 additions aside, whatever the number of
threads. It needs numba (the extra `cpu`); code is compiled at the first call and kept for later processes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gefen_kernels import cpu_leaf, cpu_step, reference
from gefen_kernels import cpu_loops as loops
from gefen_kernels.cpu_book import level_table, nearest_table
from gefen_kernels.cpu_edges import plan_sums, run_sums
from gefen_kernels.cpu_loops import KINDS
from gefen_kernels.cpu_random import EXTRA
from gefen_kernels.cpu_threads import TASK, Ints, share
from gefen_kernels.cpu_vectors import RUN
from gefen_kernels.step import NO_COUNTS, Leaf

__all__ = [
    "gefen_step",
    "histogram",
    "plan_step",
    "plan_sums",
    "run_step",
    "run_sums",
    "sum_of_squares",
    "supports",
    "warm_up",
]

_POLICIES = {
    "dense": cpu_leaf.DENSE,
    "block": cpu_leaf.BLOCKS,
    "factored": cpu_leaf.FACTORED,
    "given": cpu_leaf.GIVEN,
}
_STRETCH = 4096  # columns of a factored leaf that are read together: pages are dearer than the cache


def supports(leaf: Leaf) -> bool:
    """Whether the loops can take this leaf: plain CPU tensors of known dtypes, the state contiguous."""
    scales = leaf.nu if leaf.absmax is None else (leaf.absmax, *leaf.nu)
    tensors = (leaf.grad, leaf.param, leaf.mu, *scales)
    known = leaf.grad.dtype in KINDS and leaf.param.dtype in KINDS
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in tensors)
    typed = leaf.mu.dtype in (torch.uint8, torch.float32) and all(t.dtype == torch.float32 for t in scales)
    laid = all(t.is_contiguous() for t in (leaf.mu, *scales)) and not leaf.param.is_neg()
    return known and plain and typed and laid


def warm_up() -> None:
    """Compile the loops, or load what an earlier process compiled: some 10 s once on a machine, then 0.3 s."""
    x = torch.zeros(2, 2, device="cpu")
    book = torch.linspace(-1.0, 1.0, 256, device="cpu")
    leaf = Leaf(x, x.clone(), x.clone(), None, (x.clone(),), "dense")
    gefen_step([leaf], torch.ones(1, cpu_leaf.SCALARS, device="cpu"), book)
    histogram(x, block=2)
    sum_of_squares(x)
    run_sums(plan_sums([x], [[(0, 2)]]), [x])


class Plan(NamedTuple):
    """What does not change from step to step while leaves keep their tensors; the caller keeps these alive.

    Attributes:
        draws: whether something is rounded at random.
        kept: numbers of the leaves that have entries.
        params: their parameters.
        table: int64 `[kept, FIELDS]`, see `cpu_leaf`.
        tasks: int64 `[tasks, 5]`, see `cpu_step.step`.
        weights: about how many entries each task has.
        sizes: the scratch of a thread.
    """

    draws: bool
    kept: list[int]
    params: list[Tensor]
    table: Ints
    tasks: Ints
    weights: Ints
    sizes: "Sizes"


def plan_step(leaves: Sequence[Leaf]) -> Plan:
    """Lay out leaves for the loops, and split them into tasks."""
    kept = [n for n, leaf in enumerate(leaves) if leaf.param.numel()]
    table = np.array([_row(leaves[n]) for n in kept], np.int64).reshape(-1, cpu_leaf.FIELDS)
    tasks = np.array([task for n, row in enumerate(table.tolist()) for task in _tasks(n, row)], np.int64).reshape(-1, 5)
    params = [leaves[n].param for n in kept]
    draws = bool(table[:, [cpu_leaf.RANDOM_CODES, cpu_leaf.RANDOM_PARAM]].any())
    return Plan(draws, kept, params, table, tasks, _weights(table, tasks), _sizes(table))


def gefen_step(
    leaves: Sequence[Leaf],
    scalars: Tensor,
    codebook: Tensor,
    *,
    drive: str = "m",
    ties: reference.Ties = "zero",
    negate: bool = False,
    scaled: bool = False,
    counts: Tensor | None = None,
) -> None:
    """Step all leaves in place: moments, second moments and parameters, bit for bit as the reference.

    Args:
        leaves: what to step; see `gefen_kernels.step.Leaf`.
        scalars: fp32 `[leaves, 10]`, columns as `gefen_kernels.step.SCALARS`.
        codebook: fp32 `[256]`.
        drive: "m" steps along the moment before it is stored, "m_hat" along what is stored.
        ties: as in `reference.nearest`.
        negate: ascend.
        scaled: multiply each gradient by its `grad_scale`, rounded to its dtype.
        counts: integers `[leaves, 2]`, the counts that codes and parameters draw with; None where nothing is drawn.

    Raises:
        ValueError: if there are no counts though something is rounded at random.
    """
    grads, plan = [leaf.grad for leaf in leaves], plan_step(leaves)
    run_step(plan, grads, scalars, codebook, drive=drive, ties=ties, negate=negate, scaled=scaled, counts=counts)


def run_step(
    plan: Plan,
    grads: Sequence[Tensor],
    scalars: Tensor,
    codebook: Tensor,
    *,
    drive: str = "m",
    ties: reference.Ties = "zero",
    negate: bool = False,
    scaled: bool = False,
    counts: Tensor | None = None,
) -> None:
    """Step the leaves of a plan with these gradients, of the planned shapes and dtypes; see `gefen_step`."""
    if not plan.kept:
        return
    if plan.draws:
        if counts is None:
            raise ValueError(NO_COUNTS)
        plan.table[:, [cpu_leaf.CODES_COUNT, cpu_leaf.PARAM_COUNT]] = counts.numpy()[plan.kept]
    read = [grads[n].resolve_neg().contiguous() for n in plan.kept]
    written = [p.contiguous() for p in plan.params]
    plan.table[:, cpu_leaf.GRAD] = [g.data_ptr() for g in read]
    plan.table[:, cpu_leaf.PARAM] = [p.data_ptr() for p in written]
    numbers = np.ascontiguousarray(scalars.numpy()[plan.kept])
    options = negate, scaled, drive == "m_hat"
    nearest = tuple(nearest_table(codebook, ties))
    books = nearest, tuple(level_table(codebook)) if plan.draws else nearest

    def work(part: Ints) -> None:
        scratch = np.empty(plan.sizes.floats, np.float32)
        cpu_step.step(part, plan.table, numbers, books, options, tuple(plan.sizes), scratch)

    share(work, plan.tasks, plan.weights)
    for param, p in zip(plan.params, written, strict=True):
        if p is not param:
            param.copy_(p)


def _row(leaf: Leaf) -> list[int]:
    """One leaf as the loops read it; addresses of gradient and parameter, and counts, come with the step."""
    shape, dense = leaf.param.shape, leaf.absmax is None
    start = 0 if dense else leaf.start
    columns = int(np.prod(shape[start:], dtype=np.int64))
    rows = shape[start - 1] if start else 1
    height, width = leaf.tile[0] or rows, min(leaf.tile[1] or columns, columns)
    packed = rows if leaf.tile[0] is None else 1 << (min(height, rows).bit_length() - 1)
    if leaf.policy == "given":
        height = 1  # no sums over rows, so no room for them
    fields = {
        cpu_leaf.GRAD: 0,
        cpu_leaf.GRAD_KIND: KINDS[leaf.grad.dtype],
        cpu_leaf.PARAM: 0,
        cpu_leaf.PARAM_KIND: KINDS[leaf.param.dtype],
        cpu_leaf.MU: leaf.mu.data_ptr(),
        cpu_leaf.ABSMAX: 0 if leaf.absmax is None else leaf.absmax.data_ptr(),
        cpu_leaf.NU: leaf.nu[0].data_ptr(),
        cpu_leaf.COL: leaf.nu[-1].data_ptr(),
        cpu_leaf.ROWS: rows,
        cpu_leaf.COLUMNS: columns,
        cpu_leaf.ENTRIES: leaf.param.numel(),
        cpu_leaf.BLOCK: min(leaf.block, max(columns, 1)),
        cpu_leaf.POLICY: cpu_leaf.DENSE_LEAF if dense else _POLICIES[leaf.policy],
        cpu_leaf.TILE_ROWS: height,
        cpu_leaf.TILE_COLUMNS: width,
        cpu_leaf.PACKED: packed,
        cpu_leaf.DECAYS: leaf.decays,
        cpu_leaf.CORRECTS: leaf.corrects,
        cpu_leaf.SEED: leaf.seed,
        cpu_leaf.FIRST: leaf.first,
        cpu_leaf.RANDOM_CODES: leaf.random_codes and not dense,
        cpu_leaf.RANDOM_PARAM: leaf.random_param and leaf.param.dtype == torch.bfloat16,
        cpu_leaf.CODES_COUNT: 0,
        cpu_leaf.PARAM_COUNT: 0,
    }
    return [fields[n] for n in range(cpu_leaf.FIELDS)]


class Sizes(NamedTuple):
    """The scratch that a thread needs for any of the leaves.

    Attributes:
        line: entries of a block, of a run of columns, or runs of a row, whichever is most.
        columns: of a leaf.
        levels: entries of all levels of the tree over rows.
        runs: of all rows of a task.
    """

    line: int
    columns: int
    levels: int
    runs: int

    @property
    def floats(self) -> int:
        """Four lines, the levels, the factors of the columns, the sums of the runs, runs of some rows, and words."""
        return 4 * self.line + self.levels + self.columns + self.runs + loops.FEW * RUN + self.line + EXTRA


def _sizes(table: Ints) -> Sizes:
    if not len(table):
        return Sizes(RUN, 0, 0, 0)
    rows, height, columns = table[:, cpu_leaf.ROWS], table[:, cpu_leaf.TILE_ROWS], table[:, cpu_leaf.COLUMNS]
    width = table[:, cpu_leaf.TILE_COLUMNS]
    tallest = rows - height * (np.maximum(rows // height, 1) - 1)
    together = np.array([_tiles_together(row) for row in table.tolist()])
    runs = -(-width // RUN)
    levels = np.ceil(np.log2(tallest + 1)).astype(np.int64)
    line = max(int(table[:, cpu_leaf.BLOCK].max()), RUN, int(runs.max()))
    most = (levels * np.minimum(width * together, columns)).max(), (tallest * runs * together).max()
    return Sizes(line, int(columns.max()), int(most[0]), int(most[1]))


def _weights(table: Ints, tasks: Ints) -> Ints:
    row = table[tasks[:, 0]]
    rows, columns = tasks[:, 2] - tasks[:, 1], tasks[:, 4] - tasks[:, 3]
    tiles = columns * row[:, cpu_leaf.TILE_ROWS] * row[:, cpu_leaf.TILE_COLUMNS]
    policy = row[:, cpu_leaf.POLICY]
    kinds = [policy == kind for kind in (cpu_leaf.DENSE_LEAF, cpu_leaf.FACTORED, cpu_leaf.GIVEN)]
    return np.select(kinds, [rows, tiles, rows * columns * row[:, cpu_leaf.TILE_COLUMNS]], rows * columns)


def _tiles_together(row: list[int]) -> int:
    """Column tiles of one task: about `_STRETCH` columns, and all where blocks cross the edges of tiles."""
    width, tiles = row[cpu_leaf.TILE_COLUMNS], -(-row[cpu_leaf.COLUMNS] // row[cpu_leaf.TILE_COLUMNS])
    return min(tiles, max(1, _STRETCH // width)) if width % row[cpu_leaf.BLOCK] == 0 else tiles


def _tasks(index: int, row: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Split a leaf into tasks of about `TASK` entries; the split does not change a bit of the result."""
    entries, columns, policy = row[cpu_leaf.ENTRIES], row[cpu_leaf.COLUMNS], row[cpu_leaf.POLICY]
    if policy == cpu_leaf.DENSE_LEAF:
        for first in range(0, entries, TASK):
            yield index, first, min(first + TASK, entries), 0, 0
    elif policy == cpu_leaf.FACTORED:
        yield from _tiles(index, row)
    elif policy == cpu_leaf.GIVEN:
        yield from _strips(index, row)
    elif columns <= TASK:
        step = TASK // columns
        for first in range(0, entries // columns, step):
            yield index, first, min(first + step, entries // columns), 0, columns
    else:
        step = TASK // row[cpu_leaf.BLOCK] * row[cpu_leaf.BLOCK] or row[cpu_leaf.BLOCK]
        for r in range(entries // columns):
            for left in range(0, columns, step):
                yield index, r, r + 1, left, min(left + step, columns)


def _tiles(index: int, row: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Tasks of a factored leaf: whole tiles, and whole row tiles where blocks cross the edges of tiles."""
    rows, columns, height, width = (
        row[n] for n in (cpu_leaf.ROWS, cpu_leaf.COLUMNS, cpu_leaf.TILE_ROWS, cpu_leaf.TILE_COLUMNS)
    )
    number = row[cpu_leaf.ENTRIES] // (rows * columns) * max(1, rows // height)
    tiles, step = -(-columns // width), _tiles_together(row)
    for tile in range(number):
        for first in range(0, tiles, step):
            yield index, tile, 0, first, min(first + step, tiles)


def _strips(index: int, row: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Tasks of a leaf with given column means: some rows of whole column tiles, enough to be worth their factors."""
    rows, columns, width = (row[n] for n in (cpu_leaf.ROWS, cpu_leaf.COLUMNS, cpu_leaf.TILE_COLUMNS))
    tiles, together = -(-columns // width), _tiles_together(row)
    step = max(loops.FEW, TASK // (width * together))
    for first in range(0, rows, step):
        for tile in range(0, tiles, together):
            yield index, first, min(first + step, rows), tile, min(tile + together, tiles)


def histogram(x: Tensor, *, block: int, start: int = 1) -> Tensor:
    """The counts of `reference.histogram`, int64 `[4096]`."""

    def work(lie: tuple[int, ...], first: int, last: int) -> Ints:
        counts = np.zeros(4096, np.int64)
        loops.histogram(*lie, first, last, np.empty(lie[-1], np.float32), counts)
        return counts

    return torch.from_numpy(sum(_over_rows(work, x, block, start), np.zeros(4096, np.int64)))


def sum_of_squares(x: Tensor, *, block: int = 256, start: int = 1) -> Tensor:
    """The sum of `reference.sum_of_squares`, 0-dim float64; only the float64 additions may be in another order."""

    def work(lie: tuple[int, ...], first: int, last: int) -> float:
        return float(loops.sum_of_squares(*lie, first, last, np.empty(2 * lie[-1], np.float32)))

    return torch.tensor(sum(_over_rows(work, x, block, start), 0.0), dtype=torch.float64, device="cpu")


def _over_rows(work: Callable[[tuple[int, ...], int, int], Any], x: Tensor, block: int, start: int) -> list[Any]:
    """`work((address, kind, columns, block), first, last)` on parts of the rows of a leaf."""
    if not x.numel():
        return []
    x = x.resolve_neg().contiguous()
    columns = int(np.prod(x.shape[start:], dtype=np.int64))
    rows, step = x.numel() // columns, max(1, TASK // columns)
    tasks = np.array([(first, min(first + step, rows)) for first in range(0, rows, step)], np.int64)
    lie = (x.data_ptr(), KINDS[x.dtype], columns, min(block, columns))
    return share(lambda part: work(lie, part[0, 0], part[-1, 1]), tasks, (tasks[:, 1] - tasks[:, 0]) * columns)
