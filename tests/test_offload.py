"""State away from its parameters: moved, stepped page by page, saved and loaded there, and failing in between."""

import copy
import weakref

import pytest
import torch
from torch import nn

from gefen_fn import (
    MultiSteps,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    compensated,
    flatten_state,
    gefen,
    gefen_muon,
    inject_hyperparams,
    linear_schedule,
    move_state,
    partition,
    trace,
)
from gefen_fn.tree import StructureError, tree_leaves
from gefen_nn import CheckpointError, Gefen, GefenMuon, TransformOptimizer, load, offload, restore, save
from tests.stand import Stand

SHAPES = {"first": (64, 72), "large": (300, 70), "third": (130, 64), "norm": (40,), "experts": (3, 40, 64)}


def expression(rule):
    return lambda named, **options: TransformOptimizer(named, rule(), **options)


OPTIMIZERS = {
    "Gefen": lambda named, **options: Gefen(named, lr=1e-2, weight_decay=0.1, **options),
    "Gefen, stochastic": lambda named, **options: Gefen(named, lr=1e-2, stochastic_rounding=True, **options),
    "compensated": expression(lambda: chain(gefen(1e-2), compensated())),
    "GefenMuon": lambda named, **options: GefenMuon(named, lr=1e-2, **options),
    "clip": expression(lambda: chain(clip_by_global_norm(0.5), gefen(linear_schedule(1e-2, 0.0, 9)))),
    "hybrid with NorMuon": expression(lambda: gefen_muon(1e-2, normuon="paper")),
    "adamw": expression(lambda: inject_hyperparams(adamw)(1e-2)),
    "clip late": expression(lambda: chain(trace(0.9), clip_by_global_norm(0.5), gefen(1e-2))),
    "parts": expression(lambda: partition({"a": gefen(1e-2), "b": adamw(1e-2)}, {k: "ab"[len(k) > 5] for k in SHAPES})),
    "MultiSteps": expression(lambda: MultiSteps(gefen(1e-2), 2)),
    "apply_if_finite": expression(lambda: apply_if_finite(gefen(1e-2), 2)),
}
WHOLE = {"clip late", "MultiSteps", "apply_if_finite"}


def noise(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(kind="Gefen", host=None, steps=0, **options):
    """An optimizer after some steps, with its parameters."""
    dtype = torch.bfloat16 if kind in ("Gefen, stochastic", "compensated") else torch.float32
    named = [(k, nn.Parameter(noise(shape, i).to(dtype))) for i, (k, shape) in enumerate(SHAPES.items())]
    optimizer = OPTIMIZERS[kind](named, **options)
    if host is not None:
        optimizer.keep_state(host)
    return dict(named), stepped(optimizer, named, range(steps))


def stepped(optimizer, named, steps):
    for t in steps:
        for i, (k, p) in enumerate(dict(named).items()):
            p.grad = None if (t, k) == (2, "large") else noise(p.shape, 100 * t + i + 7).to(p.dtype)
        optimizer.step()
    return optimizer


def bits(params, optimizer):
    return {
        **{k: p.detach().clone() for k, p in params.items()},
        **flatten_state(copy.deepcopy(optimizer.state_tree())),
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


PURE = ("Gefen", "hybrid with NorMuon", "clip", "clip late")
ROWS = [(kind, None) for kind in OPTIMIZERS] + [(kind, False) for kind in PURE]


@pytest.mark.parametrize(("kind", "fused"), ROWS, ids=[f"{k}, {'pure' if f is False else 'fused'}" for k, f in ROWS])
def test_steps_whose_state_is_fetched_page_by_page_have_the_bits_of_others(kind, fused):
    host = Stand()
    assert same(bits(*made(kind, steps=4, fused=fused)), bits(*made(kind, host, steps=4, fused=fused)))
    assert host.done["write"] and not host.held


@pytest.mark.parametrize("kind", ["Gefen", "GefenMuon", "adamw", "clip late", "MultiSteps"])
def test_three_pages_are_fetched_at_a_time_where_leaves_do_not_rest_on_each_other(kind):
    params, optimizer = made(kind, host := Stand(), steps=1)
    sizes = {
        k: sum(x.nbytes for x in optimizer.state[p].values() if x.shape not in ((), (256,))) for k, p in params.items()
    }
    host.most = 0
    stepped(optimizer, params, [1])
    pages = [[sizes[k] for k in page] for page in (("first",), ("large",), ("third", "norm"), ("experts",))]
    most = sum(sizes.values()) if kind in WHOLE else max(sum(map(sum, pages[n : n + 3])) for n in (0, 1))
    assert host.most == most


@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimizer_goes_on_exactly_after_its_state_was_away_d21(steps):
    params, optimizer = made(steps=steps)
    before = bits(params, optimizer)
    optimizer.keep_state(host := Stand())
    assert same(before, bits(params, optimizer)) and host.done["copy"]
    restore(optimizer)
    assert same(before, bits(params, optimizer))
    expected = bits(*made(steps=steps + 2))
    assert same(expected, bits(params, stepped(optimizer, params, range(steps, steps + 2))))


def test_what_was_moved_is_freed():
    _, optimizer = made(steps=2)
    old = [weakref.ref(x) for x in tree_leaves(optimizer.state_tree()) if x.ndim > 1]
    optimizer.keep_state(Stand())
    assert old and not any(x() is not None for x in old)


@pytest.mark.parametrize("after", [1, 7])
@pytest.mark.parametrize("way", ["away", "back"])
def test_54_a_copy_that_fails_changes_nothing(way, after):
    host = Stand()
    params, optimizer = made(host=host if way == "back" else None, steps=2)
    kept, before = tree_leaves(optimizer.state_tree()), bits(params, optimizer)
    host.fail("copy", after)
    with pytest.raises(OSError, match="bus"):
        optimizer.keep_state(None if way == "back" else host)
    assert all(x is y for x, y in zip(kept, tree_leaves(optimizer.state_tree()), strict=True))
    assert same(before, bits(params, optimizer)) and (host.held == 0)
    assert same(bits(*made(steps=4)), bits(params, stepped(optimizer, params, [2, 3])))


def _reshape(x):
    x.data = torch.zeros(5)


def _cast(x):
    x.data = x.data.half()


DAMAGE = {
    "a scale is not finite": (lambda mu, nu: mu.absmax.view(-1)[3].fill_(float("nan")), "finite"),
    "a scale is negative": (lambda mu, nu: mu.absmax.view(-1)[-1].fill_(-1.0), "finite"),
    "a statistic is infinite": (lambda mu, nu: nu.row.view(-1)[0].fill_(float("inf")), "finite"),
    "another shape": (lambda mu, nu: _reshape(mu.absmax), "as the last step left it"),
    "another dtype": (lambda mu, nu: _cast(nu.col), "as the last step left it"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_55_a_damaged_later_leaf_is_refused_before_the_first_is_fetched(damage, words):
    params, optimizer = made(host=(host := Stand()), steps=2)
    state = optimizer.state_tree().inner_state[0]
    damage(state.mu["third"], state.nu["third"])
    before, done = bits(params, optimizer), dict(host.done)
    with pytest.raises(StructureError, match=words):
        stepped(optimizer, params, [2])
    assert host.done == done and [k for k, x in bits(params, optimizer).items() if not x.equal(before[k])] in (
        [],
        ["scale_by_gefen.mu.third.absmax"],
    )


FAILURES = {
    "the first page": ("copy", 1, False),
    "the second": ("copy", 5, False),
    "the last": ("copy", 12, True),
    "the first that is written": ("write", 1, True),
    "a later one": ("write", 9, True),
}


@pytest.mark.parametrize(("kind", "after", "half"), FAILURES.values(), ids=FAILURES)
def test_54_a_step_that_fails_between_pages_must_be_loaded_again(kind, after, half):
    params, optimizer = made(host=(host := Stand()), steps=2)
    saved = {k: p.detach().clone() for k, p in params.items()}, copy.deepcopy(optimizer.state_dict())
    before = bits(params, optimizer)
    host.fail(kind, after)
    with pytest.raises(OSError, match="bus"):
        stepped(optimizer, params, [2])
    assert same(before, bits(params, optimizer)) != half
    if half:
        for retry in (optimizer.step, lambda: restore(optimizer), lambda: offload(optimizer)):
            with pytest.raises(RuntimeError, match="Load a checkpoint"):
                retry()
        for k, p in params.items():
            p.data.copy_(saved[0][k])
        optimizer.load_state_dict(saved[1])
    assert same(bits(*made(steps=4)), bits(params, stepped(optimizer, params, [2, 3])))


def test_a_load_stays_on_the_host_and_a_save_from_there_has_the_same_bits_d21(tmp_path):
    (params, away), (_, near) = made(host=Stand(), steps=3), made(steps=3)
    for key, x in away.state_dict()["state"][1].items():
        assert torch.equal(x, near.state_dict()["state"][1][key])
    save(tmp_path / "run", nn.ParameterDict(params), away)
    for optimizer_host in (None, Stand()):
        target, optimizer = made(host=optimizer_host, steps=1)
        load(tmp_path / "run", nn.ParameterDict(target), optimizer)
        stepped(optimizer, target, [3])
        assert same(bits(*made(steps=4)), bits(target, optimizer))
    assert optimizer_host.done["write"] > 30
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict({})
    assert same(bits(*made(steps=5)), bits(target, stepped(optimizer, target, [4])))


def test_copies_and_thawed_parameters_keep_their_state_on_the_host():
    params, optimizer = made(host=Stand(), steps=2)
    params["late"] = nn.Parameter(noise((80, 64), 9))
    optimizer.add_param_group({"params": [("late", params["late"])]})
    twin = copy.deepcopy(optimizer)
    stepped(optimizer, params, [3])
    stepped(twin, zip(params, (p for group in twin.param_groups for p in group["params"]), strict=True), [3])
    assert same(flatten_state(optimizer.state_tree()), flatten_state(twin.state_tree()))
    for each in (optimizer, twin):
        assert each.describe().kept_on == "cpu" and "state fetched from cpu" in str(each.describe())


def test_state_that_is_there_already_stays_and_is_stepped_where_it_is():
    params, optimizer = made(steps=1)
    kept = tree_leaves(optimizer.state_tree())
    offload(optimizer, "cpu")
    assert all(x is y for x, y in zip(kept, tree_leaves(optimizer.state_tree()), strict=True))
    assert same(bits(*made(steps=3)), bits(params, stepped(optimizer, params, [1, 2])))
    assert all(x is y for x, y in zip(kept, tree_leaves(optimizer.state_tree()), strict=True) if x.ndim > 1)


def test_what_cannot_be_moved_is_refused():
    with pytest.raises(ValueError, match="meta"):
        offload(made()[1], "meta")
    with pytest.raises(ValueError, match="capturable"):
        offload(made(capturable=True)[1])
    restore(made(capturable=True)[1])


def test_a_state_tree_moves_but_for_what_the_host_reads():
    params = {k: noise(shape, 0) for k, shape in SHAPES.items()}
    tx = gefen(1e-2)
    _, state = tx.update(params, tx.init(params), params)
    away = flatten_state(move_state(state, "meta"))
    for key, x in flatten_state(state).items():
        assert (away[key] is x) == (not x.ndim) and (x.ndim == 0) != away[key].is_meta
        assert away[key].is_contiguous() and (away[key].shape, away[key].dtype) == (x.shape, x.dtype)
    assert all(x is y for x, y in zip(tree_leaves(state), tree_leaves(move_state(state, "cpu")), strict=True))
