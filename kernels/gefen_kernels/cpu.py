"""The CPU back end: the whole step in place, each gradient read from memory once, on as many threads as torch uses.

It gives the reference's bits, NaNs' payloads and the order of a norm's float64 additions aside, whatever the number of
threads. It needs numba (the extra `cpu`); code is compiled at the first call and kept for later processes.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gefen_kernels import cpu_loops as loops
from gefen_kernels import cpu_step, reference
from gefen_kernels.cpu_edges import plan_sums, run_sums
from gefen_kernels.cpu_loops import KINDS
from gefen_kernels.cpu_threads import TASK, Ints, share
from gefen_kernels.cpu_vectors import RUN
from gefen_kernels.step import Leaf

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
    "dense": cpu_step.DENSE,
    "block": cpu_step.BLOCKS,
    "factored": cpu_step.FACTORED,
    "given": cpu_step.GIVEN,
}
_STRETCH = 4096  # columns of a factored leaf that are read together: pages are dearer than the cache


class Codebook(NamedTuple):
    """A codebook as the loops read it.

    The code of a ratio is the number of bounds below it. A ratio's sign and the cell of its magnitude, an integer that
    is monotone in it to the bit, tell how many bounds lie in lower cells; comparisons with the next ones do the rest.
    Cells are about equal in the root of the magnitude, as levels are dense near 0.

    Attributes:
        levels: fp32 `[256]`.
        bounds: fp32 `[256]`, the last infinite.
        starts: uint8 `[2, CELLS]`, for ratios above and below 0 the number of bounds in lower cells.
        planes: uint8 `[2, 4, 256]`: the bytes of the levels and of the bounds.
        comparisons: the most bounds in one cell.
        zeros: `(first, number)` of the codes that are written as 128.
        of_zero: the code of 0.
    """

    levels: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.float32]
    starts: npt.NDArray[np.uint8]
    planes: npt.NDArray[np.uint8]
    comparisons: int
    zeros: tuple[int, int]
    of_zero: int


def codebook_table(codebook: Tensor, ties: reference.Ties) -> Codebook:
    """Lay out a codebook fp32 `[256]` for the loops."""
    return _codebook_table(codebook.numpy().tobytes(), ties)


@functools.lru_cache(maxsize=8)
def _codebook_table(raw: bytes, ties: reference.Ties) -> Codebook:
    levels = np.frombuffer(raw, np.float32).copy()
    zero = np.flatnonzero(levels == 0) if levels[128] == 0 else np.zeros(0, np.int64)
    zeros = (int(zero[0]), len(zero)) if len(zero) else (0, 0)
    bounds = np.append(reference.midpoints(torch.from_numpy(levels), ties).numpy() + np.float32(0), np.float32(np.inf))
    cell = _cells(bounds[:-1])
    ends = np.cumsum(np.bincount(cell, minlength=2 * loops.CELLS))
    starts = np.append(0, ends[:-1])
    if len(zero):  # bounds between codes that are written alike need no comparison
        skipped = (starts >= zero[0]) & (starts < zero[-1])
        starts = np.where(skipped, np.minimum(ends, zero[-1]), starts)
    planes = np.stack([levels, bounds]).view(np.uint8).reshape(2, 256, 4).transpose(0, 2, 1)
    signed = np.stack([starts[loops.CELLS :], starts[loops.CELLS - 1 :: -1]]).astype(np.uint8)
    of_zero = 128 if len(zero) else int((bounds < 0).sum())
    most = int((ends - starts).max())
    return Codebook(levels, bounds, signed, np.ascontiguousarray(planes), most, zeros, of_zero)


def _cells(x: npt.NDArray[np.float32]) -> Ints:
    """Numbers of signed cells, growing with `x`; magnitudes go as in `cpu_loops.encode`."""
    size = ((np.abs(x).view(np.uint32) >> np.uint32(1)) + np.uint32(0x1FC00000)).view(np.float32)
    cell = np.minimum((size * np.float32(loops.CELLS - 1)).astype(np.int64), loops.CELLS - 1)
    return np.where(x < 0, loops.CELLS - 1 - cell, loops.CELLS + cell)


def supports(leaf: Leaf) -> bool:
    """Whether the loops can take this leaf: plain CPU tensors of known dtypes, the state contiguous, nothing drawn."""
    scales = leaf.nu if leaf.absmax is None else (leaf.absmax, *leaf.nu)
    tensors = (leaf.grad, leaf.param, leaf.mu, *scales)
    known = leaf.grad.dtype in KINDS and leaf.param.dtype in KINDS
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in tensors)
    typed = leaf.mu.dtype in (torch.uint8, torch.float32) and all(t.dtype == torch.float32 for t in scales)
    laid = all(t.is_contiguous() for t in (leaf.mu, *scales)) and not leaf.param.is_neg()
    return known and plain and typed and laid and not (leaf.random_codes or leaf.random_param)


def warm_up() -> None:
    """Compile the loops, or load what an earlier process compiled: some 10 s once on a machine, then 0.3 s."""
    x = torch.zeros(2, 2, device="cpu")
    book = torch.linspace(-1.0, 1.0, 256, device="cpu")
    leaf = Leaf(x, x.clone(), x.clone(), None, (x.clone(),), "dense")
    gefen_step([leaf], torch.ones(1, cpu_step.SCALARS, device="cpu"), book)
    histogram(x, block=2)
    sum_of_squares(x)
    run_sums(plan_sums([x], [[(0, 2)]]), [x])


class Plan(NamedTuple):
    """What does not change from step to step while leaves keep their tensors; the caller keeps these alive.

    Attributes:
        kept: numbers of the leaves that have entries.
        params: their parameters.
        table: int64 `[kept, FIELDS]`, see `cpu_step`.
        tasks: int64 `[tasks, 5]`, see `cpu_step.step`.
        weights: about how many entries each task has.
        sizes: the scratch of a thread.
    """

    kept: list[int]
    params: list[Tensor]
    table: Ints
    tasks: Ints
    weights: Ints
    sizes: "Sizes"


def plan_step(leaves: Sequence[Leaf]) -> Plan:
    """Lay out leaves for the loops, and split them into tasks."""
    kept = [n for n, leaf in enumerate(leaves) if leaf.param.numel()]
    table = np.array([_row(leaves[n]) for n in kept], np.int64).reshape(-1, cpu_step.FIELDS)
    tasks = np.array([task for n, row in enumerate(table.tolist()) for task in _tasks(n, row)], np.int64).reshape(-1, 5)
    params = [leaves[n].param for n in kept]
    return Plan(kept, params, table, tasks, _weights(table, tasks), _sizes(table))


def gefen_step(
    leaves: Sequence[Leaf],
    scalars: Tensor,
    codebook: Tensor,
    *,
    drive: str = "m",
    ties: reference.Ties = "zero",
    negate: bool = False,
    scaled: bool = False,
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
    """
    grads, options = [leaf.grad for leaf in leaves], {"drive": drive, "ties": ties, "negate": negate, "scaled": scaled}
    run_step(plan_step(leaves), grads, scalars, codebook, **options)  # type: ignore[arg-type]  # of mixed kinds


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
) -> None:
    """Step the leaves of a plan with these gradients, of the planned shapes and dtypes; see `gefen_step`."""
    if not plan.kept:
        return
    read = [grads[n].resolve_neg().contiguous() for n in plan.kept]
    written = [p.contiguous() for p in plan.params]
    plan.table[:, cpu_step.GRAD] = [g.data_ptr() for g in read]
    plan.table[:, cpu_step.PARAM] = [p.data_ptr() for p in written]
    numbers = np.ascontiguousarray(scalars.numpy()[plan.kept])
    code, options = tuple(codebook_table(codebook, ties)), (negate, scaled, drive == "m_hat")

    def work(part: Ints) -> None:
        scratch = np.empty(plan.sizes.floats, np.float32)
        cpu_step.step(part, plan.table, numbers, code, options, tuple(plan.sizes), scratch)

    share(work, plan.tasks, plan.weights)
    for param, p in zip(plan.params, written, strict=True):
        if p is not param:
            param.copy_(p)


def _row(leaf: Leaf) -> list[int]:
    """One leaf as the loops read it; the addresses of gradient and parameter come with the step."""
    shape, dense = leaf.param.shape, leaf.absmax is None
    start = 0 if dense else leaf.start
    columns = int(np.prod(shape[start:], dtype=np.int64))
    rows = shape[start - 1] if start else 1
    height, width = leaf.tile[0] or rows, min(leaf.tile[1] or columns, columns)
    packed = rows if leaf.tile[0] is None else 1 << (min(height, rows).bit_length() - 1)
    if leaf.policy == "given":
        height = 1  # no sums over rows, so no room for them
    fields = {
        cpu_step.GRAD: 0,
        cpu_step.GRAD_KIND: KINDS[leaf.grad.dtype],
        cpu_step.PARAM: 0,
        cpu_step.PARAM_KIND: KINDS[leaf.param.dtype],
        cpu_step.MU: leaf.mu.data_ptr(),
        cpu_step.ABSMAX: 0 if leaf.absmax is None else leaf.absmax.data_ptr(),
        cpu_step.NU: leaf.nu[0].data_ptr(),
        cpu_step.COL: leaf.nu[-1].data_ptr(),
        cpu_step.ROWS: rows,
        cpu_step.COLUMNS: columns,
        cpu_step.ENTRIES: leaf.param.numel(),
        cpu_step.BLOCK: min(leaf.block, max(columns, 1)),
        cpu_step.POLICY: cpu_step.DENSE_LEAF if dense else _POLICIES[leaf.policy],
        cpu_step.TILE_ROWS: height,
        cpu_step.TILE_COLUMNS: width,
        cpu_step.PACKED: packed,
        cpu_step.DECAYS: leaf.decays,
        cpu_step.CORRECTS: leaf.corrects,
    }
    return [fields[n] for n in range(cpu_step.FIELDS)]


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
        """Four lines, the levels, the factors of the columns, the sums of the runs, and runs of some rows."""
        return 4 * self.line + self.levels + self.columns + self.runs + loops.FEW * RUN


def _sizes(table: Ints) -> Sizes:
    if not len(table):
        return Sizes(RUN, 0, 0, 0)
    rows, height, columns = table[:, cpu_step.ROWS], table[:, cpu_step.TILE_ROWS], table[:, cpu_step.COLUMNS]
    width = table[:, cpu_step.TILE_COLUMNS]
    tallest = rows - height * (np.maximum(rows // height, 1) - 1)
    together = np.array([_tiles_together(row) for row in table.tolist()])
    runs = -(-width // RUN)
    levels = np.ceil(np.log2(tallest + 1)).astype(np.int64)
    line = max(int(table[:, cpu_step.BLOCK].max()), RUN, int(runs.max()))
    most = (levels * np.minimum(width * together, columns)).max(), (tallest * runs * together).max()
    return Sizes(line, int(columns.max()), int(most[0]), int(most[1]))


def _weights(table: Ints, tasks: Ints) -> Ints:
    row = table[tasks[:, 0]]
    rows, columns = tasks[:, 2] - tasks[:, 1], tasks[:, 4] - tasks[:, 3]
    tiles = columns * row[:, cpu_step.TILE_ROWS] * row[:, cpu_step.TILE_COLUMNS]
    policy = row[:, cpu_step.POLICY]
    kinds = [policy == kind for kind in (cpu_step.DENSE_LEAF, cpu_step.FACTORED, cpu_step.GIVEN)]
    return np.select(kinds, [rows, tiles, rows * columns * row[:, cpu_step.TILE_COLUMNS]], rows * columns)


def _tiles_together(row: list[int]) -> int:
    """Column tiles of one task: about `_STRETCH` columns, and all where blocks cross the edges of tiles."""
    width, tiles = row[cpu_step.TILE_COLUMNS], -(-row[cpu_step.COLUMNS] // row[cpu_step.TILE_COLUMNS])
    return min(tiles, max(1, _STRETCH // width)) if width % row[cpu_step.BLOCK] == 0 else tiles


def _tasks(index: int, row: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Split a leaf into tasks of about `TASK` entries; the split does not change a bit of the result."""
    entries, columns, policy = row[cpu_step.ENTRIES], row[cpu_step.COLUMNS], row[cpu_step.POLICY]
    if policy == cpu_step.DENSE_LEAF:
        for first in range(0, entries, TASK):
            yield index, first, min(first + TASK, entries), 0, 0
    elif policy == cpu_step.FACTORED:
        yield from _tiles(index, row)
    elif policy == cpu_step.GIVEN:
        yield from _strips(index, row)
    elif columns <= TASK:
        step = TASK // columns
        for first in range(0, entries // columns, step):
            yield index, first, min(first + step, entries // columns), 0, columns
    else:
        step = TASK // row[cpu_step.BLOCK] * row[cpu_step.BLOCK] or row[cpu_step.BLOCK]
        for r in range(entries // columns):
            for left in range(0, columns, step):
                yield index, r, r + 1, left, min(left + step, columns)


def _tiles(index: int, row: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Tasks of a factored leaf: whole tiles, and whole row tiles where blocks cross the edges of tiles."""
    rows, columns, height, width = (
        row[n] for n in (cpu_step.ROWS, cpu_step.COLUMNS, cpu_step.TILE_ROWS, cpu_step.TILE_COLUMNS)
    )
    number = row[cpu_step.ENTRIES] // (rows * columns) * max(1, rows // height)
    tiles, step = -(-columns // width), _tiles_together(row)
    for tile in range(number):
        for first in range(0, tiles, step):
            yield index, tile, 0, first, min(first + step, tiles)


def _strips(index: int, row: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Tasks of a leaf with given column means: some rows of whole column tiles, enough to be worth their factors."""
    rows, columns, width = (row[n] for n in (cpu_step.ROWS, cpu_step.COLUMNS, cpu_step.TILE_COLUMNS))
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
