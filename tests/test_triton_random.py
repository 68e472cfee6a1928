"""Noise drawn in kernels, run by triton's interpreter, against the reference bit for bit."""

import math

import pytest
import torch
import triton.language as tl

from gefen_kernels import reference
from tests.kernel_targets import interpreted, interpreted_kernel

run = interpreted("gefen_kernels.triton_random")


@interpreted_kernel
def words_kernel(out, first, count, key, SHAPE: tl.constexpr, ALIGN: tl.constexpr):
    place = tl.reshape(tl.arange(0, 64), SHAPE)
    words = run.random_words(tl.load(first) + place, tl.load(count), tl.load(key), ALIGN)
    tl.store(out + place, words.to(tl.int64))


@interpreted_kernel
def rounding_kernel(x, words, noise, out, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    drawn = tl.load(words + place).to(tl.uint32)
    tl.store(out + place, run.round_to_bf16(tl.load(x + place), drawn))
    tl.store(noise + place, run.uniform(place.to(tl.int64), tl.cast(7, tl.int64), tl.cast(5, tl.int64), 1))


def philox_at(index, count, key):
    counter = [torch.tensor(x & 0xFFFFFFFF) for x in (index // 4, index // 4 >> 32, count, count >> 32)]
    return int(reference.philox(tuple(counter), (key & 0xFFFFFFFF, key >> 32))[index % 4])


@pytest.mark.parametrize("align", [1, 16], ids=["an entry at a time", "four entries at a time"])
@pytest.mark.parametrize("shape", [(64,), (4, 16), (16, 4)], ids=str)
@pytest.mark.parametrize(("count", "key"), [(1, 0), (2**31 + 3, 2**32 + 0xFFFFFFFF), (2**40, 2**62 + 12345)])
def test_words_follow_from_index_count_and_key_alone(align, shape, count, key):
    for first in (0, 2**35 + 4096):
        out = torch.empty(64, dtype=torch.int64)
        words_kernel[(1,)](out, torch.tensor(first), torch.tensor(count), torch.tensor(key), shape, align)
        assert out.tolist() == [philox_at(first + i, count, key) for i in range(64)]


def test_words_and_uniform_noise_are_the_reference_ones():
    x, out, noise = torch.randn(64), torch.empty(64), torch.empty(64)
    x[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.39e38, 1e-40])
    words = reference.random_words(5, torch.tensor(7), (64,), "cpu")
    rounding_kernel[(1,)](x, words, noise, out, 64)
    assert torch.equal(out, reference.round_to_bf16(x, words))
    assert torch.equal(noise, reference.uniform(5, torch.tensor(7), (64,), "cpu"))
