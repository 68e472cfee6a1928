"""The loops of the CPU back end, compiled by numba: every entry goes through the reference's operations in its order.

LLVM vectorises short loops over one dimension and, without `fastmath`, neither contracts a product into an addition nor
changes the order of a sum.
"""

import zlib
from pathlib import Path

import numba
import numpy as np
import torch
from numba.core.caching import FunctionCache

from gefen_kernels.cpu_vectors import (
    GROUP,
    LOOKS_UP,
    RUN,
    after,
    codes_at,
    floats,
    look_up,
    pass_bounds,
    run_of_squares,
    start_codes,
    words,
)

F32, U8, U16, U32, I32, I64 = np.float32, np.uint8, np.uint16, np.uint32, np.int32, np.int64
TINY, INFINITE = F32(np.finfo(np.float32).tiny), F32(np.inf)
CELLS = 256  # of a ratio's magnitude
FEW = 8  # rows whose squares are added at one time

FP32, BF16, FP16 = range(3)
KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # numba sets it from the environment
    raise ImportError("NUMBA_DISABLE_JIT is set, and these loops are nothing without a compiler")

compiled = numba.njit(nogil=True, error_model="numpy")
# For what is called in one place: LLVM need not go through it once more by itself.
inlined = numba.njit(nogil=True, error_model="numpy", inline="always")


def _sources() -> int:
    """A checksum of the loops' sources."""
    return zlib.crc32(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("cpu_*.py"))))


class _Code(FunctionCache):
    """Code kept in files; what cannot be read is compiled anew: a crash may leave files empty or cut off."""

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever pickle makes of such bytes
            self.flush()
            return None


def kept(build):
    """Compile the function that `build(source)` returns, and keep it for later processes.

    numba looks for changes in the function's own file only, while code of all these files is compiled into it: the
    checksum of all, a constant of the function, is part of what the kept code is found by.
    """
    function = compiled(build(_sources()))
    try:
        function._cache = _Code(function.py_func)
    except RuntimeError:  # numba finds no folder to write to
        pass
    return function


@inlined
def _bits(x):
    return F32(x).view(U32)


@inlined
def _as_float(bits):
    return U32(bits).view(F32)


@compiled
def to_bf16(x):
    """Nearest even, as 16 bits."""
    bits = _bits(x)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return U16(rounded) if x == x else U16(0x7FC0)


@compiled
def from_bf16(word):
    """The fp32 of 16 bits."""
    return _as_float(U32(word) << U32(16))


@compiled
def to_fp16(x):
    """Nearest even, as 16 bits."""
    bits = _bits(x)
    size = U32(bits & U32(0x7FFFFFFF))
    # Below 2^-14 a half is a multiple of 2^-24, the spacing of floats at 0.5: adding 0.5 rounds.
    small = U32(_bits(_as_float(size) + F32(0.5)) - U32(0x3F000000))
    normal = U32(U32(size + U32(0xFFF) + ((size >> U32(13)) & U32(1)) - U32(0x38000000)) >> U32(13))
    half = small if size < U32(0x38800000) else normal
    half = half if size < U32(0x477FF000) else U32(0x7C00)
    half = half if size <= U32(0x7F800000) else U32(0x7E00)
    return U16(half | ((bits >> U32(16)) & U32(0x8000)))


@compiled
def from_fp16(word):
    """The fp32 of 16 bits, subnormals included."""
    size = U32(U32(word) & U32(0x7FFF))
    wide = U32(size << U32(13))
    finite = _bits(_as_float(wide) * F32(2.0**112))
    bits = finite if size < U32(0x7C00) else U32(wide | U32(0x7F800000))
    return _as_float(bits | ((U32(word) & U32(0x8000)) << U32(16)))


@compiled
def load(kind, address, first, count, out):
    """`count` entries from `first` on, as fp32."""
    if kind == FP32:
        source = floats(address + 4 * first)
        for j in range(count):
            out[j] = source[j]
    elif kind == BF16:
        bits = words(address + 2 * first)
        for j in range(count):
            out[j] = from_bf16(bits[j])
    else:
        bits = words(address + 2 * first)
        for j in range(count):
            out[j] = from_fp16(bits[j])


@compiled
def store(kind, address, first, count, source):
    """`count` entries from `first` on, each rounded once."""
    if kind == FP32:
        out = floats(address + 4 * first)
        for j in range(count):
            out[j] = source[j]
    elif kind == BF16:
        bits = words(address + 2 * first)
        for j in range(count):
            bits[j] = to_bf16(source[j])
    else:
        bits = words(address + 2 * first)
        for j in range(count):
            bits[j] = to_fp16(source[j])


@compiled
def tree(x, count, work):
    """Sum of `count` entries by the fixed pairwise tree; `x` is kept, `work` is overwritten."""
    if count == 1:
        return x[0]
    for j in range(count):
        work[j] = x[j]
    while count > 1:
        half = count >> 1
        for j in range(half):
            work[j] = work[2 * j] + work[2 * j + 1]
        if count & 1:
            work[half] = work[count - 1]  # meets only zeros on this level
            half += 1
        count = half
    return work[0] if count else F32(0)


@compiled
def square_sum(x, count, work):
    """`tree` of the squares of `count` entries."""
    if count == RUN:
        return run_of_squares(x)
    for j in range(count):
        work[j] = x[j] * x[j]
    return tree(work, count, work)


@compiled
def add_squares(x, pitch, rows, index, count, levels, stride, work):
    """Add the squares of rows `index..index + rows` to the tree over rows, a binary counter.

    The rows lie `pitch` entries apart in `x`; there are `FEW`, and then `index` is a multiple of it, or less.
    Level k holds a sum of 2^k rows and lies at the address `levels + k * stride`.
    """
    if rows == FEW:
        a, b, c, d = x, after(x, pitch), after(x, 2 * pitch), after(x, 3 * pitch)
        e, f, g, h = after(x, 4 * pitch), after(x, 5 * pitch), after(x, 6 * pitch), after(x, 7 * pitch)
        for j in range(count):
            upper = a[j] * a[j] + b[j] * b[j] + (c[j] * c[j] + d[j] * d[j])
            work[j] = upper + (e[j] * e[j] + f[j] * f[j] + (g[j] * g[j] + h[j] * h[j]))
        _carry(work, index // FEW, count, levels + 3 * stride, stride)
        return
    for row in range(rows):
        own = after(x, row * pitch)
        for j in range(count):
            work[j] = own[j] * own[j]
        _carry(work, index + row, count, levels, stride)


@compiled
def _carry(work, index, count, levels, stride):
    """Count one more sum: while the lowest level is full it is added and the sum moves up."""
    while index & 1:
        full = floats(levels)
        for j in range(count):
            work[j] = full[j] + work[j]
        index >>= 1
        levels += stride
    empty = floats(levels)
    for j in range(count):
        empty[j] = work[j]


@compiled
def close_rows(rows, count, levels, stride, out):
    """The sum of all `rows` rows: what is left on the lower levels meets only zeros before it is added."""
    started = False
    while rows:
        if rows & 1:
            part = floats(levels)
            if started:
                for j in range(count):
                    out[j] = part[j] + out[j]
            else:
                for j in range(count):
                    out[j] = part[j]
            started = True
        rows >>= 1
        levels += stride


@compiled
def largest(x, count):
    """The largest magnitude, NaN if there is one; below the smallest normal it is 0."""
    best = U32(0)
    for j in range(count):
        size = U32(_bits(x[j]) & U32(0x7FFFFFFF))
        best = size if size > best else best
    top = _as_float(best)
    return F32(0) if top < TINY else top


@compiled
def book_at(code):
    """A `gefen_kernels.cpu_book.Codebook` as the loops hold it: pointers, those to both planes apart, and numbers."""
    levels, bounds, starts, planes, comparisons, zeros, of_zero = code
    own, limits = codes_at(planes.ctypes.data), codes_at(planes.ctypes.data + 1024)
    tables = floats(levels.ctypes.data), floats(bounds.ctypes.data), codes_at(starts.ctypes.data)
    return tables[0], tables[1], tables[2], own, limits, comparisons, U8(zeros[0]), U8(zeros[1]), U8(of_zero)


@compiled
def decode(book, codes, count, out):
    """The levels of `count` codes."""
    levels, planes = book[0], book[3]
    whole = count - count % GROUP if LOOKS_UP else 0
    look_up(planes, codes, whole // GROUP, out)
    for j in range(whole, count):
        out[j] = levels[codes[j]]


@compiled
def moment(book, codes, top, decay, rest, count, g, m):
    """`m = decay m + rest g` of a block that is kept as codes and `top`; returns the new largest magnitude."""
    decode(book, codes, count, m)
    for j in range(count):
        m[j] = m[j] * top * decay + g[j] * rest
    return largest(m, count)


@compiled
def encode(x, count, top, book, codes, ratios, limits):
    """Codes of `x / top`; the last two are scratch."""
    of_zero = book[8]
    if not (top > F32(0) and top < INFINITE):  # then a ratio is 0 or not finite
        for j in range(count):
            codes[j] = of_zero if x[j] / top == F32(0) else U8(128)
        return
    search(x, count, top, book, codes, ratios, limits)
    join_zeros(count, book, codes)


@compiled
def search(x, count, top, book, codes, ratios, limits):
    """The ratios `x / top` and how many bounds are below each: a start from the cell, then comparisons.

    See `gefen_kernels.cpu_book.Codebook`; `limits` is scratch, and `top` finite and not 0.
    """
    whole = count - count % GROUP if LOOKS_UP else 0
    _search_groups(x, whole, top, book, codes, ratios)
    _search_one_by_one(
        after(x, whole), count - whole, top, book, after(codes, whole), after(ratios, whole), after(limits, whole)
    )


@compiled
def join_zeros(count, book, codes):
    """Write 128 for every code that stands for 0, where 128 does."""
    first, number = book[6], book[7]
    for j in range(count):
        codes[j] = U8(128) if U8(codes[j] - first) < number else codes[j]


@inlined
def _cell(bits):
    """The cell of a ratio's magnitude: halving the bits of a float about takes its root."""
    return U32(I32(_as_float(((bits & U32(0x7FFFFFFF)) >> U32(1)) + U32(0x1FC00000)) * F32(CELLS - 1)))


@compiled
def _search_groups(x, count, top, book, codes, ratios):
    for j in range(count):
        ratio = x[j] / top
        ratios[j] = ratio
        codes[j] = U8(_cell(_bits(ratio)))
    start_codes(book[2], codes, count // GROUP, ratios)
    for _ in range(book[5]):
        pass_bounds(book[4], codes, count // GROUP, ratios)


@compiled
def _search_one_by_one(x, count, top, book, codes, ratios, limits):
    """Look-ups have loops of their own, so that the others are vectorised."""
    bounds, starts, comparisons = book[1], book[2], book[5]
    for j in range(count):
        ratio = x[j] / top
        ratios[j] = ratio
        bits = _bits(ratio)
        limits[j] = _as_float(_cell(bits) + (bits >> U32(31)) * U32(CELLS))
    for j in range(count):
        k = starts[_bits(limits[j])]
        codes[j] = k
        limits[j] = bounds[k]
    for _ in range(1, comparisons):
        for j in range(count):
            k = U8(codes[j] + U8(ratios[j] > limits[j]))
            codes[j] = k
            limits[j] = bounds[k]
    for j in range(count):
        codes[j] = U8(codes[j] + U8(ratios[j] > limits[j]))


@kept
def histogram(source):
    """Count entries of rows `first..last`, divided by their block's largest magnitude; scratch is fp32 `[block]`."""

    def run(grad, kind, columns, block, first, last, scratch, counts):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        g = floats(scratch.ctypes.data)
        for r in range(first, last):
            for left in range(0, columns, block):
                count = min(block, columns - left)
                load(kind, grad, r * columns + left, count, g)
                top = largest(g, count)
                for j in range(count):
                    x = g[j] / top
                    size = abs(x)
                    if size <= F32(1) and size > F32(0):
                        k = min(I64(size * F32(2048)), 2047)
                        counts[2047 - k if x < 0 else 2048 + k] += 1

    return run


@kept
def sum_of_squares(source):
    """Sum of squares of rows `first..last`, each block by the tree in fp32; scratch is fp32 `[2 * block]`."""

    def run(grad, kind, columns, block, first, last, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return 0.0
        g = floats(scratch.ctypes.data)
        work = after(g, block)
        total = 0.0
        for r in range(first, last):
            for left in range(0, columns, block):
                count = min(block, columns - left)
                load(kind, grad, r * columns + left, count, g)
                total += square_sum(g, count, work)
        return total

    return run
