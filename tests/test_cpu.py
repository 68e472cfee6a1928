"""The CPU back end against its reference twins, bit for bit."""

import numba
import numpy as np
import pytest
import torch

from gefen_kernels import cpu, cpu_leaf, cpu_loops, cpu_moment, cpu_words, moment, ops, reference, step
from gefen_kernels.codebook import default_codebook, learn_codebook

CROWDED = torch.cat([-(torch.linspace(1, 0, 128) ** 9), torch.linspace(0, 1, 128) ** 9])
BOOKS = {
    "default": (default_codebook(), "zero"),
    "published": (learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False), "published"),
    "many levels in a cell": (CROWDED, "zero"),
    "few levels": (torch.cat([-torch.ones(64), torch.zeros(128), torch.ones(64)]), "zero"),
}
LAYOUTS = [((4, 300), 256, 1), ((3, 70, 300), 100, 2), ((700,), 256, 0), ((64, 32, 3, 3), 256, 1), ((5,), 1, 1)]
EMPTY = [((0, 300), 256, 1), ((4, 0), 256, 1)]
layouts = pytest.mark.parametrize(("shape", "block", "start"), [*LAYOUTS, *EMPTY], ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
CPU = torch.device("cpu")
BAD = [float("nan"), float("inf"), -float("inf"), 2e19, 1e-40]


def drawn(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
@layouts
def test_histograms_are_equal(shape, block, start, dtype):
    x = drawn(shape, dtype=dtype)
    for i, bad in enumerate(BAD[: max(0, min(5, x.numel() - 2))]):
        x.view(-1)[i] = bad
    expected = reference.histogram(x, block=block, start=start)
    assert torch.equal(cpu.histogram(x, block=block, start=start), expected)


@dtypes
@layouts
def test_norms_differ_in_the_order_of_float64_additions_at_most(shape, block, start, dtype):
    x = drawn(shape, dtype=dtype)
    got, expected = (f(x, block=block, start=start) for f in (cpu.sum_of_squares, reference.sum_of_squares))
    torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)


def test_a_norm_does_not_depend_on_strides():
    x = drawn((2000, 300))
    assert cpu.sum_of_squares(x.t().contiguous().t()) == cpu.sum_of_squares(x)


@pytest.mark.parametrize("width", [256, 63], ids="blocks of {}".format)
@pytest.mark.parametrize(("book", "ties"), BOOKS.values(), ids=BOOKS)
def test_codes_are_the_nearest_on_and_beside_every_bound(book, ties, width):
    bounds = reference.midpoints(book, ties).clamp(-1, 1)
    near = [torch.nextafter(bounds, torch.full_like(bounds, to)) for to in (-2.0, 2.0)]
    x = torch.cat([bounds, *near, drawn(4096).clamp(-1, 1), torch.tensor([1.0, -1.0, 0.0, float("nan")])])
    x = torch.cat([x, torch.zeros(-len(x) % (width - 1))]).clamp(-1, 1).reshape(-1, width - 1)
    x = torch.cat([torch.ones(len(x), 1), x], 1)  # so that a block's largest magnitude is 1
    leaf = step.Leaf(x, torch.zeros_like(x), torch.full(x.shape, 128, dtype=torch.uint8), torch.zeros(len(x), 1),
                     (torch.zeros(len(x), 1),), "block")  # fmt: skip
    scalars = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0]])
    cpu.gefen_step([leaf], scalars, book, ties=ties)
    finite = torch.where(x.isnan().any(1, keepdim=True), float("nan"), x)
    assert torch.equal(leaf.mu, reference.nearest(finite, book, ties=ties))


@pytest.mark.parametrize("width", [64, 7], ids="blocks of {}".format)
@pytest.mark.parametrize(("book", "ties"), BOOKS.values(), ids=BOOKS)
def test_blocks_without_a_normal_largest_magnitude_have_the_references_codes(book, ties, width):
    x = drawn((8, width))
    for row, bad in enumerate([0.0, 1e-40, -1e-38, *BAD[:3]]):
        x[row, 3] = bad
    x[0], x[1], x[2] = 0.0, x[1].clamp(-1e-40, 1e-40), x[2].clamp(-1e-38, 1e-38)
    old = torch.full(x.shape, 128, dtype=torch.uint8), torch.zeros(8, 1)
    got, expected = (f(x, *old, book, 0.0, 1.0, block=256, ties=ties)[1:] for f in (cpu_moment.moment, moment.moment))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("first", [0, (1 << 34) - 5], ids="from entry {}".format)
@pytest.mark.parametrize(("book", "ties"), BOOKS.values(), ids=BOOKS)
@layouts
def test_what_is_drawn_is_the_references(shape, block, start, book, ties, first):
    g, whole = drawn(shape), ((1 << 35,), (first,))
    near = torch.cat([book, *(torch.nextafter(book, torch.full_like(book, to)) for to in (-2.0, 2.0))]).clamp(-1, 1)
    entries = g.view(-1)[: g.numel() // 2]
    entries.copy_(near.repeat(1 + len(entries) // len(near))[: len(entries)])
    for i, bad in enumerate([-0.0, *BAD, 0.0][: g.numel()]):
        g.view(-1)[-1 - 90 * i :: 10000] = bad
    p, codes = drawn(shape, 1).bfloat16(), torch.full(shape, 128, dtype=torch.uint8)
    state = codes, torch.zeros(reference.scale_shape(shape, block, start)), (torch.zeros(shape),)
    leaf = step.Leaf(g, p.clone(), *state, "dense", start=start, block=block, seed=7, first=first)
    scalars = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1e-2, 0.0, 1.0]])  # m = g, p + g / 100
    leaf = leaf._replace(random_codes=True, random_param=True, decays=False)
    cpu.gefen_step([leaf], scalars, book, ties=ties, counts=torch.tensor([[3, 1 << 33]]))
    noise = reference.uniform(7, torch.tensor(3), (g.numel(),), "cpu", whole).view(shape)
    expected = reference.encode(g, book, block=block, start=start, ties=ties, noise=noise)
    torch.testing.assert_close((leaf.mu, leaf.absmax), expected, rtol=0, atol=0, equal_nan=True)
    words = reference.random_words(7 + step.PARAM_STREAM, torch.tensor(1 << 33), (g.numel(),), "cpu", whole).view(shape)
    moved = reference.round_to_bf16(p.float() + g / (1 + g * g * 0) * 1e-2, words)
    torch.testing.assert_close(leaf.param.float(), moved, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", [5, 5 + step.PARAM_STREAM, (1 << 64) - 3], ids="key {}".format)
@pytest.mark.parametrize(
    ("shape", "part"),
    [((), None), ((5, 300), None), ((0, 3), None), ((3001,), ((9000,), (3,))), ((2, 3, 7), ((4, 5, 9), (1, 0, 2)))],
    ids=str,
)
def test_words_of_leaves_and_of_their_parts_are_the_references(shape, part, seed):
    expected, got = (
        f(seed, torch.tensor(9), shape, CPU, part) for f in (reference.random_words, cpu_words.random_words)
    )
    assert torch.equal(got, expected) and torch.equal(ops.random_words(seed, torch.tensor(9), shape, CPU, part), got)


def test_what_is_drawn_needs_counts():
    leaf = step.Leaf(*(torch.zeros(3) for _ in range(3)), None, (torch.zeros(3),), "dense")
    with pytest.raises(ValueError, match="`counts` must be given where a leaf is rounded at random"):
        cpu.gefen_step([leaf._replace(param=leaf.param.bfloat16(), random_param=True)], torch.ones(1, 10), CROWDED)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("share", [0, 0.5], ids=["empty", "cut off"])
def test_kept_code_that_a_crash_has_damaged_is_compiled_anew(share, suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def build(source):
        return lambda x: x + 1 if source else x

    assert cpu_loops.kept(build)(1) == 2
    (file,) = tmp_path.rglob(f"*.{suffix}")
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    for hits in (0, 1):
        function = cpu_loops.kept(build)
        assert function(1) == 2
        assert sum(function.stats.cache_hits.values()) == hits


def test_every_16_bit_number_is_read_as_torch_reads_it():
    words = np.arange(1 << 16, dtype=np.uint16)
    bits = torch.from_numpy(words.view(np.int16))
    for read, dtype in ((cpu_loops.from_bf16, torch.bfloat16), (cpu_loops.from_fp16, torch.float16)):
        got = torch.tensor([read(word) for word in words], dtype=torch.float32)
        torch.testing.assert_close(got, bits.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    write = cpu_loops.to_bf16 if dtype == torch.bfloat16 else cpu_loops.to_fp16
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    exact = words.view(dtype).float()
    exact = exact[exact.isfinite()]
    between = exact[:-1] / 2 + exact[1:] / 2
    x = torch.cat([exact, between, torch.nextafter(between, torch.full_like(between, 9e37)), drawn(5000) * 1e-6])
    x = torch.cat([x, torch.tensor([65503.9, 65519.9, 65520.0, 1e38, -1e38, 1e-45, float("inf"), float("nan")])])
    got = torch.from_numpy(np.array([write(v) for v in x.numpy()], dtype=np.uint16).view(np.int16)).view(dtype)
    torch.testing.assert_close(got.float(), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_tables_name_the_scalars_in_the_order_of_the_step():
    names = ("B1", "NOT_B1", "B2", "NOT_B2", "CORRECTION1", "ROOT_CORRECTION2", "EPS", "STEP", "DECAY", "GRAD_SCALE")
    assert [getattr(cpu_leaf, name) for name in names] == list(range(len(step.SCALARS)))
    assert cpu_leaf.SCALARS == len(step.SCALARS)


def test_strided_or_foreign_leaves_are_not_taken():
    x = drawn((64, 300))
    leaf = step.Leaf(x, x, torch.zeros(64, 300, dtype=torch.uint8), torch.zeros(64, 2), (torch.zeros(64, 2),), "block")
    assert cpu.supports(leaf)
    assert not cpu.supports(leaf._replace(absmax=torch.zeros(2, 64).t()))
    assert not cpu.supports(leaf._replace(nu=(torch.zeros(64, 2, dtype=torch.float64),)))
    assert not cpu.supports(leaf._replace(grad=x.double()))
    assert not cpu.supports(leaf._replace(param=x.to("meta")))
