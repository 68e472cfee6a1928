"""A leaf as the loops read it: its row of the table, whose columns are named here, its scalars, and its gradient."""

from gefen_kernels.cpu_loops import BF16, FP32, I64, compiled, from_bf16, from_fp16, load, to_bf16, to_fp16
from gefen_kernels.cpu_vectors import RUN, after, floats

# Columns of the table of leaves.
(
    GRAD,
    GRAD_KIND,
    PARAM,
    PARAM_KIND,
    MU,
    ABSMAX,
    NU,
    COL,
    ROWS,
    COLUMNS,
    ENTRIES,
    BLOCK,
    POLICY,
    TILE_ROWS,
    TILE_COLUMNS,
    PACKED,
    DECAYS,
    CORRECTS,
    SEED,
    FIRST,
    RANDOM_CODES,
    RANDOM_PARAM,
    CODES_COUNT,
    PARAM_COUNT,
    FIELDS,
) = range(25)
DENSE_LEAF, DENSE, BLOCKS, FACTORED, GIVEN = range(5)
# Columns of the scalars; the order of `gefen_kernels.step.SCALARS`.
B1, NOT_B1, B2, NOT_B2, CORRECTION1, ROOT_CORRECTION2, EPS, STEP, DECAY, GRAD_SCALE, SCALARS = range(11)


@compiled
def load_grad(leaf, scalars, options, first, count, room):
    """The gradient as the first moment meets it: negated, and scaled with one rounding to its dtype.

    Where nothing is to be done it is read in place; callers do not write to it.
    """
    kind, address = leaf[GRAD_KIND], leaf[GRAD]
    if kind == FP32 and not (options[0] or options[1]):
        return floats(address + 4 * first)
    load(kind, address, first, count, room)
    if options[0]:
        for j in range(count):
            room[j] = -room[j]
    if options[1]:
        _scale(kind, scalars[GRAD_SCALE], count, room)
    return room


@compiled
def _scale(kind, factor, count, g):
    """`factor * g`, rounded to the dtype that `kind` names."""
    if kind == FP32:
        for j in range(count):
            g[j] = g[j] * factor
    elif kind == BF16:
        for j in range(count):
            g[j] = from_bf16(to_bf16(g[j] * factor))
    else:
        for j in range(count):
            g[j] = from_fp16(to_fp16(g[j] * factor))


@compiled
def load_rows(leaf, scalars, options, first_row, rows, left, count, room):
    """Some columns of some rows of the gradient, see `load_grad`, and how many entries apart the rows lie."""
    columns = leaf[COLUMNS]
    first = first_row * columns + left
    if leaf[GRAD_KIND] == FP32 and not (options[0] or options[1]):
        return floats(leaf[GRAD] + 4 * first), columns
    for k in range(rows):
        load_grad(leaf, scalars, options, first + k * columns, count, after(room, k * RUN))
    return room, I64(RUN)
