"""`gefen convert`: files of other optimizers' state to ours and back, with the error that it states."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gefen_fn import Block
from gefen_nn import CheckpointError, Gefen, GefenMuon, Muon, convert_state, save
from gefen_nn.cli import main
from gefen_nn.converting import convert_files
from gefen_nn.dense_moments import adamw_state, dense_moments
from tests.test_bad_input import refuse

DATA = Path(__file__).parent / "data"
MATRICES = ("1.weight", "2.weight")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 300), nn.Linear(300, 64))


def of_gefen_x():
    """A model with the parameters that tests/data was recorded with."""
    net = nn.Module()
    for name, shape in {"matrix": (64, 96), "conv": (32, 16, 3, 3), "bias": (96,)}.items():
        net.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return net


def named(net, matrices):
    return [(name, p) for name, p in net.named_parameters() if (name in MATRICES) == matrices]


def blocks(groups):
    return Gefen(groups, second_moment=Block())


def train(net, *optimizers, steps=10, start=0):
    for step in range(start, start + steps):
        net.zero_grad()
        words = torch.randint(0, 100, (64,), generator=torch.Generator().manual_seed(step))
        (net(words) - 1.0).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.fixture(scope="module")
def adamw():
    net = network()
    optimizer = torch.optim.AdamW(net.named_parameters(), 3e-3, betas=(0.8, 0.99))
    train(net, optimizer)
    return net, optimizer


@pytest.fixture(scope="module")
def muon_and_adamw():
    net = network()
    muon = torch.optim.Muon(named(net, True), 3e-3, momentum=0.9)
    rest = torch.optim.AdamW(named(net, False), 2e-3)
    train(net, muon, rest)
    return net, muon, rest


def test_muon_takes_the_buffer_of_torchs_and_its_next_steps_follow(muon_and_adamw):
    params = [nn.Parameter(p.detach().clone()) for _, p in named(muon_and_adamw[0], True)]
    theirs, mine = (list(zip(MATRICES, ps, strict=True)) for ps in (params, [nn.Parameter(p.clone()) for p in params]))
    source, target = torch.optim.Muon(theirs, 3e-3, momentum=0.9), Muon(mine, quantize=False)
    for optimizer in (source, target):
        saved = muon_and_adamw[1].state_dict()
        optimizer.load_state_dict(convert_state(saved, target) if optimizer is target else saved)
    assert {key: target.param_groups[0][key] for key in ("lr", "momentum", "weight_decay")} == {
        "lr": 3e-3,
        "momentum": 0.9,
        "weight_decay": 0.1,
    }
    kept = dense_moments(target)  # steps differ more: torch rounds the norm to bf16
    for (name, p), (_, q) in zip(theirs, mine, strict=True):
        assert torch.equal(kept[name].mu, source.state[p]["momentum_buffer"])
        before = p.detach().clone()
        p.grad = q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
        source.step()
        target.step()
        assert float((p - q).detach().norm() / (p.detach() - before).norm()) < 0.03, (
            name
        )  # torch rounds the norm to bf16
        p.grad = q.grad = None


def test_two_optimizers_of_torch_become_one_of_ours(muon_and_adamw):
    net, muon, rest = muon_and_adamw
    target = GefenMuon(network(), adjust_lr_fn="original")
    target.load_state_dict(convert_state([muon.state_dict(), rest.state_dict()], target))
    found = dense_moments(target)
    for name, p in net.named_parameters():
        theirs = muon.state[p]["momentum_buffer"] if name in MATRICES else rest.state[p]["exp_avg"]
        assert float((found[name].mu - theirs).norm() / theirs.norm()) < 0.01
    assert {group["rule"]: group["lr"] for group in target.param_groups} == {"muon": 3e-3, "gefen": 2e-3}


BAD_SOURCES = {
    "one of two": (lambda muon, rest: muon, "missing"),
    "the same twice": (lambda muon, rest: [muon, muon, rest], "twice"),
    "no names": (lambda muon, rest: [muon, unnamed(rest)], "one of several optimizers"),
    "no second moment": (lambda muon, rest: [muon, momentum_alone(rest)], "must have `exp_avg`"),
}


TOLD = {
    "adjust_lr_fn": ({}, lambda net: GefenMuon(net), "GefenMuon(adjust_lr_fn=...)"),
    "adjust_lr_fn of the source": (
        {"adjust_lr_fn": "match_rms_adamw"},
        lambda net: GefenMuon(net, adjust_lr_fn="original"),
        "`adjust_lr_fn` must be",
    ),
    "nesterov": ({"nesterov": False}, lambda net: GefenMuon(net, adjust_lr_fn=None), "GefenMuon(nesterov=...)"),
    "ns_steps": ({"ns_steps": 4}, lambda net: GefenMuon(net, adjust_lr_fn=None), "GefenMuon(ns_steps=...)"),
    "coefficients": (
        {"ns_coefficients": (3.0, -4.0, 2.0)},
        lambda net: GefenMuon(net, adjust_lr_fn=None),
        "`ns_coefficients` must be",
    ),
    "eps of a part": ({"eps": 1e-6}, lambda net: GefenMuon(net, adjust_lr_fn=None), "`eps` of Muon's part must be"),
    "eps": ({"eps": 1e-6}, lambda net: Muon(named(net, True)), "Muon(eps=...)"),
}


@pytest.mark.parametrize(("told", "make", "words"), TOLD.values(), ids=TOLD)
def test_what_torchs_muon_was_told_otherwise_is_refused_as_in_loaded_groups(told, make, words, muon_and_adamw):
    _, muon, rest = muon_and_adamw
    source, target = muon.state_dict(), make(network())
    source = {**source, "param_groups": [{**group, **told} for group in source["param_groups"]]}
    sources = [source, rest.state_dict()] if isinstance(target, GefenMuon) else source
    refuse(CheckpointError, lambda: convert_state(sources, target), words)


def unnamed(state):
    return {
        **state,
        "param_groups": [{k: x for k, x in g.items() if k != "param_names"} for g in state["param_groups"]],
    }


def momentum_alone(state):
    return {**state, "state": {i: {"momentum_buffer": x["exp_avg"]} for i, x in state["state"].items()}}


@pytest.mark.parametrize(("change", "words"), BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_parts_of_a_model_that_do_not_fit_together_are_refused(change, words, muon_and_adamw):
    _, muon, rest = muon_and_adamw
    with pytest.raises(CheckpointError, match=words):
        convert_state(change(muon.state_dict(), rest.state_dict()), GefenMuon(network()))


def test_gefen_refuses_a_state_without_second_moments(muon_and_adamw):
    _, muon, _ = muon_and_adamw
    with pytest.raises(CheckpointError, match=r"'1.weight' must have a second moment.*`Muon`"):
        convert_state(muon.state_dict(), Gefen(named(network(), True)))


@pytest.mark.parametrize("options", [{}, {"b2_warmup": None}, {"second_moment": Block()}], ids=str)
def test_back_to_adamw_the_moments_are_those_of_the_next_step(options, adamw):
    """From a state that is exact in our form, AdamW's next step is ours."""
    net = network()
    ours = Gefen(net.named_parameters(), 3e-3, betas=(0.8, 0.99), **options)
    train(net, ours)
    other = network()
    other.load_state_dict(net.state_dict())
    theirs = torch.optim.AdamW(other.named_parameters())
    theirs.load_state_dict(adamw_state(ours))
    assert theirs.param_groups[0]["lr"] == 3e-3 and tuple(theirs.param_groups[0]["betas"]) == (0.8, 0.99)
    p, q = net[1].bias, other[1].bias  # dense, so that a step shows no other error
    for x in (p, q):
        x.grad = torch.ones_like(x)
    before = p.detach().clone()
    ours.step()
    theirs.step()
    torch.testing.assert_close(p - before, q - before, rtol=1e-4, atol=1e-8)


def test_there_and_back_the_moments_differ_by_the_error_that_is_stated(adamw, tmp_path):
    net, source = adamw
    torch.save({"model": net.state_dict(), "optimizer": source.state_dict()}, tmp_path / "adamw.pt")
    made, told = convert_files([tmp_path / "adamw.pt"])
    torch.save(made, tmp_path / "ours.pt")
    back, _ = convert_files([tmp_path / "ours.pt"])
    rows = {leaf.name: leaf for leaf in told.leaves}
    for i, (name, p) in enumerate(net.named_parameters()):
        before, after = source.state[p], back["state"][i]
        assert rows[name].first == pytest.approx(apart(after["exp_avg"], before["exp_avg"]), abs=1e-6)
        roots = [x["exp_avg_sq"].sqrt() for x in (after, before)]
        assert rows[name].second == pytest.approx(apart(*roots), abs=1e-6) and after["step"] == 10
    assert 0 < rows["1.weight"].first < 0.01 and rows["1.bias"].first == rows["1.bias"].second == 0.0
    assert told.bytes_after < 0.3 * told.bytes_before


def apart(x, y):
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("maker", [Gefen, blocks, GefenMuon], ids=["Gefen", "other arguments", "GefenMuon"])
@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_checkpoint_of_ours_becomes_state_that_adamw_loads(maker, folder, tmp_path):
    net = network()
    ours = maker(net.named_parameters())
    train(net, ours, steps=2)
    path = tmp_path / "it"
    save(path, net, ours) if folder else torch.save(ours.state_dict(), path)
    made, told = convert_files([path], make=blocks if maker is blocks else None)
    known = dict(network().named_parameters())
    groups = [{"params": [(name, known[name]) for name in group["param_names"]]} for group in made["param_groups"]]
    theirs = torch.optim.AdamW(groups)
    theirs.load_state_dict(made)
    assert told.fresh == (("0.weight", *MATRICES) if maker is GefenMuon else ())
    assert len(theirs.state) == 5 - len(told.fresh)


CASES = {
    "by names": (["adamw.pt"], "gefen", 5),
    "to the hybrid": (["adamw.pt", "--to", "gefen_muon", "--model", "M:network"], "gefen_muon", 5),
    "by position with a model": (["unnamed.pt", "--to", "gefen_muon", "--model", "M:network"], "gefen_muon", 5),
    "by position": (["unnamed.pt"], "gefen", 5),
    "Gefen-X": (["gefen_x.pt", "--model", "M:of_gefen_x"], "gefen", 3),
    "other arguments": (["adamw.pt", "--optimizer", "M:blocks"], "gefen", 5),
}


@pytest.fixture(scope="module")
def files(adamw, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converting")
    torch.save(adamw[1].state_dict(), folder / "adamw.pt")
    torch.save(unnamed(adamw[1].state_dict()), folder / "unnamed.pt")
    torch.save(
        torch.load(DATA / "gefen_x_050_state.pt", weights_only=True)["block"]["state_dict"], folder / "gefen_x.pt"
    )
    return folder


@pytest.mark.parametrize(("arguments", "target", "count"), CASES.values(), ids=CASES)
def test_the_command_writes_what_the_optimizer_loads(arguments, target, count, files, tmp_path, capsys):
    source, *rest = (x.replace("M:", "tests.test_converting:") for x in arguments)
    assert main(["convert", str(files / source), str(tmp_path / "out.pt"), *rest, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["target"] == target and len(told["leaves"]) == count and not told["fresh"]
    net = of_gefen_x() if "gefen_x" in source else network()
    make = {"gefen": blocks if "--optimizer" in rest else Gefen, "gefen_muon": GefenMuon}[target]
    optimizer = make(net if target == "gefen_muon" else net.named_parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert len(dense_moments(optimizer)) == count


REFUSED = {
    "positions to Muon": (["unnamed.pt", "--to", "gefen_muon"], "--model"),
    "flattened": (["gefen_x.pt"], "Shapes of all parameters must be known"),
    "another model": (["unnamed.pt", "--model", "M:of_gefen_x"], "3 for 5"),
    "to itself": (["adamw.pt", "--to", "adamw"], "from other packages to ours"),
    "nothing there": (["absent.pt"], "No such file"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_the_command_says_why_it_cannot(arguments, words, files, tmp_path, capsys):
    source, *rest = (x.replace("M:", "tests.test_converting:") for x in arguments)
    assert main(["convert", str(files / source), str(tmp_path / "out.pt"), *rest]) == 1
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def leaf(**values):
    return lambda state: state["state"][0].update(values)


NAN = float("nan")
DAMAGED = {
    "a moment that is text": ("adamw.pt", leaf(exp_avg_sq="x"), "must be a tensor with data: got a str"),
    "a step that is NaN": ("adamw.pt", leaf(step=NAN), "must count from 1 upwards: got nan"),
    "no parameters": ("adamw.pt", lambda state: (state["state"].clear(), state["param_groups"].clear()), "any"),
    "one beta": ("adamw.pt", lambda state: state["param_groups"][0].update(betas=(0.9,)), "must be two numbers"),
    "a codebook in two axes": ("gefen_x.pt", lambda state: state.update(gefen_codebook=torch.eye(2)), "must be sorted"),
    "codes that are floats": ("gefen_x.pt", leaf(m_codebook=torch.ones(6, 1024)), "must be uint8 rows"),
    "magnitudes that are cut": ("gefen_x.pt", leaf(m_magnitude=torch.ones(5, 1)), "with 5 magnitudes"),
}


@pytest.mark.parametrize(("source", "damage", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_state_is_refused_in_words(source, damage, words, files, tmp_path, capsys):
    state = torch.load(files / source, weights_only=True)
    damage(state)
    torch.save(state, tmp_path / "it.pt")
    model = ["--model", "tests.test_converting:of_gefen_x"] * (source == "gefen_x.pt")
    assert main(["convert", str(tmp_path / "it.pt"), str(tmp_path / "out.pt"), *model]) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "out.pt").exists()


def test_no_file_is_overwritten(files, tmp_path, capsys):
    (tmp_path / "out.pt").touch()
    assert main(["convert", str(files / "adamw.pt"), str(tmp_path / "out.pt")]) == 2
    assert "OUT must be new" in capsys.readouterr().err


def test_a_disk_that_is_full_leaves_nothing(files, tmp_path, capsys, monkeypatch):
    def half(made, path):
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed")

    monkeypatch.setattr(torch, "save", half)
    assert main(["convert", str(files / "adamw.pt"), str(tmp_path / "out.pt")]) == 1
    assert "must lie where all processes may write and read" in capsys.readouterr().err and not list(tmp_path.iterdir())
