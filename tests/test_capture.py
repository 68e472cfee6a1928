"""A step with capturable=True reads nothing on the host: recorded and replayed, it has live numbers and counts."""

import copy
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from gefen_fn import (
    Block,
    MultiSteps,
    adamw,
    apply_if_finite,
    calibrate,
    chain,
    clip_by_global_norm,
    cosine_decay_schedule,
    flatten_state,
    fuse,
    gefen,
    inject_hyperparams,
    linear_schedule,
    partition,
    scale_by_gefen,
    scale_by_learning_rate,
)
from gefen_fn.gefen import warm_decay
from gefen_fn.muon_plan import MuonWork
from gefen_fn.scalar import bias_correction, root_correction
from gefen_fn.tree import tree_leaves, tree_map
from gefen_kernels import cpu, cpu_moment, cpu_normalize, ops
from gefen_nn import Gefen, GefenMuon, Muon, TransformOptimizer
from tests.kernel_targets import interpreted
from tests.recorded_graph import Graph, captured

triton_step = interpreted("gefen_kernels.triton_step")
SHAPES = {"embed": (70, 150), "w": (96, 260), "norm": (150,), "b": ()}
KERNELS = [(cpu, "run_step"), (cpu, "sum_of_squares"), (cpu_moment, "moment"), (cpu_normalize, "normalized")]
COSINE = cosine_decay_schedule(1e-2, 10)


def noise(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 3


def fresh():
    params = [(name, Parameter(noise(shape, i))) for i, (name, shape) in enumerate(SHAPES.items())]
    for _, p in params:
        p.grad = torch.zeros_like(p)
    return params


def gradients(params, seed):
    for i, (_, p) in enumerate(params):
        p.grad.copy_(noise(p.shape, 100 * seed + i))


def clipped(learning_rate, max_norm):
    return chain(clip_by_global_norm(max_norm), gefen(learning_rate, weight_decay=0.1))


def two_parts(learning_rate):
    return partition({"a": gefen(learning_rate), "b": adamw(learning_rate)}, lambda p: {k: "ab"[k < "n"] for k in p})


def narrow(params):
    """The same parameters in bf16."""
    for _, p in params:
        p.grad = None
        p.data = p.data.bfloat16()
        p.grad = torch.zeros_like(p)
    return params


LIVE = {
    "Gefen": lambda params, **options: Gefen(params, 1e-2, weight_decay=0.1, **options),
    "pure": lambda params, **options: Gefen(params, 1e-2, weight_decay=0.1, fused=False, **options),
    "ascent by blocks": lambda params, **options: Gefen(params, maximize=True, second_moment=Block(), **options),
    "two groups": lambda params, **options: Gefen(
        [{"params": params[:1], "lr": 0.1, "weight_decay": 0.2}, {"params": params[1:]}], **options
    ),
    "clip": lambda params, **options: TransformOptimizer(params, inject_hyperparams(clipped)(1e-2, 0.5), **options),
    "schedules": lambda params, **options: TransformOptimizer(
        params, chain(clip_by_global_norm(linear_schedule(1.0, 0.1, 4)), gefen(COSINE, b1=COSINE)), **options
    ),
    "an injected schedule": lambda params, **options: TransformOptimizer(
        params, inject_hyperparams(gefen)(COSINE, weight_decay=0.1), **options
    ),
    "in part": lambda params, **options: TransformOptimizer(params, inject_hyperparams(two_parts)(1e-2), **options),
    "at random": lambda params, **options: Gefen(narrow(params), stochastic_rounding=True, **options),
    "Muon": lambda params, **options: Muon(params[:2], 1e-2, **options),
    "NorMuon": lambda params, **options: Muon(params[:2], maximize=True, normuon="norm_kept", **options),
    "GefenMuon": lambda params, **options: GefenMuon(params, 1e-2, muon_lr=0.02, weight_decay=0.1, **options),
    "GefenMuon at random": lambda params, **options: GefenMuon(narrow(params), stochastic_rounding=True, **options),
    "Muon and AdamW": lambda params, **options: GefenMuon(params, backup="adamw", quantize=False, **options),
}


@pytest.fixture(autouse=True)
def muon_as_on_a_gpu(monkeypatch):
    """Muon's loops are for a CPU, where nothing is captured, and read their numbers."""
    monkeypatch.setattr(MuonWork, "takes", lambda self, grad: False)


def change(optimizer, t):
    """Other numbers in place, where groups have any."""
    for n, group in enumerate(optimizer.param_groups):
        for key in {"lr", "weight_decay", "max_norm"} & group.keys():
            group[key].fill_(0.01 * (t + 1) * (n + 1))


def hosted(optimizer):
    return [x for key, x in flatten_state(optimizer.state_tree()).items() if key.endswith(".learned")]


def recorded(optimizer):
    return Graph(optimizer.step, hosted(optimizer), KERNELS)


@pytest.mark.parametrize("make", LIVE.values(), ids=LIVE)
def test_a_replayed_step_is_a_step(make):
    ours, theirs = fresh(), fresh()
    first, second, graph = make(ours, capturable=True), make(theirs, capturable=True), None
    for t in range(5):
        for params, optimizer in ((ours, first), (theirs, second)):
            gradients(params, t)
            change(optimizer, t)
        if graph is None and t == 2:
            graph = recorded(first)
        elif graph is None:
            first.step()
        else:
            graph.replay()
        second.step()
        pairs = zip(ours, theirs, strict=True)
        assert [name for (name, p), (_, q) in pairs if not torch.equal(p, q)] == []
    states = (flatten_state(o.state_tree()) for o in (first, second))
    assert all(torch.equal(x, y) for x, y in zip(*(s.values() for s in states), strict=True))


# ---- nothing is read


class NoCrossing(TorchDispatchMode):
    """Fail whatever brings a tensor from one device to another."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.device for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        made = {x.device for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        if "copy" in func._schema.name and len(given | made) > 1:
            raise RuntimeError(f"a tensor changes its device: {func}")
        return out


CPU, META = torch.device("cpu"), torch.device("meta")
UNREAD = {
    "gefen": lambda: gefen(1e-2, weight_decay=0.1),
    "clip by a schedule": lambda: chain(clip_by_global_norm(COSINE), gefen(1e-2, b2_warmup=None)),
    "injected": lambda: inject_hyperparams(gefen)(1e-2, b2=COSINE),
    "numbers per leaf": lambda: chain(
        scale_by_gefen(), scale_by_learning_rate({name: 0.1 * n for n, name in enumerate(SHAPES)})
    ),
}


def on_meta(tx):
    """Gradients, state and parameters that cannot be read, but for `learned`, which is True."""
    params = {name: torch.empty(shape, device=META) for name, shape in SHAPES.items()}
    state = tree_map(lambda x: torch.ones_like(x) if x.dtype == torch.bool else x.to(META), tx.init(params))
    return {name: torch.empty_like(p) for name, p in params.items()}, state, params


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_a_fused_step_reads_no_tensor_and_moves_none(make):
    tx, taken = make(), []
    back_end = SimpleNamespace(
        supports=lambda leaf: True,
        plan_step=lambda leaves: None,
        sum_of_squares=lambda x, start: torch.empty((), dtype=torch.float64, device=x.device),
        run_step=lambda plan, grads, scalars, book, **options: taken.append(scalars),
    )
    step, trees = fuse(tx), on_meta(tx)
    with mock.patch.object(ops, "back_end", lambda device: back_end):
        step(*trees)
        with NoCrossing():
            step(*trees)
    assert [(table.device, table.shape) for table in taken] == [(META, (4, 10))] * 2


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_a_pure_update_reads_no_tensor(make):
    tx = make()
    grads, state, params = on_meta(tx)
    updates, after = tx.update(grads, state, params)
    assert {x.device for x in tree_leaves(updates)} == {META}
    assert [x.device for x in tree_leaves(after)] == [x.device for x in tree_leaves(state)]


def test_the_numbers_of_a_step_are_those_of_the_pure_path_for_any_count_and_leaf():
    names, draws = [f"{i:03}" for i in range(200)], torch.Generator().manual_seed(0)
    counts = torch.randint(0, 10**6, (200,), generator=draws) // 10 ** torch.randint(0, 7, (200,), generator=draws)
    given = {k: {name: torch.rand((), generator=draws, dtype=torch.float64) for name in names} for k in ("b2", "lr")}
    tx = inject_hyperparams(gefen)(1e-2, linear_schedule(0.8, 0.9, 10), 0.99, weight_decay=0.1, codebook="fixed")
    params = {name: torch.zeros(64, 64 if i % 2 else 1) for i, name in enumerate(names)}
    state = tx.init(params)
    state.hyperparams.update(b2=given["b2"], learning_rate=given["lr"])
    for x, count in zip(tree_leaves(state.inner_state[0].count), counts, strict=True):
        x.copy_(count)
    with mock.patch.object(cpu, "run_step") as run_step:
        fuse(tx)({name: torch.ones_like(p) for name, p in params.items()}, state, params)
    expected = []
    for i, (name, count) in enumerate(zip(names, counts, strict=True)):
        b1, b2, t = linear_schedule(0.8, 0.9, 10)(0), given["b2"][name], (count + 1).to(torch.int32)
        warm = warm_decay(b2, t, 0.9) if i % 2 else b2
        corrections = (bias_correction(b1, t), root_correction(b2, t))
        expected.append([b1, 1 - b1, warm, 1 - warm, *corrections, 1e-8, -given["lr"][name], 0.1, 1.0])
    assert torch.equal(run_step.call_args.args[2], torch.tensor(expected, dtype=torch.float64).float())


def test_triton_kernels_replay_the_pure_path():
    ours, theirs = fresh(), fresh()
    first, second = Gefen(ours, capturable=True), Gefen(theirs, fused=False)
    with mock.patch.object(ops, "back_end", lambda device: triton_step):
        for t in range(4):
            gradients(ours, t)
            if t == 2:
                graph = Graph(first.step, hosted(first), [(triton_step, "run_step")])
            else:
                graph.replay() if t > 2 else first.step()
    for t in range(4):
        gradients(theirs, t)
        second.step()
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(ours, theirs, strict=True))


# ---- refused


def stepped(steps=2, make=Gefen, **options):
    params = fresh()
    optimizer = make(params, **{"capturable": True, **options})
    for t in range(steps):
        gradients(params, t)
        optimizer.step()
    return params, optimizer


def expression(tx):
    params = fresh()
    optimizer = TransformOptimizer(params, tx, capturable=True)
    optimizer.step()
    return params, optimizer


def with_a_number():
    params, optimizer = stepped()
    optimizer.param_groups[0]["lr"] = 0.1
    return params, optimizer


def captured_before():
    params, optimizer = stepped()
    recorded(optimizer)
    return params, optimizer


def with_other_tensors():
    params, optimizer = stepped()
    params[0][1].data = params[0][1].data.clone()
    return params, optimizer


REFUSED = {
    "an unlearned codebook": (lambda: stepped(0), "right after one like it that is not"),
    "an unlearned codebook, pure": (lambda: stepped(0, fused=False), "take one step first"),
    "a first step": (lambda: stepped(0, codebook="fixed"), "right after one like it that is not"),
    "a second capture": (captured_before, "a second capture"),
    "other tensors": (with_other_tensors, "other tensors than in the last step"),
    "counters on the host": (lambda: stepped(capturable=False), "capturable=True"),
    "a number": (with_a_number, r"`lr` must be a tensor on cpu while a step is captured: got 0\.1"),
    "accumulation": (lambda: expression(MultiSteps(gefen(0.1), 2)), "`MultiSteps` decides.*under graph capture"),
    "a guard": (lambda: expression(apply_if_finite(gefen(0.1), 2)), "`apply_if_finite` decides.*under graph capture"),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_a_capture_whose_replays_would_not_be_steps_is_refused_and_changes_nothing(make, text):
    params, optimizer = make()
    before = copy.deepcopy((params, flatten_state(optimizer.state_tree())))
    with pytest.raises(RuntimeError, match=text), captured():
        optimizer.step()
    state = flatten_state(optimizer.state_tree())
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(before[0], params, strict=True))
    assert all(torch.equal(x, state[key]) for key, x in before[1].items() if "hyperparams" not in key)


def test_a_step_that_looks_for_bad_gradients_is_refused_as_capturable():
    with pytest.raises(ValueError, match="error_if_nonfinite"):
        Gefen(fresh(), capturable=True, error_if_nonfinite=True)


def test_a_calibrated_state_needs_no_first_step_on_the_pure_path():
    params = {name: noise(shape, 0) for name, shape in SHAPES.items()}
    tx = gefen(1e-2)
    state = calibrate(tx, params, tx.init(params), params)
    with captured():
        tx.update(params, state, params)


def test_what_a_graph_has_taken_along_is_its_own():
    optimizer = stepped()[1]
    plans, run_step = [], cpu.run_step
    with mock.patch.object(cpu, "run_step", lambda plan, *args, **o: plans.append(plan) or run_step(plan, *args, **o)):
        optimizer.step()
        recorded(optimizer)
        optimizer.step()
        optimizer.step()
    assert plans[0] is plans[1] and plans[1] is not plans[2] and plans[2] is plans[3]


# ---- groups, loads and copies


def test_schedulers_and_loads_fill_the_tensors_of_a_group():
    optimizer = stepped()[1]
    group = optimizer.param_groups[0]
    held = [group["lr"], *group["betas"], group["weight_decay"]]
    scheduler, saved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    scheduler.step()
    assert group["lr"] is held[0] and held[0] == 5e-4
    optimizer.load_state_dict(saved)
    plain = Gefen(fresh(), 0.3, (0.5, 0.6))
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["lr"] == 1e-3 and type(plain.param_groups[0]["betas"][0]) is float
    optimizer.load_state_dict(Gefen(fresh(), 0.3, (0.5, 0.6), weight_decay=0.2).state_dict(), strict=True)
    assert [float(x) for x in held] == [0.3, 0.5, 0.6, 0.2]
    assert all(x is y for x, y in zip(held, [group["lr"], *group["betas"], group["weight_decay"]], strict=True))


def test_a_graph_goes_on_from_a_loaded_state():
    params, optimizer = stepped()
    saved, start = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for _, p in params]
    graph, ends = recorded(optimizer), []
    for _ in range(2):
        optimizer.load_state_dict(saved)
        for (_, p), x in zip(params, start, strict=True):
            p.data.copy_(x)
        for t in range(3):
            gradients(params, t)
            graph.replay()
        ends.append([p.detach().clone() for _, p in params])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))
    assert flatten_state(optimizer.state_tree())["scale_by_gefen.count.w"] == 5


@pytest.mark.parametrize("make", [Gefen, GefenMuon])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_can_be_captured_too(copied, make):
    optimizer = copied(stepped(make=make))[1]
    optimizer.step()
    recorded(optimizer).replay()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
