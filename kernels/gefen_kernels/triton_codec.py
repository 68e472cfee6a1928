"""The reference's block operations as Triton kernels, equal to it bit for bit; one program holds whole blocks.

Every product is rounded before it is added (`enable_fp_fusion=False`), and every division is an IEEE division.
The functions of registers (`encode_block`, `decode_block`, `tree_sum_last`, ...) serve other kernels too.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gefen_kernels import reference
from gefen_kernels.reference import Ties
from gefen_kernels.triton_base import jit, launch, magnitude_bits, widen
from gefen_kernels.triton_levels import level_search_of, nearest_code, search_of, stochastic_code

_ENTRIES, _FEWER = 2048, 512  # of one program; fewer where a thread's registers would not hold them
_PROGRAMS = 1024  # of a histogram: enough to fill any device, few enough to add up
# Not `tl.max` and `tl.sum`: kernels that triton made as it was imported, for the compiler or the interpreter alone.
_larger, _plus = tl.standard._elementwise_max, tl.standard._sum_combine


class Blocks(NamedTuple):
    """The blocks of a leaf: how many in all and in a row, a row's columns and a block's (the last may be shorter)."""

    total: int
    per_row: int
    columns: int
    block: int


@jit
def absmax_last(x: tl.tensor) -> tl.tensor:
    """`[rows, width]` -> `[rows]`: the largest magnitude; NaN where there is one."""
    return tl.reduce(magnitude_bits(x), 1, _larger).to(tl.float32, bitcast=True)


@jit
def tree_sum_last(x: tl.tensor) -> tl.tensor:
    """`[rows, width]` -> `[rows]`: `reference.tree_sum` of the last axis, a power of two; padding must hold zeros."""
    for _level in tl.static_range(20):
        if x.shape[1] > 1:
            x = tl.reduce(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2, _plus)
    return tl.reshape(x, [x.shape[0]])


@jit
def tree_sum_first(x: tl.tensor) -> tl.tensor:
    """`[rows, width]` -> `[width]`: `reference.tree_sum` of the first axis, a power of two; padding must hold zeros."""
    for _level in tl.static_range(20):
        if x.shape[0] > 1:
            x = tl.reduce(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), 1, _plus)
    return tl.reshape(x, [x.shape[1]])


@jit
def scale_last(x: tl.tensor) -> tl.tensor:
    """`absmax_last`, 0 where it is below the smallest normal fp32."""
    absmax = absmax_last(x)
    return tl.where(magnitude_bits(absmax) < 0x00800000, 0.0, absmax)


@jit
def encode_block(x: tl.tensor, search: tl.tuple) -> tuple[tl.tensor, tl.tensor]:
    """Codes (uint8 `[rows, width]`) and absmax (`[rows]`) of fp32 rows, each a block; padding must hold zeros."""
    absmax = scale_last(x)
    return nearest_code(tl.div_rn(x, absmax[:, None]), search, True), absmax


@jit
def encode_block_at_random(
    x: tl.tensor, noise: tl.tensor, book: tl.tensor, search: tl.tuple
) -> tuple[tl.tensor, tl.tensor]:
    """`encode_block` with codes rounded up or down by `noise`; see `stochastic_code`."""
    absmax = scale_last(x)
    return stochastic_code(tl.div_rn(x, absmax[:, None]), noise, book, search), absmax


@jit
def decode_block(codes: tl.tensor, absmax: tl.tensor, book: tl.tensor) -> tl.tensor:
    """fp32 `[rows, width]` that codes `[rows, width]` and absmax `[rows]` stand for; `book` points to the codebook.

    Levels come from the L1 cache: `tl.gather`, through shared memory, compiles to as many instructions and a barrier.
    """
    return tl.load(book + codes.to(tl.int32)) * absmax[:, None]


@jit
def place(
    program: tl.tensor, blocks: tl.tuple, COUNT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Offsets and mask of a program's entries `[COUNT, WIDTH]`, its blocks and their lengths `[COUNT]`; all int64."""
    index = tl.cast(program, tl.int64) * COUNT + tl.arange(0, COUNT)
    column = tl.arange(0, WIDTH)[None, :]
    if WHOLE:
        first, length = index * WIDTH, tl.full([COUNT], WIDTH, tl.int64)
        mask = tl.broadcast_to(index[:, None] < blocks.total, [COUNT, WIDTH])
    else:
        start = index % blocks.per_row * blocks.block
        first = index // blocks.per_row * blocks.columns + start
        length = tl.minimum(blocks.columns - start, blocks.block)
        mask = (index[:, None] < blocks.total) & (column < length[:, None])
    return first[:, None] + column, mask, index, length


@jit
def _encode_kernel(
    x: tl.tensor, noise: tl.tensor, codes: tl.tensor, absmax: tl.tensor, book: tl.tensor, search: tl.tuple,
    blocks: tl.tuple, COUNT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
) -> None:  # fmt: skip
    offset, mask, index, _ = place(tl.program_id(0), blocks, COUNT, WIDTH, WHOLE)
    entries = widen(tl.load(x + offset, mask=mask, other=0.0))
    if noise is None:
        code, largest = encode_block(entries, search)
    else:
        drawn = tl.load(noise + offset, mask=mask, other=0.0)
        code, largest = encode_block_at_random(entries, drawn, book, search)
    tl.store(codes + offset, code, mask=mask)
    tl.store(absmax + index, largest, mask=index < blocks.total)


@jit
def _decode_kernel(
    codes: tl.tensor, absmax: tl.tensor, book: tl.tensor, out: tl.tensor, blocks: tl.tuple,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
) -> None:  # fmt: skip
    offset, mask, index, _ = place(tl.program_id(0), blocks, COUNT, WIDTH, WHOLE)
    scale = tl.load(absmax + index, mask=index < blocks.total, other=0.0)
    tl.store(out + offset, decode_block(tl.load(codes + offset, mask=mask, other=0), scale, book), mask=mask)


@jit
def _statistic_kernel(
    x: tl.tensor, out: tl.tensor, blocks: tl.tuple,
    STATISTIC: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
) -> None:  # fmt: skip
    offset, mask, index, length = place(tl.program_id(0), blocks, COUNT, WIDTH, WHOLE)
    entries = widen(tl.load(x + offset, mask=mask, other=0.0))
    if STATISTIC == "absmax":
        value = absmax_last(entries)
    else:
        value = tree_sum_last(entries * entries)
        if STATISTIC == "mean":
            value = tl.div_rn(value, length.to(tl.float32))
    tl.store(out + index, value, mask=index < blocks.total)


@jit
def _histogram_kernel(
    x: tl.tensor, counts: tl.tensor, blocks: tl.tuple, COUNT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
) -> None:
    found = tl.full([4096], 0, tl.int32)
    for part in range(tl.program_id(0), (blocks.total + COUNT - 1) // COUNT, tl.num_programs(0)):
        offset, mask, _, _ = place(part, blocks, COUNT, WIDTH, WHOLE)
        entries = widen(tl.load(x + offset, mask=mask, other=0.0))
        ratio = tl.reshape(tl.div_rn(entries, scale_last(entries)[:, None]), [COUNT * WIDTH])
        counted = (magnitude_bits(ratio) < 0x7F800000) & (ratio != 0)
        size = tl.minimum((tl.where(counted, tl.abs(ratio), 0.0) * 2048.0).to(tl.int32), 2047)
        found += tl.histogram(tl.where(ratio < 0, 2047 - size, 2048 + size), 4096, mask=counted)
    tl.atomic_add(counts + tl.arange(0, 4096), found.to(tl.int64), mask=found > 0, sem="relaxed")


@jit
def _nearest_kernel(x: tl.tensor, codes: tl.tensor, search: tl.tuple, size: tl.tensor, WIDTH: tl.constexpr) -> None:
    offset = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    entries = tl.load(x + offset, mask=offset < size, other=0.0)
    tl.store(codes + offset, nearest_code(entries, search, False), mask=offset < size)


@jit
def _translate_kernel(codes: tl.tensor, table: tl.tensor, out: tl.tensor, size: tl.tensor, WIDTH: tl.constexpr) -> None:
    offset = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    code = tl.load(codes + offset, mask=offset < size, other=0)
    tl.store(out + offset, tl.load(table + code.to(tl.int32)), mask=offset < size)


def blocks_of(shape: Sequence[int], block: int, start: int) -> Blocks:
    """The blocks of a leaf of `shape`."""
    *lead, per_row = reference.scale_shape(shape, block, start)
    columns = math.prod(shape[start:])
    return Blocks(math.prod(lead) * per_row, per_row, columns, max(1, min(block, columns)))


def nearest(x: Tensor, codebook: Tensor, *, ties: Ties = "zero") -> Tensor:
    """`reference.nearest`."""
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    _launch_flat(_nearest_kernel, x.to(torch.float32).contiguous(), codes, search_of(codebook, ties))
    return codes


def encode(
    x: Tensor, codebook: Tensor, *, block: int, start: int = 1, ties: Ties = "zero", noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.encode`."""
    absmax = x.new_empty(reference.scale_shape(x.shape, block, start), dtype=torch.float32)
    codes, book = x.new_empty(x.shape, dtype=torch.uint8), codebook.contiguous()
    if noise is None:
        search, entries = search_of(book, ties), _ENTRIES
    else:
        search, entries, noise = level_search_of(book), _FEWER, noise.contiguous()
    _launch_blocks(_encode_kernel, _entries(x), block, start, noise, codes, absmax, book, search, entries=entries)
    return codes, absmax


def decode(codes: Tensor, absmax: Tensor, codebook: Tensor, *, block: int, start: int = 1) -> Tensor:
    """`reference.decode`."""
    reference.expand_blocks(absmax.to("meta"), codes.shape, block=block, start=start)  # raises where shapes do not fit
    out = codes.new_empty(codes.shape, dtype=torch.float32)
    args = (absmax.contiguous(), codebook.contiguous(), out)
    _launch_blocks(_decode_kernel, codes.contiguous(), block, start, *args)
    return out


def requantize(codes: Tensor, old: Tensor, new: Tensor, *, ties: Ties = "zero") -> Tensor:
    """`reference.requantize`."""
    out = codes.new_empty(codes.shape)
    _launch_flat(_translate_kernel, codes.contiguous(), nearest(old, new, ties=ties), out)
    return out


def block_absmax(x: Tensor, *, block: int, start: int = 1) -> Tensor:
    """`reference.block_absmax`."""
    return _statistic(x, block, start, "absmax")


def block_mean_square(x: Tensor, *, block: int, start: int = 1) -> Tensor:
    """`reference.block_mean_square`."""
    return _statistic(x, block, start, "mean")


def sum_of_squares(x: Tensor, *, block: int = 256, start: int = 1) -> Tensor:
    """`reference.sum_of_squares`."""
    return _statistic(x, block, start, "sum").to(torch.float64).sum()


def histogram(x: Tensor, *, block: int, start: int = 1) -> Tensor:
    """`reference.histogram`."""
    counts = torch.zeros(4096, dtype=torch.int64, device=x.device)
    _launch_blocks(_histogram_kernel, _entries(x), block, start, counts, most=_PROGRAMS)
    return counts


def _entries(x: Tensor) -> Tensor:
    """A leaf as kernels read it: contiguous, of a dtype that they widen themselves."""
    return (x if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x.to(torch.float32)).contiguous()


def _statistic(x: Tensor, block: int, start: int, name: str) -> Tensor:
    out = x.new_empty(reference.scale_shape(x.shape, block, start), dtype=torch.float32)
    _launch_blocks(_statistic_kernel, _entries(x), block, start, out, STATISTIC=name)
    return out


def _launch_blocks(
    kernel: Any, x: Tensor, block: int, start: int, *args: Any,
    entries: int = _ENTRIES, most: int = 2**31 - 1, **constants: str,
) -> None:  # fmt: skip
    """Launch a kernel whose arguments are a leaf, `args` and the leaf's blocks, of which a program takes COUNT."""
    blocks = blocks_of(x.shape, block, start)
    width = triton.next_power_of_2(blocks.block)
    count = max(1, entries // width)
    whole = width == blocks.block and blocks.columns % width == 0
    warps = min(16, max(4, width // 512))  # 16 entries for each thread; 16 of AMD's warps are a program's most
    programs = min(most, triton.cdiv(blocks.total, count))
    launch(kernel, programs, x, *args, blocks, warps=warps, COUNT=count, WIDTH=width, WHOLE=whole, **constants)


def _launch_flat(kernel: Any, x: Tensor, *args: Any) -> None:
    """Launch a kernel that knows no blocks: its arguments are x, `args` and the number of entries."""
    launch(kernel, triton.cdiv(x.numel(), _FEWER), x, *args, x.numel(), WIDTH=_FEWER)
