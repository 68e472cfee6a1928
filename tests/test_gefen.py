"""`scale_by_gefen` against its promises: no creep, no frozen entries, symmetry, independence of the tree."""

import pytest
import torch

from gefen_fn.blocks import FlatBlocks, find_blocks, leaf_layout
from gefen_fn.calibrate import calibrate
from gefen_fn.combine import chain
from gefen_fn.gefen import scale_by_gefen
from gefen_fn.quantize import dequantize, gradient_histogram, quantize, requantize
from gefen_fn.scale import scale
from gefen_fn.second_moment import Block, Dense, Factored
from gefen_fn.tree import StructureError, tree_leaves
from gefen_kernels.codebook import default_codebook, learn_codebook

FORMS = [
    {},
    {"drive": "m_hat", "b2_warmup": None},
    {"rounding": "stochastic"},
    {"second_moment": Block()},
    {"second_moment": Dense()},
    {"second_moment": Factored(), "block": 100},
    {"block": FlatBlocks(128)},
    {"codebook": learn_codebook(torch.ones(4096, dtype=torch.int64))},
]


# Inductor's own imports warn of torch.jit.
INDUCTOR = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(shapes, steps=3):
    return [{k: noise(*s, seed=100 * t + i) for i, (k, s) in enumerate(shapes.items())} for t in range(steps)]


def run(tx, grads, state=None):
    state = tx.init(grads[0]) if state is None else state
    updates = []
    for g in grads:
        u, state = tx.update(g, state)
        updates.append(u)
    return updates, state


def same(a, b):
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    return all(x is y or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in pairs)


SHAPES = {"w": (128, 300), "conv": (64, 32, 3, 3), "experts": (3, 40, 64), "bias": (7,)}


@pytest.mark.parametrize("form", FORMS, ids=lambda f: str(f)[:60])
def test_trap_entries_and_rows_whose_gradient_is_zero_do_not_move_by_one_bit_q17(form):
    def silent(g):
        g = g.clone()
        g[2], g[:, 5] = 0, 0
        return g

    grads = [{k: silent(g) for k, g in step.items() if g.ndim > 1} for step in gradients(SHAPES, 20)]
    for u in run(scale_by_gefen(**form), grads)[0]:
        assert all((x[2] == 0).all() and (x[:, 5] == 0).all() for x in u.values())


@pytest.mark.parametrize("shape", [(7,), (3, 5), (63, 65), (5000,), (5000, 1), ()], ids=str)
def test_trap_a_tiny_leaf_is_adam_and_learns_no_codebook(shape):
    p = torch.nn.Parameter(noise(*shape))
    theirs = torch.optim.AdamW([p], lr=1.0, weight_decay=0.0)
    tx = scale_by_gefen()
    state = tx.init(p)
    for t in range(10):
        before, p.grad = p.detach().clone(), noise(*shape, seed=t)
        theirs.step()
        u, state = tx.update(p.grad, state)
        torch.testing.assert_close(before - u, p.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(state.codebook, default_codebook()) and not state.learned


@pytest.mark.parametrize(("rounding", "least"), [("nearest", 0.09), ("stochastic", 0.8)])
def test_trap_an_entry_a_hundredth_of_its_block_moves(rounding, least):
    g = noise(64, 256).sign()
    g[:, 1::2] /= 100
    tx = scale_by_gefen(second_moment=Dense(), rounding=rounding, codebook="fixed")
    updates = torch.stack(run(tx, [g] * 40)[0])
    adams = g.sign()
    share = (updates * adams)[:, :, 1::2].mean()
    assert share >= least
    assert share <= 1.2


@pytest.mark.parametrize("form", FORMS[:6], ids=str)
def test_the_negated_gradients_give_the_negated_updates_to_the_bit(form):
    grads = gradients(SHAPES)
    ours, state = run(scale_by_gefen(**form), grads)
    theirs, mirrored = run(scale_by_gefen(**form), [{k: -g for k, g in step.items()} for step in grads])
    assert all(torch.equal(a[k], -b[k]) for a, b in zip(ours, theirs, strict=True) for k in a)
    assert torch.equal(state.codebook, mirrored.codebook) and state.learned


@pytest.mark.parametrize("form", FORMS[:5], ids=str)
def test_updating_parts_of_the_tree_is_updating_the_tree(form):
    tx, grads = scale_by_gefen(**{**form, "codebook": "fixed"}), gradients(SHAPES)
    whole = run(tx, grads)[0]
    for key in SHAPES:
        part = run(tx, [{key: g[key]} for g in grads])[0]
        assert all(torch.equal(a[key], b[key]) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("policy", [Factored(tile=(64, 256)), Factored(tile=(64, None)), Block(), Dense()], ids=str)
def test_rows_split_at_the_edges_of_tiles_give_the_same_bits(policy):
    tx = scale_by_gefen(second_moment=policy, codebook="fixed")
    grads = [noise(210, 300, seed=t) for t in range(3)]
    whole, state = run(tx, grads)
    for a, b in ((0, 64), (64, 210), (0, 128), (128, 210)):
        part, cut = run(tx, [g[a:b] for g in grads])
        assert all(torch.equal(x[a:b], y) for x, y in zip(whole, part, strict=True))
        leaves = zip(tree_leaves((state.mu, state.nu)), tree_leaves((cut.mu, cut.nu)), strict=True)
        assert all(torch.equal(x[a:b], y) for x, y in leaves)


@pytest.mark.parametrize("form", FORMS[:5], ids=str)
def test_eight_runs_by_vmap_equal_eight_runs_f11(form):
    tx = scale_by_gefen(**{**form, "codebook": "fixed"})
    grads = [{"w": noise(8, 64, 100, seed=t), "b": noise(8, 5, seed=t + 50)} for t in range(2)]
    state = torch.vmap(tx.init)(grads[0])
    batched = []
    for g in grads:
        u, state = torch.vmap(tx.update)(g, state)
        batched.append(u)
    for i in range(8):
        single = run(tx, [{k: x[i] for k, x in g.items()} for g in grads])[0]
        for a, b in zip(batched, single, strict=True):
            assert all(torch.equal(a[k][i], b[k]) for k in b)


def compiled(**form):
    torch._dynamo.reset()
    tx = scale_by_gefen(**form)
    return tx, torch.compile(tx.update, fullgraph=True)


@INDUCTOR
def test_trap_compiled_equals_eager_on_ragged_rows():
    tx, fast = compiled(codebook="fixed")
    grads = gradients({"w": (128, 300), "conv": (64, 32, 3, 3)})
    state = other = tx.init(grads[0])
    for g in grads:
        u, state = tx.update(g, state)
        v, other = fast(g, other)
        for a, b in zip(tree_leaves((u, state)), tree_leaves((v, other)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@INDUCTOR
def test_a_compiled_step_takes_a_calibrated_state_and_refuses_an_unlearned_one():
    tx, fast = compiled()
    g = noise(64, 64)
    with pytest.raises(RuntimeError, match=r"codebook='fixed'.*calibrate.*one step first that is neither compiled"):
        fast(g, tx.init(g))
    state = calibrate(tx, g, tx.init(g))
    torch.testing.assert_close(fast(g, state)[0], tx.update(g, state)[0])


def test_vmap_takes_calibrated_states_and_refuses_unlearned_ones():
    tx, g = scale_by_gefen(), noise(2, 64, 64)
    with pytest.raises(RuntimeError, match=r'codebook="fixed".*calibrate'):
        torch.vmap(tx.update)(g, torch.vmap(tx.init)(g))
    states = [calibrate(tx, x, tx.init(x)) for x in g]
    stacked = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *states)
    u, _ = torch.vmap(tx.update)(g, stacked)
    assert all(torch.equal(u[i], tx.update(g[i], states[i])[0]) for i in range(2))


@pytest.mark.parametrize("codebook", ["learned", "fixed"])
def test_gradients_flow_through_three_steps_f11(codebook):
    tx, start = scale_by_gefen(codebook=codebook), noise(64, 100)

    def loss(p):
        state = tx.init(p)
        for _ in range(3):
            u, state = tx.update(p * p + 1, state)
            p = p - 0.1 * u
        return p.sum()

    leaf = start.clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad.isfinite().all()
    if codebook == "fixed":
        torch.testing.assert_close(torch.func.grad(loss)(start), leaf.grad)


def test_calibrate_learns_inside_a_chain_and_leaves_all_else():
    tx, g = chain(scale(0.5), scale_by_gefen()), {"w": noise(64, 100)}
    state = tx.init(g)
    learned = calibrate(tx, g, state)
    assert learned[1].learned and not state[1].learned
    assert torch.equal(learned[1].codebook, learn_codebook(gradient_histogram(g)))
    assert same(learned[1]._replace(codebook=0, learned=0)[3:], state[1][3:])
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(run(tx, [g])[0], run(tx, [g], learned)[0], strict=True))


def test_a_codebook_waits_for_a_gradient_and_is_then_frozen():
    tx, g = scale_by_gefen(), noise(64, 100)
    _, state = run(tx, [torch.zeros_like(g), torch.full_like(g, torch.nan)])
    assert not state.learned and torch.equal(state.codebook, default_codebook())
    _, first = run(tx, [g])
    assert first.learned and torch.equal(first.codebook, learn_codebook(gradient_histogram(g)))
    assert torch.equal(run(tx, [noise(64, 100, seed=1) ** 3], first)[1].codebook, first.codebook)


def test_a_leaf_without_gradient_comes_back_as_the_same_tensors():
    tx, g = scale_by_gefen(), gradients(SHAPES, 1)[0]
    state = tx.init(g)
    u, new = tx.update({**g, "w": None}, state)
    assert u["w"] is None and new.count["bias"] == 1
    for field in ("count", "mu", "nu"):
        pairs = zip(tree_leaves(getattr(state, field)["w"]), tree_leaves(getattr(new, field)["w"]), strict=True)
        assert all(a is b for a, b in pairs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2e19])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: str(f)[:60])
def test_non_finite_gradients_never_raise(form, bad):
    grads = gradients(SHAPES, 2)
    for g in grads[0].values():
        g.view(-1)[2] = bad
    _, state = run(scale_by_gefen(**form), grads)
    assert state.mu["w"].codes.dtype == torch.uint8


def test_init_on_meta_gives_meta_moments_and_a_real_codebook():
    tx, real = scale_by_gefen(), {k: torch.zeros(s) for k, s in SHAPES.items()}
    meta, state = tx.init({k: x.to("meta") for k, x in real.items()}), tx.init(real)
    assert all(x.is_meta for x in tree_leaves((meta.mu, meta.nu)))
    assert torch.equal(meta.codebook, state.codebook)
    assert [x.shape for x in tree_leaves(meta)] == [x.shape for x in tree_leaves(state)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_trap_state_and_updates_do_not_follow_the_dtype_of_the_gradient(dtype):
    grads = [{"w": noise(64, 100, dtype=dtype), "b": noise(5, dtype=dtype)}]
    updates, state = run(scale_by_gefen(), grads)
    assert {x.dtype for x in tree_leaves((updates, state.nu, state.mu["b"], state.mu["w"].absmax))} == {torch.float32}


def test_no_two_counts_share_memory_and_state_owns_its_bytes():
    state = scale_by_gefen().init({k: noise(*s) for k, s in SHAPES.items()})
    leaves = tree_leaves(state)
    assert len({x.data_ptr() for x in leaves}) == len(leaves)
    assert all(x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes for x in leaves)


@pytest.mark.parametrize(
    ("shape", "dense", "start"),
    [
        ((64, 64), False, 1),
        ((63, 65), True, 1),
        ((5000,), True, 1),
        ((5000, 1), True, 1),
        ((5000, 1, 1), True, 1),
        ((1, 5000), False, 1),
        ((3, 40, 64), False, 2),
        ((3, 40, 31, 2), False, 1),
        ((8, 31, 64), False, 1),
        ((64, 32, 3, 3), False, 1),
    ],
)
def test_trap_a_leafs_kind_follows_from_its_global_shape(shape, dense, start):
    layout = leaf_layout(shape)
    assert (layout.dense, layout.start) == (dense, start)


def test_found_blocks_divide_their_rows_and_drive_the_transform():
    grads = {**gradients(SHAPES, 1)[0], "none": None}
    found = find_blocks(grads)
    assert all(leaf_layout(SHAPES[k]).columns % found[k] == 0 for k in ("w", "conv", "experts"))
    run(scale_by_gefen(block=found), [grads])
    run(scale_by_gefen(block=FlatBlocks(find_blocks(grads, rowwise=False))), [grads])


def test_quantized_trees_come_back_and_move_between_codebooks():
    tree, book = {"a": noise(10, 300), "b": [noise(9), noise(2, 40, 64)], "n": None}, default_codebook()
    q = quantize(tree, book, block=100)
    back = dequantize(q, book, block=100, like=tree)
    assert back["n"] is None and (back["a"] - tree["a"]).abs().max() < 0.05
    new = learn_codebook(gradient_histogram({"a": noise(100, 300)}))
    moved = requantize(q, book, new, block=100)
    assert torch.equal(moved["a"].absmax, q["a"].absmax)
    assert same(requantize(q, book, book, block=100), q)
    assert (dequantize(moved, new, block=100)["b"][1] - tree["b"][1]).abs().max() < 0.1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("b1", 1.0),
        ("b2", -0.1),
        ("eps", -1e-8),
        ("b2_warmup", 0.0),
        ("block", 0),
        ("block", FlatBlocks(-1)),
        ("codebook", "learn"),
        ("codebook", torch.zeros(16)),
        ("drive", "mu"),
        ("rounding", "up"),
    ],
)
def test_arguments_are_refused_at_construction(argument, value):
    with pytest.raises(ValueError, match=argument):
        scale_by_gefen(**{argument: value})


def test_a_state_of_other_shapes_is_refused():
    tx = scale_by_gefen()
    for g in (noise(64, 101), noise(5)):
        with pytest.raises(StructureError, match="fit its gradient"):
            tx.update(g, tx.init(noise(64, 100)))


def test_the_repr_is_the_expression():
    assert repr(scale_by_gefen(0.8)).startswith("scale_by_gefen(b1=0.8, b2=0.999")
    assert "second_moment=Factored(tile=(128, 256))" in repr(scale_by_gefen())


def test_a_codebook_may_be_learned_under_grad():
    params, x = torch.randn(64, 128), torch.randn(8, 64)
    tx = scale_by_gefen()
    state = tx.init(params)

    def length(p):
        updates, _ = tx.update(torch.func.grad(lambda q: (x @ q).square().mean())(p), state, p)
        return updates.square().sum()

    assert torch.func.grad(length)(params).shape == params.shape


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_codebook_is_real_whatever_the_default_device(device):
    p = noise(64, 100)
    with torch.device(device):
        state = scale_by_gefen().init(p)
    assert torch.equal(state.codebook, default_codebook()) and not state.learned.is_meta
