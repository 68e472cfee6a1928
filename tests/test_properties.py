"""Laws that hold for every tensor, tree and transform, on examples that hypothesis draws."""

import io
import itertools
import math
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_fn.adam import scale_by_adam, scale_by_lion
from gefen_fn.base import apply_updates, identity, incremental_update
from gefen_fn.blocks import FlatBlocks
from gefen_fn.clip import adaptive_grad_clip, clip, clip_by_block_rms, clip_by_global_norm
from gefen_fn.combine import chain, masked, partition
from gefen_fn.gefen import scale_by_gefen
from gefen_fn.inject import inject_hyperparams
from gefen_fn.scale import add_decayed_weights, ema, scale, scale_by_learning_rate, scale_by_schedule, trace, zero_nans
from gefen_fn.schedule import linear_schedule
from gefen_fn.second_moment import Block, Dense, Factored
from gefen_fn.state_io import flatten_state, unflatten_state
from gefen_fn.tree import tree_leaves, tree_map, tree_structure, tree_unflatten
from gefen_kernels.codebook import default_codebook, learn_codebook
from gefen_kernels.reference import block_absmax, block_mean_square, decode, encode, histogram, nearest, tree_sum

Pair = namedtuple("Pair", "x y")
BOOKS = {
    "default": default_codebook(),
    "published": learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False),
    "four bits": torch.linspace(-1, 1, 16),
}
BOOK = BOOKS["default"]
# Normal entries become entries of many sizes, many zeros, ties, or numbers near the smallest normal one.
KINDS = {
    "normal": lambda x: x,
    "wide": lambda x: x**9,
    "sparse": lambda x: torch.where(x > 1, x, 0.0),
    "signs": lambda x: x.sign(),
    "tiny": lambda x: x * 1e-37,
}
TREES = {
    "bare": lambda t: t(40, 130),
    "pair": lambda t: Pair(t(7, 9), (t(5), None)),
    "dict": lambda t: {"w": t(33, 300), "b": t(5), "v.x": [t(3, 40, 64), {"conv": t(16, 32, 3, 3)}], "s": t()},
}
POLICIES = {
    "gefen": {},
    "learned": {"codebook": "learned"},
    "published": {"drive": "m_hat", "b2_warmup": None},
    "stochastic": {"rounding": "stochastic"},
    "block": {"second_moment": Block()},
    "dense": {"second_moment": Dense()},
    "one tile": {"second_moment": Factored(), "block": 100},
    "small tiles": {"second_moment": Factored(tile=(16, 32)), "block": 32},
    "flat": {"block": FlatBlocks(128)},
}


def gefen(policy):
    return scale_by_gefen(**{"codebook": "fixed"} | POLICIES[policy])


ENTRIES = {  # these treat every entry by itself
    "identity": identity,
    "scale": lambda: scale(0.3),
    "learning rate": lambda: scale_by_learning_rate(0.1),
    "schedule": lambda: scale_by_schedule(linear_schedule(1.0, 0.0, 7)),
    "clip": lambda: clip(0.5),
    "decay": lambda: add_decayed_weights(0.1),
    "adam": scale_by_adam,
    "nadam": lambda: scale_by_adam(0.8, 0.95, eps_root=1e-6, nesterov=True),
    "half adam": lambda: scale_by_adam(mu_dtype=torch.bfloat16),
    "lion": scale_by_lion,
    "trace": lambda: trace(0.9),
    "nesterov": lambda: trace(0.9, nesterov=True, accumulator_dtype=torch.bfloat16),
    "ema": lambda: ema(0.9),
    "injected": lambda: inject_hyperparams(trace)(0.7),
}
LEAVES = {  # these treat every leaf by itself
    **ENTRIES,
    "zero nans": zero_nans,
    "rms": lambda: clip_by_block_rms(0.5),
    "adaptive": lambda: adaptive_grad_clip(0.1),
    **{policy: lambda policy=policy: gefen(policy) for policy in POLICIES if policy != "learned"},
}
ALL = {**LEAVES, "norm": lambda: clip_by_global_norm(1.0), "nothing": chain}

names, kinds, transforms = (st.sampled_from(list(table)) for table in (TREES, KINDS, ALL))
seeds, dtypes = st.integers(0, 2**16), st.sampled_from([torch.float32, torch.bfloat16])


def drawn(examples):
    return settings(derandomize=True, deadline=None, max_examples=examples)


def tensor(shape, seed, kind="normal", dtype=torch.float32):
    return KINDS[kind](torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def tree(name, seed, kind="normal", dtype=torch.float32):
    numbers = itertools.count(seed)
    return TREES[name](lambda *shape: tensor(shape, next(numbers), kind, dtype))


def gradients(name, seed, kind, dtype):
    return [tree(name, seed + 1000 * step, kind, dtype) for step in range(1, 4)]


def run(tx, params, grads):
    """Every update, the last parameters and the last state."""
    state, updates = tx.init(params), []
    for g in grads:
        u, state = tx.update(g, state, params)
        params = apply_updates(params, u)
        updates.append(u)
    return updates, params, state


def same(a, b):
    """Whether the leaves in order agree in dtype, shape and bits."""

    def described(x):
        return x if x is None else (x.dtype, x.shape)

    a, b = tree_leaves(a), tree_leaves(b)
    return list(map(described, a)) == list(map(described, b)) and all(
        x is y or torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True)
    )


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def same_states(a, b):
    a, b = flatten_state(a), flatten_state(b)
    return list(a) == list(b) and same(list(a.values()), list(b.values()))


def test_fresh_memory_is_poisoned():
    assert torch.empty(9).isnan().all() and torch.ones(9).new_empty(2, 3).isnan().all()
    assert (torch.empty(9, dtype=torch.uint8) == 255).all()


@pytest.mark.parametrize("policy", POLICIES)
@drawn(15)
@given(names, seeds, kinds, dtypes)
def test_negated_gradients_give_negated_updates_and_mirrored_states(policy, name, seed, kind, dtype):
    grads, tx = gradients(name, seed, kind, dtype), gefen(policy)
    negated = [tree_map(torch.neg, g) for g in grads]
    (ours, _, state), (theirs, _, mirrored) = run(tx, grads[0], grads), run(tx, grads[0], negated)
    for x, y in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert x is y or torch.equal(x, -y)
    for x, y in zip(flatten_state(state).values(), flatten_state(mirrored).values(), strict=True):
        levels = [state.codebook[z.int()] if z.dtype == torch.uint8 else z for z in (x, y)]
        assert torch.equal(*(z if z.dtype == torch.bool else z.abs() for z in levels))


@pytest.mark.parametrize("policy", POLICIES)
@drawn(15)
@given(names, seeds, kinds, dtypes, st.integers(1, 7))
def test_rows_and_columns_without_gradient_stay_put(policy, name, seed, kind, dtype, every):
    def silent(x):
        mask = torch.zeros(x.shape, dtype=torch.bool)
        if x.ndim:
            mask[::every], mask[..., ::every] = True, True
        return mask

    grads = [tree_map(lambda x: x.masked_fill(silent(x), 0), g) for g in gradients(name, seed, kind, dtype)]
    start = tree(name, seed, "normal", dtype)
    updates, params, _ = run(chain(gefen(policy), scale_by_learning_rate(0.1)), start, grads)
    assert all(x is None or (x[silent(x)] == 0).all() for x in tree_leaves(updates))
    for x, y in zip(tree_leaves(start), tree_leaves(params), strict=True):
        assert x is y or torch.equal(x[silent(x)], y[silent(y)])


layouts = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 300), st.integers(0, 3))


@pytest.mark.parametrize("book", BOOKS)
@drawn(60)
@given(layouts, seeds, kinds, dtypes, st.sampled_from(["zero", "published"]))
def test_decoded_codes_lie_within_half_a_gap_and_encode_to_themselves(book, layout, seed, kind, dtype, ties):
    (shape, block, start), levels = layout, BOOKS[book]
    x, where = tensor(shape, seed, kind, dtype), {"block": block, "start": min(start, len(shape))}
    codes, absmax = encode(x, levels, ties=ties, **where)
    values = decode(codes, absmax, levels, **where)
    largest = decode(torch.full_like(codes, len(levels) - 1), absmax, levels, **where).double()
    upper = torch.bucketize(x.double() / largest, levels.double()).clamp(1, len(levels) - 1)
    half = largest * (levels[upper] - levels[upper - 1]).double() / 2
    tiny = torch.finfo(torch.float32).tiny
    assert ((values.double() - x.double()).abs() <= half + 4 * 2**-24 * largest + tiny * (largest == 0)).all()
    assert same(encode(values, levels, ties=ties, **where), (codes, absmax))


def nest(draw, stages):
    """The stages in a chain of chains, bracketed at random."""
    if len(stages) == 1:
        return stages[0]
    cut = draw(st.integers(1, len(stages) - 1))
    return chain(nest(draw, stages[:cut]), nest(draw, stages[cut:]))


@drawn(80)
@given(st.lists(transforms, min_size=2, max_size=5), names, seeds, kinds, dtypes, st.data())
def test_chain_is_associative(keys, name, seed, kind, dtype, data):
    stages, params = [ALL[key]() for key in keys], tree(name, seed, "normal", dtype)
    grads = gradients(name, seed, kind, dtype)
    flat, nested = run(chain(*stages), params, grads), run(nest(data.draw, stages), params, grads)
    assert same(flat, nested)
    assert same_states(flat[2], nested[2])


@pytest.mark.parametrize("key", ALL)
@drawn(10)
@given(st.sampled_from(["pair", "dict"]), seeds, kinds, dtypes, st.data())
def test_masked_is_partition_with_identity(key, name, seed, kind, dtype, data):
    params, grads = tree(name, seed, "normal", dtype), gradients(name, seed, kind, dtype)
    mask = tree_unflatten(tree_structure(params), [data.draw(st.booleans()) for _ in tree_leaves(params)])
    one = run(masked(ALL[key](), mask), params, grads)
    two = run(partition({True: ALL[key](), False: identity()}, mask), params, grads)
    assert same(one[:2], two[:2])
    assert same_states(one[2], two[2])


@pytest.mark.parametrize("key", LEAVES)
@drawn(10)
@given(st.sets(st.sampled_from(["w", "b", "v.x", "s"])), seeds, kinds, dtypes)
def test_updating_the_parts_of_a_tree_is_updating_the_tree(key, part, seed, kind, dtype):
    params, grads = tree("dict", seed, "normal", dtype), gradients("dict", seed, kind, dtype)
    updates, last, state = run(LEAVES[key](), params, grads)
    whole, found = flatten_state(state), set()
    for kept in (part, params.keys() - part):

        def taken(tree, kept=kept):
            return {k: v for k, v in tree.items() if k in kept}

        u, p, s = run(LEAVES[key](), taken(params), list(map(taken, grads)))
        assert same((u, p), (list(map(taken, updates)), taken(last)))
        assert all(same(x, whole[k]) for k, x in flatten_state(s).items())
        found |= flatten_state(s).keys()
    assert found == whole.keys()


def check_cuts(tx, params, grads, cuts):
    """Rows updated apart have the bits of rows updated together; one part is a view, one owns its memory."""
    whole = run(tx, params, grads)
    for cut in cuts:
        top = run(tx, params[:cut], [g[:cut] for g in grads])
        bottom = run(tx, params[cut:].clone(), [g[cut:].clone() for g in grads])
        for x, a, b in zip(*map(tree_leaves, (whole, top, bottom)), strict=True):
            once_per_leaf = x.shape == a.shape
            assert same([x, x], [a, b]) if once_per_leaf else same(x, torch.cat([a, b]))


def leaf_steps(shape, seed, kind, dtype):
    return tensor(shape, seed, "normal", dtype), [tensor(shape, seed + t, kind, dtype) for t in (1, 2, 3)]


FUNCTIONS = {  # of rows, a block length
    "block_absmax": lambda x, block: block_absmax(x, block=block),
    "block_mean_square": lambda x, block: block_mean_square(x, block=block),
    "encode": lambda x, block: encode(x, BOOK, block=block),
    "decode": lambda x, block: decode(*encode(x, BOOK, block=block), BOOK, block=block),
    "nearest": lambda x, block: nearest(x.float(), BOOK),
    "tree_sum": lambda x, block: tree_sum(x.float(), -1),
    "tree_sum down": lambda x, block: tree_sum(x.float().T.contiguous(), 0),
    "apply_updates": lambda x, block: apply_updates(x, x.float() * 0.3),
    "incremental_update": lambda x, block: incremental_update(x, x.flip(-1), 0.3),
}
sizes = st.tuples(st.integers(2, 6), st.integers(1, 70) | st.integers(250, 600))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@drawn(30)
@given(sizes, st.integers(1, 300), seeds, kinds, dtypes)
def test_a_function_has_the_same_bits_on_every_cut_of_the_rows(function, shape, block, seed, kind, dtype):
    x = tensor(shape, seed, kind, dtype)
    for cut in range(1, shape[0]):
        whole, top, bottom = (function(part, block) for part in (x, x[:cut], x[cut:].clone()))
        assert same(tree_map(lambda _, a, b: torch.cat([a, b]), whole, top, bottom), whole)


@drawn(30)
@given(sizes, st.integers(1, 300), seeds, kinds, dtypes)
def test_the_histograms_of_any_cut_of_the_rows_add_up(shape, block, seed, kind, dtype):
    x = tensor(shape, seed, kind, dtype)
    whole = histogram(x, block=block)
    for cut in range(1, shape[0]):
        assert torch.equal(histogram(x[:cut], block=block) + histogram(x[cut:].clone(), block=block), whole)


@drawn(40)
@given(st.integers(1, 200), st.integers(0, 6), seeds, kinds)
def test_the_tree_of_the_sums_of_aligned_runs_is_the_tree_of_all(rows, power, seed, kind):
    x = tensor((rows, 3), seed, kind)
    runs = torch.stack([tree_sum(part, 0) for part in x.split(2**power)])
    assert torch.equal(tree_sum(runs, 0), tree_sum(x, 0))


@pytest.mark.parametrize("key", [*ENTRIES, "adaptive"])
@drawn(20)
@given(sizes, seeds, kinds, dtypes)
def test_an_update_has_the_same_bits_on_every_cut_of_the_rows(key, shape, seed, kind, dtype):
    check_cuts(LEAVES[key](), *leaf_steps(shape, seed, kind, dtype), range(1, shape[0]))


# Every row of 4,096 entries or more, and every such expert, is a quantized leaf for itself.
@pytest.mark.parametrize("policy", ["gefen", "published", "block", "dense"])
@drawn(15)
@given(st.tuples(st.integers(2, 5), st.integers(4096, 4400)), seeds, kinds, dtypes)
def test_gefens_update_has_the_same_bits_on_every_cut_of_the_rows(policy, shape, seed, kind, dtype):
    check_cuts(gefen(policy), *leaf_steps(shape, seed, kind, dtype), range(1, shape[0]))


@pytest.mark.parametrize("policy", ["gefen", "published", "block", "dense", "one tile", "small tiles"])
@drawn(15)
@given(st.tuples(st.integers(2, 4), st.integers(40, 60), st.integers(110, 150)), seeds, kinds, dtypes)
def test_gefens_update_has_the_same_bits_on_every_cut_of_the_experts(policy, shape, seed, kind, dtype):
    check_cuts(gefen(policy), *leaf_steps(shape, seed, kind, dtype), range(1, shape[0]))


@pytest.mark.parametrize("tile", [(1, 32), (16, 100), (32, None), (64, 256)], ids=str)
@drawn(10)
@given(st.integers(0, 40), st.integers(130, 300), seeds, kinds, dtypes, st.sampled_from([0.9, None]))
def test_gefens_update_has_the_same_bits_on_every_cut_at_the_edges_of_tiles(tile, more, columns, seed, kind, dtype, q):
    tx = scale_by_gefen(second_moment=Factored(tile=tile), b2_warmup=q, codebook="fixed", block=100)
    high = max(32, tile[0])
    rows = 2 * high + more
    cuts = range(high, rows - high + 1, max(tile[0], 4))
    check_cuts(tx, *leaf_steps((rows, columns), seed, kind, dtype), cuts)


def raw(dtype, shape, seed):
    """Any bits that a tensor can hold."""
    count = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return noise.view(dtype).reshape(shape)


def trees(leaves):
    keys = st.sampled_from(["a", "a.a", "a%2Ea", ""])
    return st.recursive(
        leaves | st.none(),
        lambda inner: (
            st.dictionaries(keys, inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


def saved_and_loaded(state, like):
    file = io.BytesIO()
    torch.save(flatten_state(state), file)
    file.seek(0)
    return unflatten_state(torch.load(file, weights_only=True), like)


shapes = st.lists(st.integers(0, 4), max_size=3)
anything = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]


@drawn(150)
@given(trees(st.builds(raw, st.sampled_from(anything), shapes, seeds)))
def test_saving_and_loading_any_tree_keeps_every_bit(state):
    loaded = saved_and_loaded(state, tree_map(lambda x: x.to("meta"), state))
    assert tree_structure(loaded) == tree_structure(state)
    assert same(loaded, state)


# A whole tree that is None cannot be told from `params=None`.
parameters = trees(st.builds(tensor, shapes, seeds, kinds, dtypes)).filter(lambda params: params is not None)


@drawn(150)
@given(st.lists(transforms, min_size=1, max_size=3), parameters)
def test_saving_and_loading_the_state_over_any_tree_keeps_every_bit(keys, params):
    tx = chain(*(ALL[key]() for key in keys))
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    loaded = saved_and_loaded(state, tx.init(params))
    assert tree_structure(loaded) == tree_structure(state)
    assert same(loaded, state)
