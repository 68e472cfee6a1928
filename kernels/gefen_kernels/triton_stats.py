"""Second moments by row and column means: the trees of a tile's sums, and kernels for tiles that no program holds.

Such a tile is cut into strips of 128 rows and spans of 256 columns. A tree over whole strips or spans, taken over their
trees, is the tree over the tile.
"""

import triton.language as tl

from gefen_kernels.step import STRIP as STRIP_ROWS
from gefen_kernels.triton_base import jit
from gefen_kernels.triton_codec import tree_sum_first, tree_sum_last
from gefen_kernels.triton_parts import Numbers, Row, average, gradient, numbers_of, pointer, row_of

STRIP = tl.constexpr(STRIP_ROWS)
SPAN = tl.constexpr(256)
_UNROLLED = tl.constexpr(8)  # steps whose rows are read together
_TINY = tl.constexpr(1.1754943508222875e-38)
_SMALLEST_SCALE = tl.constexpr(2.0**-20)  # below it, or where it is NaN, sums of unscaled squares may have overflowed


@jit
def column_slot(row: Row, matrix: tl.tensor, tile: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Where the statistic of a column of a row tile lies (`gefen_fn.second_moment.FactoredState`)."""
    line = matrix * row.rows + tile * row.height + column % row.packed
    return row.col + line * ((row.columns + row.packed - 1) // row.packed) + column // row.packed


@jit
def normaliser(total: tl.tensor, count: tl.tensor) -> tl.tensor:
    """A tile's mean, at least the smallest normal number; NaN stays."""
    mean = tl.div_rn(total, count.to(tl.float32))
    return tl.where(mean < _TINY, _TINY, mean)


@jit
def square_tree(
    pitch: tl.tensor,
    scale: tl.tensor,
    grad: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    live: tl.tensor,
    sums: tl.tensor,
    gap: tl.tensor,
    step: tl.tensor,
    STEPS: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    NEGATE: tl.constexpr,
    SCALED: tl.constexpr,
    KEEP: tl.constexpr,
) -> tl.tensor:
    """`[ROWS, width]`: line i is the tree of squares of the rows `i STRIDE + step ..+ STEPS` after `first`.

    Rows of the gradient lie `pitch` entries apart. Neighbours in the tree are read one after the other by the same
    thread, so that no thread waits for another's sums. With `KEEP` each row's own tree is left at `sums`, `gap` apart.
    """
    HALF: tl.constexpr = STEPS // 2
    if STEPS == 1:
        local = tl.arange(0, ROWS) * STRIDE + step
        line, there = first + local, local < count
        mask = there[:, None] & live[None, :]
        g = gradient(grad, line[:, None] * pitch + column[None, :], mask, scale, NEGATE, SCALED)
        if KEEP:
            tl.store(sums + line * gap, tree_sum_last(g * g), mask=there)
        return g * g
    elif STEPS <= _UNROLLED:
        lower = square_tree(
            pitch, scale, grad, first, count, column, live, sums, gap, step, HALF, STRIDE, ROWS, NEGATE, SCALED, KEEP
        )
        step += HALF
        upper = square_tree(
            pitch, scale, grad, first, count, column, live, sums, gap, step, HALF, STRIDE, ROWS, NEGATE, SCALED, KEEP
        )
        return lower + upper
    else:
        total = tl.full([ROWS, column.shape[0]], 0.0, tl.float32)
        for half in range(0, 2):
            at = step + half * HALF
            total += square_tree(
                pitch, scale, grad, first, count, column, live, sums, gap, at, HALF, STRIDE, ROWS, NEGATE, SCALED, KEEP
            )
        return total


@jit
def column_squares(
    pitch: tl.tensor,
    scale: tl.tensor,
    grad: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    live: tl.tensor,
    sums: tl.tensor,
    gap: tl.tensor,
    HEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    NEGATE: tl.constexpr,
    SCALED: tl.constexpr,
    KEEP: tl.constexpr,
) -> tl.tensor:
    """`[width]`: the tree of squares of each column over `HEIGHT` rows from `first`, of which `count` exist."""
    STEPS: tl.constexpr = HEIGHT // ROWS
    return tree_sum_first(
        square_tree(
            pitch, scale, grad, first, count, column, live, sums, gap, 0, STEPS, STEPS, ROWS, NEGATE, SCALED, KEEP
        )
    )


@jit
def line_tree(
    at: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    live: tl.tensor,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """As `square_tree` of `count` lines of fp32 at the pointers `at`, `stride` apart, of the values themselves."""
    if STEPS == 1:
        local = tl.arange(0, ROWS) * STRIDE + STEP
        return tl.load(at[None, :] + local[:, None] * stride, mask=(local < count)[:, None] & live[None, :], other=0.0)
    else:
        HALF: tl.constexpr = STEPS // 2
        return line_tree(at, stride, count, live, STEP, HALF, STRIDE, ROWS) + line_tree(
            at, stride, count, live, STEP + HALF, HALF, STRIDE, ROWS
        )


@jit
def strip_of(row: Row, strip: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The row tile of a strip of a matrix, the strip's first row and its number of rows."""
    tile = tl.minimum(strip // row.strips, row.down - 1)
    first = tile * row.height + (strip - tile * row.strips) * STRIP
    end = tl.where(tile == row.down - 1, row.rows, (tile + 1) * row.height)
    return tile, first, tl.minimum(end - first, STRIP)


@jit
def span_of(row: Row, span: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The columns of a span of a row, and which of them exist."""
    left = span // row.spans * row.width
    column = left + span % row.spans * SPAN + tl.arange(0, SPAN)
    return column, column < tl.minimum(row.columns, left + row.width)


@jit
def unravel(index: tl.tensor, inner: tl.tensor, outer: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Coordinates in `[.., outer, inner]`, the last one first."""
    return index % inner, index // inner % outer, index // inner // outer


@jit
def sum_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    grads: tl.tensor,
    scalars: tl.tensor,
    scratch: tl.tensor,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    ALIGN: tl.constexpr,
    NEGATE: tl.constexpr,
    SCALED: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    """First of three launches: the sums of squares of a strip of rows and a span of columns.

    With `SUMMED` those of the unscaled gradient are there already, and are taken again only if scaling them would not
    do.
    """
    row, program = row_of(table, owner, PARAM, "u8", ALIGN)
    n, grad = numbers_of(scalars, row.index), pointer(tl.load(grads + row.index), GRAD, ALIGN)
    if SUMMED:
        if n.grad_scale >= _SMALLEST_SCALE:
            return
    span, strip, matrix = unravel(program, row.all_spans, row.all_strips)
    _, first, count = strip_of(row, strip)
    column, live = span_of(row, span)
    line, rows = matrix * row.rows + first, scratch + row.row_sums + span
    all_columns, scale, pitch = row.columns, n.grad_scale, row.all_spans
    sums = column_squares(
        all_columns, scale, grad, line, count, column, live, rows, pitch, STRIP, 16, NEGATE, SCALED, True
    )
    tl.store(scratch + row.column_sums + (matrix * row.all_strips + strip) * row.columns + column, sums, mask=live)


@jit
def rescaled(mean: tl.tensor, n: Numbers, SUMMED: tl.constexpr) -> tl.tensor:
    """Means of squares of the scaled gradient, out of those of the unscaled one if it is `SUMMED`."""
    if SUMMED:
        mean = mean * tl.where(n.grad_scale >= _SMALLEST_SCALE, n.grad_scale * n.grad_scale, 1.0)
    return mean


@jit
def row_means(
    row: Row,
    n: Numbers,
    scratch: tl.tensor,
    index: tl.tensor,
    LINES: tl.constexpr,
    SPANS: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    """Average the means of `LINES` rows of a column tile."""
    tile, line = index % row.across, index // row.across * LINES + tl.arange(0, LINES)
    width = tl.minimum(row.columns - tile * row.width, row.width)
    span, live = tl.arange(0, SPANS)[None, :], line < row.total
    at = scratch + row.row_sums + line[:, None] * row.all_spans + tile * row.spans + span
    sums = tl.load(at, mask=live[:, None] & (span < (width + SPAN - 1) // SPAN), other=0.0)
    mean = rescaled(tl.div_rn(tree_sum_last(sums), width.to(tl.float32)), n, SUMMED)
    average(n, row.nu + line * row.across + tile, live, mean)


@jit
def averaged_columns(
    row: Row,
    n: Numbers,
    scratch: tl.tensor,
    tile: tl.tensor,
    matrix: tl.tensor,
    column: tl.tensor,
    live: tl.tensor,
    STRIPS: tl.constexpr,
    SUMMED: tl.constexpr,
) -> tl.tensor:
    """Average the means of some columns of a row tile."""
    height = tl.where(tile == row.down - 1, row.rows - tile * row.height, row.height)
    first = scratch + row.column_sums + (matrix * row.all_strips + tile * row.strips) * row.columns + column
    ROWS: tl.constexpr = 16 if STRIPS > 16 else STRIPS
    STEPS: tl.constexpr = STRIPS // ROWS
    sums = line_tree(first, row.columns, (height + STRIP - 1) // STRIP, live, 0, STEPS, STEPS, ROWS)
    mean = rescaled(tl.div_rn(tree_sum_first(sums), height.to(tl.float32)), n, SUMMED)
    return average(n, column_slot(row, matrix, tile, column), live, mean)


@jit
def column_means(
    row: Row,
    n: Numbers,
    scratch: tl.tensor,
    index: tl.tensor,
    STRIPS: tl.constexpr,
    SUMMED: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Average the means of a span of columns of a row tile, or take the given ones; leave their normaliser's part."""
    span, tile, matrix = unravel(index, row.all_spans, row.down)
    column, live = span_of(row, span)
    if GIVEN:
        col = tl.load(row.col + column, mask=live, other=0.0)
    else:
        col = averaged_columns(row, n, scratch, tile, matrix, column, live, STRIPS, SUMMED)
    norm = scratch + row.norms + (matrix * row.down + tile) * row.all_spans + span
    tl.store(norm + tl.arange(0, 1), tree_sum_last(col[None, :]))


@jit
def mean_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    scalars: tl.tensor,
    scratch: tl.tensor,
    LINES: tl.constexpr,
    SPANS: tl.constexpr,
    STRIPS: tl.constexpr,
    SUMMED: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Second: the averages of `LINES` rows' means, or of the means of a span of columns; `GIVEN` columns are known."""
    row, program = row_of(table, owner, "fp32", "u8", 1)
    n = numbers_of(scalars, row.index)
    others = (row.total + LINES - 1) // LINES * row.across
    if program < others:
        row_means(row, n, scratch, program, LINES, SPANS, SUMMED)
    else:
        column_means(row, n, scratch, program - others, STRIPS, SUMMED, GIVEN)
