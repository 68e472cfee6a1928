"""The loops of the CPU back end, compiled by numba: every entry goes through the reference's operations in its order.

LLVM vectorises short loops over one dimension and, without `fastmath`, neither contracts a product into an addition nor
changes the order of a sum.
"""

import zlib
from pathlib import Path

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

F32, U8, U16, U32, I64 = np.float32, np.uint8, np.uint16, np.uint32, np.int64
RUN = 256  # columns whose squares are added at one time
TINY = F32(np.finfo(np.float32).tiny)
HALF_CELLS = 8192

FP32, BF16, FP16 = range(3)


if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # numba sets it from the environment
    raise ImportError("NUMBA_DISABLE_JIT is set, and these loops are nothing without a compiler")

compiled = numba.njit(nogil=True, error_model="numpy")
# For what is called once a block: an array is passed as seven numbers, and a call costs as much as a short loop.
inlined = numba.njit(nogil=True, error_model="numpy", inline="always")


def _may_cache() -> bool:
    """Whether numba finds a folder to keep compiled code in; it refuses to build a cached function without one."""
    try:
        numba.njit(cache=True)(_may_cache)
    except RuntimeError:
        return False
    return True


def _sources() -> int:
    """A checksum of the loops' sources."""
    return zlib.crc32(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("cpu_*.py"))))


def kept(build):
    """Compile the function that `build(source)` returns, and keep it for later processes.

    numba looks for changes in the function's own file only, while code of all these files is compiled into it: the
    checksum of all, a constant of the function, is part of what the kept code is found by.
    """
    return numba.njit(cache=_may_cache(), nogil=True, error_model="numpy")(build(_sources()))


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer; numba has no public cast."""

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


@compiled
def floats(address, count):
    """fp32 `[count]` at an address."""
    return numba.carray(_pointer(I64(address)), (count,), F32)


@compiled
def raw(array):
    """The same memory, flat, without references that numba counts: counting costs as much as a short loop."""
    return numba.carray(_pointer(I64(array.ctypes.data)), (array.size,), array.dtype)


@compiled
def _words(address, count):
    return numba.carray(_pointer(I64(address)), (count,), U16)


@compiled
def codes_at(address, count):
    """uint8 `[count]` at an address."""
    return numba.carray(_pointer(I64(address)), (count,), U8)


@compiled
def _bits(x):
    return F32(x).view(U32)


@compiled
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
        source = floats(address + 4 * first, count)
        for j in range(count):
            out[j] = source[j]
    elif kind == BF16:
        words = _words(address + 2 * first, count)
        for j in range(count):
            out[j] = from_bf16(words[j])
    else:
        words = _words(address + 2 * first, count)
        for j in range(count):
            out[j] = from_fp16(words[j])


@compiled
def store(kind, address, first, count, source):
    """`count` entries from `first` on, each rounded once."""
    if kind == FP32:
        out = floats(address + 4 * first, count)
        for j in range(count):
            out[j] = source[j]
    elif kind == BF16:
        words = _words(address + 2 * first, count)
        for j in range(count):
            words[j] = to_bf16(source[j])
    else:
        words = _words(address + 2 * first, count)
        for j in range(count):
            words[j] = to_fp16(source[j])


@inlined
def _halves(work):
    """The rest of the tree of a whole run, once its first level is there."""
    half = RUN // 2
    while half > 1:
        half >>= 1
        for j in range(half):
            work[j] = work[2 * j] + work[2 * j + 1]
    return work[0]


@inlined
def tree(x, count, work):
    """Sum of `count` entries by the fixed pairwise tree; `x` is kept, `work` is overwritten."""
    if count == RUN:  # a length that the compiler knows is summed three times as fast
        for j in range(RUN // 2):
            work[j] = x[2 * j] + x[2 * j + 1]
        return _halves(work)
    return _ragged_tree(x, count, work)


@compiled
def _ragged_tree(x, count, work):
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


@inlined
def square_sum(x, count, work):
    """`tree` of the squares of `count` entries."""
    if count == RUN:
        for j in range(RUN // 2):
            work[j] = x[2 * j] * x[2 * j] + x[2 * j + 1] * x[2 * j + 1]
        return _halves(work)
    for j in range(count):
        work[j] = x[j] * x[j]
    return _ragged_tree(work, count, work)


@inlined
def add_squares(x, index, count, levels, stride, work):
    """Add the squares of row number `index` to the tree over rows, a binary counter: level k holds a sum of 2^k rows.

    Level k lies at the address `levels + k * stride`.
    """
    full = floats(levels, count)
    if index & 1 == 0:
        for j in range(count):
            full[j] = x[j] * x[j]
        return
    for j in range(count):
        work[j] = full[j] + x[j] * x[j]
    index >>= 1
    levels += stride
    while index & 1:
        full = floats(levels, count)
        for j in range(count):
            work[j] = full[j] + work[j]
        index >>= 1
        levels += stride
    empty = floats(levels, count)
    for j in range(count):
        empty[j] = work[j]


@compiled
def close_rows(rows, count, levels, stride, out):
    """The sum of all `rows` rows: what is left on the lower levels meets only zeros before it is added."""
    started = False
    while rows:
        if rows & 1:
            part = floats(levels, count)
            if started:
                for j in range(count):
                    out[j] = part[j] + out[j]
            else:
                for j in range(count):
                    out[j] = part[j]
            started = True
        rows >>= 1
        levels += stride


@inlined
def largest(x, count):
    """The largest magnitude, NaN if there is one; below the smallest normal it is 0."""
    bits = x.view(U32)
    best = U32(0)
    for j in range(count):
        size = U32(bits[j] & U32(0x7FFFFFFF))
        best = size if size > best else best
    top = _as_float(best)
    return F32(0) if top < TINY else top


@inlined
def encode(x, count, top, cells, bounds, comparisons, zeros, codes, starts, limits, ratios):
    """Codes of `x / top`: a start from the cell, then comparisons; see `gefen_kernels.cpu.Codebook`.

    The look-ups have loops of their own, so that the others are vectorised; the last three arrays are scratch.
    """
    index = limits.view(U32)
    for j in range(count):
        ratio = x[j] / top
        ratios[j] = ratio
        ratio = ratio if abs(ratio) <= F32(1) else F32(0)
        index[j] = np.int32((ratio + F32(1)) * F32(HALF_CELLS))
    for j in range(count):
        k = cells[index[j]]
        starts[j] = k
        limits[j] = bounds[k]
    for _ in range(1, comparisons):
        for j in range(count):
            k = U8(starts[j] + U8(ratios[j] > limits[j]))
            starts[j] = k
            limits[j] = bounds[k]
    first, span = U32(zeros[0]), U32(zeros[1])
    for j in range(count):
        ratio = ratios[j]
        k = U32(U32(starts[j]) + U32(ratio > limits[j]))
        codes[j] = U8(U32(128) if not abs(ratio) <= F32(1) or U32(k - first) < span else k)


@kept
def histogram(source):
    """Count the entries of rows `first..last`, divided by their block's largest magnitude, into `counts`."""

    def run(grad, kind, columns, block, first, last, counts):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        g = np.empty(block, F32)
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
    """Sum of squares of rows `first..last`: each block by the tree in fp32, blocks in float64."""

    def run(grad, kind, columns, block, first, last):
        if source < 0:  # never: it makes the checksum a constant of this function
            return 0.0
        g, work = np.empty(block, F32), np.empty(block, F32)
        total = 0.0
        for r in range(first, last):
            for left in range(0, columns, block):
                count = min(block, columns - left)
                load(kind, grad, r * columns + left, count, g)
                total += square_sum(g, count, work)
        return total

    return run
