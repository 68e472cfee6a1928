"""Symmetric products in Triton, run by its interpreter, against float64; compiled for four GPUs."""

import itertools

import pytest
import torch

from gefen_fn import NS_COEFFS
from gefen_kernels import products, triton_gram
from gefen_kernels.newton_schulz import orthogonalize
from tests.kernel_targets import SPILLS_ALLOWED, TARGETS, compiled, interpreted, recorded

run = interpreted("gefen_kernels.triton_gram")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of one rounding, as a share of the largest entry; the interpreter cuts bf16 off instead of rounding it.
ERRORS = {BF16: 2**-7, FP16: 2**-10, FP32: 1e-6}
# Batch, rows, depth: nothing, less than one tile, exactly one, more; 130 rows are two tiles of bf16 and three of fp32.
SHAPES = [(0, 5, 5), (2, 3, 0), (1, 1, 1), (2, 63, 60), (1, 128, 64), (1, 130, 33)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", ERRORS, ids=str)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def symmetric(count, rows, dtype, seed=0):
    x = drawn(count, rows, rows, seed=seed).to(dtype)
    return x.tril() + x.tril(-1).mT


def assert_near(got, expected, dtype):
    assert (got.dtype, got.shape) == (dtype, expected.shape)
    assert torch.equal(got, got.mT) and got.isfinite().all()
    if expected.numel():
        assert (got.double() - expected).abs().max() <= ERRORS[dtype] * expected.abs().max()


@shapes
@dtypes
def test_a_matrix_times_its_transpose_is_that_of_float64_and_symmetric_to_the_bit(shape, dtype):
    x = drawn(*shape).to(dtype)
    assert_near(run.symmetric_product(x, x), x.double() @ x.double().mT, dtype)


@shapes
@dtypes
def test_a_polynomial_of_a_symmetric_matrix_is_that_of_float64(shape, dtype):
    a = symmetric(*shape[:2], dtype)
    y = a.double()
    assert_near(run.symmetric_product(a, a, a, beta=-4.775, alpha=2.0315), -4.775 * y + 2.0315 * y @ y, dtype)


@dtypes
def test_factors_that_are_not_contiguous_or_not_equal_are_taken(dtype):
    u, d = (symmetric(2, 70, dtype, seed=seed) for seed in (1, 2))
    square = (u.double() @ u.double()).to(dtype)
    got = run.symmetric_product(u.mT, square.mT.contiguous().mT, d.mT, beta=0.5)
    expected = u.double() @ square.double() + 0.5 * d.double()
    assert (got.double() - expected).abs().max() <= 2 * ERRORS[dtype] * expected.abs().max()
    assert torch.equal(got, got.mT)


def test_matrices_of_a_batch_have_the_bits_they_have_alone():
    x = drawn(3, 130, 40)
    together = run.symmetric_product(x, x)
    assert all(torch.equal(together[n : n + 1], run.symmetric_product(x[n : n + 1], x[n : n + 1])) for n in range(3))


@pytest.mark.parametrize("side", range(1, 7))
def test_every_tile_of_the_triangle_is_made_once(side):
    """A tile holds the numbers of its rows and columns, multiplied; one left out would be NaN."""
    number = torch.arange(1, 64 * side + 1, dtype=FP32).reshape(1, -1, 1)
    assert torch.equal(run.symmetric_product(number, number), number @ number.mT)


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets CPU tensors take the kernels, as tensors on a GPU do; holds the shapes that they were given."""
    given = []

    def counted(a, *rest, **factors):
        given.append(tuple(a.shape))
        return run.symmetric_product(a, *rest, **factors)

    class BackEnd:
        symmetric_product = staticmethod(counted)

    monkeypatch.setattr(products, "back_end", lambda device: BackEnd)
    return given


@pytest.mark.parametrize(("shape", "cut"), [((170, 300), (2,)), ((300, 170), (2,)), ((170, 170), (1, 1))], ids=str)
def test_orthogonalization_with_the_kernels_is_that_without(shape, cut, on_gpu, monkeypatch):
    x, options = drawn(*shape), {"coeffs": NS_COEFFS["tuned3"][:2], "dtype": FP32}
    got = orthogonalize(x, **options)
    assert len(on_gpu) == sum(4 * length - 2 for length in cut)
    monkeypatch.undo()
    assert (got - orthogonalize(x, **options)).norm() < 1e-4 * got.norm()


def test_no_kernel_makes_products_that_whole_tiles_would_make_dearer(on_gpu):
    orthogonalize(drawn(130, 200), dtype=FP32)
    assert not on_gpu


def test_vmap_compile_and_derivatives_know_the_kernels(on_gpu):
    x, function = drawn(2, 170, 180), lambda y: orthogonalize(y, coeffs=[(1.5, -0.5, 0.0)], dtype=FP32)
    expected = function(x)
    assert torch.equal(torch.vmap(function)(x), expected)
    compiled_one = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled_one(x), expected, rtol=0, atol=1e-5)
    assert on_gpu == [(2, 170, 180), (2, 170, 170)] * 3
    function(x.requires_grad_()).sum().backward()
    assert x.grad.any() and len(on_gpu) == 6


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rows", [1000, 1024, 4096])
def test_flops_are_those_of_the_programs_that_are_launched(rows, dtype, monkeypatch):
    launches = []
    monkeypatch.setattr(triton_gram, "launch", lambda *args, **options: launches.append((args[1], options["TILE"])))
    triton_gram.symmetric_product(*[torch.empty(3, rows, rows, device="meta", dtype=dtype)] * 3)
    ((programs, tile),) = launches
    assert 3 * products.symmetric_flops(rows, rows, products.TILES[dtype]) == programs * 2 * tile * tile * rows


# Whole tiles with nothing added, and ragged ones with something; addresses beyond 2^31.
LAUNCHES = {
    "bf16, whole": ((4, 1024, 4096), BF16, False),
    "bf16, ragged": ((2, 63, 61), BF16, True),
    "fp16, huge": ((3, 2**17, 2**17), FP16, True),
    "fp32, ragged": ((2, 63, 61), FP32, True),
}


EVERYWHERE = [*itertools.product(("bf16, ragged", "fp32, ragged"), TARGETS)]


@pytest.mark.parametrize(("name", "target"), [*EVERYWHERE, ("bf16, whole", "cuda 90"), ("fp16, huge", "cuda 80")])
def test_the_kernel_compiles_without_spills(name, target):
    shape, dtype, adds = LAUNCHES[name]
    x = torch.empty(shape, dtype=dtype, device="meta")
    added = torch.empty(shape[0], shape[1], shape[1], dtype=dtype, device="meta") if adds else None
    (launch,) = recorded(lambda: triton_gram.symmetric_product(x, x, added))
    usage = compiled(launch, TARGETS[target])
    assert usage.spills <= SPILLS_ALLOWED and usage.registers <= 255
