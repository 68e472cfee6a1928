"""Faults that users of such libraries reported: those that no other file's tests are named after, and a list of all."""

import ast
import copy
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gefen_fn import (
    MultiSteps,
    adam,
    adamw,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    dequantize,
    ema,
    flatten_state,
    gefen,
    gefen_muon,
    inject_hyperparams,
    linear_schedule,
    lion,
    muon,
    scale,
    scale_by_adam,
    scale_by_gefen,
    scale_by_lion,
    scale_by_schedule,
    sgd,
    state_bytes,
    trace,
    unflatten_state,
)
from gefen_fn.tree import StructureError, tree_leaves
from gefen_nn import CheckpointError, Gefen, OptimizerState, load, save, save_async

CASES = "q1 q2 q3 q4 q6 q7 q9 q10 q11 q13 q15 q16 q17 q18 q19 q21 q22 q24 q25 q27 q28 i1 i3 i6".split()
CASES += "f1 f3 f4 f6 f8 f11 f12".split()
CASES += "m1 m2 m3 m4 m6 m7 m9 m12 m13 m14 m17 m18 m19 m22 m23 m24 m28".split()
CASES += "d1 d9 d11 d13 d14 d15 d17 d18 d19 d21 d23 d24 d26".split()


@cache
def names_of_tests():
    trees = [ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.rglob("test_*.py"))]
    functions = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_in_the_name_of_a_test(case):
    assert any(case in name.split("_") for name in names_of_tests())


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four processes, of which this is the first; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(64, 64), (8, 1024), (63, 65), (5000, 1), (64, 32, 3, 3), (4, 40, 64)], ids=str)
def test_a_leaf_on_a_mesh_is_of_the_kind_that_its_global_shape_says_q4(shape, mesh):
    whole = torch.zeros(shape)
    local = whole[: -(-shape[0] // 4)]
    part = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    alone, here = scale_by_gefen().init(whole), scale_by_gefen().init(part)
    assert local.numel() < 4096 or shape == (64, 32, 3, 3)
    assert [(x.dtype, x.shape) for x in tree_leaves(alone)] == [(x.dtype, x.shape) for x in tree_leaves(here)]


STATES = {
    "gefen": gefen(0.1),
    "muon": muon(0.1, normuon="paper"),
    "adamw": adamw(0.1),
    "lion": lion(0.1),
    "averages": chain(trace(0.9), ema(0.9)),
    "accumulated": MultiSteps(gefen(0.1), 2),
}


@pytest.mark.parametrize("tx", STATES.values(), ids=STATES)
def test_state_lies_as_its_parameter_does_q28(tx, mesh):
    whole = torch.zeros(128, 4, 256)
    part = DTensor.from_local(whole[:32], mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    entries = [x for key, x in flatten_state(tx.init({"w": part})).items() if x.ndim and "codebook" not in key]
    assert entries and all(x.device_mesh == mesh and x.placements == part.placements for x in entries)
    assert all(x.to_local().shape[0] == 32 for x in entries)


WRAPPED = {
    "save": lambda optimizer, path: save(path, nn.Linear(2, 2), optimizer),
    "save_async": lambda optimizer, path: save_async(path, nn.Linear(2, 2), optimizer),
    "load": lambda optimizer, path: load(path, nn.Linear(2, 2), optimizer),
    "OptimizerState": lambda optimizer, path: OptimizerState(optimizer),
}


@pytest.mark.parametrize("call", WRAPPED.values(), ids=WRAPPED)
def test_an_optimizer_that_a_wrapper_put_in_place_of_ours_is_found_out_i3(call, tmp_path):
    swapped = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match=r"one of gefen_nn: got torch\.optim\.adamw\.AdamW.*wrapper"):
        call(swapped, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def stepped(steps=2):
    torch.manual_seed(0)
    net = nn.Linear(96, 64)
    optimizer = Gefen(net.named_parameters())
    for seed in range(steps):
        step(net, optimizer, seed)
    return net, optimizer


def step(net, optimizer, seed):
    for i, p in enumerate(net.parameters()):
        p.grad = noise(*p.shape, seed=10 * seed + i)
    optimizer.step()


def test_a_state_without_its_codebook_is_refused_q21():
    _, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    for leaves in saved["state"].values():
        del leaves["scale_by_gefen.codebook"]
    with pytest.raises(CheckpointError, match="codebook"):
        optimizer.load_state_dict(saved)
    flat = flatten_state(optimizer.state_tree())
    del flat["scale_by_gefen.codebook"]
    with pytest.raises(StructureError, match="codebook"):
        unflatten_state(flat, optimizer.state_tree())


def test_a_loaded_codebook_is_not_learned_again_q21():
    _, optimizer = stepped()
    net, resumed = stepped(0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in net.parameters():
        p.grad = noise(*p.shape, seed=99) ** 5
    resumed.step()
    book = optimizer.state_tree().inner_state[0].codebook
    assert torch.equal(resumed.state_tree().inner_state[0].codebook, book)


def test_codes_of_the_fixed_codebook_move_to_the_one_that_is_learned_after_the_load_q21():
    torch.manual_seed(0)
    net, twin = nn.Linear(96, 64), nn.Linear(96, 64)
    fixed, learned = Gefen(net.named_parameters(), codebook="fixed"), Gefen(twin.named_parameters())
    for seed in range(3):
        step(net, fixed, seed)
    learned.load_state_dict(copy.deepcopy(fixed.state_dict()))
    for optimizer, model in ((fixed, net), (learned, twin)):
        for p in model.parameters():
            p.grad = 1e-3 * noise(*p.shape, seed=99) ** 5
        optimizer.step()
    (one, _), (two, _) = (optimizer.state_tree().inner_state[:2] for optimizer in (fixed, learned))
    assert two.learned and not torch.equal(one.codebook, two.codebook)
    expected, got = (dequantize(state.mu["weight"], state.codebook) for state in (one, two))
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_defaults_and_order_are_those_of_adamw_but_for_the_decay_q24():
    ours, theirs = (inspect.signature(kind).parameters for kind in (Gefen, torch.optim.AdamW))
    assert list(ours)[:6] == list(theirs)[:6]
    differ = {name for name, p in theirs.items() if ours[name].default != p.default or ours[name].kind != p.kind}
    assert differ == {"weight_decay"} and ours["weight_decay"].default == 0.0


@pytest.mark.parametrize("factory", [adamw, lion, gefen])
def test_decay_is_decoupled_from_the_moments_q24(factory):
    params = {"w": noise(64, 72), "b": noise(5)}
    tx = factory(0.1, weight_decay=0.5)
    first = tx.init(params)
    updates, state = tx.update({k: torch.zeros_like(p) for k, p in params.items()}, first, params)
    for k, p in apply_updates(params, updates).items():
        torch.testing.assert_close(p, params[k] * (1 - 0.1 * 0.5), rtol=1e-6, atol=0)
    before, after = tree_leaves(first[0]), tree_leaves(state[0])
    moments = [(x, y) for x, y in zip(before, after, strict=True) if x.ndim]
    assert moments and all(torch.equal(x, y) for x, y in moments)


def test_state_takes_less_than_adamws_in_bf16_and_needs_parameters_alone_q25():
    net = nn.Sequential(nn.Linear(1024, 3072), nn.Linear(3072, 1024)).bfloat16()
    optimizer, theirs = Gefen(net.parameters()), torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    theirs.step()
    size = sum(p.numel() for p in net.parameters())
    assert state_bytes(optimizer.state_tree()) < 1.1 * size < 4 * size <= state_bytes(list(theirs.state.values()))
    dtypes = {key.split(".", 1)[1]: x.dtype for key, x in optimizer.state[net[0].weight].items() if x.ndim}
    assert dtypes.pop("mu.codes") == torch.uint8 and set(dtypes.values()) == {torch.float32}


def test_an_old_state_goes_on_after_stages_were_inserted_f6():
    params = {"w": noise(3, 4), "b": noise(4)}
    old = chain(trace(0.9), scale_by_adam())
    new = chain(scale(1.0), trace(0.9), scale_by_schedule(lambda count: 1.0), clip_by_global_norm(1e9), scale_by_adam())
    _, state = old.update(params, old.init(params))
    fresh = new.init(params)
    moved = unflatten_state({**flatten_state(fresh), **flatten_state(state)}, fresh)
    assert [type(part) for part in moved] == [type(part) for part in fresh]
    expected, got = old.update(params, state)[0], new.update(params, moved)[0]
    assert all(torch.equal(expected[k], got[k]) for k in params)


SCHEDULED = {
    scale_by_adam: ("b1", "b2", "eps", "eps_root"),
    scale_by_lion: ("b1", "b2"),
    trace: ("decay",),
    ema: ("decay",),
    scale_by_gefen: ("b1", "b2", "eps", "b2_warmup"),
    add_decayed_weights: ("weight_decay",),
    adam: ("learning_rate", "b1", "b2", "eps", "eps_root"),
    adamw: ("learning_rate", "b1", "b2", "eps", "weight_decay"),
    lion: ("learning_rate", "b1", "b2", "weight_decay"),
    gefen: ("learning_rate", "b1", "b2", "eps", "weight_decay", "b2_warmup"),
    sgd: ("learning_rate", "momentum"),
    gefen_muon: ("learning_rate", "muon_learning_rate", "momentum", "weight_decay", "b1", "b2", "eps", "b2_warmup"),
}
ARGUMENTS = [(factory, name) for factory, names in SCHEDULED.items() for name in names]


@pytest.mark.parametrize(("factory", "name"), ARGUMENTS, ids=[f"{f.__name__} {name}" for f, name in ARGUMENTS])
def test_a_schedule_gives_at_each_step_the_bits_of_its_number_f8(factory, name):
    schedule, params = linear_schedule(0.3, 0.9, 3), {"w": noise(64, 72), "b": noise(5)}
    fixed = {"learning_rate": 0.1} if factory in (adam, adamw, lion, gefen, gefen_muon, sgd) else {}
    direct, injected = (build(**{**fixed, name: schedule}) for build in (factory, inject_hyperparams(factory)))
    plain = factory(**{**fixed, name: schedule(0)}).init(params)
    states, outs = [direct.init(params), injected.init(params), plain], []
    for t in range(4):
        steps = [direct, injected, factory(**{**fixed, name: schedule(t)})]
        grads = {k: noise(*p.shape, seed=t) for k, p in params.items()}
        pairs = [tx.update(grads, state, params) for tx, state in zip(steps, states, strict=True)]
        outs, states = [updates for updates, _ in pairs], [state for _, state in pairs]
        assert all(torch.equal(u[k], outs[0][k]) for u in outs for k in params)
