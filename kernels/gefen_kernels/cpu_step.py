"""The whole Gefen step over leaves, block by block, as numba compiles it.

No loop allocates; a task works in the scratch of its thread. Functions take a leaf as its row of the table and its row
of the scalars, see `cpu_leaf`.
"""

import numpy as np

from gefen_kernels.cpu_leaf import (
    ABSMAX,
    B1,
    B2,
    BLOCK,
    BLOCKS,
    CODES_COUNT,
    COL,
    COLUMNS,
    CORRECTION1,
    CORRECTS,
    DECAY,
    DECAYS,
    DENSE,
    DENSE_LEAF,
    EPS,
    FACTORED,
    FIELDS,
    FIRST,
    GIVEN,
    MU,
    NOT_B1,
    NOT_B2,
    NU,
    PACKED,
    PARAM,
    PARAM_COUNT,
    PARAM_KIND,
    POLICY,
    RANDOM_CODES,
    RANDOM_PARAM,
    ROOT_CORRECTION2,
    ROWS,
    SCALARS,
    SEED,
    STEP,
    TILE_COLUMNS,
    TILE_ROWS,
    load_grad,
    load_rows,
)
from gefen_kernels.cpu_loops import (
    F32,
    FEW,
    FP32,
    I64,
    TINY,
    add_squares,
    book_at,
    close_rows,
    compiled,
    decode,
    encode,
    inlined,
    kept,
    load,
    moment,
    square_sum,
    store,
    tree,
)
from gefen_kernels.cpu_random import EXTRA, draw, encode_at_random, store_at_random
from gefen_kernels.cpu_vectors import RUN, after, codes_at, floats, integers, long_words
from gefen_kernels.step import PARAM_STREAM


@compiled
def _descend(leaf, scalars, count, d, root, p):
    """`p + step (d / c1 / (root + eps) + decay p)`; `root` is overwritten."""
    c1, eps, step, decay = scalars[CORRECTION1], scalars[EPS], scalars[STEP], scalars[DECAY]
    if leaf[CORRECTS]:
        c2 = scalars[ROOT_CORRECTION2]
        for j in range(count):
            root[j] = root[j] / c2
    if c1 == F32(1):  # after the first few hundred steps
        for j in range(count):
            root[j] = d[j] / (root[j] + eps)
    else:
        for j in range(count):
            root[j] = d[j] / c1 / (root[j] + eps)
    if leaf[DECAYS]:
        for j in range(count):
            p[j] = p[j] + (root[j] + p[j] * decay) * step
    else:
        for j in range(count):
            p[j] = p[j] + root[j] * step


@compiled
def _apply(leaf, scalars, first, count, d, root, p, drawn):
    """The parameter's step from the moment `d` and the root of the second moment; `p` and `drawn` are scratch."""
    kind, address = leaf[PARAM_KIND], leaf[PARAM]
    if kind == FP32:
        _descend(leaf, scalars, count, d, root, floats(address + 4 * first))
    else:
        load(kind, address, first, count, p)
        _descend(leaf, scalars, count, d, root, p)
        if leaf[RANDOM_PARAM]:
            noise = draw(leaf[SEED] + PARAM_STREAM, leaf[PARAM_COUNT], leaf[FIRST] + first, count, drawn)
            store_at_random(address, first, count, p, noise)
        else:
            store(kind, address, first, count, p)


@compiled
def _average(nu, index, b2, not_b2, new):
    """One step of an average that is stored as one number."""
    nu[index] = nu[index] * b2 + new * not_b2
    return nu[index]


@compiled
def _dense_root(leaf, scalars, first, count, g, root):
    """Average g^2 entry by entry; `root` becomes its root."""
    nu = floats(leaf[NU] + 4 * first)
    b2, not_b2 = scalars[B2], scalars[NOT_B2]
    for j in range(count):
        nu[j] = nu[j] * b2 + g[j] * g[j] * not_b2
        root[j] = np.sqrt(nu[j])


@inlined
def _dense_leaf(leaf, scalars, options, first, last, room):
    """Adam on entries `first..last` of a leaf with fp32 moments."""
    root, p = room[1], room[2]
    b1, not_b1 = scalars[B1], scalars[NOT_B1]
    for start in range(first, last, RUN):
        count = min(RUN, last - start)
        g = load_grad(leaf, scalars, options, start, count, room[0])
        _dense_root(leaf, scalars, start, count, g, root)
        mu = floats(leaf[MU] + 4 * start)
        for j in range(count):
            mu[j] = mu[j] * b1 + g[j] * not_b1
        _apply(leaf, scalars, start, count, mu, root, p, room[8])


@compiled
def _block_root(leaf, scalars, block, count, g, root, work):
    """Average the block's mean of g^2; its root is shared."""
    mean = square_sum(g, count, work) / F32(count)
    shared = np.sqrt(_average(floats(leaf[NU]), block, scalars[B2], scalars[NOT_B2], mean))
    for j in range(count):
        root[j] = shared


@inlined
def _square_sums(leaf, scalars, options, first_row, rows, first_tile, last_tile, room):
    """Sum g^2 over some tiles, a few rows at a time, so that memory is read in long stretches.

    Leaves the sums of runs in `sums`, those of columns in the levels of the tree.
    """
    work, levels, sums, few = room[2], room[5], room[6], room[7]
    columns, width = leaf[COLUMNS], leaf[TILE_COLUMNS]
    start, end = first_tile * width, min(last_tile * width, columns)
    runs = (width + RUN - 1) // RUN * (last_tile - first_tile)
    runs -= (width - 1) // RUN - (end - (last_tile - 1) * width - 1) // RUN  # the last tile may be narrower
    for above in range(0, rows, FEW):
        number, n = min(FEW, rows - above), above * runs
        for tile in range(first_tile, last_tile):
            stop = min((tile + 1) * width, columns)
            for left in range(tile * width, stop, RUN):
                count = min(RUN, stop - left)
                x, pitch = load_rows(leaf, scalars, options, first_row + above, number, left, count, few)
                for k in range(number):
                    sums[n + k * runs] = square_sum(after(x, k * pitch), count, work)
                n += 1
                add_squares(x, pitch, number, above, count, levels + 4 * (left - start), 4 * (end - start), work)


@inlined
def _column_means(leaf, scalars, tile, start, stop, first_tile, last_tile, room):
    """Average the column means of one tile; `factors[start:stop]` becomes the new averages."""
    square, factors, levels = room[1], room[4], room[5]
    columns, width = leaf[COLUMNS], leaf[TILE_COLUMNS]
    group, stride = first_tile * width, 4 * (min(last_tile * width, columns) - first_tile * width)
    _, rows, batch_row, local = _row_tile(leaf, tile)
    packed, slots = leaf[PACKED], -(-columns // leaf[PACKED])
    col = floats(leaf[COL] + 4 * (batch_row + local * leaf[TILE_ROWS]) * slots)
    down, across = start % packed, start // packed
    for left in range(start, stop, RUN):
        count = min(RUN, stop - left)
        close_rows(rows, count, levels + 4 * (left - group), stride, square)
        for j in range(count):
            mean = square[j] / F32(rows)
            factors[left + j] = _average(col, down * slots + across, scalars[B2], scalars[NOT_B2], mean)
            down += 1
            if down == packed:
                down, across = 0, across + 1


@inlined
def _normalise(start, stop, factors, sums, work):
    """Divide `factors[start:stop]` by their mean, and take the roots."""
    number = (stop - start + RUN - 1) // RUN
    for k in range(number):
        left = start + k * RUN
        sums[k] = tree(after(factors, left), min(RUN, stop - left), work)
    norm = tree(sums, number, work) / F32(stop - start)
    norm = TINY if norm < TINY else norm
    for c in range(start, stop):
        factors[c] = np.sqrt(factors[c] / norm)


@inlined
def _tile_statistics(leaf, scalars, options, tile, first_tile, last_tile, room):
    """Average row and column means of some column tiles of a row tile; returns its rows and columns.

    `tile` numbers the row tile over all batches; the factors in `room` become `sqrt(col / mean(col))`.
    """
    square, work, factors, sums = room[1], room[2], room[4], room[6]
    columns, width = leaf[COLUMNS], leaf[TILE_COLUMNS]
    first_row, rows, _, _ = _row_tile(leaf, tile)
    _square_sums(leaf, scalars, options, first_row, rows, first_tile, last_tile, room)
    tiles = -(-columns // width)
    row = floats(leaf[NU] + 4 * first_row * tiles)
    for i in range(rows):
        for k in range(first_tile, last_tile):
            length = min((k + 1) * width, columns) - k * width
            number = (length + RUN - 1) // RUN
            _average(row, i * tiles + k, scalars[B2], scalars[NOT_B2], tree(sums, number, work) / F32(length))
            sums = after(sums, number)
    for k in range(first_tile, last_tile):
        start, stop = k * width, min((k + 1) * width, columns)
        _column_means(leaf, scalars, tile, start, stop, first_tile, last_tile, room)
        _normalise(start, stop, factors, square, work)
    return first_row, first_row + rows, first_tile * width, min(last_tile * width, columns)


@inlined
def _given_statistics(leaf, scalars, options, first_row, last_row, first_tile, last_tile, room):
    """Average the row means of some column tiles; the factors in `room` become `sqrt(col / mean(col))` of given means.

    Returns the columns.
    """
    spare, square, work, factors, sums = room[0], room[1], room[2], room[4], room[6]
    columns, width = leaf[COLUMNS], leaf[TILE_COLUMNS]
    tiles = -(-columns // width)
    row, given = floats(leaf[NU]), floats(leaf[COL])
    for k in range(first_tile, last_tile):
        start, stop = k * width, min((k + 1) * width, columns)
        for c in range(start, stop):
            factors[c] = given[c]
        _normalise(start, stop, factors, square, work)
        for r in range(first_row, last_row):
            number = 0
            for left in range(start, stop, RUN):
                count = min(RUN, stop - left)
                g = load_grad(leaf, scalars, options, r * columns + left, count, spare)
                sums[number] = square_sum(g, count, work)
                number += 1
            mean = tree(sums, number, work) / F32(stop - start)
            _average(row, r * tiles + k, scalars[B2], scalars[NOT_B2], mean)
    return first_tile * width, min(last_tile * width, columns)


@compiled
def _row_tile(leaf, tile):
    """First row over all batches, rows, first row of its batch, and number in its batch, of a row tile."""
    height = leaf[TILE_ROWS]
    tiles = max(1, leaf[ROWS] // height)
    local = tile % tiles
    batch_row = tile // tiles * leaf[ROWS]
    rows = leaf[ROWS] - local * height if local == tiles - 1 else height
    return batch_row + local * height, rows, batch_row, local


@compiled
def _factored_root(leaf, row, left, count, factors, root):
    """`sqrt(row) * sqrt(col / mean(col))` of some columns; `row` holds the row's mean in each tile."""
    width = leaf[TILE_COLUMNS]
    for tile in range(left // width, (left + count - 1) // width + 1):
        shared = np.sqrt(row[tile])
        start, stop = max(left, tile * width), min(left + count, (tile + 1) * width)
        source, out = after(factors, start), after(root, start - left)
        for j in range(stop - start):
            out[j] = shared * source[j]


@compiled
def _encode(leaf, first, count, m, top, book, codes, room):
    """Codes of `m / top`, where they are drawn `m` is overwritten; `first` is the place of the first in the leaf."""
    if leaf[RANDOM_CODES]:
        noise = draw(leaf[SEED], leaf[CODES_COUNT], leaf[FIRST] + first, count, room[8])
        encode_at_random(m, count, top, book, noise, codes, room[3], room[0])
    else:
        encode(m, count, top, book, codes, room[3], room[0])


@inlined
def _update_rows(leaf, scalars, book, options, first_row, last_row, start, stop, room):
    """Step columns `start..stop` of rows `first_row..last_row` of a quantized leaf, block by block.

    `options` is `(negate, scaled, from_stored)`, and the factors in `room` are the `sqrt(col / mean(col))` of every
    column of a factored leaf.
    """
    spare, m, root, work, factors, from_stored = room[0], room[1], room[2], room[3], room[4], options[2]
    columns, block, policy = leaf[COLUMNS], leaf[BLOCK], leaf[POLICY]
    blocks, tiles = -(-columns // block), -(-columns // leaf[TILE_COLUMNS])
    for r in range(first_row, last_row):
        for left in range(start, stop, block):
            count, first, index = min(block, stop - left), r * columns + left, r * blocks + left // block
            g = load_grad(leaf, scalars, options, first, count, spare)
            if policy == DENSE:
                _dense_root(leaf, scalars, first, count, g, root)
            elif policy == BLOCKS:
                _block_root(leaf, scalars, index, count, g, root, work)
            else:
                _factored_root(leaf, floats(leaf[NU] + 4 * r * tiles), left, count, factors, root)
            codes, scale = codes_at(leaf[MU] + first), floats(leaf[ABSMAX] + 4 * index)
            scale[0] = moment(book, codes, scale[0], scalars[B1], scalars[NOT_B1], count, g, m)
            if from_stored:
                _encode(leaf, first, count, m, scale[0], book, codes, room)
                decode(book, codes, count, m)
                for j in range(count):
                    m[j] = m[j] * scale[0]
            _apply(leaf, scalars, first, count, m, root, work, room[8])
            if not from_stored:  # last, so that nothing waits for the largest magnitude
                _encode(leaf, first, count, m, scale[0], book, codes, room)


@kept
def step(source):
    """Do the tasks, rows `(leaf, first, last, first, last)`, one after the other.

    Args:
        source: the checksum that `kept` gives; the others are those of the step.
        tasks: int64 `[n, 5]`: entries of a dense leaf; a row tile and column tiles of a factored one; rows and column
            tiles of a given one; rows and columns of another.
        table: int64 `[leaves, FIELDS]`.
        scalars: fp32 `[leaves, 10]`.
        books: the codebook for the nearest codes, and for those that are drawn; see `cpu_book.Codebook`.
        options: `(negate, scaled, from_stored)`.
        sizes: see `cpu.Sizes`.
        scratch: fp32, as many as `cpu.Sizes.floats` says.
    """

    def run(tasks, table, scalars, books, options, sizes, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        line, columns, levels_size, runs = sizes
        g = floats(scratch.ctypes.data)
        m, root, work = after(g, line), after(g, 2 * line), after(g, 3 * line)
        levels = scratch.ctypes.data + 16 * line
        factors = after(g, 4 * line + levels_size)
        sums = after(factors, columns)
        few = after(sums, runs)
        drawn = long_words(scratch.ctypes.data + 4 * (scratch.size - line - EXTRA))
        room = (g, m, root, work, factors, I64(levels), sums, few, drawn)
        nearest, between = book_at(books[0]), book_at(books[1])
        for n in range(tasks.shape[0]):
            task = integers(tasks.ctypes.data + 40 * n)
            leaf = integers(table.ctypes.data + 8 * FIELDS * task[0])
            own = floats(scalars.ctypes.data + 4 * SCALARS * task[0])
            first, last, left, right = task[1], task[2], task[3], task[4]
            book = between if leaf[RANDOM_CODES] else nearest
            if leaf[POLICY] == DENSE_LEAF:
                _dense_leaf(leaf, own, options, first, last, room)
                continue
            if leaf[POLICY] == FACTORED:
                first, last, left, right = _tile_statistics(leaf, own, options, first, left, right, room)
            elif leaf[POLICY] == GIVEN:
                left, right = _given_statistics(leaf, own, options, first, last, left, right, room)
            _update_rows(leaf, own, book, options, first, last, left, right, room)

    return run
