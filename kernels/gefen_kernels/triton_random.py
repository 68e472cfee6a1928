"""Noise that depends on a leaf's path, its count and an entry's index alone: the reference's, in registers."""

import triton.language as tl

from gefen_kernels.triton_base import jit, magnitude_bits


@jit
def multiply(factor: tl.constexpr, word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Upper and lower 32 bits of a product of two 32-bit words."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@jit
def philox(counter: tl.tensor, count: tl.tensor, key: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """`reference.philox` of the words of two 64-bit counters, with the words of a 64-bit key; all int64."""
    a, b = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c, d = count.to(tl.uint32), (count >> 32).to(tl.uint32)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _round in tl.static_range(10):
        high0, low0 = multiply(0xD2511F53, a)
        high1, low1 = multiply(0xCD9E8D57, c)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = k0 + tl.cast(0x9E3779B9, tl.uint32), k1 + tl.cast(0xBB67AE85, tl.uint32)
    return a, b, c, d


@jit
def random_words(offset: tl.tensor, count: tl.tensor, key: tl.tensor, ALIGN: tl.constexpr) -> tl.tensor:
    """`reference.random_words` at the offsets: uint32 of their shape.

    If `ALIGN` is a multiple of 4, the offsets are runs of four that start at multiples of 4, and a run draws once.
    """
    if ALIGN % 4 == 0:
        COUNT: tl.constexpr = offset.numel // 4
        even, _ = tl.split(tl.reshape(offset, [COUNT, 2, 2]))
        first, _ = tl.split(even)
        a, b, c, d = philox(first >> 2, count, key)
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), offset.shape)
    else:
        a, b, c, d = philox(offset >> 2, count, key)
        word = offset & 3
        return tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))


@jit
def uniform(offset: tl.tensor, count: tl.tensor, key: tl.tensor, ALIGN: tl.constexpr) -> tl.tensor:
    """`reference.uniform` at the offsets."""
    return (random_words(offset, count, key, ALIGN) >> 8).to(tl.float32) * 5.9604644775390625e-08


@jit
def round_to_bf16(x: tl.tensor, words: tl.tensor) -> tl.tensor:
    """`reference.round_to_bf16`: fp32 with the precision of bf16."""
    bits = (x.to(tl.uint32, bitcast=True) + (words >> 16)) & 0xFFFF0000
    return tl.where(magnitude_bits(x) < 0x7F800000, bits.to(tl.float32, bitcast=True), x)
