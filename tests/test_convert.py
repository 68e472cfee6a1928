"""State of other packages' optimizers goes on here: the next steps follow theirs."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from gefen_fn import Block, Dense, Factored, default_codebook
from gefen_fn.alias import sgd
from gefen_nn import CheckpointError, Gefen, GefenMuon, TransformOptimizer, convert_state
from tests.small_net import injected

DATA = Path(__file__).parent / "data"
SHAPES = {"matrix": (128, 300), "conv": (64, 32, 3, 3), "bias": (70,)}
POLICIES = {
    "default": {},
    "block": {"second_moment": Block(), "b2_warmup": None},
    "one tile": {"second_moment": Factored(), "b2_warmup": None},
    "dense": {"second_moment": Dense()},
}


def gradient(name, step):
    """Rows of different size, in each of which all entries have one mean square, and a direction of their own."""
    generator = torch.Generator().manual_seed(100 * step + len(name))
    drift = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name))).sign()
    rows = 2.0 ** -(torch.arange(SHAPES[name][0]) % 4).reshape(-1, *[1] * (len(SHAPES[name]) - 1))
    return (0.3 * torch.randn(SHAPES[name], generator=generator) + drift) * rows


def parameters():
    return {name: nn.Parameter(gradient(name, 0)) for name in SHAPES}


def train(params, optimizer, steps, draw=gradient):
    for step in steps:
        for name, p in params.items():
            p.grad = draw(name, step)
        optimizer.step()


def adamw(steps=20, make=torch.optim.AdamW, **options):
    params = parameters()
    optimizer = make(params.items(), **{"lr": 1e-3, "weight_decay": 0.1, **options})
    train(params, optimizer, range(1, steps + 1))
    return params, optimizer


def twins(params):
    return {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}


def distance(moved, reference, start):
    """How far a run is from another, in units of how far that one went."""
    pairs = [(moved[n].detach() - reference[n].detach(), reference[n].detach() - start[n].detach()) for n in moved]
    return {n: float(a.norm() / b.norm()) for n, (a, b) in zip(moved, pairs, strict=True)}


# Rows share a second moment here, of which each entry of the gradients keeps within some percent.
TOLERANCE = {"default": 0.07, "block": 0.07, "one tile": 0.07, "dense": 0.003}
RUNS = [(torch.optim.AdamW, policy) for policy in POLICIES] + [(torch.optim.Adam, "default")]


@pytest.mark.parametrize(("make", "policy"), RUNS, ids=[f"{make.__name__}-{policy}" for make, policy in RUNS])
def test_a_run_of_torchs_goes_on_within_the_tolerance_of_the_policy(make, policy):
    params, source = adamw(make=make, weight_decay=0.1 if make is torch.optim.AdamW else 0.0)
    start, own = twins(params), twins(params)
    target = Gefen(own.items(), lr=0.5, **POLICIES[policy])
    target.load_state_dict(convert_state(source.state_dict(), target))
    assert target.param_groups[0]["lr"] == 1e-3
    assert all(leaves["scale_by_gefen.count"] == 20 for leaves in target.state.values())
    train(params, source, range(21, 31))
    train(own, target, range(21, 31))
    far = distance(own, params, start)
    assert max(far["matrix"], far["conv"]) < TOLERANCE[policy] and far["bias"] < 1e-4


def recorder():
    spec = importlib.util.spec_from_file_location("record_gefen_x_state", DATA / "record_gefen_x_state.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("mode", "policy"), [("block", "block"), ("factored", "one tile"), ("factored", "default")])
def test_a_run_of_gefen_x_goes_on_within_3_percent(mode, policy):
    source, saved = recorder(), torch.load(DATA / "gefen_x_050_state.pt", weights_only=True)[mode]
    start, own = saved["parameters 10"], twins(saved["parameters 10"])
    target = Gefen(own.items(), lr=0.5, **POLICIES[policy])
    target.load_state_dict(convert_state(saved["state_dict"], target))
    assert target.param_groups[0]["lr"] == 1e-3 and target.param_groups[0]["weight_decay"] == 0.1
    train(own, target, range(source.SAVED_AT + 1, source.LAST + 1), source.gradient)
    far = distance(own, saved["parameters 15"], start)
    assert max(far["matrix"], far["conv"]) < 0.03  # the bias is dense here, and has one second moment there


def test_the_codebook_is_learned_from_the_moments_unless_it_is_known():
    _, source = adamw()
    fresh, fixed, known = Gefen(parameters().items()), Gefen(parameters().items(), codebook="fixed"), parameters()
    learned = Gefen(known.items())
    train(known, learned, range(1, 2))
    books = []
    for target in (fresh, fixed, learned):
        state = convert_state(source.state_dict(), target)["state"]
        assert bool(state[0]["scale_by_gefen.learned"]) == (target is not fixed)
        books.append(state[0]["scale_by_gefen.codebook"])
    assert not torch.equal(books[0], default_codebook()) and torch.equal(books[1], default_codebook())
    assert torch.equal(books[2], learned.state[known["matrix"]]["scale_by_gefen.codebook"])


def test_muon_takes_the_average_of_gradients_and_the_backup_both_moments():
    net = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 300), nn.Linear(300, 64))
    source = torch.optim.AdamW(net.named_parameters())
    net(torch.arange(9)).square().sum().backward()
    source.step()
    target = GefenMuon(net)
    target.load_state_dict(convert_state(source.state_dict(), target))
    p = net[1].weight
    state = {key.split(".", 1)[1]: x for key, x in target.state[p].items() if key.startswith("scale_by_muon")}
    stored = state["codebook"][state["mu.codes"].long()] * state["mu.absmax"].repeat_interleave(64, 1)
    average = source.state[p]["exp_avg"] / 0.1
    assert float((stored - average).norm() / average.norm()) < 0.01
    backup = target.state[net[0].weight]
    assert backup["scale_by_gefen.count"] == 1 and backup["scale_by_gefen.mu.absmax"].any()


def test_d17_names_count_where_both_have_them_else_positions():
    params, source = adamw()
    target = Gefen(reversed(parameters().items()))
    by_name = convert_state(source.state_dict(), target)["state"]
    assert torch.equal(by_name[0]["scale_by_gefen.mu"], source.state[params["bias"]]["exp_avg"])
    unnamed = Gefen(parameters().values())
    by_place = convert_state(source.state_dict(), unnamed)["state"]
    assert torch.equal(by_place[2]["scale_by_gefen.mu"], source.state[params["bias"]]["exp_avg"])


def _shorter(d):
    d["state"][0]["exp_avg"] = d["state"][0]["exp_avg"][:-1]


REFUSED = {
    "38 no step": (lambda d: d["state"][0].pop("step"), "'matrix' must have `step`"),
    "no second moment": (lambda d: d["state"][1].pop("exp_avg_sq"), "'conv' must have `exp_avg_sq`"),
    "another shape": (_shorter, "moment of 'matrix' must be finite"),
    "nan": (lambda d: d["state"][2]["exp_avg_sq"].fill_(float("nan")), "moment of 'bias' must be finite"),
    "half a step": (lambda d: d["state"][2]["step"].fill_(1.5), "'bias' must count"),
    "another name": (lambda d: d["param_groups"][0]["param_names"].__setitem__(0, "other"), "missing `matrix`"),
    "amsgrad": (lambda d: d["param_groups"][0].update(amsgrad=True), "amsgrad"),
    "no betas": (lambda d: d["param_groups"][0].pop("betas"), "`betas`"),
    "no groups": (lambda d: d.pop("param_groups"), "`state` and `param_groups`"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_state_dict_that_cannot_be_read_is_refused_by_name(fault):
    _, source = adamw(2)
    saved, target = copy.deepcopy(source.state_dict()), Gefen(parameters().items())
    REFUSED[fault][0](saved)
    with pytest.raises(CheckpointError, match=REFUSED[fault][1]):
        convert_state(saved, target)
    assert not any(x.any() for leaves in target.state.values() for key, x in leaves.items() if "count" in key)


def test_an_optimizer_without_moments_of_adam_is_refused_and_adamw_of_ours_takes_them_whole():
    params, source = adamw(2)
    with pytest.raises(CheckpointError, match="must keep moments"):
        convert_state(source.state_dict(), TransformOptimizer(parameters().items(), sgd(0.1, momentum=0.9)))
    target = TransformOptimizer(parameters().items(), injected())
    leaves = convert_state(source.state_dict(), target)["state"][1]
    assert torch.equal(leaves["scale_by_adam.nu"], source.state[params["conv"]]["exp_avg_sq"])
    assert leaves["scale_by_adam.count"] == 2


def test_a_state_that_knows_parameters_by_position_is_refused_where_the_order_differs():
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False))
    old = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"knows them by position.*named_parameters"):
        convert_state(old.state_dict(), GefenMuon(model))
    assert convert_state(torch.optim.AdamW(model.named_parameters()).state_dict(), GefenMuon(model))
