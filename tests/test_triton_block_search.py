"""The statistics of a search for block lengths, run by triton's interpreter, against their twins bit for bit."""

from unittest import mock

import pytest
import torch

from gefen_kernels import block_search, ops, triton_block_search
from tests.kernel_targets import SPILLS_ALLOWED, TARGETS, compiled, interpreted, recorded

run = interpreted("gefen_kernels.triton_step")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def squares(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).square().to(dtype)


@pytest.mark.parametrize("name", ["block_means", "block_variances"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((3, 7), 1), ((3, 7), 7), ((5, 48), 3), ((9, 300), 100), ((2, 2048), 2048), ((2, 2049), 2049), ((1, 15000), 5000)],
    ids=str,
)
def test_every_block_has_the_bits_of_the_twin(name, shape, block):
    for dtype in DTYPES:
        x = squares(shape, dtype)
        assert torch.equal(getattr(run, name)(x, block), getattr(block_search, name)(x, block))
    assert torch.equal(getattr(run, name)(x.T, shape[0]), getattr(block_search, name)(x.T, shape[0]))


@pytest.mark.parametrize("rule", ["variance_drop", "log_contrast"])
def test_the_search_asks_the_back_end_and_gets_the_same_answer(rule):
    stripes = (1.0 + 99.0 * ((torch.arange(480) // 32) % 2)).repeat(4, 1) * squares((4, 480)).clamp(0.5, 2)
    expected = block_search.find_block(stripes, (4, 480), rule=rule)
    back_end = mock.Mock(wraps=run)
    with mock.patch.object(ops, "back_end", lambda device: back_end):
        assert block_search.find_block(stripes, (4, 480), rule=rule) == expected
    asked = back_end.block_variances if rule == "variance_drop" else back_end.block_means
    assert asked.call_count >= 10


@pytest.mark.parametrize("target", TARGETS)
def test_every_length_compiles_without_spills(target):
    def everything():
        for block in (1, 100, 30_000):
            triton_block_search.block_means(torch.zeros(4, 30_000, dtype=torch.float64), block)
            triton_block_search.block_variances(torch.zeros(4, 30_000), block)

    launches = recorded(everything)
    assert len(launches) == 9
    assert all(compiled(launch, TARGETS[target]).spills <= SPILLS_ALLOWED for launch in launches)
