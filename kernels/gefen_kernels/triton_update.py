"""Kernels that step the parts of a leaf: a block's moment stays in registers from its codes to its codes."""

import triton.language as tl

from gefen_kernels.triton_base import jit
from gefen_kernels.triton_codec import Blocks, place, tree_sum_last
from gefen_kernels.triton_parts import average, gradient, moment, numbers_of, pointer, row_of, step_param
from gefen_kernels.triton_stats import SPAN, column_slot, column_squares, normaliser, strip_of, unravel


@jit
def dense_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    grads: tl.tensor,
    scalars: tl.tensor,
    counts: tl.tensor,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    ALIGN: tl.constexpr,
    NEGATE: tl.constexpr,
    SCALED: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Leaves with fp32 moments: a program steps `WIDTH` entries."""
    row, program = row_of(table, owner, PARAM, "fp32", ALIGN)
    n, grad = numbers_of(scalars, row.index), pointer(tl.load(grads + row.index), GRAD, ALIGN)
    offset = program * WIDTH + tl.arange(0, WIDTH)
    mask = offset < row.columns
    g = gradient(grad, offset, mask, n.grad_scale, NEGATE, SCALED)
    m = tl.load(row.mu + offset, mask=mask, other=0.0) * n.b1 + g * n.one_minus_b1
    tl.store(row.mu + offset, m, mask=mask)
    root = tl.sqrt_rn(average(n, row.nu + offset, mask, g * g))
    step_param(row, n, counts, offset, mask, m, root, ALIGN, RANDOM_PARAM)


@jit
def block_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    grads: tl.tensor,
    scalars: tl.tensor,
    counts: tl.tensor,
    book: tl.tensor,
    search: tl.tuple,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    ALIGN: tl.constexpr,
    NEGATE: tl.constexpr,
    SCALED: tl.constexpr,
    MHAT: tl.constexpr,
    RANDOM_CODES: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    DENSE: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Quantized leaves whose second moment is one per block, or one per entry: a program steps `COUNT` blocks."""
    row, program = row_of(table, owner, PARAM, "u8", ALIGN)
    n, grad = numbers_of(scalars, row.index), pointer(tl.load(grads + row.index), GRAD, ALIGN)
    blocks = Blocks(row.total, row.blocks, row.columns, row.block)
    offset, mask, block, length = place(program, blocks, COUNT, WIDTH, WHOLE)
    live = block < row.total
    g = gradient(grad, offset, mask, n.grad_scale, NEGATE, SCALED)
    if DENSE:
        nu = average(n, row.nu + offset, mask, g * g)
    else:
        mean = tl.div_rn(tree_sum_last(g * g), length.to(tl.float32))
        nu = average(n, row.nu + block, live, mean)[:, None]
    drive = moment(row, n, counts, book, search, g, offset, mask, block, live, WIDTH, ALIGN, MHAT, RANDOM_CODES)
    step_param(row, n, counts, offset, mask, drive, tl.sqrt_rn(nu), ALIGN, RANDOM_PARAM)


@jit
def tile_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    grads: tl.tensor,
    scalars: tl.tensor,
    counts: tl.tensor,
    book: tl.tensor,
    search: tl.tuple,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    ALIGN: tl.constexpr,
    NEGATE: tl.constexpr,
    SCALED: tl.constexpr,
    MHAT: tl.constexpr,
    RANDOM_CODES: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Factored leaves, a program for each tile: one sweep for the columns' means, one to step `ROWS` rows at a time.

    The second sweep finds the gradient in the cache: a tile of 128 x 256 is 64 KiB of bf16. Where the means are `GIVEN`
    there is the second only, and a program has `HEIGHT` rows.
    """
    row, program = row_of(table, owner, PARAM, "u8", ALIGN)
    n, grad = numbers_of(scalars, row.index), pointer(tl.load(grads + row.index), GRAD, ALIGN)
    edge, tile, matrix = unravel(program, row.across, row.down)
    if GIVEN:
        line = program // row.across * HEIGHT
        count = tl.minimum(row.rows - line, HEIGHT)
    else:
        line = matrix * row.rows + tile * row.height
        count = tl.where(tile == row.down - 1, row.rows - tile * row.height, row.height)
    left = edge * row.width
    width = tl.minimum(row.columns - left, row.width)
    column, live = left + tl.arange(0, WIDTH), tl.arange(0, WIDTH) < width
    if GIVEN:
        col = tl.load(row.col + column, mask=live, other=0.0)
    else:
        total = tl.full([WIDTH], 0.0, tl.float32)
        for first in range(0, count, HEIGHT):  # the last tile is up to two tall
            at, rest, scale = line + first, count - first, n.grad_scale
            total += column_squares(
                row.columns, scale, grad, at, rest, column, live, scalars, 0, HEIGHT, ROWS, NEGATE, SCALED, False
            )
        col = average(n, column_slot(row, matrix, tile, column), live, tl.div_rn(total, count.to(tl.float32)))
    down = tl.sqrt_rn(tl.div_rn(col, normaliser(tree_sum_last(col[None, :]), width)))[None, :]
    piece = tl.arange(0, WIDTH // BLOCK) * BLOCK
    for first in range(0, count, ROWS):
        here, at = first + tl.arange(0, ROWS) < count, line + first + tl.arange(0, ROWS)
        offset, mask = at[:, None] * row.columns + column[None, :], here[:, None] & live[None, :]
        g = gradient(grad, offset, mask, n.grad_scale, NEGATE, SCALED)
        mean = tl.div_rn(tree_sum_last(g * g), width.to(tl.float32))
        across = tl.sqrt_rn(average(n, row.nu + at * row.across + edge, here, mean))[:, None]
        block = tl.reshape(at[:, None] * row.blocks + ((left + piece) // row.block)[None, :], [ROWS * WIDTH // BLOCK])
        exists = tl.reshape(here[:, None] & (piece < width)[None, :], [ROWS * WIDTH // BLOCK])
        drive = moment(row, n, counts, book, search, g, offset, mask, block, exists, BLOCK, ALIGN, MHAT, RANDOM_CODES)
        step_param(row, n, counts, offset, mask, drive, across * down, ALIGN, RANDOM_PARAM)


@jit
def update_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    grads: tl.tensor,
    scalars: tl.tensor,
    counts: tl.tensor,
    book: tl.tensor,
    search: tl.tuple,
    scratch: tl.tensor,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    ALIGN: tl.constexpr,
    NEGATE: tl.constexpr,
    SCALED: tl.constexpr,
    MHAT: tl.constexpr,
    RANDOM_CODES: tl.constexpr,
    RANDOM_PARAM: tl.constexpr,
    SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRADDLES: tl.constexpr,
) -> None:
    """Third: the step of a strip of rows and one block of columns, which `STRADDLES` tiles or lies in one."""
    row, program = row_of(table, owner, PARAM, "u8", ALIGN)
    n, grad = numbers_of(scalars, row.index), pointer(tl.load(grads + row.index), GRAD, ALIGN)
    piece, strip, matrix = unravel(program, row.blocks, row.all_strips)
    tile, start, count = strip_of(row, strip)
    column = piece * row.block + tl.arange(0, WIDTH)
    live = (tl.arange(0, WIDTH) < row.block) & (column < row.columns)
    if STRADDLES:
        where = tl.where(live, column, 0) // row.width
    else:
        where = piece * row.block // row.width + tl.arange(0, 1)
    width = tl.minimum(row.columns - where * row.width, row.width)
    span = tl.arange(0, SPANS)[None, :]
    norms = scratch + row.norms + (matrix * row.down + tile) * row.all_spans + where[:, None] * row.spans + span
    sums = tl.load(norms, mask=span < (width[:, None] + SPAN - 1) // SPAN, other=0.0)
    col = tl.load(column_slot(row, matrix, tile, column), mask=live, other=0.0)
    down = tl.sqrt_rn(tl.div_rn(col, normaliser(tree_sum_last(sums), width)))[None, :]
    for first in range(0, count, ROWS):
        here, at = first + tl.arange(0, ROWS) < count, matrix * row.rows + start + first + tl.arange(0, ROWS)
        offset, mask = at[:, None] * row.columns + column[None, :], here[:, None] & live[None, :]
        g = gradient(grad, offset, mask, n.grad_scale, NEGATE, SCALED)
        means = tl.load(row.nu + at[:, None] * row.across + where[None, :], mask=here[:, None], other=0.0)
        block = at * row.blocks + piece
        drive = moment(row, n, counts, book, search, g, offset, mask, block, here, WIDTH, ALIGN, MHAT, RANDOM_CODES)
        step_param(row, n, counts, offset, mask, drive, tl.sqrt_rn(means) * down, ALIGN, RANDOM_PARAM)
