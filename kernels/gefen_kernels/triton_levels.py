"""How kernels find codes: a table by cells of [-1, 1] gives a start, comparisons with bounds the rest."""

import math
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gefen_kernels import reference
from gefen_kernels.reference import Ties
from gefen_kernels.triton_base import jit, magnitude_bits

_CELLS = 16384


class Search(NamedTuple):
    """What a kernel needs to find codes: the code of x is the number of bounds below x.

    Attributes:
        table: uint8 `[16384]`, for each cell of [-1, 1] the number of bounds in the cells before it.
        bounds: fp32 `[256]`, ascending, padded with infinity.
        info: int32 `[4]`: the bounds in the fullest cell; the code of zero; first and last of the codes written as it.
    """

    table: Tensor
    bounds: Tensor
    info: Tensor


@jit
def below(x: tl.tensor, search: tl.tuple) -> tl.tensor:
    """The number of bounds below each finite x, int32.

    The cell of x never decreases as x grows: bounds in earlier cells are below x, those in later ones are not.
    """
    cell = tl.minimum(tl.maximum((x + 1.0) * 8192.0, 0.0), 16383.0).to(tl.int32)
    code = tl.load(search.table + cell).to(tl.int32)
    fullest = tl.load(search.info)
    if fullest <= 2:
        for _ in range(fullest):
            code += (tl.load(search.bounds + code) < x).to(tl.int32)
    else:
        code, step = code * 0, 128
        for _ in range(8):
            code += tl.where(tl.load(search.bounds + code + (step - 1)) < x, step, 0)
            step = step // 2
    return code


@jit
def with_zero(code: tl.tensor, finite: tl.tensor, search: tl.tuple) -> tl.tensor:
    """uint8 codes: that of zero for entries that are not finite and for every other code of the level 0."""
    zero, first, last = tl.load(search.info + 1), tl.load(search.info + 2), tl.load(search.info + 3)
    return tl.where(finite & ((code < first) | (code > last)), code, zero).to(tl.uint8)


@jit
def nearest_code(x: tl.tensor, search: tl.tuple) -> tl.tensor:
    """`reference.nearest` for fp32 entries."""
    finite = magnitude_bits(x) < 0x7F800000
    return with_zero(below(tl.where(finite, x, 0.0), search), finite, search)


@jit
def stochastic_code(x: tl.tensor, noise: tl.tensor, book: tl.tensor, search: tl.tuple) -> tl.tensor:
    """The reference's codes rounded up or down by `noise`; the search is `level_search_of(book)`."""
    finite = magnitude_bits(x) < 0x7F800000
    x = tl.where(finite, x, 0.0)
    code = below(x, search)
    low, high = tl.load(book + code), tl.load(book + code + 1)
    share = tl.div_rn(tl.where(x < 0, high - x, x - low), high - low)
    return with_zero(code + ((x < 0) != (noise < share)).to(tl.int32), finite, search)


def search_of(codebook: Tensor, ties: Ties = "zero") -> Search:
    """What kernels need to find the nearest level of a codebook `[K]`; made on its device without waiting for it."""
    return _search(codebook, reference.midpoints(codebook, ties))


def level_search_of(codebook: Tensor) -> Search:
    """What kernels need to find the levels around x: the code at or below it, of those with one above."""
    levels = codebook[1:-1]  # at or above a level is above the number before it
    return _search(codebook, torch.nextafter(levels, torch.full_like(levels, -math.inf)))


def _search(codebook: Tensor, bounds: Tensor) -> Search:
    cells = ((bounds + 1) * (_CELLS // 2)).clamp(0, _CELLS - 1).to(torch.int32)
    every = torch.arange(_CELLS, dtype=torch.int32, device=bounds.device)
    table = torch.searchsorted(cells, every, out_int32=True)
    fullest = (torch.searchsorted(cells, every, right=True, out_int32=True) - table).amax()
    middle = codebook.shape[0] // 2
    # Without a zero in the middle no code is another's: none is at least 256.
    first = torch.where(codebook[middle] == 0, (codebook < 0).sum(), 256)
    last = (codebook <= 0).sum() - 1
    info = torch.stack([fullest, torch.full_like(fullest, middle), first, last]).to(torch.int32)
    padding = bounds.new_full((256 - bounds.shape[0],), math.inf)
    return Search(table.to(torch.uint8), torch.cat([bounds, padding]), info)
