"""Parts of a fused step in registers: a leaf's entry in the table of leaves, its gradient, sums, moment and parameter.

A launch serves many leaves: `table` is int64 `[leaves, len(Row._fields)]`; `owner` int32 `[programs, 2]`, the leaf of
each program and its number among that leaf's; `grads` has the addresses of the gradients, `scalars` the numbers and
`counts` int32 `[leaves, 2]` the counts that codes and parameters draw with, of all leaves of the step. Every operation
is rounded by itself and every sum is the reference's tree.
"""

from typing import Any, NamedTuple

import triton.language as tl

from gefen_kernels.step import PARAM_STREAM, SCALARS
from gefen_kernels.triton_base import jit, widen
from gefen_kernels.triton_codec import decode_block, encode_block, encode_block_at_random
from gefen_kernels.triton_random import random_words, round_to_bf16, uniform


class Row(NamedTuple):
    """One leaf of a launch: ints on the host, int64 scalars in a kernel, where addresses are pointers."""

    param: Any
    mu: Any
    absmax: Any
    nu: Any
    col: Any
    decays: Any
    corrects: Any
    index: Any  # among all leaves of the step
    seed: Any
    first: Any  # what is drawn at random for its first entry, is that of this one
    total: Any  # blocks, or rows of a factored leaf
    rows: Any  # R, of one matrix
    columns: Any  # C
    block: Any
    blocks: Any  # of one row
    height: Any  # Tr
    down: Any  # row tiles of one matrix
    width: Any  # Tc
    across: Any  # column tiles
    packed: Any  # Q
    strips: Any  # pieces of rows in a row tile of nominal height
    all_strips: Any  # of one matrix
    spans: Any  # pieces of columns in a column tile of nominal width
    all_spans: Any  # of one row
    row_sums: Any  # offsets into the scratch
    column_sums: Any
    norms: Any


class Numbers(NamedTuple):
    """A leaf's scalars, in the order of `SCALARS`, on the device."""

    b1: Any
    one_minus_b1: Any
    b2: Any
    one_minus_b2: Any
    correction1: Any
    root_correction2: Any
    eps: Any
    step: Any
    weight_decay: Any
    grad_scale: Any


_FIELDS = tl.constexpr(len(Row._fields))
_SCALARS = tl.constexpr(len(SCALARS))
_PARAM_STREAM = tl.constexpr(PARAM_STREAM)


@jit
def pointer(address: tl.tensor, KIND: tl.constexpr, ALIGN: tl.constexpr) -> tl.tensor:
    """A pointer out of an address that is a multiple of `ALIGN` bytes."""
    if KIND == "bf16":
        return tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), ALIGN)
    elif KIND == "fp16":
        return tl.multiple_of(address.to(tl.pointer_type(tl.float16)), ALIGN)
    elif KIND == "u8":
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGN)


@jit
def row_of(
    table: tl.tensor,
    owner: tl.tensor,
    PARAM: tl.constexpr,
    MU: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tuple[Row, tl.tensor]:
    """The entry of this program's leaf, and the program's number among that leaf's, int64.

    `ALIGN` divides the addresses of entries, the number of columns, the block and the tile's width.
    """
    owned = owner + tl.program_id(0).to(tl.int64) * 2
    at = table + tl.load(owned).to(tl.int64) * _FIELDS
    row = Row(
        pointer(tl.load(at), PARAM, ALIGN),
        pointer(tl.load(at + 1), MU, ALIGN),
        pointer(tl.load(at + 2), "fp32", 4),
        pointer(tl.load(at + 3), "fp32", ALIGN),
        pointer(tl.load(at + 4), "fp32", 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
        tl.load(at + 8),
        tl.load(at + 9),
        tl.load(at + 10),
        tl.load(at + 11),
        tl.multiple_of(tl.load(at + 12), ALIGN),
        tl.multiple_of(tl.load(at + 13), ALIGN),
        tl.load(at + 14),
        tl.load(at + 15),
        tl.load(at + 16),
        tl.multiple_of(tl.load(at + 17), ALIGN),
        tl.load(at + 18),
        tl.load(at + 19),
        tl.load(at + 20),
        tl.load(at + 21),
        tl.load(at + 22),
        tl.load(at + 23),
        tl.load(at + 24),
        tl.load(at + 25),
        tl.load(at + 26),
    )
    return row, tl.load(owned + 1).to(tl.int64)


@jit
def numbers_of(scalars: tl.tensor, index: tl.tensor) -> Numbers:
    """A leaf's scalars: row `index` of fp32 `[n, 10]`."""
    at = scalars + index * _SCALARS
    return Numbers(
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
        tl.load(at + 8),
        tl.load(at + 9),
    )


@jit
def gradient(
    grad: tl.tensor, offset: tl.tensor, mask: tl.tensor, scale: tl.tensor, NEGATE: tl.constexpr, SCALED: tl.constexpr
) -> tl.tensor:
    """fp32 entries of a gradient, 0 where masked."""
    raw = tl.load(grad + offset, mask=mask, other=0.0)
    g = widen(raw)
    if NEGATE:
        g = -g
    if SCALED:
        g = tl.where(mask, widen((g * scale).to(raw.dtype)), 0.0)
    return g


@jit
def moment(
    row: Row,
    n: Numbers,
    counts: tl.tensor,
    book: tl.tensor,
    search: tl.tuple,
    g: tl.tensor,
    offset: tl.tensor,
    mask: tl.tensor,
    block: tl.tensor,
    live: tl.tensor,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    MHAT: tl.constexpr,
    RANDOM: tl.constexpr,
) -> tl.tensor:
    """Step the quantized moment of `[rows, width]`, runs of `BLOCK` of it being blocks; return what drives the update.

    `block` holds the blocks' indices and `live` whether they exist; `RANDOM` draws the codes' rounding.
    """
    COUNT: tl.constexpr = g.shape[0] * g.shape[1] // BLOCK
    codes = tl.reshape(tl.load(row.mu + offset, mask=mask, other=0), [COUNT, BLOCK])
    old = decode_block(codes, tl.load(row.absmax + block, mask=live, other=0.0), book)
    m = old * n.b1 + tl.reshape(g * n.one_minus_b1, [COUNT, BLOCK])
    m = tl.where(tl.reshape(mask, [COUNT, BLOCK]), m, 0.0)
    # Both wait for every thread of a block, so all have read what is now written.
    if RANDOM:
        noise = tl.reshape(
            uniform(offset + row.first, tl.load(counts + row.index * 2), row.seed, ALIGN), [COUNT, BLOCK]
        )
        code, absmax = encode_block_at_random(m, noise, book, search)
    else:
        code, absmax = encode_block(m, search)
    tl.store(row.mu + offset, tl.reshape(code, g.shape), mask=mask)
    tl.store(row.absmax + block, absmax, mask=live)
    if MHAT:
        m = decode_block(code, absmax, book)
    return tl.reshape(m, g.shape)


@jit
def step_param(
    row: Row,
    n: Numbers,
    counts: tl.tensor,
    offset: tl.tensor,
    mask: tl.tensor,
    drive: tl.tensor,
    root: tl.tensor,
    ALIGN: tl.constexpr,
    RANDOM: tl.constexpr,
) -> None:
    """Step the parameter along `drive`; `root` broadcasts to its shape. `RANDOM` draws the rounding of bf16."""
    if row.corrects != 0:
        root = tl.div_rn(root, n.root_correction2)
    if n.correction1 != 1.0:  # as it is after some 160 steps
        drive = tl.div_rn(drive, n.correction1)
    u = tl.div_rn(drive, root + n.eps)
    raw = tl.load(row.param + offset, mask=mask, other=0.0)
    p = widen(raw)
    if row.decays != 0:
        u = u + p * n.weight_decay
    new = p + u * n.step
    if RANDOM:
        key = row.seed + _PARAM_STREAM
        words = random_words(offset + row.first, tl.load(counts + row.index * 2 + 1), key, ALIGN)
        new = p + (round_to_bf16(new, words) - p)  # as updates are added to parameters
    tl.store(row.param + offset, new.to(raw.dtype), mask=mask)


@jit
def average(n: Numbers, at: tl.tensor, live: tl.tensor, new: tl.tensor) -> tl.tensor:
    """Step the averages at `at` toward `new` and return them, 0 where there is none."""
    old = tl.load(at, mask=live, other=0.0)
    tl.debug_barrier()  # several threads may hold the same average: all have read it before one writes
    value = tl.where(live, old * n.b2 + new * n.one_minus_b2, 0.0)
    tl.store(at, value, mask=live)
    return value
