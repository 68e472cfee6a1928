"""Rounding at random on the CPU: Philox by index, codes by their distance from two levels, and bf16 numbers."""

import numpy as np

from gefen_kernels.cpu_loops import F32, I32, INFINITE, U8, U16, U32, compiled, decode, join_zeros, search, to_bf16
from gefen_kernels.cpu_vectors import after, words

EXTRA = 6  # words that are drawn with some of one counter
_U64 = np.uint64


@compiled
def draw(seed, t, first, count, room):
    """`reference.random_words` of count `t` at the entries `first..first + count`; returns where they are.

    Four words have one counter: up to `EXTRA` more than `count` are written to `room`.
    """
    counter = first >> 2
    for k in range(((first + count - 1) >> 2) - counter + 1):
        a, b, c, d = U32(counter + k), U32((counter + k) >> 32), U32(t), U32(t >> 32)
        k0, k1 = U32(seed), U32(seed >> 32)
        for _ in range(10):
            left, right = _U64(a) * _U64(0xD2511F53), _U64(c) * _U64(0xCD9E8D57)
            a, b = U32(U32(right >> _U64(32)) ^ b ^ k0), U32(right)
            c, d = U32(U32(left >> _U64(32)) ^ d ^ k1), U32(left)
            k0, k1 = U32(k0 + U32(0x9E3779B9)), U32(k1 + U32(0xBB67AE85))
        room[4 * k] = a
        room[4 * k + 1] = b
        room[4 * k + 2] = c
        room[4 * k + 3] = d
    return after(room, first & 3)


@compiled
def _uniform(word):
    return F32(I32(word >> U32(8))) * F32(2.0**-24)


@compiled
def encode_at_random(x, count, top, book, drawn, codes, ratios, limits):
    """Codes of `x / top`, up or down by distance, from random words; `x` and the last two are scratch.

    The book's bounds are levels, so that the number of bounds below a ratio is the code of the level below it.
    """
    if not (top > F32(0) and top < INFINITE):  # then a ratio is 0 or not finite
        below, levels = book[8], book[0]
        share = -levels[below] / (levels[below + 1] - levels[below])
        for j in range(count):
            codes[j] = U8(below + U8(_uniform(drawn[j]) < share)) if x[j] / top == F32(0) else U8(128)
    else:
        search(x, count, top, book, codes, ratios, limits)
        low, high = x, limits
        decode(book, codes, count, low)
        for j in range(count):
            codes[j] = U8(codes[j] + U8(1))
        decode(book, codes, count, high)
        for j in range(count):
            negative = ratios[j] < F32(0)
            # From the level nearer to zero, as the reference.
            share = (high[j] - ratios[j] if negative else ratios[j] - low[j]) / (high[j] - low[j])
            codes[j] = U8(codes[j] - U8((_uniform(drawn[j]) < share) == negative))
    join_zeros(count, book, codes)


@compiled
def store_at_random(address, first, count, source, drawn):
    """`count` bf16 numbers from `first` on, `reference.round_to_bf16` of `source` under random words."""
    bits = words(address + 2 * first)
    for j in range(count):
        own = F32(source[j]).view(U32)
        finite = U32(own & U32(0x7FFFFFFF)) < U32(0x7F800000)
        bits[j] = U16(U32(own + (drawn[j] >> U32(16))) >> U32(16)) if finite else to_bf16(source[j])
