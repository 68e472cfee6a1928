"""How kernels find codes: a table by cells of [-1, 1] gives a start, comparisons with bounds the rest."""

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gefen_kernels import reference
from gefen_kernels.reference import Ties
from gefen_kernels.triton_base import jit

_CELLS = tl.constexpr(16384)
# x of at most 1 times the one and plus the other is 3 * 2^22 + 2^13 + its cell, an integer, so that the cell is in its
# last bits; those of anything else name some cell too.
_SCALE, _SHIFT = tl.constexpr(8191.0), tl.constexpr(12591104.0)
_LARGEST = tl.constexpr(3.4028234663852886e38)


class Search(NamedTuple):
    """What a kernel needs to find codes: the code of x is the number of bounds below x.

    Attributes:
        table: uint8 `[16384]`, for each cell of [-1, 1] the number of bounds in the cells before it.
        bounds: fp32 `[256]`, ascending, padded with infinity.
        info: int32 `[4]`: the bounds in the fullest cell; the code of zero; first of the codes written as it, and how
            many those are.
    """

    table: Tensor
    bounds: Tensor
    info: Tensor


@jit
def one_more(code: tl.tensor, x: tl.tensor, search: tl.tuple) -> tl.tensor:
    """`code + 1` where the bound of that number is below x."""
    return code + (tl.load(search.bounds + code) < x).to(tl.int32)


@jit
def below(x: tl.tensor, search: tl.tuple, INSIDE: tl.constexpr) -> tl.tensor:
    """The number of bounds below each finite x, int32, and some code for others; `INSIDE`: no x is larger than 1.

    The cell of x never decreases as x grows: bounds in earlier cells are below x, those in later ones are not.
    """
    near = x if INSIDE else tl.minimum(tl.maximum(x, -1.0), 1.0)
    cell = (near * _SCALE + _SHIFT).to(tl.int32, bitcast=True) & (_CELLS - 1)
    code = tl.load(search.table + cell).to(tl.int32)
    fullest = tl.load(search.info)
    if fullest <= 2:
        code = one_more(code, x, search)
        if fullest == 2:
            code = one_more(code, x, search)
    else:
        code, step = code * 0, 128
        for _ in range(8):
            code += tl.where(tl.load(search.bounds + code + (step - 1)) < x, step, 0)
            step = step // 2
    return code


@jit
def with_zero(code: tl.tensor, x: tl.tensor, search: tl.tuple) -> tl.tensor:
    """uint8 codes of x: that of zero where x is not finite and for every other code of the level 0."""
    zero, first, count = tl.load(search.info + 1), tl.load(search.info + 2), tl.load(search.info + 3)
    kept = (code - first).to(tl.uint32) >= count.to(tl.uint32)
    return tl.where((tl.abs(x) <= _LARGEST) & kept, code, zero).to(tl.uint8)


@jit
def nearest_code(x: tl.tensor, search: tl.tuple, INSIDE: tl.constexpr) -> tl.tensor:
    """`reference.nearest` for fp32 entries; no finite one is larger than 1 if they are `INSIDE`."""
    return with_zero(below(x, search, INSIDE), x, search)


@jit
def stochastic_code(x: tl.tensor, noise: tl.tensor, book: tl.tensor, search: tl.tuple) -> tl.tensor:
    """The reference's codes, x in [-1, 1] rounded up or down by `noise`; the search is `level_search_of(book)`."""
    code = below(x, search, True)
    low, high = tl.load(book + code), tl.load(book + code + 1)
    share = tl.div_rn(tl.where(x < 0, high - x, x - low), high - low)
    return with_zero(code + ((x < 0) != (noise < share)).to(tl.int32), x, search)


def search_of(codebook: Tensor, ties: Ties = "zero") -> Search:
    """What kernels need to find the nearest level of a codebook `[K]`; made on its device without waiting for it."""
    return _search(codebook, reference.midpoints(codebook, ties))


def level_search_of(codebook: Tensor) -> Search:
    """What kernels need to find the levels around x: the code at or below it, of those with one above."""
    levels = codebook[1:-1]  # at or above a level is above the number before it
    return _search(codebook, torch.nextafter(levels, torch.full_like(levels, -math.inf)))


def _search(codebook: Tensor, bounds: Tensor) -> Search:
    cells = (bounds.clamp(-1, 1) * _SCALE.value + _SHIFT.value).view(torch.int32) & (_CELLS.value - 1)
    every = torch.arange(_CELLS.value, dtype=torch.int32, device=bounds.device)
    table = torch.searchsorted(cells, every, out_int32=True)
    fullest = (torch.searchsorted(cells, every, right=True, out_int32=True) - table).amax()
    middle = codebook.shape[0] // 2
    # Without a zero in the middle no code is written as another.
    zeros = torch.where(codebook[middle] == 0, (codebook == 0).sum(), 0)
    info = torch.stack([fullest, torch.full_like(fullest, middle), (codebook < 0).sum(), zeros]).to(torch.int32)
    padding = bounds.new_full((256 - bounds.shape[0],), math.inf)
    return Search(table.to(torch.uint8), torch.cat([bounds, padding]), info)
