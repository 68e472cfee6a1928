"""A codebook as the loops of the CPU back end read it."""

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gefen_kernels import cpu_loops as loops
from gefen_kernels import reference
from gefen_kernels.cpu_threads import Ints

_Floats = npt.NDArray[np.float32]


class Codebook(NamedTuple):
    """A codebook as the loops read it.

    The code of a ratio, or of the level below it where codes are drawn, is the number of bounds below it. A ratio's
    sign and the cell of its magnitude, an integer that is monotone in it to the bit, tell how many bounds lie in lower
    cells; comparisons with the next ones do the rest. Cells are about equal in the root of the magnitude, as levels are
    dense near 0.

    Attributes:
        levels: fp32 `[256]`.
        bounds: fp32 `[256]`, the last infinite.
        starts: uint8 `[2, CELLS]`, for ratios above and below 0 the number of bounds in lower cells.
        planes: uint8 `[2, 4, 256]`: the bytes of the levels and of the bounds.
        comparisons: the most bounds in one cell that a ratio is compared with.
        zeros: `(first, number)` of the codes that are written as 128.
        of_zero: the code of 0, or of the level below it.
    """

    levels: _Floats
    bounds: _Floats
    starts: npt.NDArray[np.uint8]
    planes: npt.NDArray[np.uint8]
    comparisons: int
    zeros: tuple[int, int]
    of_zero: int


def nearest_table(codebook: Tensor, ties: reference.Ties) -> Codebook:
    """Lay out a codebook fp32 `[256]` for the nearest codes."""
    return _nearest_table(codebook.numpy().tobytes(), ties)


def level_table(codebook: Tensor) -> Codebook:
    """Lay out a codebook fp32 `[256]` for codes that are drawn: a bound below each level but the first and the last."""
    return _level_table(codebook.numpy().tobytes())


@functools.lru_cache(maxsize=8)
def _nearest_table(raw: bytes, ties: reference.Ties) -> Codebook:
    levels = np.frombuffer(raw, np.float32).copy()
    bounds = reference.midpoints(torch.from_numpy(levels), ties).numpy() + np.float32(0)
    starts, ends = _ends_of_cells(bounds)
    zeros, last = _zeros(levels), sum(_zeros(levels)) - 1
    if zeros[1]:  # bounds between codes that are written alike need no comparison
        skipped = (starts >= zeros[0]) & (starts < last)
        starts = np.where(skipped, np.minimum(ends, last), starts)
    return _table(levels, bounds, starts, int((ends - starts).max()))


@functools.lru_cache(maxsize=8)
def _level_table(raw: bytes) -> Codebook:
    levels = np.frombuffer(raw, np.float32).copy()
    bounds = np.nextafter(levels[1:-1], np.float32(-np.inf))
    starts, _ = _ends_of_cells(bounds)
    # Bounds of zeros lie in one cell with -0, which becomes 0 from the level below 0 as well, if 0 is written 128.
    compared = bounds[levels[1:-1] != 0] if _zeros(levels)[1] else bounds
    return _table(levels, bounds, starts, int(np.bincount(_cells(compared), minlength=1).max()))


def _table(levels: _Floats, bounds: _Floats, starts: Ints, comparisons: int) -> Codebook:
    zeros, of_zero = _zeros(levels), int((bounds < 0).sum())
    bounds = np.pad(bounds, (0, len(levels) - len(bounds)), constant_values=np.inf)
    planes = np.stack([levels, bounds]).view(np.uint8).reshape(2, 256, 4).transpose(0, 2, 1)
    signed = np.stack([starts[loops.CELLS :], starts[loops.CELLS - 1 :: -1]]).astype(np.uint8)
    return Codebook(
        levels, bounds, signed, np.ascontiguousarray(planes), comparisons, zeros, 128 if zeros[1] else of_zero
    )


def _zeros(levels: _Floats) -> tuple[int, int]:
    """The first and the number of the codes that stand for 0, if 128 is one of them; else `(0, 0)`."""
    zeros = np.flatnonzero(levels == 0)
    return (int(zeros[0]), len(zeros)) if levels[128] == 0 else (0, 0)


def _ends_of_cells(bounds: _Floats) -> tuple[Ints, Ints]:
    """How many bounds lie below each cell of `_cells`, and how many below its end."""
    ends = np.cumsum(np.bincount(_cells(bounds), minlength=2 * loops.CELLS))
    return np.append(0, ends[:-1]), ends


def _cells(x: _Floats) -> Ints:
    """Numbers of signed cells, growing with `x`; magnitudes go as in `cpu_loops.search`."""
    size = ((np.abs(x).view(np.uint32) >> np.uint32(1)) + np.uint32(0x1FC00000)).view(np.float32)
    cell = np.minimum((size * np.float32(loops.CELLS - 1)).astype(np.int64), loops.CELLS - 1)
    return np.where(x < 0, loops.CELLS - 1 - cell, loops.CELLS + cell)
