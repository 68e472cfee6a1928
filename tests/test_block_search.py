"""Block lengths read off a squared gradient: both rules against plain loops, the fallback, and refusals."""

import math
from itertools import pairwise

import pytest
import torch

from gefen_kernels.block_search import divisors, find_block


def bare(s, shape, **options):
    return find_block(s, shape, fallback=False, **options)


def plain_variance_drop(rows):
    n = rows.shape[1]
    best, answer, before = 1e-12, 1, None
    for p in (p for p in range(1, n) if n % p == 0):
        variances = []
        for row in rows.double().tolist():
            for k in range(0, n, p):
                run = row[k : k + p]
                mean = sum(run) / p
                variances.append(sum((v - mean) ** 2 for v in run) / p)
        spread = math.sqrt(sum(variances) / len(variances))
        if before is not None and spread - before < best:
            best, answer = spread - before, p
        before = spread
    return answer if answer >= 8 else 1


def plain_contrast(rows, p):
    gaps = []
    for row in rows.double().tolist():
        logs = [math.log(v + 1e-12) for v in row]
        means = [sum(logs[k : k + p]) / p for k in range(0, len(row), p)]
        gaps += [abs(a - b) for a, b in pairwise(means)]
    return sum(gaps) / len(gaps)


def plain_log_contrast(rows):
    n = rows.shape[1]
    candidates = [p for p in range(1, n // 4 + 1) if n % p == 0]
    score = [plain_contrast(rows, p) for p in candidates]
    best, answer = -math.inf, 1
    for k in range(1, len(score) - 1):
        if candidates[k] > 8 and score[k] > max(score[k - 1], score[k + 1], best):
            best, answer = score[k], candidates[k]
    return answer


def squares(shape, seed, levels=None):
    """Squared gradients, with `levels` in runs of that length, as in fused heads."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if levels:
        scale = torch.randn(math.prod(shape) // levels, generator=torch.Generator().manual_seed(seed + 9)).exp()
        g = g * scale.repeat_interleave(levels).reshape(shape)
    return g**2


@pytest.mark.parametrize("levels", [None, 12, 24, 40])
@pytest.mark.parametrize(
    ("rule", "plain"), [("variance_drop", plain_variance_drop), ("log_contrast", plain_log_contrast)]
)
@pytest.mark.parametrize("shape", [(2, 240), (5, 120), (3, 480)])
def test_both_rules_agree_with_their_plain_loops_by_row_and_flattened(shape, rule, plain, levels):
    for seed in range(4):
        s = squares(shape, seed, levels)
        assert bare(s, shape, rule=rule) == plain(s)
        assert bare(s, shape, rule=rule, rowwise=False) == plain(s.reshape(1, -1))


def stripes(n, run):
    """Runs of `run` entries that alternate between two sizes, so that longer blocks are all alike."""
    return (1.0 + 99.0 * ((torch.arange(n) // run) % 2)).repeat(4, 1)


@pytest.mark.parametrize(
    ("n", "run", "expected"),
    [(480, 24, 24), (512, 16, 16), (1 << 15, 4096, 2048), (3 * 5 * 4096, 4096, 2048), (64, 8, 1), (64, 16, 1)],
)
def test_log_contrast_finds_the_stripes_and_shortens_what_exceeds_1024(n, run, expected):
    assert bare(stripes(n, run), (4, n), rule="log_contrast") == expected


@pytest.mark.parametrize(("n", "run", "expected"), [(48, 16, 16), (480, 32, 32), (96, 4, 1), (64, 16, 1)])
def test_variance_drop_finds_the_stripes_that_shorter_blocks_straddle(n, run, expected):
    assert bare(stripes(n, run), (4, n)) == plain_variance_drop(stripes(n, run)) == expected


@pytest.mark.parametrize(
    ("shape", "rowwise", "start", "expected"),
    [
        ((4, 300), True, 1, 300),
        ((4, 11008), True, 1, 11008),
        ((4, 300), False, 1, 1200),
        ((64, 32, 3, 3), True, 1, 288),
        ((2, 40, 64), True, 2, 64),
        ((2, 40, 64), True, 1, 1280),
        ((6, 7), True, 1, 1),
        ((6, 7), False, 1, 42),
        ((1009,), True, 1, 1009),
        ((5003, 2), False, 1, 1),
        ((16, 1), True, 1, 1),
        ((8, 1), False, 1, 8),
    ],
)
def test_the_fallback_is_the_longer_of_the_last_axis_and_the_largest_divisor_up_to_2048(
    shape, rowwise, start, expected
):
    even = torch.ones(shape)
    for rule in ("variance_drop", "log_contrast"):
        assert find_block(even, shape, rule=rule, rowwise=rowwise, start=start) == expected
        assert bare(even, shape, rule=rule, rowwise=rowwise, start=start) == 1


@pytest.mark.parametrize("rule", ["variance_drop", "log_contrast"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_squares_that_are_not_finite_count_as_zero(rule, bad):
    s = squares((4, 480), 1, 24)
    s[1, 7] = 0
    spoilt = s.clone()
    spoilt[1, 7] = bad
    assert bare(spoilt, (4, 480), rule=rule) == bare(s, (4, 480), rule=rule)


def test_every_answer_divides_the_row_and_leaves_the_input_as_it_was():
    for seed, n in enumerate([97, 128, 300, 1000, 4096]):
        s = squares((3, n), seed).to(torch.bfloat16)
        kept = s.clone()
        for rule in ("variance_drop", "log_contrast"):
            assert n % find_block(s, (3, n), rule=rule) == 0
        assert torch.equal(s, kept)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,)])
def test_an_empty_leaf_gets_an_answer(shape):
    assert find_block(torch.zeros(shape), shape) >= 1


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (49, [1, 7, 49]), (97, [1, 97])])
def test_divisors_come_ascending_and_once(number, expected):
    assert divisors(number) == expected


@pytest.mark.parametrize(
    ("shape", "rule", "words"),
    [
        ((4, 8), "median", "`rule` must be one of .*'log_contrast'.*: got 'median'. Use 'variance_drop'"),
        ((4, 9), "variance_drop", r"must have the entries of `shape`: got 32 for \(4, 9\). Pass"),
    ],
)
def test_a_wrong_rule_or_shape_is_refused(shape, rule, words):
    with pytest.raises(ValueError, match=words):
        find_block(torch.ones(4, 8), shape, rule=rule)
