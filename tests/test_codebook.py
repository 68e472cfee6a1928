"""The learned codebook against the O(K n^2) recurrence, its invariants, the default levels, and refusals."""

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import pytest
import torch

from gefen_kernels.codebook import default_codebook, learn_codebook

FORMS = {
    "symmetric": {"zero": True, "symmetric": True},
    "symmetric without zero": {"zero": False, "symmetric": True},
    "zero alone": {"zero": True, "symmetric": False},
    "published": {"zero": False, "symmetric": False},
}
HISTOGRAMS = ["flat", "spiky", "gaps", "equal", "far from zero", "one bin"]


def made(kind, bins, seed):
    rng = np.random.default_rng(seed)
    half = bins // 2
    counts = {
        "flat": lambda: rng.integers(1, 100, bins),
        "spiky": lambda: np.exp(4 * rng.standard_normal(bins)).astype(np.int64) + 1,
        "gaps": lambda: rng.integers(1, 50, bins) * (rng.random(bins) < 0.4),
        "equal": lambda: np.full(bins, 7),
        "far from zero": lambda: rng.integers(1, 50, bins) * (np.abs(np.arange(bins) + 0.5 - half) > 0.6 * half),
        "one bin": lambda: (np.arange(bins) == bins // 3).astype(np.int64) * 5,
    }[kind]()
    counts[-1] += 1
    return torch.from_numpy(counts.astype(np.int64))


def brute(weights, centres, free, first, last):
    """Least cost of the segmentation, written as the plain recurrence: O(K n^2)."""
    centres, weights = centres[weights > 0], weights[weights > 0].astype(np.float64)
    size = len(centres)

    def cost(i, j, level=None):
        w, c = weights[i:j], centres[i:j]
        if i == j:
            return 0.0
        level = (w * c).sum() / w.sum() if level is None else level
        return float((w * (c - level) ** 2).sum())

    table = [[cost(i, j) if i <= j else math.inf for j in range(size + 1)] for i in range(size + 1)]
    f = [cost(0, j, first) if first is not None or j == 0 else math.inf for j in range(size + 1)]
    for _ in range(free):
        f = [min(f[i] + table[i][j] for i in range(j + 1)) for j in range(size + 1)]
    return min(f[i] + cost(i, size, last) for i in range(size + 1))


def least_cost(counts, levels, zero, symmetric):
    n = len(counts) // 2
    up = (np.arange(n) + 0.5) / n
    if symmetric:
        folded = counts[n:] + counts[:n][::-1]
        return brute(folded, up, levels // 2 - 1 - zero, 0.0 if zero else None, 1.0)
    if zero:
        sides = [(brute(counts[n:], up, k, 0.0, 1.0), k) for k in range(levels - 2)]
        return min(c + brute(counts[:n][::-1], up, levels - 3 - k, 0.0, 1.0) for c, k in sides)
    return brute(counts, np.concatenate([-up[::-1], up]), levels - 2, -1.0, 1.0)


def cost_of(book, counts):
    n = len(counts) // 2
    centres = (np.arange(2 * n) + 0.5 - n) / n
    distance = np.abs(centres[:, None] - book.double().numpy()[None]).min(axis=1)
    return float((counts * distance**2).sum())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HISTOGRAMS)
@pytest.mark.parametrize(("bins", "levels"), [(24, 6), (40, 8), (64, 16), (16, 32)])
def test_the_learned_levels_reach_the_least_cost_of_the_quadratic_recurrence(form, kind, bins, levels):
    for seed in range(3):
        histogram = made(kind, bins, seed)
        counts = histogram.numpy()
        expected = least_cost(counts, levels, **FORMS[form])
        got = cost_of(learn_codebook(histogram, levels=levels, **FORMS[form]), counts)
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HISTOGRAMS)
@pytest.mark.parametrize(("bins", "levels"), [(4096, 256), (4096, 16), (62, 256), (2, 4)])
def test_every_book_is_sorted_pinned_at_its_ends_and_keeps_its_form_q16(form, kind, bins, levels):
    zero, symmetric = FORMS[form]["zero"], FORMS[form]["symmetric"]
    book = learn_codebook(made(kind, bins, 0), levels=levels, zero=zero, symmetric=symmetric)
    assert book.shape == (levels,) and book.dtype == torch.float32 and bool((book.diff() >= 0).all())
    assert book[0] == -1 and book[-1] == 1
    assert not bool((torch.signbit(book) & (book == 0)).any()), "zero is written without a sign"
    if symmetric:
        assert torch.equal(book, 0.0 - book.flip(0))
    if zero:
        assert bool((book == 0).any())
    if zero and symmetric:
        assert book[levels // 2 - 1] == 0 and book[levels // 2] == 0


def test_fewer_bins_than_levels_are_met_exactly_and_padded_with_zeros():
    histogram = torch.zeros(4096, dtype=torch.int64)
    histogram[[3000, 3500, 4095]] = torch.tensor([5, 7, 9])
    book = learn_codebook(histogram)
    top = book[128:]
    assert int((top == 0).sum()) == 124
    assert top[124:].tolist() == [(952 + 0.5) / 2048, (1452 + 0.5) / 2048, (2047 + 0.5) / 2048, 1.0]


def test_negating_the_sample_leaves_the_symmetric_book_as_it_is():
    histogram = made("spiky", 4096, 1)
    assert torch.equal(learn_codebook(histogram), learn_codebook(histogram.flip(0)))


def test_scaling_all_counts_by_a_power_of_two_changes_no_bit():
    histogram = made("flat", 4096, 2)
    assert torch.equal(learn_codebook(histogram), learn_codebook(histogram * 2**20))


@cache
def gaussian_histogram(block=256, half=2048, nodes=512):
    """Expected counts of |x| for Gaussian blocks over their maximum: given the maximum m, the others lie below it."""
    mass, edges = torch.zeros(half, dtype=torch.float64), torch.arange(half + 1, dtype=torch.float64) / half
    for node in range(nodes):
        inside = ((node + 0.5) / nodes) ** (1 / block)  # P(|z| < m) at a midpoint of the law of the maximum
        maximum = NormalDist().inv_cdf((1 + inside) / 2)
        mass += torch.erf(edges * (maximum / math.sqrt(2))).diff() / inside
    mass *= (block - 1) / nodes
    mass[-1] += 1  # the maximum itself
    counts = (mass / block * 2**40).round().long()
    return torch.cat([counts.flip(0), counts])


def test_the_default_levels_are_the_optimum_for_gaussian_blocks_over_their_maximum():
    torch.testing.assert_close(default_codebook(), learn_codebook(gaussian_histogram()), rtol=1e-6, atol=0)


def test_the_expected_histogram_agrees_with_drawn_blocks():
    z = torch.randn(20_000, 256, generator=torch.Generator().manual_seed(0)).abs()
    drawn = torch.histc(z / z.amax(1, keepdim=True), bins=32, min=0, max=1).double()
    expected = gaussian_histogram()[2048:].reshape(32, 64).sum(1).double()
    torch.testing.assert_close(drawn / drawn.sum(), expected / expected.sum(), rtol=0.02, atol=0)


def test_the_default_book_is_fresh_symmetric_and_has_255_distinct_levels():
    book, again = default_codebook(), default_codebook()
    assert book.data_ptr() != again.data_ptr() and torch.equal(book, again)
    assert book.dtype == torch.float32 and torch.equal(book, 0.0 - book.flip(0))
    assert book.unique().numel() == 255 and book[127] == book[128] == 0 and book[-1] == 1


GOOD = torch.ones(16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("histogram", "levels", "error", "words"),
    [
        (GOOD - 2, 16, ValueError, "counts must be >= 0: got -1"),
        (GOOD[:15], 16, ValueError, "even number of bins"),
        (GOOD.reshape(4, 4), 16, ValueError, r"got \(4, 4\)"),
        (GOOD.int(), 16, TypeError, "must hold int64 counts: got torch.int32"),
        (GOOD.double(), 16, TypeError, "int64"),
        (GOOD, 15, ValueError, "`levels` must be even and from 4 to 256: got 15"),
        (GOOD, 2, ValueError, "`levels`"),
        (GOOD, 258, ValueError, "`levels`"),
        (GOOD * 0, 16, ValueError, "at least one entry: got 16 empty bins. Use `default_codebook"),
        (GOOD[:0], 16, ValueError, "at least one entry"),
    ],
)
def test_an_unfit_histogram_is_refused_with_the_rule_what_came_and_the_fix(histogram, levels, error, words):
    with pytest.raises(error, match=words):
        learn_codebook(histogram, levels=levels)
