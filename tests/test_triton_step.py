"""The fused Triton step, run by triton's interpreter, against the pure path bit for bit; launches, bytes, spills."""

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from gefen_fn import (
    Block,
    Dense,
    Factored,
    FlatBlocks,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    decay_mask,
    default_codebook,
    flatten_state,
    fuse,
    gefen,
    learn_codebook,
    scale,
    scale_by_gefen,
    scale_by_learning_rate,
    stochastic_rounding,
)
from gefen_fn.blocks import leaf_layout
from gefen_fn.quantize import quantized_zeros
from gefen_fn.second_moment import policy_for
from gefen_kernels import ops, reference, triton_step
from gefen_kernels.step import SCALARS, Leaf
from tests.kernel_targets import SPILLS_ALLOWED, TARGETS, compiled, interpreted, recorded, rounded_as_on_a_gpu

run = interpreted("gefen_kernels.triton_step")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BOOK = default_codebook()
PUBLISHED = learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False)
Builder = interpreter.InterpreterBuilder


@pytest.fixture(autouse=True)
def interpreter_rounds(monkeypatch):
    rounded_as_on_a_gpu(monkeypatch)


def noise(shape, seed, dtype=FP32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 3).to(dtype)


def assert_same_bits(expected, got):
    """Same names, dtypes and bits, but for those of a NaN."""
    assert expected.keys() == got.keys()
    differing = [
        name
        for name, x in expected.items()
        if x.dtype != got[name].dtype or not torch.equal(x.nan_to_num(7.0), got[name].nan_to_num(7.0))
    ]
    assert differing == []


def assert_fused_is_plain(tx, shapes, dtypes=(FP32, FP32), steps=2, change=lambda g: g, view=lambda x: x):
    """Take steps with the kernels and without; every leaf must have gone to the kernels."""
    step, taken = fuse(tx), []
    plain = {str(i): noise(s, 1000 + i, dtypes[1]) for i, s in enumerate(shapes)}
    fused = {k: view(p.clone()) for k, p in plain.items()}
    state, other = tx.init(plain), tx.init(plain)

    def stepped(plan, grads, *args, **options):
        taken.extend(grads)
        run.run_step(plan, grads, *args, **options)

    back_end = mock.Mock(wraps=run, run_step=stepped)
    with mock.patch.object(ops, "back_end", lambda device: back_end):
        for t in range(steps):
            grads = {str(i): change(noise(s, 10 * t + i, dtypes[0])) for i, s in enumerate(shapes)}
            updates, state = tx.update(grads, state, plain)
            plain = apply_updates(plain, updates)
            other = step({k: view(g) for k, g in grads.items()}, other, fused)
    assert len(taken) == steps * len(shapes)
    assert_same_bits(plain, fused)
    assert_same_bits(flatten_state(state), flatten_state(other))


def leaf_of(shape, policy, block=256, dtypes=(BF16, BF16), device="cpu"):
    """A leaf with its first state."""
    layout = leaf_layout(shape, block)
    policy, p = policy_for(policy, layout), torch.zeros(shape, dtype=dtypes[1], device=device)
    mu, nu = (torch.zeros_like(p, dtype=FP32), None) if layout.dense else quantized_zeros(p, layout)
    state = policy.init(p, layout)
    factored = isinstance(policy, Factored)
    return Leaf(
        grad=noise(shape, 1, dtypes[0]) if device == "cpu" else torch.empty_like(p, dtype=dtypes[0]),
        param=p,
        mu=mu,
        absmax=nu,
        nu=tuple(state) if factored else (state,),
        policy=type(policy).__name__.lower(),
        start=layout.start,
        block=block,
        tile=policy.sides if factored else (None, None),
    )


def numbers(count, **changes):
    """Scalars for `count` leaves."""
    usual = [0.9, 0.1, 0.99, 0.01, 0.5, 0.7, 1e-8, -1e-2, 0.1, 1.0]
    row = dict(zip(SCALARS, usual, strict=True)) | changes
    return torch.tensor([list(row.values())] * count, dtype=FP32)


def copied(leaf):
    """The same leaf of other tensors."""
    return leaf._replace(
        param=leaf.param.clone(), mu=leaf.mu.clone(), absmax=leaf.absmax.clone(), nu=tuple(x.clone() for x in leaf.nu)
    )


ROWS = {
    "default": (Factored((128, 256)), 256, [(40, 256), (300, 300), (2, 33, 150), (16, 300), (7,), (3, 5)]),
    "small tiles": (Factored((32, 64)), 64, [(32, 128), (70, 150), (127, 65)]),
    "tiles of several blocks": (Factored((32, 128)), 32, [(40, 300), (33, 140)]),
    "blocks longer than rows": (Factored((16, 256)), 4096, [(40, 160)]),
    "tiles of one row": (Factored((1, None)), 256, [(33, 140)]),
    "blocks across tiles": (Factored((16, 96)), 100, [(64, 100), (45, 300)]),
    "one tile": (Factored(), 256, [(40, 128), (150, 520), (2, 33, 150)]),
    "rows of tiles": (Factored((64, None)), 128, [(140, 1100)]),
    "columns of tiles": (Factored((None, 8)), 256, [(130, 40)]),
    "blocks": (Block(), 256, [(16, 512), (9, 700), (64, 16, 3, 3), ()]),
    "odd blocks": (Block(), 100, [(16, 512), (64, 64)]),
    "blocks of one": (Block(), 1, [(64, 65)]),
    "dense": (Dense(), 256, [(16, 512), (9, 700), (0, 4), (1025,)]),
}


@pytest.mark.parametrize(("policy", "block", "shapes"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32)], ids=["bf16", "fp32"])
def test_steps_have_the_pure_path_bits(policy, block, shapes, dtypes):
    tx = gefen(1e-2, weight_decay=0.1, second_moment=policy, block=block, codebook="fixed")
    assert_fused_is_plain(tx, shapes, dtypes)


@pytest.mark.parametrize("dtypes", [(FP16, FP32), (FP32, BF16), (BF16, FP16)], ids=str)
def test_gradients_and_parameters_may_have_two_dtypes(dtypes):
    tx = gefen(1e-2, weight_decay=0.1, second_moment=Factored((32, 64)), block=64, codebook="fixed")
    assert_fused_is_plain(tx, [(40, 128), (16, 300), (5, 7)], dtypes)


SHAPES = [(70, 150), (16, 512), (30,)]
TILES = {"second_moment": Factored((32, 64)), "block": 64, "codebook": "fixed"}
EXPRESSIONS = {
    "stored moment, published book": lambda policy: gefen(1e-2, **policy | {"codebook": PUBLISHED}),
    "stored moment": lambda policy: chain(scale_by_gefen(drive="m_hat", **policy), scale_by_learning_rate(1e-2)),
    "corrected": lambda policy: gefen(1e-2, b2_warmup=None, **policy),
    "masked decay": lambda policy: gefen(1e-2, weight_decay=0.1, mask=decay_mask, **policy),
    "learned book": lambda policy: gefen(1e-2, **policy | {"codebook": "learned"}),
    "random codes": lambda policy: gefen(1e-2, rounding="stochastic", drive="m_hat", **policy),
    "numbers per leaf": lambda policy: chain(
        scale_by_gefen(b1={"0": 0.9, "1": 0.8, "2": 0.7}, **policy),
        add_decayed_weights(0.1),
        scale_by_learning_rate({"0": 1e-2, "1": 2e-2, "2": 3e-2}),
    ),
}


@pytest.mark.parametrize("make", EXPRESSIONS.values(), ids=EXPRESSIONS)
@pytest.mark.parametrize("policy", [TILES, TILES | {"second_moment": Factored()}], ids=["tiles", "one tile"])
def test_expressions_have_the_pure_path_bits(make, policy):
    assert_fused_is_plain(make(policy), SHAPES, (BF16, FP32), steps=3)


@pytest.mark.parametrize("policy", [Factored((32, 64)), Factored(), Block(), Dense()], ids=repr)
@pytest.mark.parametrize("codes", ["nearest", "stochastic"])
def test_what_is_rounded_at_random_has_the_pure_path_bits(policy, codes):
    rule = gefen(1e-2, weight_decay=0.1, second_moment=policy, block=64, codebook="fixed", rounding=codes)
    shapes = [(40, 128), (33, 131), (30,)]
    assert_fused_is_plain(chain(rule, stochastic_rounding()), shapes, (BF16, BF16))


def test_a_parameter_that_needs_no_rounding_only_counts():
    assert_fused_is_plain(chain(gefen(1e-2, **TILES), stochastic_rounding()), [(40, 128), (5, 7)], (BF16, FP32))


def clipped(policy, limit=0.5):
    rule = gefen(1e-2, second_moment=policy, block=64, codebook="fixed")
    return chain(scale(-1.0), clip_by_global_norm(limit), rule)


@pytest.mark.parametrize("policy", [Factored((32, 64)), Factored((32, 96)), Block(), Dense()], ids=repr)
def test_a_clip_has_the_pure_path_bits_where_no_whole_side_is_averaged(policy):
    assert_fused_is_plain(clipped(policy), SHAPES, (BF16, FP32), steps=3)


def bad(g):
    return g.fill_(float("nan"))


@pytest.mark.parametrize(
    ("limit", "change"),
    [(1e3, lambda g: g), (0.5, lambda g: g * 1e8), (0.5, lambda g: g * 1e18), (0.5, bad)],
    ids=["nothing to clip", "far above the limit", "sums overflow", "NaN"],
)
def test_whole_sides_have_the_pure_path_bits_where_sums_cannot_be_rescaled_or_need_not(limit, change):
    assert_fused_is_plain(clipped(Factored(), limit), SHAPES, (BF16, FP32), change=change)


@pytest.mark.parametrize(
    ("policy", "dtype", "within"),
    [
        (Factored(), BF16, 2**-7),
        (Factored((64, None)), FP16, 2**-10),
        (Factored((None, 256)), FP32, 2**-20),
    ],
    ids=str,
)
def test_means_of_a_clipped_whole_side_differ_by_the_rounding_of_the_gradient_alone(policy, dtype, within):
    tx, shapes = clipped(policy, limit=60.0), {"0": (70, 1200), "1": (64, 300), "2": (30,)}
    plain = {k: noise(s, int(k)) for k, s in shapes.items()}
    fused = {k: p.clone() for k, p in plain.items()}
    state, other, step, moved = tx.init(plain), tx.init(fused), fuse(tx), dict.fromkeys(shapes, 0.0)
    for t in range(2):
        grads = {k: noise(s, 10 * t + int(k), dtype) for k, s in shapes.items()}
        updates, state = tx.update(grads, state, plain)
        plain = apply_updates(plain, updates)
        with mock.patch.object(ops, "back_end", lambda device: run):
            other = step(grads, other, fused)
        expected, got = flatten_state(state), flatten_state(other)
        means = {k for k in expected if ".row" in k or ".col" in k}
        assert len(means) == 4
        assert_same_bits(*({k: x for k, x in flat.items() if k not in means} for flat in (expected, got)))
        for k in means:
            assert ((got[k] - expected[k]).abs() <= within * expected[k]).all()
        for k, p in plain.items():
            moved[k] = moved[k] + updates[k].abs()
            assert ((fused[k] - p).abs() <= 2 * within * moved[k] + (t + 1) * 2**-23 * p.abs()).all()


def test_blocks_may_run_over_a_flattened_leaf():
    tx = gefen(1e-2, second_moment=Block(), block=FlatBlocks(100), codebook="fixed")
    assert_fused_is_plain(tx, [(70, 150), (65_600,)])


@pytest.mark.parametrize("policy", [Factored((32, 64)), Factored(), Block(), Dense()], ids=repr)
def test_what_is_not_finite_or_hardly_normal_steps_alike(policy):
    def change(g):
        g[0, 3], g[1, 5], g[40, 64] = float("nan"), float("inf"), -float("inf")
        g[2], g[3], g[4], g[5, 1:] = 0, g[3] * 1e-30, g[4] * 1e-38, 0
        return g

    tx = gefen(1e-2, second_moment=policy, block=64, codebook="fixed")
    assert_fused_is_plain(tx, [(70, 150), (70, 150)], change=change)


@pytest.mark.parametrize("view", [lambda x: x.T.contiguous().T, lambda x: torch.stack([x, x], -1)[..., 0]])
def test_strides_of_gradients_and_parameters_do_not_matter(view):
    assert_fused_is_plain(gefen(1e-2, **TILES), [(40, 128), (16, 300)], view=view)


def test_a_norm_that_is_given_leaves_the_gradients_to_be_found_by_the_step():
    tx, seen = clipped(Factored((32, 64))), []
    plain = {"0": noise((40, 128), 1)}
    fused, grads, norm = {"0": plain["0"].clone()}, {"0": noise((40, 128), 2)}, torch.tensor(9.0)
    updates, _ = tx.update(grads, tx.init(plain), plain, global_norm=norm)

    def stepped(plan, grads, *args, **options):
        seen.append(options.get("summed", False))
        run.run_step(plan, grads, *args, **options)

    with mock.patch.object(ops, "back_end", lambda device: mock.Mock(wraps=run, run_step=stepped)):
        fuse(tx)(grads, tx.init(fused), fused, global_norm=norm)
    assert seen == [False]
    assert_same_bits(apply_updates(plain, updates), fused)


# ---- launches


@pytest.mark.parametrize(
    ("policy", "block", "shape", "kernels"),
    [
        (Factored((128, 256)), 256, (300, 512), "tile"),
        (Factored((128, 256)), 64, (300, 512), "tile"),
        (Factored((128, 256)), 100, (300, 512), "sum mean update"),
        (Factored((128, None)), 256, (300, 512), "tile"),
        (Factored((128, None)), 256, (300, 2048), "sum mean update"),
        (Factored(), 256, (300, 512), "sum mean update"),
        (Block(), 256, (300, 512), "block"),
        (Dense(), 256, (300, 512), "block"),
        (Block(), 256, (300,), "dense"),
    ],
    ids=str,
)
def test_a_policy_has_its_kernels(policy, block, shape, kernels):
    plan = run.plan_step([leaf_of(shape, policy, block)])
    assert [step.kernel.__name__ for step in plan.launches] == [f"{name}_kernel" for name in kernels.split()]


@pytest.mark.parametrize(("policy", "most"), [(Factored((128, 256)), 3), (Factored(), 5), (Block(), 2), (Dense(), 2)])
def test_launches_do_not_grow_with_the_leaves(policy, most):
    kinds = [leaf_of(shape, policy) for shape in [(64, 256), (16, 256), (256,)]]
    few, many = (run.plan_step(leaves).launches for leaves in (kinds, kinds * 20))
    assert len(few) == len(many) == most
    assert sum(step.programs for step in many) == 20 * sum(step.programs for step in few)


LEAVES = [
    ((64, 256), Factored((32, 256))),
    ((70, 300), Factored((32, 256))),
    ((150, 520), Factored()),
    ((64, 300), Factored((None, 96))),
    ((3, 40, 96), Block()),
    ((64, 65), Dense()),
    ((700,), Block()),
    ((), Block()),
    ((0, 4), Block()),
]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_all_squares_are_added_as_the_reference_adds_each_leaf(dtype):
    leaves = [leaf_of(shape, policy, dtypes=(dtype, dtype)) for shape, policy in LEAVES]
    starts = [min(leaf.start, leaf.param.ndim) for leaf in leaves]
    grads = [noise(leaf.param.shape, i, dtype) for i, leaf in enumerate(leaves)]
    expected = sum(reference.sum_of_squares(g, start=s) for g, s in zip(grads, starts, strict=True))
    got = run.squares(run.plan_step(leaves), grads, starts)
    assert got.dtype == torch.float64 and got.dim() == 0
    assert abs(got - expected) <= 1e-14 * expected


def test_launches_of_a_norm_do_not_grow_with_the_leaves():
    kinds = [leaf_of(shape, policy) for shape, policy in LEAVES[:7]]
    plans = [run.plan_step(leaves) for leaves in (kinds, kinds * 5)]
    for plan, leaves in zip(plans, (kinds, kinds * 5), strict=True):
        run.squares(plan, [leaf.grad for leaf in leaves], [leaf.start for leaf in leaves])
    few, many = (plan.norm for plan in plans)
    assert len(few) == len(many) <= 4
    assert sum(step.programs for step in many) == 5 * sum(step.programs for step in few)


def test_no_leaves_and_empty_leaves_launch_nothing():
    assert run.plan_step([]).launches == run.plan_step([leaf_of((0, 4), Block())]).launches == ()
    run.gefen_step([leaf_of((0, 4), Block())], numbers(1), BOOK)


def test_a_plan_reads_scalars_and_gradients_anew():
    leaf, other = (leaf_of((64, 256), Factored((32, 256)), dtypes=(FP32, FP32)) for _ in range(2))
    scalars, plan, unaligned = numbers(1), run.plan_step([leaf]), torch.empty(64 * 256 + 1)[1:].reshape(64, 256)
    for n, grad in enumerate([leaf.grad, leaf.grad, noise((64, 256), 2), unaligned.copy_(leaf.grad), leaf.grad[:1]]):
        grad = grad.mul_(0.5).expand(64, 256)
        scalars[0, SCALARS.index("step")] = -1e-2 * n
        run.run_step(plan, [grad], scalars, BOOK)
        run.gefen_step([other._replace(grad=grad)], numbers(1, step=-1e-2 * n), BOOK)
    assert torch.equal(leaf.param, other.param) and torch.equal(leaf.mu, other.mu)


def test_a_plan_sees_that_the_codebook_changed():
    leaf, other = (leaf_of((64, 256), Block()) for _ in range(2))
    book, plan = BOOK.clone(), run.plan_step([leaf])
    for ties in ("zero", "published", "published"):
        run.run_step(plan, [leaf.grad], numbers(1), book, ties=ties, drive="m_hat")
        run.gefen_step([other], numbers(1), book, ties=ties, drive="m_hat")
        book.copy_(PUBLISHED)
    assert torch.equal(leaf.param, other.param) and torch.equal(leaf.mu, other.mu)


def test_leaves_step_alike_alone_and_together():
    leaves = [leaf_of(shape, Factored((32, 256))) for shape in [(64, 256), (40, 300), (16, 512), (64, 256)]]
    alone = [copied(leaf) for leaf in leaves]
    run.gefen_step(leaves, numbers(4), BOOK)
    for leaf in alone:
        run.gefen_step([leaf], numbers(1), BOOK)
    assert all(torch.equal(a.param, b.param) and torch.equal(a.mu, b.mu) for a, b in zip(leaves, alone, strict=True))


def test_what_kernels_cannot_take_is_left_to_others():
    leaf = leaf_of((64, 256), Block())
    assert run.supports(leaf) and not triton_step.supports(leaf)
    assert not run.supports(leaf._replace(param=leaf.param.double()))
    assert not run.supports(leaf._replace(block=100_000))
    assert not run.supports(leaf._replace(mu=leaf.mu.T.contiguous().T))
    with pytest.raises(ValueError, match="Kernels take fp32, bf16 and fp16"):
        run.plan_step([leaf._replace(grad=leaf.grad.double())])
    with pytest.raises(ValueError, match="`block` may be 65,536 at most: got 100,000"):
        run.plan_step([leaf_of((2, 120_000), Block(), 100_000)])
    with pytest.raises(ValueError, match="takes tensors on a GPU: got one on cpu"):
        triton_step.gefen_step([leaf], numbers(1), BOOK)
    with pytest.raises(ValueError, match="`counts` must be given where a leaf is rounded at random"):
        run.gefen_step([leaf._replace(random_codes=True)], numbers(1), BOOK)


# ---- memory


class Access:
    """What one launch's program reads or writes at one time: addresses and bytes of each entry."""

    def __init__(self, launch, program, writes, addresses, size):
        self.launch, self.program, self.writes, self.addresses, self.size = launch, program, writes, addresses, size


@contextlib.contextmanager
def watched(imagined=range(0)):
    """Collect every access of interpreted kernels; imagined memory holds zeros."""
    accesses, launches = [], []
    load, store, start = Builder.create_masked_load, Builder.create_masked_store, Builder.set_grid_dim

    def note(builder, pointers, mask, writes):
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        accesses.append(Access(len(launches), builder.grid_idx[0], writes, addresses, size))
        return addresses.size and int(addresses[0]) in imagined

    def loads(builder, pointers, mask, other, *rest):
        if note(builder, pointers, mask, False):
            kind = pointers.get_element_ty()
            return interpreter.TensorHandle(np.zeros(pointers.data.shape, interpreter._get_np_dtype(kind)), kind)
        return load(builder, pointers, mask, other, *rest)

    def stores(builder, pointers, value, mask, *rest):
        return None if note(builder, pointers, mask, True) else store(builder, pointers, value, mask, *rest)

    def starts(builder, *grid):
        launches.append(grid)
        start(builder, *grid)

    with mock.patch.multiple(Builder, create_masked_load=loads, create_masked_store=stores, set_grid_dim=starts):
        yield accesses


def distinct(accesses, key):
    """Bytes of the distinct entries that accesses of the same key touch."""
    groups = {}
    for access in accesses:
        groups.setdefault((key(access), access.size), []).append(access.addresses)
    return sum(size * len(np.unique(np.concatenate(parts))) for (_, size), parts in groups.items())


@pytest.mark.parametrize(
    ("policy", "clips", "floor", "asked"),
    [
        (Block(), False, 1.02, 1.02),
        (Factored((128, 256)), False, 1.06, 1.30),
        (Factored(), False, 1.30, 1.31),
        (Block(), True, 1.32, 1.32),
        (Factored((128, 256)), True, 1.32, 1.55),
        (Factored(), True, 1.32, 1.32),
    ],
    ids=repr,
)
def test_a_bf16_step_moves_little_more_than_its_eight_bytes(policy, clips, floor, asked):
    """`floor` bounds what is distinct in each program, as its second look at an entry finds it in the cache."""
    leaf = leaf_of((256, 512), policy)
    plan, scalars = run.plan_step([leaf]), numbers(1, grad_scale=0.5 if clips else 1.0)

    def step():
        if clips:
            run.squares(plan, [leaf.grad], [1])
        run.run_step(plan, [leaf.grad], scalars, BOOK, scaled=clips, summed=clips)

    step()
    with watched() as accesses:
        step()
    lookup = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (BOOK, *plan.books[False][3])]
    used = [x for x in accesses if x.addresses.size]
    shared = [x for x in used if any(int(x.addresses[0]) in memory for memory in lookup)]
    own = [x for x in used if x not in shared]
    assert distinct(shared, lambda x: x.launch) <= 20_000 * len(plan.launches)  # codebook and search, per launch
    moved = distinct(own, lambda x: (x.launch, x.program, x.writes)) / leaf.param.numel()
    assert 8 <= moved <= 8 * floor
    assert sum(x.size * x.addresses.size for x in own) / leaf.param.numel() <= 8 * asked


@pytest.mark.parametrize("policy", [Factored((128, 256)), Block()], ids=repr)
def test_entries_are_addressed_beyond_two_to_the_31(policy):
    shape = (2**17, 2**16)
    (step,) = run.plan_step([leaf_of(shape, policy, device="meta")]).launches
    bases = torch.tensor([n << 40 for n in range(1, 7)])
    table = torch.cat([bases[:5], step.table[0, 5:]])[None]
    last = torch.tensor([[0, step.programs - 1]], dtype=torch.int32)
    args = (table, last, bases[5:], numbers(1), None, BOOK, run.search_of(BOOK))
    options = dict.fromkeys(("NEGATE", "SCALED", "MHAT"), False)
    with watched(imagined=range(1 << 39, 1 << 43)) as accesses:
        run.launch(step.kernel, 1, *args, **step.constants, **options)
    entries, touched = shape[0] * shape[1], [x for x in accesses if x.addresses.size]
    read, written = ({int(x.addresses.max()) for x in touched if x.writes == w} for w in (False, True))
    assert (6 << 40) + 2 * (entries - 1) in read
    assert {(1 << 40) + 2 * (entries - 1), (2 << 40) + entries - 1, (3 << 40) + 4 * (entries // 256 - 1)} <= written


# ---- compiled


def launched(leaves, **options):
    return recorded(lambda: triton_step.gefen_step(leaves, numbers(len(leaves)), BOOK, **options))


@pytest.mark.parametrize("target", TARGETS)
def test_the_default_step_compiles_without_spills_and_reads_16_bytes_at_once(target):
    shapes = {"tile_kernel": (256, 512), "block_kernel": (16, 512), "dense_kernel": (512,)}
    launches = launched([leaf_of(shape, Factored((128, 256))) for shape in shapes.values()])
    assert [launch.kernel.__name__ for launch in launches] == list(shapes)
    for launch in launches:
        usage = compiled(launch, TARGETS[target])
        assert usage.spills + usage.parked <= SPILLS_ALLOWED
        if "cuda" in target:
            assert "ld.global.v4.b32" in usage.assembly and "fma.rn.f32" not in usage.assembly


@pytest.mark.parametrize(
    ("policy", "block", "shape", "dtypes"),
    [
        (Factored(), 256, (256, 512), (BF16, BF16)),
        (Factored((16, 96)), 100, (64, 300), (FP16, FP32)),
        (Factored((128, 256)), 256, (64, 300), (FP32, BF16)),
        (Block(), 100, (64, 300), (FP32, FP32)),
        (Dense(), 256, (64, 300), (FP16, FP16)),
    ],
    ids=str,
)
def test_every_other_kernel_compiles_with_every_option(policy, block, shape, dtypes):
    leaf = leaf_of(shape, policy, block, dtypes)._replace(random_codes=True, random_param=True)
    counts = torch.ones(1, 2, dtype=torch.int64)
    for launch in launched([leaf], drive="m_hat", negate=True, scaled=True, counts=counts):
        assert compiled(launch, TARGETS["cuda 90"]).spills <= SPILLS_ALLOWED


@pytest.mark.parametrize("target", TARGETS)
def test_rounding_at_random_compiles_without_spills(target):
    leaves = [leaf_of(shape, Factored((128, 256))) for shape in [(256, 512), (9,)]]
    drawn = [leaf._replace(seed=5, random_codes=True, random_param=True) for leaf in leaves]
    launches = launched(drawn, counts=torch.ones(len(drawn), 2, dtype=torch.int64))
    assert [launch.kernel.__name__ for launch in launches] == ["tile_kernel", "dense_kernel"]
    assert all(compiled(launch, TARGETS[target]).spills <= SPILLS_ALLOWED for launch in launches)


@pytest.mark.parametrize("target", TARGETS)
def test_a_clipped_step_compiles_without_spills(target):
    leaves = [leaf_of(shape, policy) for policy in (Factored((128, 256)), Factored()) for shape in [(256, 512), (9,)]]
    plan, grads, book = triton_step.plan_step(leaves), [leaf.grad for leaf in leaves], BOOK

    def step():
        triton_step.squares(plan, grads, [1] * len(leaves))
        triton_step.run_step(plan, grads, numbers(len(leaves)), book, scaled=True, summed=True)

    launches = recorded(step)
    kernels = [
        launch for launch in launches if launch.kernel.__name__ in ("square_kernel", "sum_kernel", "mean_kernel")
    ]
    assert len(kernels) == 5
    assert all(compiled(launch, TARGETS[target]).spills <= SPILLS_ALLOWED for launch in kernels)
