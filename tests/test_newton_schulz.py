"""Orthogonalization: against the SVD, float64 and torch.optim.Muon; its Gram form; its stacks."""

import itertools
import math

import numpy as np
import pytest
import torch

from gefen_fn import NS_COEFFS, orthogonalize
from gefen_kernels import newton_schulz, products
from gefen_kernels.newton_schulz import flops, iterate, normalized, orthogonalize_many, plan, segments, working_bytes
from gefen_kernels.ns_coefficients import ns_coefficients

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = (1,) * 5

# name: smallest singular value, as a share of the norm, that ends in the range; the range
RANGES = {
    "standard": (2e-3, 0.681, 1.203),
    "tuned3": (2e-2, 0.887, 1.146),
    "tuned4": (2e-2, 0.991, 1.009),
    "polar_express": (2e-3, 0.870, 1.124),
    "minimax3": (2e-2, 0.896, 1.104),
    "minimax4": (5e-3, 0.903, 1.097),
    "minimax5": (2e-3, 0.971, 1.029),
}
ranges = pytest.mark.parametrize(("name", "least", "low", "high"), [(k, *v) for k, v in RANGES.items()], ids=RANGES)


def drawn(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_spectrum(rows, cols, values):
    u, _, vt = torch.linalg.svd(drawn(rows, cols).double(), full_matrices=False)
    return (u * values.double()) @ vt


MATRICES = {
    "random [64, 256]": drawn(64, 256),
    "random tall [192, 96]": drawn(192, 96),
    "random square [128, 128]": drawn(128, 128),
    "conditioned 1e3 [96, 128]": with_spectrum(96, 128, torch.logspace(0, -3, 96)),
    "conditioned 1e8 [96, 96]": with_spectrum(96, 96, torch.logspace(0, -8, 96)),
    "of rank 8 [64, 256]": drawn(64, 8) @ drawn(8, 256, seed=1),
    "one large value [128, 256]": with_spectrum(128, 256, torch.tensor([1.0] + [0.02] * 127)),
}
matrices = pytest.mark.parametrize("x", MATRICES.values(), ids=MATRICES)


def steps_of(s, triples):
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


def wide(x):
    """The matrices as a batch `[N, R, C]`, R <= C."""
    return (x.mT if x.shape[-2] > x.shape[-1] else x).reshape(-1, *sorted(x.shape[-2:]))


def exact(x, triples, dtype=FP32):
    """The same iterations in float64, on what the working dtype holds of `x / norm`."""
    y = normalized(wide(x), 1e-7, dtype).double()
    for a, b, c in triples:
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if x.shape[-2] > x.shape[-1] else y).reshape(x.shape)


def error(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


@ranges
def test_polynomials_send_singular_values_into_the_range_that_is_claimed(name, least, low, high):
    ends = steps_of(np.geomspace(least, 1, 20001), NS_COEFFS[name])
    assert low <= ends.min() <= low + 0.002 and high - 0.002 <= ends.max() <= high


def band(triples, least, cushion=0.01):
    """The range in which singular values from `least` to 1 end if the input of each step is off by `cushion`."""
    low, high = least, 1.0
    for index, triple in enumerate(triples):
        widened = np.linspace(low * (1 - cushion if index else 1), high * (1 + cushion), 4001)
        ends = steps_of(widened, [triple])
        low, high = ends.min(), ends.max()
    return low, high


@pytest.mark.parametrize("name", ["minimax3", "minimax4", "minimax5"])
def test_no_small_change_of_a_coefficient_brings_a_minimax_set_nearer_to_one(name):
    least, triples = RANGES[name][0], np.array(NS_COEFFS[name])
    distance = lambda t: max(1 - band(t, least)[0], band(t, least)[1] - 1)  # noqa: E731
    for index, factor in itertools.product(np.ndindex(triples.shape), (0.999, 1.001)):
        changed = triples.copy()
        changed[index] *= factor
        assert distance(changed) > distance(triples)


@matrices
@ranges
def test_singular_values_of_what_bf16_gives_lie_in_the_claimed_range(name, least, low, high, x):
    before, after = torch.linalg.svdvals(x.double()), torch.linalg.svdvals(orthogonalize(x, coeffs=name).double())
    claimed = before > 1.1 * least * before.norm()
    assert claimed.any()
    assert after.max() <= high + 0.01 and after[claimed].min() >= low - 0.01


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("standard", 0.68, 1.14), ("tuned3", 0.88, 1.15), ("tuned4", 0.99, 1.012), ("minimax5", 0.97, 1.03)],
)
def test_singular_values_of_a_random_256_by_1024_matrix(name, low, high):
    values = torch.linalg.svdvals(orthogonalize(drawn(256, 1024), coeffs=name).double())
    assert low <= values.min() and values.max() <= high


def test_singular_vectors_stay_those_of_the_matrix():
    x = drawn(96, 64)
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    expected = (u * torch.as_tensor(steps_of((s / s.norm()).numpy(), NS_COEFFS["standard"]))) @ vt
    assert error(orthogonalize(x, dtype=FP32), expected) < 1e-5


def longest(triples, dtype):
    return segments(1, 1 << 40, triples, dtype=dtype, tile=None)


# The largest relative error over MATRICES and all sets. Of a random matrix it is 1 % in bf16; the large ones are of
# singular values near 0, which are what rounding makes them.
@pytest.mark.parametrize(
    ("dtype", "form", "largest"),
    [
        (BF16, "plain", 0.3),
        (FP16, "plain", 0.05),
        (FP16, "longest", 0.06),
        (FP32, "plain", 5e-5),
        (FP32, "longest", 1e-3),
    ],
)
def test_every_form_follows_float64(dtype, form, largest):
    errors = []
    for x, triples in itertools.product(MATRICES.values(), NS_COEFFS.values()):
        y = normalized(wide(x), 1e-7, dtype)
        cut = longest(triples, dtype) if form == "longest" else (1,) * len(triples)
        errors.append(error(iterate(y, triples, cut), exact(y, triples, dtype)))
    assert largest / 3 < max(errors) < largest


@pytest.mark.parametrize(
    ("dtype", "largest"), [(BF16, 0.016), (FP16, 0.01), (FP32, 5e-5)], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)], ids=str)
def test_random_matrices_come_near_float64_in_the_form_that_is_chosen(shape, dtype, largest):
    x = drawn(*shape)
    assert error(orthogonalize(x, dtype=dtype), exact(x, NS_COEFFS["standard"], dtype)) < largest


def follow_muon(shape, steps=50, lr=1e-2, decay=0.1, momentum=0.95):
    """Parameters after as many steps of torch.optim.Muon, ours beside them, and where both began."""
    start = drawn(*shape, seed=1)
    param, ours, m = torch.nn.Parameter(start.clone()), start.clone(), torch.zeros(shape)
    optimizer = torch.optim.Muon([param], lr=lr, weight_decay=decay, momentum=momentum)
    for step in range(steps):
        g = drawn(*shape, seed=2 + step)
        param.grad = g.clone()
        optimizer.step()
        m.lerp_(g, 1 - momentum)
        update = orthogonalize(g.lerp(m, momentum))
        ours.mul_(1 - lr * decay).add_(update, alpha=-lr * math.sqrt(max(1, shape[0] / shape[1])))
    return param.data, ours, start


SHAPES = pytest.mark.parametrize("shape", [(64, 96), (96, 64), (128, 128), (33, 70), (257, 100)], ids=str)


@SHAPES
def test_torch_muon_is_followed_within_half_a_percent(shape):
    theirs, ours, start = follow_muon(shape)
    assert (theirs - ours).norm() < 0.005 * (theirs - start).norm()


@SHAPES
def test_torch_muon_is_followed_to_the_bit_with_its_norm_rounded_to_bf16(shape, monkeypatch):
    norm = newton_schulz.frobenius_norm
    monkeypatch.setattr(newton_schulz, "frobenius_norm", lambda x: norm(x).to(BF16).to(FP32))
    monkeypatch.setenv("GEFEN_REFERENCE", "1")  # loops take their own norm
    theirs, ours, _ = follow_muon(shape)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize(("dtype", "largest"), [(BF16, 0.0), (FP16, 3e-3), (FP32, 1e-5)], ids=str)
def test_leading_axes_layout_and_orientation_do_not_matter(dtype, largest):
    x = drawn(2, 3, 48, 20)
    got, before = orthogonalize(x, dtype=dtype), x.clone()
    alone = torch.stack([orthogonalize(y, dtype=dtype) for y in x.flatten(0, 1)]).unflatten(0, (2, 3))
    assert error(alone, got.double()) <= largest
    assert torch.equal(got, orthogonalize(x.mT.contiguous(), dtype=dtype).mT)
    assert torch.equal(got, orthogonalize(x.transpose(0, 3).contiguous().transpose(0, 3), dtype=dtype))
    assert (got.shape, got.dtype, got.is_contiguous()) == (x.shape, dtype, True) and torch.equal(x, before)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 1e6, 1e30])
def test_the_scale_of_a_matrix_does_not_matter_above_eps(dtype, scale):
    x = drawn(16, 24).double()
    small = scale * x.norm() < 1e-7
    values = torch.linalg.svdvals(orthogonalize((x * scale).float(), dtype=dtype).double())
    assert values.max() < 1e-15 if small else values.max() > 0.6


def test_a_float64_input_is_as_good_as_a_rounded_one():
    x = drawn(16, 24)
    assert torch.equal(orthogonalize(x.double()), orthogonalize(x))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4), (0, 3, 4), (1, 9), (9, 1), (1, 1), (5, 7)], ids=str)
def test_small_and_empty_matrices_are_taken(shape):
    got = orthogonalize(drawn(*shape))
    assert got.shape == shape and got.isfinite().all()


def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_own_matrix_alone():
    x = drawn(4, 16, 24)
    x[1], x[2, 3, 4], x[3, 0, 0] = 0, math.nan, math.inf
    got = orthogonalize(x)
    assert torch.equal(got[0], orthogonalize(x[0])) and not got[1].any() and got[2:].isnan().all()


@pytest.mark.parametrize(
    "given", [NS_COEFFS["standard"], [[3.4445, -4.775, 2.0315]] * 5, np.array(NS_COEFFS["standard"])]
)
def test_a_set_may_be_given_as_triples(given):
    x = drawn(16, 24)
    assert ns_coefficients(given) == NS_COEFFS["standard"]
    assert torch.equal(orthogonalize(x, coeffs=given), orthogonalize(x))


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: orthogonalize(drawn(4)), ValueError, "at least two axes: got shape"),
        (lambda: orthogonalize(torch.ones(4, 4, dtype=torch.int64)), TypeError, "floating dtype: got torch.int64"),
        (lambda: orthogonalize(drawn(4, 4), dtype=torch.float64), ValueError, "`dtype` must be bf16, fp16 or fp32"),
        (lambda: orthogonalize(drawn(4, 4), coeffs="best"), ValueError, "one of standard, tuned3, .*: got 'best'"),
        (lambda: orthogonalize(drawn(4, 4), coeffs=[]), ValueError, "one triple of finite numbers"),
        (lambda: orthogonalize(drawn(4, 4), coeffs=(3.4, -4.7, 2.0)), TypeError, "one triple of finite numbers"),
        (lambda: orthogonalize(drawn(4, 4), coeffs=[(1.0, 2.0)]), ValueError, "one triple of finite numbers"),
        (lambda: orthogonalize(drawn(4, 4), coeffs=[(1.0, 2.0, math.inf)]), ValueError, "one triple of finite"),
        (lambda: orthogonalize(drawn(4, 4), coeffs=5), TypeError, "one triple of finite numbers"),
    ],
)
def test_what_is_no_matrix_dtype_or_set_is_refused(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


COUNTED = [(r, c) for r in (1, 64, 100, 130, 512, 1000, 4096) for c in (1, 100, 768, 1024, 4096, 11008) if r <= c]


@pytest.mark.parametrize("name", NS_COEFFS)
@pytest.mark.parametrize("tile", [None, 64, 128])
def test_the_chosen_cut_costs_the_least_of_those_the_dtype_can_bear(name, tile):
    triples = NS_COEFFS[name]
    for (rows, cols), dtype in itertools.product(COUNTED, (BF16, FP16, FP32)):
        cut = segments(rows, cols, triples, dtype=dtype, tile=tile)
        plain = flops(rows, cols, (1,) * len(triples), tile=tile)
        assert sum(cut) == len(triples)
        assert flops(rows, cols, cut, tile=tile) <= plain <= flops(rows, cols, (1,) * len(triples))


@pytest.mark.parametrize(
    ("side", "tile", "most"),
    [(1024, 128, 0.71), (4096, 128, 0.68), (1024, 64, 0.71), (4096, 64, 0.68), (2**20, 128, 0.66671)],
)
def test_square_matrices_cost_two_thirds_with_a_kernel_for_symmetric_products(side, tile, most):
    for name, dtype in itertools.product(NS_COEFFS, (BF16, FP16, FP32)):
        cut = segments(side, side, NS_COEFFS[name], dtype=dtype, tile=tile)
        share = flops(side, side, cut, tile=tile) / flops(side, side, (1,) * len(NS_COEFFS[name]))
        assert 2 / 3 <= share <= most


@pytest.mark.parametrize("cut", [PLAIN, (2, 2, 1), (1, 4), (5,)], ids=str)
def test_flops_are_those_of_the_products_that_are_made(cut, monkeypatch):
    made = []

    def counting(multiply):
        def counted(a, *rest, **options):
            made.append(2 * a.shape[-2] * a.shape[-1] * (rest[0] if rest else a.mT).shape[-1])
            return multiply(a, *rest, **options)

        return counted

    monkeypatch.setattr(newton_schulz, "gram", counting(products.gram))
    monkeypatch.setattr(newton_schulz, "product", counting(products.product))
    iterate(drawn(1, 20, 70), NS_COEFFS["standard"], cut)
    assert sum(made) == flops(20, 70, cut)


# On a CPU bf16 keeps torch's form, and fp32 takes the Gram form from 1.5 times as many columns as rows.
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "device", "cut"),
    [
        (512, 2048, BF16, CPU, (PLAIN, BF16)),
        (512, 2048, FP32, CPU, ((5,), FP32)),
        (512, 760, FP32, CPU, (PLAIN, FP32)),
        (512, 2048, FP16, CPU, ((2, 2, 1), FP16)),
        (512, 2048, BF16, CUDA, ((2, 2, 1), FP16)),
        (512, 512, BF16, CUDA, (PLAIN, BF16)),
    ],
    ids=str,
)
def test_the_form_follows_from_shape_dtype_and_device(rows, cols, dtype, device, cut, monkeypatch):
    monkeypatch.setattr(
        newton_schulz, "tile_side", lambda device, dtype: products.TILES[dtype] if device == CUDA else None
    )
    assert plan(rows, cols, NS_COEFFS["standard"], dtype=dtype, device=device) == cut


def test_fp32_products_with_fewer_bits_keep_the_plain_form():
    try:
        torch.set_float32_matmul_precision("high")
        assert plan(64, 256, NS_COEFFS["standard"], dtype=FP32, device=CPU) == (PLAIN, FP32)
    finally:
        torch.set_float32_matmul_precision("highest")


MANY = [
    drawn(*shape, seed=seed) for seed, shape in enumerate([(16, 40), (40, 16), (5, 16, 40), (33, 33), (2, 2, 33, 33)])
]


@pytest.mark.parametrize("budget", [None, 0, 20_000, 50_000])
def test_stacked_matrices_have_the_bits_they_have_alone_in_any_order(budget):
    expected = [orthogonalize(x) for x in MANY]
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1)):
        got = orthogonalize_many([MANY[index] for index in order], budget=budget)
        assert all(torch.equal(y, expected[index]) for index, y in zip(order, got, strict=True))
    assert orthogonalize_many([]) == []


@pytest.mark.parametrize(("each", "sizes"), [(1000, [7, 5]), (0, [1] * 12), (1, [1] * 12), (4, [4, 3, 4, 1])])
def test_a_stack_holds_what_the_budget_allows(each, sizes, monkeypatch):
    seen = []
    once = newton_schulz.iterate
    monkeypatch.setattr(newton_schulz, "iterate", lambda x, *rest: seen.append(len(x)) or once(x, *rest))
    for part in (MANY[:3], MANY[3:]):
        shape = sorted(part[0].shape)
        orthogonalize_many(part, budget=each * working_bytes(*shape[-2:], BF16))
    assert seen == sizes


def test_vmap_gives_the_bits_of_a_batch():
    x = drawn(3, 4, 20, 30)
    assert torch.equal(torch.vmap(torch.vmap(orthogonalize))(x), orthogonalize(x))
    assert torch.equal(torch.vmap(orthogonalize, in_dims=3)(x), orthogonalize(x.movedim(3, 0)))


# Inductor's own imports warn of torch.jit.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_equals_eager_but_for_rounding_and_is_compiled_once():
    torch._dynamo.reset()
    compiled = torch.compile(orthogonalize, fullgraph=True)
    try:
        for seed in range(3):
            x = drawn(24, 64, seed=seed)
            assert error(compiled(x), orthogonalize(x).double()) < 0.03
            torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")


def test_other_shapes_are_compiled_too():
    compiled = torch.compile(lambda *xs: orthogonalize_many(xs), fullgraph=True, backend="eager")
    for shape in ((24, 64), (40, 64), (40, 70)):
        xs = [drawn(*shape), drawn(*shape[::-1]), drawn(3, *shape)]
        assert all(torch.equal(y, orthogonalize(x)) for x, y in zip(xs, compiled(*xs), strict=True))


def test_a_derivative_passes_through():
    x, weight = drawn(8, 20).requires_grad_(), drawn(8, 20, seed=1)
    (orthogonalize(x, dtype=FP32) * weight).sum().backward()
    y = x.detach().double().requires_grad_()
    (exact_of_double(y) * weight).sum().backward()
    assert error(x.grad, y.grad) < 1e-3


def exact_of_double(y):
    y = y / y.norm()
    for a, b, c in NS_COEFFS["standard"]:
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y
