"""The second moment's policies against float64 formulas written out."""

import pytest
import torch

from gefen_fn.blocks import FlatBlocks, leaf_layout
from gefen_fn.gefen import scale_by_gefen
from gefen_fn.second_moment import Block, Dense, Factored, FactoredState, policy_for
from gefen_fn.tree import tree_leaves

B2 = 0.9


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1e-2


def steps(policy, shape, block=256, count=4):
    layout = leaf_layout(shape, block)
    grads = [noise(*shape, seed=t) for t in range(count)]
    nu = policy.init(grads[0], layout)
    for g in grads:
        root, nu = policy.update(g, nu, B2, layout)
    return grads, root, nu


def ema(values):
    out = torch.zeros_like(values[0])
    for v in values:
        out = B2 * out + (1 - B2) * v
    return out


def spans(length, side, absorb):
    """Tile edges: rows leave their remainder to the last tile, columns to a tile of its own."""
    side = side or length
    count = max(1, length // side) if absorb else -(-length // side)
    return [(k * side, length if k == count - 1 else (k + 1) * side) for k in range(count)]


MATRICES = [
    ((64, 100), (None, None)),
    ((70, 300), (None, None)),
    ((64, 100), (16, None)),
    ((70, 300), (16, 256)),
    ((33, 300), (128, 256)),
    ((129, 513), (64, 256)),
    ((100, 64), (1, None)),
    ((100, 64), (None, 1)),
    ((50, 40), (16, 32)),
]


@pytest.mark.parametrize(("shape", "tile"), MATRICES, ids=str)
def test_factored_tiles_equal_adafactor_inside_each_tile_in_float64(shape, tile):
    grads, root, nu = steps(Factored(tile=tile), shape)
    square = ema([g.double() ** 2 for g in grads])
    expected = torch.empty(shape, dtype=torch.float64)
    for a, b in spans(shape[0], tile[0], True):
        for c, d in spans(shape[1], tile[1], False):
            part = square[a:b, c:d]
            expected[a:b, c:d] = part.mean(1, keepdim=True) * part.mean(0) / part.mean()
    torch.testing.assert_close(root.double(), expected.sqrt(), rtol=2e-6, atol=0)
    assert isinstance(nu, FactoredState)


@pytest.mark.parametrize("tile", [(1, None), (None, 1)], ids=str)
def test_a_tile_of_one_row_or_column_is_exact(tile):
    grads, root, _ = steps(Factored(tile=tile), (64, 100))
    torch.testing.assert_close(root, ema([g * g for g in grads]).sqrt(), rtol=2e-6, atol=0)


@pytest.mark.parametrize(("shape", "tile"), MATRICES, ids=str)
def test_column_statistics_lie_in_the_rows_of_their_own_tile(shape, tile):
    (rows, columns), grads = shape, steps(Factored(tile=tile), shape)
    square, col = ema([g.double() ** 2 for g in grads[0]]), grads[2].col
    height = tile[0] or rows
    q = rows if tile[0] is None else 2 ** (min(height, rows).bit_length() - 1)
    assert col.shape == (rows, -(-columns // q))
    expected = torch.zeros(col.shape, dtype=torch.float64)
    for k, (a, b) in enumerate(spans(rows, tile[0], True)):
        for c in range(columns):
            expected[k * height + c % q, c // q] = square[a:b, c].mean()
    torch.testing.assert_close(col.double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("policy", [Factored(tile=(16, 32)), Factored(), Block(), Dense()], ids=str)
def test_trap_the_second_moment_follows_its_ema_through_2000_zero_gradients(policy):
    layout, g = leaf_layout((64, 64)), noise(64, 64)
    _, nu = policy.update(g, policy.init(g, layout), 0.999, layout)
    first, zero = [x.double() for x in tree_leaves(nu)], torch.zeros_like(g)
    for _ in range(2000):
        _, nu = policy.update(zero, nu, 0.999, layout)
    for x, y in zip(first, tree_leaves(nu), strict=True):
        torch.testing.assert_close(y.double(), x * 0.999**2000, rtol=1e-3, atol=0)


def test_batch_axes_are_separate_matrices():
    policy, batched = Factored(tile=(16, 32)), steps(Factored(tile=(16, 32)), (3, 40, 64), count=1)
    for i in range(3):
        g = batched[0][0][i]
        layout = leaf_layout(g.shape)
        root, nu = policy.update(g, policy.init(g, layout), B2, layout)
        assert torch.equal(batched[1][i], root)
        assert all(torch.equal(x[i], y) for x, y in zip(batched[2], nu, strict=True))


@pytest.mark.parametrize(("shape", "block"), [((20, 300), 256), ((64, 32, 3, 3), 256), ((3, 40, 64), 48)], ids=str)
def test_block_keeps_the_mean_square_of_each_block(shape, block):
    grads, root, nu = steps(Block(), shape, block)
    start = leaf_layout(shape, block).start
    flat = ema([g.double() ** 2 for g in grads]).reshape(*shape[:start], -1)
    parts = [p.mean(-1, keepdim=True).expand_as(p) for p in flat.split(block, -1)]
    torch.testing.assert_close(root.double(), torch.cat(parts, -1).sqrt().reshape(shape), rtol=2e-6, atol=0)
    assert nu.shape == (*shape[:start], len(parts))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 300), Factored(tile=(128, 256))),
        ((16, 300), Block()),
        ((300, 31), Block()),
        ((64, 32, 3, 3), Factored(tile=(128, 256))),
        ((512, 1, 3, 3), Block()),
        ((3, 40, 64), Factored(tile=(128, 256))),
        ((10, 10), Dense()),
    ],
    ids=str,
)
def test_leaves_that_tiles_do_not_fit_fall_back_to_blocks(shape, expected):
    assert policy_for(Factored(tile=(128, 256)), leaf_layout(shape)) == expected


def test_a_flattened_partition_is_one_row_of_blocks():
    state = scale_by_gefen(block=FlatBlocks(256)).init(torch.zeros(65_536))
    assert state.mu.codes.shape == (65_536,)
    assert state.nu.shape == state.mu.absmax.shape == (256,)


@pytest.mark.parametrize("policy", [Factored(), Factored(tile=(128, 256)), Block()], ids=str)
def test_tiny_gradients_neither_vanish_nor_overflow(policy):
    layout, g = leaf_layout((128, 300)), torch.full((128, 300), 1e-17)
    root, _ = policy.update(g, policy.init(g, layout), 0.0, layout)
    torch.testing.assert_close(root, g, rtol=1e-3, atol=0)


def test_the_default_state_costs_what_the_table_says():
    p = torch.zeros(4096, 4096, device="meta")
    state = scale_by_gefen().init(p)
    sizes = [x.nbytes for x in (*state.mu, *state.nu)]
    assert sum(sizes) / p.numel() == 1 + 4 / 256 + 4 / 128 + 4 / 256


def test_warm_averages_need_no_correction():
    g = noise(64, 100).abs() + 1
    tx = scale_by_gefen(second_moment=Factored(tile=(1, None)), codebook="fixed", b2=0.999)
    state = tx.init(g)
    for _ in range(5):
        u, state = tx.update(g, state)
        torch.testing.assert_close(u, torch.ones_like(g), rtol=0.02, atol=0)


@pytest.mark.parametrize("tile", [(100, 256), (0, 1), (16, -1), (2.0, None)], ids=str)
def test_a_bad_tile_is_refused_at_construction(tile):
    with pytest.raises(ValueError, match="power of two"):
        Factored(tile=tile)
