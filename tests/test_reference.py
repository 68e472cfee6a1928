"""The plain-torch block operations against brute force, over awkward shapes, splits, vmap and compile."""

import math

import pytest
import torch

from gefen_kernels.codebook import default_codebook, learn_codebook
from gefen_kernels.reference import (
    block_absmax,
    block_count,
    block_mean_square,
    decode,
    encode,
    expand_blocks,
    histogram,
    nearest,
    philox,
    random_words,
    round_to_bf16,
    scale_shape,
    sum_of_squares,
    tree_sum,
    uniform,
)

# shape, block, start, shape of the scales
LAYOUTS = [
    ((4, 1), 256, 1, (4, 1)),
    ((4, 63), 256, 1, (4, 1)),
    ((4, 255), 256, 1, (4, 1)),
    ((4, 256), 256, 1, (4, 1)),
    ((4, 257), 256, 1, (4, 2)),
    ((4, 300), 256, 1, (4, 2)),
    ((3, 130), 48, 1, (3, 3)),
    ((5, 7), 1, 1, (5, 7)),
    ((0, 300), 256, 1, (0, 2)),
    ((4, 0), 256, 1, (4, 0)),
    ((64, 32, 3, 3), 256, 1, (64, 2)),
    ((3, 8, 300), 256, 2, (3, 8, 2)),
    ((700,), 256, 0, (3,)),
    ((10, 70), 256, 0, (3,)),
]
layouts = pytest.mark.parametrize(("shape", "block", "start", "scales"), LAYOUTS, ids=[str(row[:3]) for row in LAYOUTS])
BOOKS = {
    "default": default_codebook(),
    "four bits": torch.tensor([-1, -0.7, -0.5, -0.35, -0.2, -0.1, -0.03, 0, 0, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 1]),
    "no zero": learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False),
    "zero off the middle": learn_codebook(torch.arange(1, 4097), zero=True, symmetric=False),
}
books = pytest.mark.parametrize("book", BOOKS.values(), ids=BOOKS)
BOOK = BOOKS["default"]
BAD = [math.nan, math.inf, -math.inf]


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise_of(shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(x, block, start):
    """Every block of x as a 1-D tensor, by plain loops."""
    rows = x.reshape(math.prod(x.shape[:start]), math.prod(x.shape[start:]))
    return [row[first : first + block] for row in rows for first in range(0, rows.shape[1], block)]


def brute_code(value, book, ties):
    """Walk up the levels while the midpoint above is passed."""
    middle = ((book[:-1] + book[1:]) * 0.5).tolist()
    down = ties == "zero" and value < 0
    code = sum(value >= m if down else value > m for m in middle)
    return len(book) // 2 if book[code] == 0 and book[len(book) // 2] == 0 else code


def probes(book):
    """Levels, midpoints, their neighbours in fp32, zeros of both signs and random entries."""
    middle = (book[:-1] + book[1:]) * 0.5
    exact = torch.cat([book, middle])
    up, down = (torch.nextafter(exact, torch.full_like(exact, end)) for end in (2.0, -2.0))
    return torch.cat([exact, up, down, torch.tensor([0.0, -0.0]), 2 * noise_of(200) - 1]).clamp(-1, 1)


@layouts
def test_scales_have_the_shape_that_the_layout_says(shape, block, start, scales):
    assert scale_shape(shape, block, start) == scales
    assert scales[-1] == block_count(math.prod(shape[start:]), block)
    x = drawn(shape)
    assert block_absmax(x, block=block, start=start).shape == scales
    assert block_mean_square(x, block=block, start=start).shape == scales


@layouts
def test_block_statistics_equal_plain_loops(shape, block, start, scales):
    x, parts = drawn(shape), blocks_of(drawn(shape), block, start)
    largest, square = block_absmax(x, block=block, start=start), block_mean_square(x, block=block, start=start)
    assert largest.flatten().tolist() == [part.abs().max().item() for part in parts]
    expected = torch.tensor([part.double().square().mean() for part in parts], dtype=torch.float64)
    torch.testing.assert_close(square.flatten().double(), expected, rtol=2e-6, atol=0)


@layouts
def test_expanded_scales_reach_the_entries_of_their_block(shape, block, start, scales):
    values = torch.arange(math.prod(scales), dtype=torch.float32).reshape(scales)
    wide = expand_blocks(values, shape, block=block, start=start)
    assert wide.shape == shape
    for value, part in zip(values.flatten(), blocks_of(wide, block, start), strict=True):
        assert (part == value).all()


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_equal_brute_force_in_every_layout(shape, block, start, scales, dtype):
    x = drawn(shape).to(dtype)
    codes, absmax = encode(x, BOOK, block=block, start=start)
    assert (codes.shape, codes.dtype, absmax.dtype) == (x.shape, torch.uint8, torch.float32)
    pairs = zip(blocks_of(x.float(), block, start), blocks_of(codes, block, start), strict=True)
    for part, got in list(pairs)[:3]:
        assert got.tolist() == [brute_code(v, BOOK, "zero") for v in (part / part.abs().max()).tolist()]


@books
@pytest.mark.parametrize("ties", ["zero", "published"])
def test_nearest_equals_brute_force_on_and_beside_the_midpoints(book, ties):
    x = probes(book)
    assert nearest(x, book, ties=ties).tolist() == [brute_code(v, book, ties) for v in x.tolist()]


@books
def test_no_level_is_nearer_than_the_chosen_one_by_more_than_an_ulp(book):
    x = probes(book).double()
    gaps = (x[:, None] - book.double()).abs()
    chosen = gaps.gather(1, nearest(x.float(), book).long()[:, None])[:, 0]
    assert (chosen - gaps.min(1).values).max() <= torch.finfo(torch.float32).eps


@layouts
def test_encoding_decoded_values_gives_the_same_codes(shape, block, start, scales):
    codes, absmax = encode(drawn(shape), BOOK, block=block, start=start)
    again = encode(decode(codes, absmax, BOOK, block=block, start=start), BOOK, block=block, start=start)
    assert again[0].equal(codes) and again[1].equal(absmax)


@pytest.mark.parametrize("book", [BOOKS["default"], BOOKS["four bits"]], ids=["default", "four bits"])
@pytest.mark.parametrize("noise", [None, noise_of((6, 300))], ids=["nearest", "stochastic"])
def test_the_opposite_gradient_decodes_to_the_opposite_bits(book, noise):
    x = drawn((6, 300))
    x[:, ::7] = 0
    there, back = (decode(*encode(s * x, book, block=256, noise=noise), book, block=256) for s in (1, -1))
    assert there.equal(-back)


@layouts
def test_rows_encoded_apart_have_the_bits_of_rows_encoded_together(shape, block, start, scales):
    if start:
        x = drawn(shape)
        for cut in range(0, shape[0] + 1, 16 if shape[0] > 16 else 1):
            for whole, top, bottom in zip(*(statistics(p, block, start) for p in (x, x[:cut], x[cut:])), strict=True):
                assert whole.equal(torch.cat([top, bottom]))


def statistics(x, block=256, start=1):
    codes, absmax = encode(x, BOOK, block=block, start=start)
    values = decode(codes, absmax, BOOK, block=block, start=start)
    return codes, absmax, values, block_mean_square(x, block=block, start=start)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("noise", [None, noise_of((2, 600))], ids=["nearest", "stochastic"])
def test_a_non_finite_entry_zeroes_codes_and_shows_in_the_scale_of_its_block_only(bad, noise):
    x = drawn((2, 600))
    x[1, 300] = bad
    codes, absmax = encode(x, BOOK, block=256, noise=noise)
    assert codes[1, 300] == 128
    assert absmax.isfinite().tolist() == [[True] * 3, [True, False, True]]
    assert nearest(torch.tensor(BAD), BOOK).tolist() == [128] * 3


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1.1e-38])
@pytest.mark.parametrize("noise", [None, noise_of((2, 300))], ids=["nearest", "stochastic"])
def test_a_block_of_zeros_or_subnormals_is_stored_as_zeros(scale, noise):
    x = torch.full((2, 300), scale)
    codes, absmax = encode(x, BOOK, block=256, noise=noise)
    assert (codes == 128).all() and (absmax == 0).all()
    assert (decode(codes, absmax, BOOK, block=256) == 0).all()


def test_the_lower_of_two_zeros_is_accepted_but_never_written():
    assert not (encode(drawn((64, 512)), BOOK, block=256)[0] == 127).any()
    assert (decode(torch.full((1, 4), 127, dtype=torch.uint8), torch.ones(1, 1), BOOK, block=256) == 0).all()


def test_stochastic_codes_are_neighbours_of_x_and_right_on_average():
    x, book = torch.cat([torch.tensor([1.0, -1.0, 0.0]), 2 * noise_of(29) - 1]), BOOKS["four bits"]
    coded = (encode(x, book, block=32, start=0, noise=noise_of(32, seed)) for seed in range(2000))
    draws = torch.stack([decode(*pair, book, block=32, start=0) for pair in coded])
    assert draws[:, :3].unique(dim=0).tolist() == [[1, -1, 0]]
    low, high = draws.amin(0), draws.amax(0)
    between = ((book[:, None] > low) & (book[:, None] < high)).sum(0)
    assert (low <= x).all() and (x <= high).all() and (between <= 1).all()
    assert ((draws.mean(0) - x).abs() <= 5 * 0.15 / math.sqrt(2000)).all()


def test_eight_runs_under_vmap_equal_eight_single_runs():
    x, noise, counts = drawn((8, 5, 300)), noise_of((8, 5, 300)), torch.arange(8)

    def everything(x, noise, count):
        stochastic = encode(x, BOOK, block=256, noise=noise)
        return *statistics(x), *stochastic, histogram(x, block=256), uniform(7, count, (5, 3), "cpu")

    together = torch.vmap(everything)(x, noise, counts)
    apart = [everything(*row) for row in zip(x, noise, counts, strict=True)]
    for many, ones in zip(together, zip(*apart, strict=True), strict=True):
        assert many.equal(torch.stack(ones))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("shape", [(128, 300), (64, 32, 3, 3)])
def test_compiled_equals_eager_on_ragged_rows(shape):
    compiled = torch.compile(statistics, fullgraph=True, dynamic=False)
    for got, expected in zip(compiled(drawn(shape)), statistics(drawn(shape)), strict=True):
        assert got.equal(expected)


def test_large_leaves_pass_through_chunks_without_changing_a_code():
    x = drawn((3, 700_001))
    codes, _, values, _ = statistics(x)
    for row in range(3):
        one = statistics(x[row : row + 1])
        assert codes[row].equal(one[0][0]) and values[row].equal(one[2][0])


def test_results_are_contiguous_and_own_exactly_their_bytes_for_any_strides():
    x = drawn((64, 32, 3, 3)).to(memory_format=torch.channels_last)
    plain = statistics(x.contiguous())
    for got, expected in zip(statistics(x), plain, strict=True):
        assert got.equal(expected) and got.is_contiguous()
        assert got.untyped_storage().nbytes() == got.numel() * got.element_size()


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 6, 7, 8, 63, 100])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_tree_adds_neighbours_of_a_padded_power_of_two(length, dim):
    x = drawn((length, 3) if dim == 0 else (3, length)) * 1e3
    rows = x.movedim(dim, 0)
    level = list(rows) + [torch.zeros(3)] * ((1 << max(length - 1, 0).bit_length()) - length)
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    assert tree_sum(x, dim).equal(level[0])


def test_the_histogram_counts_finite_entries_once_and_mirrors_them():
    x = torch.tensor([[1.0, -1.0, 0.5, -0.5, 0.0, 0.25, 1e-9, -1e-9], [0.0] * 8, *([bad] * 8 for bad in BAD)])
    expected = {0: 1, 4095: 1, 2048 + 1024: 1, 2047 - 1024: 1, 2048 + 512: 1, 2048: 1, 2047: 1}
    counts = histogram(x, block=8)
    assert counts.dtype == torch.int64 and {i: int(c) for i, c in enumerate(counts) if c} == expected


def test_the_histogram_of_the_opposite_is_reversed_and_adds_over_rows():
    x = drawn((6, 300)).bfloat16()
    counts = histogram(x, block=256)
    assert counts.sum() == (x != 0).sum()
    assert histogram(-x, block=256).equal(counts.flip(0))
    assert counts.equal(histogram(x[:2], block=256) + histogram(x[2:], block=256))


# Known answers of Random123: counter, key, words.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_known_answers(counter, key, words):
    counter, key = (tuple(int(word, 16) for word in text.split()) for text in (counter, key))
    assert [f"{int(word):08x}" for word in philox(tuple(map(torch.tensor, counter)), key)] == words.split()


def test_noise_depends_on_seed_count_and_flat_index_alone():
    noise = uniform(5, torch.tensor(3), (40, 25), "cpu")
    assert noise.dtype == torch.float32 and 0 <= noise.min() and noise.max() < 1
    assert noise.flatten()[:7].equal(uniform(5, torch.tensor(3, dtype=torch.int32), (7,), "cpu"))
    assert abs(noise.mean() - 0.5) < 0.05 and len(noise.unique()) > 990
    for seed, count in ((6, 3), (5, 4), (5 + (1 << 40), 3)):
        assert not uniform(seed, torch.tensor(count), (40, 25), "cpu").equal(noise)


REFUSALS = {
    "block": lambda: block_count(4, 0),
    "start": lambda: scale_shape((4, 4), 2, 3),
    "ties": lambda: nearest(torch.zeros(2), BOOK, ties="even"),
    "scales": lambda: decode(torch.zeros(4, 300, dtype=torch.uint8), torch.zeros(4, 1), BOOK, block=256),
}


@pytest.mark.parametrize(("word", "call"), REFUSALS.items(), ids=REFUSALS)
def test_a_wrong_argument_is_refused_by_name(word, call):
    with pytest.raises(ValueError, match=word):
        call()


def test_the_sum_of_squares_does_not_depend_on_strides_and_adds_over_rows():
    x = drawn((70, 300))
    whole = sum_of_squares(x)
    assert whole.dtype == torch.float64
    torch.testing.assert_close(whole, x.double().square().sum(), rtol=1e-6, atol=0)
    assert whole == sum_of_squares(x.t().contiguous().t())
    parts = sum_of_squares(x[:23]) + sum_of_squares(x[23:])
    torch.testing.assert_close(whole, parts, rtol=1e-15, atol=0)


def test_rounding_to_bf16_takes_a_neighbour_and_is_right_on_average():
    x = torch.cat([drawn((500,)), torch.tensor([1.0 + 2**-16, 1.0 + 255 * 2**-16, 1e-40, 3.0e38])])
    draws = round_to_bf16(x.expand(4000, -1), random_words(7, torch.tensor(1), (4000, len(x)), "cpu"))
    low, high = draws.amin(0), draws.amax(0)
    assert draws.equal(draws.bfloat16().float()) and (low <= x).all() and (x <= high).all()
    gap = torch.nextafter(low.bfloat16(), torch.tensor(math.inf).bfloat16()).float() - low
    assert (high - low <= gap).all()
    share = ((x - low).double() / gap.double())[:, None]
    assert ((draws.double().mean(0) - x).abs() <= 5 * gap * (share * (1 - share)).sqrt()[:, 0] / math.sqrt(4000)).all()


def test_rounding_to_bf16_keeps_what_needs_none_and_mirrors_the_rest():
    words = random_words(3, torch.tensor(2), (600,), "cpu")
    x = drawn((600,))
    assert round_to_bf16(-x, words).equal(-round_to_bf16(x, words))
    exact = x.bfloat16().float()
    exact[:5] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 2.0**-133])
    assert round_to_bf16(exact, words).view(torch.int32).equal(exact.view(torch.int32))
    assert round_to_bf16(x * math.nan, words).isnan().all()


@pytest.mark.parametrize("whole", [(7,), (6, 9), (4, 5, 6)], ids=str)
def test_a_part_of_a_leaf_draws_what_the_leaf_draws_there(whole):
    words = random_words(3, torch.tensor(2), whole, "cpu")
    for axis, length in enumerate(whole):
        for first, last in [(0, length), (1, 3), (2, 2), (length - 1, length)]:
            offset = [first if i == axis else 0 for i in range(len(whole))]
            cut = words.narrow(axis, first, last - first)
            assert random_words(3, torch.tensor(2), cut.shape, "cpu", (whole, offset)).equal(cut)
