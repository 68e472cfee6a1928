"""The whole Gefen step over leaves, block by block, as numba compiles it.

No loop allocates; a task works in the scratch of its thread. Functions take a leaf as its row of the table, whose
columns are named here, and its row of the scalars.
"""

import numpy as np

from gefen_kernels.cpu_loops import (
    BF16,
    F32,
    FP32,
    RUN,
    TINY,
    add_squares,
    close_rows,
    codes_at,
    compiled,
    encode,
    floats,
    from_bf16,
    from_fp16,
    inlined,
    kept,
    largest,
    load,
    raw,
    square_sum,
    store,
    to_bf16,
    to_fp16,
    tree,
)

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
    FIELDS,
) = range(19)
DENSE_LEAF, DENSE, BLOCKS, FACTORED = range(4)
# Columns of the scalars; the order of `gefen_kernels.step.SCALARS`.
B1, NOT_B1, B2, NOT_B2, CORRECTION1, ROOT_CORRECTION2, EPS, STEP, DECAY, GRAD_SCALE, SCALARS = range(11)


@inlined
def _load_grad(leaf, scalars, options, first, count, room):
    """The gradient as the first moment meets it: negated, and scaled with one rounding to its dtype.

    Where nothing is to be done it is read in place; callers do not write to it.
    """
    kind, address = leaf[GRAD_KIND], leaf[GRAD]
    if kind == FP32 and not (options[0] or options[1]):
        return floats(address + 4 * first, count)
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


@inlined
def _descend(leaf, scalars, count, d, root, p):
    """`p + step (d / c1 / (root + eps) + decay p)`."""
    c1, eps, step, decay = scalars[CORRECTION1], scalars[EPS], scalars[STEP], scalars[DECAY]
    if leaf[CORRECTS]:
        c2 = scalars[ROOT_CORRECTION2]
        for j in range(count):
            root[j] = root[j] / c2
    if leaf[DECAYS]:
        for j in range(count):
            p[j] = p[j] + (d[j] / c1 / (root[j] + eps) + p[j] * decay) * step
    else:
        for j in range(count):
            p[j] = p[j] + d[j] / c1 / (root[j] + eps) * step


@inlined
def _apply(leaf, scalars, first, count, d, root, p):
    """The parameter's step from the moment `d` and the root of the second moment; `p` is scratch."""
    kind, address = leaf[PARAM_KIND], leaf[PARAM]
    if kind == FP32:
        _descend(leaf, scalars, count, d, root, floats(address + 4 * first, count))
    else:
        load(kind, address, first, count, p)
        _descend(leaf, scalars, count, d, root, p)
        store(kind, address, first, count, p)


@inlined
def _moment(leaf, scalars, code, from_stored, block, first, count, g, m, limits, starts, spare):
    """Decode, average and re-encode one block; `m` becomes the moment that drives the step."""
    book, cells, bounds, comparisons, zeros = code
    codes = codes_at(leaf[MU] + first, count)
    scale = floats(leaf[ABSMAX] + 4 * block, 1)
    b1, not_b1, top = scalars[B1], scalars[NOT_B1], scale[0]
    for j in range(count):
        m[j] = book[codes[j]]
    for j in range(count):
        m[j] = m[j] * top * b1 + g[j] * not_b1
    top = largest(m, count)
    scale[0] = top
    encode(m, count, top, cells, bounds, comparisons, zeros, codes, starts, limits, spare)
    if from_stored:
        for j in range(count):
            m[j] = book[codes[j]] * top


@inlined
def _average(nu, index, b2, not_b2, new):
    """One step of an average that is stored as one number."""
    nu[index] = nu[index] * b2 + new * not_b2
    return nu[index]


@inlined
def _dense_root(leaf, scalars, first, count, g, root):
    """Average g^2 entry by entry; `root` becomes its root."""
    nu = floats(leaf[NU] + 4 * first, count)
    b2, not_b2 = scalars[B2], scalars[NOT_B2]
    for j in range(count):
        nu[j] = nu[j] * b2 + g[j] * g[j] * not_b2
        root[j] = np.sqrt(nu[j])


@compiled
def _dense_leaf(leaf, scalars, options, first, last, room):
    """Adam on entries `first..last` of a leaf with fp32 moments."""
    root, p = room[1], room[2]
    b1, not_b1 = scalars[B1], scalars[NOT_B1]
    for start in range(first, last, RUN):
        count = min(RUN, last - start)
        g = _load_grad(leaf, scalars, options, start, count, room[0])
        _dense_root(leaf, scalars, start, count, g, root)
        mu = floats(leaf[MU] + 4 * start, count)
        for j in range(count):
            mu[j] = mu[j] * b1 + g[j] * not_b1
        _apply(leaf, scalars, start, count, mu, root, p)


@inlined
def _block_root(leaf, scalars, block, count, g, root, work):
    """Average the block's mean of g^2; its root is shared."""
    mean = square_sum(g, count, work) / F32(count)
    shared = np.sqrt(_average(floats(leaf[NU], block + 1), block, scalars[B2], scalars[NOT_B2], mean))
    for j in range(count):
        root[j] = shared


@compiled
def _square_sums(leaf, scalars, options, first_row, rows, first_tile, last_tile, room):
    """Sum g^2 over the rows of some tiles, row after row, so that memory is read in long stretches.

    Leaves the sums of runs in `sums`, those of columns in the levels of the tree.
    """
    work, levels, sums = room[2], room[6], room[7]
    columns, width = leaf[COLUMNS], leaf[TILE_COLUMNS]
    start, stride = first_tile * width, 4 * (min(last_tile * width, columns) - first_tile * width)
    n = 0
    for r in range(first_row, first_row + rows):
        for tile in range(first_tile, last_tile):
            stop = min((tile + 1) * width, columns)
            for left in range(tile * width, stop, RUN):
                count = min(RUN, stop - left)
                g = _load_grad(leaf, scalars, options, r * columns + left, count, room[0])
                sums[n] = square_sum(g, count, work)
                n += 1
                add_squares(g, r - first_row, count, levels + 4 * (left - start), stride, work)


@compiled
def _column_means(leaf, scalars, tile, start, stop, first_tile, last_tile, room):
    """Average the column means of one tile; `factors[start:stop]` becomes the new averages."""
    _, square, _, _, _, factors, levels, _ = room
    columns, width = leaf[COLUMNS], leaf[TILE_COLUMNS]
    group, stride = first_tile * width, 4 * (min(last_tile * width, columns) - first_tile * width)
    _, rows, batch_row, local = _row_tile(leaf, tile)
    packed, slots = leaf[PACKED], -(-columns // leaf[PACKED])
    col = floats(leaf[COL] + 4 * batch_row * slots, leaf[ROWS] * slots)
    for left in range(start, stop, RUN):
        count = min(RUN, stop - left)
        close_rows(rows, count, levels + 4 * (left - group), stride, square)
        for j in range(count):
            c = left + j
            slot = (local * leaf[TILE_ROWS] + c % packed) * slots + c // packed
            factors[c] = _average(col, slot, scalars[B2], scalars[NOT_B2], square[j] / F32(rows))


@compiled
def _normalise(start, stop, factors, sums, work):
    """Divide `factors[start:stop]` by their mean, and take the roots."""
    number = (stop - start + RUN - 1) // RUN
    for k in range(number):
        left = start + k * RUN
        sums[k] = tree(factors[left : left + RUN], min(RUN, stop - left), work)
    norm = tree(sums, number, work) / F32(stop - start)
    norm = TINY if norm < TINY else norm
    for c in range(start, stop):
        factors[c] = np.sqrt(factors[c] / norm)


@compiled
def _tile_statistics(leaf, scalars, options, tile, first_tile, last_tile, room):
    """Average row and column means of some column tiles of a row tile.

    `tile` numbers the row tile over all batches; the factors in `room` become `sqrt(col / mean(col))`.
    """
    _, square, work, _, _, factors, _, sums = room
    columns, width = leaf[COLUMNS], leaf[TILE_COLUMNS]
    first_row, rows, _, _ = _row_tile(leaf, tile)
    _square_sums(leaf, scalars, options, first_row, rows, first_tile, last_tile, room)
    tiles = -(-columns // width)
    row = floats(leaf[NU] + 4 * first_row * tiles, rows * tiles)
    n = 0
    for i in range(rows):
        for k in range(first_tile, last_tile):
            length = min((k + 1) * width, columns) - k * width
            number = (length + RUN - 1) // RUN
            mean = tree(sums[n : n + number], number, work) / F32(length)
            n += number
            _average(row, i * tiles + k, scalars[B2], scalars[NOT_B2], mean)
    for k in range(first_tile, last_tile):
        start, stop = k * width, min((k + 1) * width, columns)
        _column_means(leaf, scalars, tile, start, stop, first_tile, last_tile, room)
        _normalise(start, stop, factors, square, work)


@compiled
def _row_tile(leaf, tile):
    """First row over all batches, rows, first row of its batch, and number in its batch, of a row tile."""
    height = leaf[TILE_ROWS]
    tiles = max(1, leaf[ROWS] // height)
    local = tile % tiles
    batch_row = tile // tiles * leaf[ROWS]
    rows = leaf[ROWS] - local * height if local == tiles - 1 else height
    return batch_row + local * height, rows, batch_row, local


@inlined
def _factored_root(leaf, row, left, count, factors, root):
    """`sqrt(row) * sqrt(col / mean(col))` of some columns; `row` holds the row's mean in each tile."""
    width = leaf[TILE_COLUMNS]
    for tile in range(left // width, (left + count - 1) // width + 1):
        shared = np.sqrt(row[tile])
        start, stop = max(left, tile * width), min(left + count, (tile + 1) * width)
        source, out = factors[start:stop], root[start - left : stop - left]
        for j in range(stop - start):
            out[j] = shared * source[j]


@compiled
def _update_rows(leaf, scalars, code, options, first_row, rows, start, stop, room):
    """Step columns `start..stop` of some rows of a quantized leaf, block by block.

    `code` is a `cpu.Codebook`, `options` is `(negate, scaled, from_stored)`, and the factors in `room` are the
    `sqrt(col / mean(col))` of every column of a factored leaf.
    """
    spare, m, root, work, starts, factors, _, _ = room
    columns, block, policy = leaf[COLUMNS], leaf[BLOCK], leaf[POLICY]
    blocks, tiles = -(-columns // block), -(-columns // leaf[TILE_COLUMNS])
    for r in range(first_row, first_row + rows):
        for left in range(start, stop, block):
            count, first, index = min(block, stop - left), r * columns + left, r * blocks + left // block
            g = _load_grad(leaf, scalars, options, first, count, room[0])
            if policy == DENSE:
                _dense_root(leaf, scalars, first, count, g, root)
            elif policy == BLOCKS:
                _block_root(leaf, scalars, index, count, g, root, work)
            else:
                _factored_root(leaf, floats(leaf[NU] + 4 * r * tiles, tiles), left, count, factors, root)
            _moment(leaf, scalars, code, options[2], index, first, count, g, m, work, starts, spare)
            _apply(leaf, scalars, first, count, m, root, work)


@compiled
def _factored(leaf, scalars, code, options, tile, first_tile, last_tile, room):
    """Step column tiles `first_tile..last_tile` of a row tile; its edges must be edges of blocks."""
    first_row, rows, _, _ = _row_tile(leaf, tile)
    start, stop = first_tile * leaf[TILE_COLUMNS], min(last_tile * leaf[TILE_COLUMNS], leaf[COLUMNS])
    _tile_statistics(leaf, scalars, options, tile, first_tile, last_tile, room)
    _update_rows(leaf, scalars, code, options, first_row, rows, start, stop, room)


@kept
def step(source):
    """Do the tasks, rows `(leaf, first, last, first, last)`, one after the other.

    Args:
        source: the checksum that `kept` gives; the others are those of the step.
        tasks: int64 `[n, 5]`: entries of a dense leaf; a row tile and column tiles of a factored one; rows and columns
            of another.
        table: int64 `[leaves, FIELDS]`.
        scalars: fp32 `[leaves, 10]`.
        code: the codebook, see `cpu.Codebook`.
        options: `(negate, scaled, from_stored)`.
        sizes: see `cpu.Sizes`.
        scratch: fp32, as many as `cpu.Sizes.floats` says.
        starts: uint8 `[sizes.line]`.
    """

    def run(tasks, table, scalars, code, options, sizes, scratch, starts):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        line, columns, levels_size, runs = sizes
        base = scratch.ctypes.data
        g, m = floats(base, line), floats(base + 4 * line, line)
        root, work = floats(base + 8 * line, line), floats(base + 12 * line, line)
        levels = base + 16 * line
        factors = floats(levels + 4 * levels_size, columns)
        sums = floats(levels + 4 * (levels_size + columns), runs)
        book = (raw(code[0]), raw(code[1]), raw(code[2]), code[3], code[4])
        room = (g, m, root, work, raw(starts), factors, levels, sums)
        every_leaf, every_scalar = raw(table), raw(scalars)
        for n in range(tasks.shape[0]):
            index, first, last, left, right = tasks[n, 0], tasks[n, 1], tasks[n, 2], tasks[n, 3], tasks[n, 4]
            leaf = every_leaf[index * FIELDS : (index + 1) * FIELDS]
            own = every_scalar[index * SCALARS : (index + 1) * SCALARS]
            if leaf[POLICY] == DENSE_LEAF:
                _dense_leaf(leaf, own, options, first, last, room)
            elif leaf[POLICY] == FACTORED:
                _factored(leaf, own, book, options, first, left, right, room)
            else:
                _update_rows(leaf, own, book, options, first, last - first, left, right, room)

    return run
