"""The Triton codec, run by triton's interpreter, against the reference bit for bit; compiled for four GPUs."""

import inspect
import math
import re
import sys

import pytest
import torch
import triton
import triton.language as tl

import gefen_kernels
from gefen_kernels import reference, triton_codec
from gefen_kernels.codebook import default_codebook, learn_codebook
from tests.kernel_targets import SPILLS_ALLOWED, TARGETS, compiled, interpreted, interpreted_kernel, recorded

run = interpreted("gefen_kernels.triton_codec")

BOOK = default_codebook()
BOOKS = {
    "default": BOOK,
    "four bits": torch.tensor([-1, -0.7, -0.5, -0.35, -0.2, -0.1, -0.03, 0, 0, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 1]),
    "published": learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False),
    "zero off the middle": learn_codebook(torch.arange(1, 4097), zero=True, symmetric=False),
    "two in a cell": torch.cat([BOOK[:200], 0.4102 + torch.arange(3) * 1e-5, BOOK[203:]]),
    "crowded": torch.cat([torch.tensor([-1.0]), torch.linspace(0.1, 0.10004, 254), torch.tensor([1.0])]),
    "zero many times": torch.cat([torch.tensor([-1.0]), torch.zeros(200), torch.linspace(0.5, 1, 55)]),
    "wider than one": BOOK * 3,
}
books = pytest.mark.parametrize("book", BOOKS.values(), ids=BOOKS)

# shape, block, start
LAYOUTS = [
    ((4, 1), 256, 1),
    ((4, 63), 256, 1),
    ((4, 60), 256, 1),
    ((4, 255), 256, 1),
    ((9, 256), 256, 1),
    ((4, 257), 256, 1),
    ((4, 300), 256, 1),
    ((2, 700), 300, 1),
    ((3, 130), 48, 1),
    ((5, 7), 1, 1),
    ((0, 300), 256, 1),
    ((4, 0), 256, 1),
    ((64, 32, 3, 3), 256, 1),
    ((3, 8, 300), 256, 2),
    ((10, 70), 256, 0),
    ((1, 5000), 4096, 1),
]
layouts = pytest.mark.parametrize(("shape", "block", "start"), LAYOUTS, ids=[str(row) for row in LAYOUTS])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = {
    "encode": lambda m, x, **kw: m.encode(x, BOOK, **kw),
    "encode published": lambda m, x, **kw: m.encode(x, BOOKS["published"], ties="published", **kw),
    "encode stochastically": lambda m, x, **kw: m.encode(x, BOOK, noise=noise_of(x.shape), **kw),
    "decode": lambda m, x, **kw: m.decode(*reference.encode(x, BOOK, **kw), BOOK, **kw),
    "block_absmax": lambda m, x, **kw: m.block_absmax(x, **kw),
    "block_mean_square": lambda m, x, **kw: m.block_mean_square(x, **kw),
    "sum_of_squares": lambda m, x, **kw: m.sum_of_squares(x, **kw),
    "histogram": lambda m, x, **kw: m.histogram(x, **kw),
}
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
NAMES = [
    "encode",
    "decode",
    "requantize",
    "nearest",
    "block_absmax",
    "block_mean_square",
    "sum_of_squares",
    "histogram",
]


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise_of(shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(got, expected):
    """Same dtypes, shapes and bits, but for those of a NaN; one tensor or several."""
    got, expected = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, expected))
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        assert a.is_contiguous()
        a, b = (x.contiguous().reshape(-1) for x in (a, b))
        assert a.isnan().equal(b.isnan())
        assert torch.where(a.isnan(), 0, a).view(torch.uint8).equal(torch.where(b.isnan(), 0, b).view(torch.uint8))


def probes(book):
    """Levels, midpoints and edges of the table's cells with their neighbours in fp32, and what is far or not finite."""
    edges = (torch.arange(-8191, 8192, 37) + 0.5) / 8191
    exact = torch.cat([book, (book[:-1] + book[1:]) * 0.5, edges])
    up, down = (torch.nextafter(exact, torch.full_like(exact, end)) for end in (9.0, -9.0))
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-20, 1.5, -1.5, 3e38, -3e38, math.inf, -math.inf, math.nan])
    return torch.cat([exact, up, down, odd, 2 * noise_of(2000) - 1])


def awkward(dtype):
    """Rows of 300 with what is hard: not finite, zero, subnormal, huge, mixed, and an absmax just large enough."""
    x, tiny = drawn((11, 300)).to(dtype), torch.finfo(torch.float32).tiny
    x[0, 5], x[1, 5], x[2, 299], x[3] = math.nan, math.inf, -math.inf, math.inf
    x[4], x[5, ::2] = 0, -0.0
    x[6], x[7, :256] = x[6].sign() * torch.finfo(dtype).smallest_normal / 4, x[7, :256] * 1e-41
    x[8] = x[8] * (torch.finfo(dtype).max / 8)
    x[9, 1:], x[10, :256] = x[9, 1:] * 1e-7, 0
    x[10, 0], x[10, 256:], x[10, 256] = tiny, 0, tiny / 2
    return x


@ops
@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_has_the_reference_bits_in_every_layout(op, shape, block, start, dtype):
    x = drawn(shape).to(dtype)
    assert_same_bits(op(run, x, block=block, start=start), op(reference, x, block=block, start=start))


@ops
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_entries_that_are_not_finite_or_hardly_normal_give_the_reference_bits(op, dtype):
    x = awkward(dtype)
    assert_same_bits(op(run, x, block=256), op(reference, x, block=256))


@books
@pytest.mark.parametrize("ties", ["zero", "published"])
def test_the_nearest_level_is_the_reference_one_at_every_edge(book, ties):
    x = probes(book)
    assert_same_bits(run.nearest(x, book, ties=ties), reference.nearest(x, book, ties=ties))


@books
def test_stochastic_codes_are_the_reference_ones_at_every_edge(book):
    x = torch.cat([probes(book).nan_to_num().clamp(-1, 1), torch.tensor([1.0])]).reshape(1, -1)
    for noise in (noise_of(x.shape), torch.zeros_like(x), torch.full_like(x, 1 - 2**-24)):
        got, expected = (m.encode(x, book, block=x.shape[1], noise=noise) for m in (run, reference))
        assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("name", "fullest"),
    [("default", 1), ("published", 1), ("two in a cell", 2), ("crowded", 253), ("zero many times", 199)],
)
def test_the_search_table_says_how_many_bounds_share_a_cell(name, fullest):
    assert run.search_of(BOOKS[name]).info[0] == fullest


@books
@pytest.mark.parametrize("new", BOOKS.values(), ids=BOOKS)
def test_requantized_codes_are_the_reference_ones(book, new):
    codes = torch.randint(0, len(book), (3, 70), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    assert_same_bits(run.requantize(codes, book, new), reference.requantize(codes, book, new))


VIEWS = {
    "transposed": lambda x: x.T,
    "every third": lambda x: x[:, ::3],
    "cut out": lambda x: x[1:, 7:],
    "repeated": lambda x: x[:1].expand(9, -1),
    "overlapping": lambda x: x[0].as_strided((5, 90), (3, 1)),
}


@ops
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strides_of_a_leaf_do_not_matter(op, view):
    x = view(drawn((20, 300)))
    before = x.clone()
    assert_same_bits(op(run, x, block=64), op(reference, x, block=64))
    assert_same_bits(x.contiguous(), before.contiguous())


def test_strides_of_codes_scales_noise_and_codebooks_do_not_matter():
    x, wide = drawn((6, 300)), torch.stack([BOOK, -BOOK], 1)
    codes, absmax = reference.encode(x, BOOK, block=64)
    got = run.decode(codes.T.contiguous().T, absmax.T.contiguous().T, wide[:, 0], block=64)
    assert_same_bits(got, reference.decode(codes, absmax, BOOK, block=64))
    noise = noise_of((300, 6)).T
    expected = reference.encode(x, BOOK, block=64, noise=noise)
    assert_same_bits(run.encode(x, wide[:, 0], block=64, noise=noise), expected)
    assert_same_bits(
        run.requantize(codes.T, wide[:, 0], BOOKS["published"]), reference.requantize(codes.T, BOOK, BOOKS["published"])
    )


def test_a_program_counts_several_parts_of_a_histogram(monkeypatch):
    x = drawn((40, 300))
    monkeypatch.setattr(run, "_PROGRAMS", 2)
    assert_same_bits(run.histogram(x, block=256), reference.histogram(x, block=256))


@interpreted_kernel
def trees_kernel(x, last, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    entries = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    tl.store(last + row, run.tree_sum_last(entries))
    tl.store(first + column, run.tree_sum_first(entries))


@pytest.mark.parametrize("shape", [(1, 1), (8, 4), (16, 32), (2, 256), (64, 1)], ids=str)
def test_sums_of_registers_are_the_reference_tree(shape):
    x, last, first = drawn(shape), torch.empty(shape[0]), torch.empty(shape[1])
    trees_kernel[(1,)](x, last, first, *shape)
    assert_same_bits((last, first), (reference.tree_sum(x, 1), reference.tree_sum(x, 0)))


@interpreted_kernel
def place_kernel(out, program, blocks, COUNT: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    offset, mask, index, length = run.place(program, blocks, COUNT, WIDTH, WHOLE)
    here = tl.arange(0, COUNT)
    tl.store(out + here[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], tl.where(mask, offset, -1))
    tl.store(out + COUNT * WIDTH + here, index)
    tl.store(out + COUNT * WIDTH + COUNT + here, length)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "ragged"])
def test_entries_are_addressed_beyond_two_to_the_31(whole):
    columns = 2**33 if whole else 2**33 - 1
    blocks = run.Blocks(total=3 * 2**25, per_row=2**25, columns=columns, block=256)
    out = torch.empty(4 * 256 + 8, dtype=torch.int64)
    place_kernel[(1,)](out, 2**24 - 1, blocks, COUNT=4, WIDTH=256, WHOLE=whole)
    offset, index, length = out[:1024].reshape(4, 256), out[1024:1028], out[1028:]
    assert index.tolist() == [4 * (2**24 - 1) + n for n in range(4)]
    assert length.tolist() == [256, 256, 256, 256 if whole else 255]
    first = [columns + (n - 2**25) * 256 for n in index.tolist()]
    expected = torch.tensor(first)[:, None] + torch.arange(256)
    assert torch.where(torch.arange(256) < length[:, None], expected, -1).equal(offset)


@pytest.mark.parametrize("name", NAMES)
def test_launchers_are_called_as_the_reference_is(name):
    assert inspect.signature(getattr(triton_codec, name)) == inspect.signature(getattr(reference, name))


@ops
@pytest.mark.parametrize("shape", [(4, 300), (0, 300)], ids=str)
def test_a_cpu_tensor_is_refused_without_the_interpreter(op, shape):
    with pytest.raises(ValueError, match="takes tensors on a GPU: got one on cpu"):
        op(triton_codec, drawn(shape), block=256)


@pytest.mark.parametrize("m", [run, reference], ids=["triton", "reference"])
def test_what_does_not_fit_is_refused_in_the_same_words(m):
    with pytest.raises(ValueError, match="`block` must be at least 1"):
        m.encode(drawn((4, 300)), BOOK, block=0)
    with pytest.raises(ValueError, match="`start` must lie between"):
        m.block_absmax(drawn((4, 300)), block=256, start=3)
    with pytest.raises(ValueError, match="`ties` must be"):
        m.nearest(drawn((4, 300)), BOOK, ties="up")
    with pytest.raises(ValueError, match="scales must have shape"):
        m.decode(torch.zeros(4, 300, dtype=torch.uint8), torch.zeros(4, 3), BOOK, block=256)


# What launchers are given to launch: whole blocks; rows of odd length with offsets beyond 32 bits; and one entry, whose
# sizes triton takes for constants.
LEAVES = {
    "whole": (torch.zeros(64, 1024, dtype=torch.bfloat16), 256),
    "huge": (torch.empty(3, 2**33 + 5, dtype=torch.float16, device="meta"), 256),
    "one entry": (torch.zeros(1, 1), 1),
}
EVERYWHERE = [(leaf, target) for leaf in ("whole", "huge") for target in TARGETS] + [("one entry", "cuda 90")]


def launches_of(x, block):
    """What every launcher launches for a leaf."""
    codes, book, fp32 = (
        torch.zeros_like(x, dtype=torch.uint8),
        BOOK.to(x.device),
        torch.zeros_like(x, dtype=torch.float32),
    )
    absmax = torch.zeros(reference.scale_shape(x.shape, block), device=x.device)

    def everything():
        triton_codec.encode(x, book, block=block)
        triton_codec.encode(x, book, block=block, noise=fp32)
        triton_codec.decode(codes, absmax, book, block=block)
        triton_codec.requantize(codes, book, book)
        triton_codec.nearest(fp32, book)
        triton_codec.block_absmax(x, block=block)
        triton_codec.block_mean_square(x, block=block)
        triton_codec.sum_of_squares(x, block=block)
        triton_codec.histogram(x, block=block)

    return recorded(everything)


@pytest.mark.parametrize(("leaf", "target"), EVERYWHERE, ids=[" ".join(row) for row in EVERYWHERE])
def test_every_kernel_compiles_without_spills(leaf, target):
    launches = launches_of(*LEAVES[leaf])
    kernels = {name for name in vars(triton_codec) if name.endswith("_kernel")}
    assert {launch.kernel.__name__ for launch in launches} == kernels
    usages = [compiled(launch, TARGETS[target]) for launch in launches]
    assert all(usage.spills + usage.parked <= SPILLS_ALLOWED for usage in usages)
    assert max(usage.registers for usage in usages) <= 255


@pytest.mark.parametrize("target", TARGETS)
def test_products_are_rounded_before_a_sum_and_quotients_are_exact(target):
    for launch in launches_of(*LEAVES["whole"]):
        assembly = compiled(launch, TARGETS[target]).assembly
        fused = re.findall(r"\b(?:fma\.|mad\.\w*\.?f32|v_(?:pk_)?(?:fma|fmac|mad|mac)_)", assembly)
        exact = re.findall(r"div\.rn\.f32|v_div_fixup_f32", assembly)
        assert not re.search(r"\.ftz|div\.(?:full|approx)|rcp\.approx", assembly)
        # AMD writes the steps of an exact quotient out: five of them are fused.
        assert len(fused) == (0 if target.startswith("cuda") else 5 * len(exact))
        assert exact or launch.kernel.__name__ not in ("_encode_kernel", "_histogram_kernel")


def test_a_module_is_interpreted_beside_the_compiled_one():
    assert isinstance(triton_codec.encode_block, triton.JITFunction)
    assert not isinstance(run.encode_block, triton.JITFunction)
    assert sys.modules["gefen_kernels.triton_codec"] is gefen_kernels.triton_codec is triton_codec
    assert not triton.knobs.runtime.interpret
