"""Rows of tiles that shard edges cut: sums of strips and steps with given column means, against the reference."""

from itertools import pairwise

import pytest
import torch

from gefen_fn import Factored, default_codebook
from gefen_fn.blocks import leaf_layout
from gefen_fn.quantize import quantized_zeros
from gefen_kernels import cpu, reference
from gefen_kernels import triton_step as for_gpus
from gefen_kernels.step import SCALARS, STRIP, Leaf
from tests.kernel_targets import SPILLS_ALLOWED, TARGETS, compiled, interpreted, recorded, rounded_as_on_a_gpu

triton_step = interpreted("gefen_kernels.triton_step")
BACK_ENDS = {"cpu": cpu, "triton": triton_step}
BOOK = default_codebook()
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
back_ends = pytest.mark.parametrize("module", BACK_ENDS.values(), ids=BACK_ENDS)


@pytest.fixture(autouse=True)
def interpreter_rounds(monkeypatch):
    rounded_as_on_a_gpu(monkeypatch)


def drawn(shape, seed, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(count, **changes):
    """Scalars for `count` leaves."""
    usual = [0.9, 0.1, 0.99, 0.01, 0.5, 0.7, 1e-8, -1e-2, 0.1, 1.0]
    return torch.tensor([list((dict(zip(SCALARS, usual, strict=True)) | changes).values())] * count, dtype=FP32)


STRIPS = [
    ((50, 512), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 32)]),
    ((1, 300), [(0, 1)]),
    ((200, 40), []),
    ((230, 272), [(3, STRIP), (131, 64)]),
]


SUMS = [(name, dtype, scale) for name in BACK_ENDS for dtype, scale in ((FP32, None), (BF16, 0.37), (FP16, 0.37))]


@pytest.mark.parametrize(("module", "dtype", "scale"), SUMS, ids=str)
def test_strips_of_rows_are_summed_as_the_reference_sums_them(module, dtype, scale):
    module = BACK_ENDS[module]
    grads, strips = [drawn(shape, n, dtype) for n, (shape, _) in enumerate(STRIPS)], [own for _, own in STRIPS]
    plan, factor = module.plan_sums(grads, strips), None if scale is None else torch.tensor(scale)
    for _ in range(1 + (module is cpu)):
        scaled = grads if scale is None else [(g.float() * factor).to(dtype) for g in grads]
        got = module.run_sums(plan, grads, factor)
        assert all(map(torch.equal, got, map(reference.strip_sums, scaled, strips)))
        grads = [g.flip(0).contiguous() for g in grads]


@back_ends
def test_no_strips_have_no_sums(module):
    assert module.run_sums(module.plan_sums([], []), []) == []
    (sums,) = module.run_sums(module.plan_sums([drawn((3, 40), 1)], [[]]), [drawn((3, 40), 1)])
    assert sums.shape == (0, 40)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2e19, 1e-30])
def test_sums_of_what_is_not_finite_or_hardly_normal_are_the_references(bad):
    g = drawn((24, 300), 0)
    g[3, 7], g[17, 299] = bad, -bad
    strips = [(0, 8), (8, 16)]
    (got,) = cpu.run_sums(cpu.plan_sums([g], [strips]), [g])
    torch.testing.assert_close(got, reference.strip_sums(g, strips), rtol=0, atol=0, equal_nan=True)


def leaf_of(shape, tile, block, dtypes=(FP32, FP32)):
    """A factored leaf with its first state, and its tiles."""
    layout, policy = leaf_layout(shape, block), Factored(tile)
    p = drawn(shape, 1, dtypes[1])
    leaf = Leaf(
        drawn(shape, 2, dtypes[0]), p, *quantized_zeros(p, layout), tuple(policy.init(p, layout)), "factored",
        block=block, tile=policy.sides,
    )  # fmt: skip
    return leaf, policy.tiles(layout)


def state_of(leaf):
    return leaf.param, leaf.mu, leaf.absmax, leaf.nu[0]


def pieces_of(leaf, tiles, cut, state, means):
    """Each tile of a leaf in two leaves, cut after `cut` of its rows, on these tensors."""
    tops, out = [*tiles.tops, len(leaf.param)], []
    for (top, bottom), own in zip(pairwise(tops), means, strict=True):
        for rows in (slice(top, min(top + cut, bottom)), slice(min(top + cut, bottom), bottom)):
            param, mu, absmax, row = (x[rows] for x in state)
            given = Leaf(leaf.grad[rows], param, mu, absmax, (row, own), "given", block=leaf.block)
            out.append(given._replace(tile=(None, leaf.tile[1]), corrects=leaf.corrects, decays=leaf.decays))
    return out


ROWS = {
    "tiles": ((50, 512), (16, 256), 256, 5),
    "one row": ((1, 300), (128, 256), 256, 1),
    "a remainder, two column tiles": ((45, 300), (32, 256), 64, 31),
    "whole columns": ((17, 1040), (16, None), 256, 16),
    "blocks across tiles": ((40, 300), (16, 96), 100, 7),
    "one tile": ((40, 264), None, 256, 13),
    "rows below a program's": ((70, 264), (64, 256), 256, 34),
}
OPTIONS = {
    "plain": ((FP32, FP32), {}),
    "bf16, scaled ascent": ((BF16, BF16), {"negate": True, "scaled": True}),
    "fp16, from what is stored": ((FP16, FP32), {"drive": "m_hat"}),
}
CASES = [(module, row, option) for module in BACK_ENDS for row in ROWS for option in OPTIONS]
FEW = [case for case in CASES if case[0] == "cpu" or case[2] == "plain" or case[1] == "tiles"]


@pytest.mark.parametrize(("module", "row", "option"), FEW, ids=map(", ".join, FEW))
def test_rows_with_given_means_step_as_in_their_whole_tile(module, row, option):
    (shape, tile, block, cut), (dtypes, options), module = ROWS[row], OPTIONS[option], BACK_ENDS[module]
    leaf, tiles = leaf_of(shape, tile, block, dtypes)
    scalars = numbers(1, grad_scale=0.37)
    for step in range(2):
        leaf = leaf._replace(grad=drawn(shape, 10 + step, dtypes[0]), corrects=bool(step))
        own = [x.clone() for x in state_of(leaf)]
        cpu.gefen_step([leaf], scalars, BOOK, **options)
        means = tiles.unpack(tiles.unstack(leaf.nu[1])).contiguous()
        pieces = pieces_of(leaf, tiles, cut, own, means)
        module.gefen_step(pieces, scalars.expand(len(pieces), -1), BOOK, **options)
        assert torch.equal(means, tiles.unpack(tiles.unstack(leaf.nu[1])))
        assert all(map(torch.equal, own, state_of(leaf)))


@back_ends
@pytest.mark.parametrize(("policy", "shape", "cut"), [("block", (12, 256), 5), ("dense", (70,), 33)], ids=str)
def test_rows_of_a_shard_draw_what_they_draw_in_the_whole_leaf(policy, shape, cut, module):
    """Block by block from the fourth row on with 16 bytes at once; entry by entry where that is not possible."""
    p, counts = drawn(shape, 1, BF16), torch.tensor([[3, 4]])
    if policy == "dense":
        state = torch.zeros(shape), None, torch.zeros(shape)
    else:
        state = torch.full(shape, 128, dtype=torch.uint8), torch.zeros(shape[0], 1), torch.zeros(shape[0], 1)
    whole = Leaf(drawn(shape, 2, BF16), p, *state[:2], state[2:], policy, seed=5)
    whole = whole._replace(random_codes=policy != "dense", random_param=True)

    def piece(rows):
        absmax = None if whole.absmax is None else whole.absmax[rows].clone()
        own = {
            "param": p[rows].clone(),
            "mu": whole.mu[rows].clone(),
            "absmax": absmax,
            "nu": (whole.nu[0][rows].clone(),),
        }
        return whole._replace(grad=whole.grad[rows], first=rows.start * p[0].numel(), **own)

    pieces = [piece(slice(0, cut)), piece(slice(cut, shape[0]))]
    module.gefen_step([whole], numbers(1), BOOK, counts=counts)
    module.gefen_step(pieces, numbers(2), BOOK, counts=counts.expand(2, -1))
    assert torch.equal(torch.cat([x.param for x in pieces]), whole.param)
    assert torch.equal(torch.cat([x.mu for x in pieces]), whole.mu)


def launches_of(tile, block, options):
    """What a GPU launches for the sums and the step of the rows of one cut tile."""
    leaf, tiles = leaf_of((40, 512), tile, block, (BF16, BF16))
    piece = pieces_of(leaf, tiles, 40, state_of(leaf), torch.zeros(len(tiles.parts), 512))[0]

    def step():
        plan = for_gpus.plan_sums([piece.grad], [[(0, 32)]])
        for_gpus.run_sums(plan, [piece.grad], torch.tensor(0.37) if options else None)
        for_gpus.gefen_step([piece], numbers(1), BOOK, **options)

    return recorded(step)


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_of_cut_tiles_compile_without_spills_and_read_16_bytes_at_once(target):
    launches = launches_of((64, 256), 256, {"scaled": True})
    assert [launch.kernel.__name__ for launch in launches] == ["strip_kernel", "tile_kernel"]
    for launch in launches:
        usage = compiled(launch, TARGETS[target])
        assert usage.spills + usage.parked <= SPILLS_ALLOWED
        if "cuda" in target:
            assert "ld.global.v4.b32" in usage.assembly and "fma.rn.f32" not in usage.assembly


def test_the_other_kernels_of_cut_tiles_compile_with_every_option():
    launches = launches_of((64, 96), 100, {"scaled": True, "negate": True, "drive": "m_hat"})
    assert [launch.kernel.__name__ for launch in launches[1:]] == ["sum_kernel", "mean_kernel", "update_kernel"]
    assert all(compiled(launch, TARGETS["cuda 90"]).spills <= SPILLS_ALLOWED for launch in launches)
