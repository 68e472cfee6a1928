"""Runs saved to folders and loaded again by one process: complete or not there, exact, refused whole, and cheap."""

import copy
import io
import itertools
import os
import random
import shutil
import threading
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gefen_fn import adamw, chain, flatten_state, gefen, trace
from gefen_nn import (
    CheckpointError,
    Gefen,
    GefenMuon,
    OptimizerState,
    StateTree,
    TransformOptimizer,
    folders,
    load,
    save,
    save_async,
)
from gefen_nn.checkpoint import same_bits


def net(seed=0, width=80):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 48))


def take_steps(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def run(steps=2, **options):
    model = net()
    optimizer = Gefen(model.named_parameters(), lr=0.1, **options)
    take_steps(model, optimizer, range(steps))
    return model, optimizer


def fresh(seed=1, **options):
    model = net(seed)
    return model, Gefen(model.named_parameters(), lr=0.5, **options)


def held(model, optimizer):
    names = {p: name for name, p in model.named_parameters()}
    out = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out | {f"{names[p]} {k}": x.clone() for p, own in optimizer.state.items() for k, x in own.items()}


def same(left, right):
    return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)


def stock(function, *args, **kwargs):
    """A function of torch's, which warns that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return function(*args, **kwargs)


def test_a_loaded_run_goes_on_to_the_bit_and_returns_what_else_was_saved(tmp_path):
    model, optimizer = run()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    extra = {"step": 2, "noise": torch.arange(3), "scheduler": scheduler.state_dict(), "name": ["a", None, 0.5]}
    save(tmp_path / "runs" / "last", model, optimizer, **extra)
    other, target = fresh()
    report = load(tmp_path / "runs" / "last", other, target)
    assert report.missing == report.unexpected == () and report.extra.keys() == extra.keys()
    assert torch.equal(report.extra["noise"], torch.arange(3)) and report.extra["scheduler"] == scheduler.state_dict()
    assert target.param_groups[0]["lr"] == 0.1 and target.param_groups[0]["betas"] == (0.9, 0.999)
    take_steps(model, optimizer, range(2, 4))
    take_steps(other, target, range(2, 4))
    assert same(held(model, optimizer), held(other, target))


def test_d17_names_count_whatever_the_order_and_groups_and_a_tensor_lr_is_filled_in_place(tmp_path):
    model, optimizer = run()
    save(tmp_path / "a", model, optimizer)
    other, rate = net(1), torch.tensor(0.5, dtype=torch.float64)
    named = list(reversed(list(other.named_parameters())))
    target = Gefen([{"params": named[:1]}, {"params": named[1:], "lr": rate}])
    load(tmp_path / "a", other, target)
    assert target.param_groups[1]["lr"] is rate and rate == 0.1 and target.param_groups[0]["lr"] == 0.1
    assert same(held(model, optimizer), held(other, target))


def test_q3_a_run_that_never_stepped_and_m18_a_second_save_each_stand_for_themselves(tmp_path):
    model, optimizer = run(steps=0)
    save(tmp_path / "a", model, optimizer)
    first = held(model, optimizer)
    take_steps(model, optimizer, range(2))
    save(tmp_path / "b", model, optimizer)
    save(tmp_path / "b", model, optimizer, step=2)
    for name, expected in (("a", first), ("b", held(model, optimizer))):
        other, target = fresh()
        load(tmp_path / name, other, target)
        assert same(expected, held(other, target))
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_48_an_asynchronous_save_is_of_the_moment_of_the_call_when_all_is_overwritten_in_place(tmp_path, monkeypatch):
    model, optimizer = run()
    noise, before, overwritten = torch.ones(2), held(model, optimizer), threading.Event()
    prepare = folders.prepare
    monkeypatch.setattr(folders, "prepare", lambda path: overwritten.wait(20) and prepare(path))
    saved = save_async(tmp_path / "a", model, optimizer, noise=noise)
    for x in (noise, *model.parameters(), *(x for own in optimizer.state.values() for x in own.values())):
        x.data.fill_(0)
    overwritten.set()
    saved.result()
    other, target = fresh()
    assert torch.equal(load(tmp_path / "a", other, target).extra["noise"], torch.ones(2))
    assert same(before, held(other, target))


class Killed(BaseException):
    """Stands for kill -9: from that moment on the process does nothing more."""


class Mortal:
    """Lets so many calls of the file system happen, and none after them."""

    def __init__(self, calls, patch):
        self.left = calls
        for module, name in ((os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "fsync"), (io, "open")):
            patch.setattr(module, name, self.counted(getattr(module, name)))

    def counted(self, function):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Killed
            return function(*args, **kwargs)

        return call


def step_at(path, other, target):
    try:
        return load(path, other, target).extra["step"]
    except CheckpointError as error:
        assert "must be a checkpoint" in str(error)
        return None


PLACES = {"over an older one": "run", "at a new path": None, "after a kill while it took the place": ".run.old"}


@pytest.mark.parametrize("place", PLACES)
def test_49_a_save_killed_between_any_two_calls_leaves_the_last_complete_one(tmp_path, monkeypatch, place):
    model, optimizer = run(steps=1)
    states = {1: held(model, optimizer)}
    save(tmp_path / "older", model, optimizer, step=1)
    take_steps(model, optimizer, range(1, 2))
    states[2] = held(model, optimizer)
    other, target = fresh()
    found = []
    for calls in itertools.count():
        here = tmp_path / f"after {calls} calls"
        here.mkdir()
        if PLACES[place]:
            shutil.copytree(tmp_path / "older", here / PLACES[place])
        with monkeypatch.context() as patch:
            mortal = Mortal(calls, patch)
            try:
                save(here / "run", model, optimizer, step=2)
            except (Killed, CheckpointError):
                assert mortal.left < 0
        found.append(step_at(here / "run", other, target))
        assert found[-1] is None or same(states[found[-1]], held(other, target))
        save(here / "run", model, optimizer, step=2)
        assert os.listdir(here) == ["run"] and step_at(here / "run", other, target) == 2
        if mortal.left >= 0:
            break
    changes = [left != right for left, right in itertools.pairwise(found)]
    assert found[0] == (1 if PLACES[place] else None) and found[-1] == 2 and sum(changes) == 1 and len(found) > 10


def test_41_no_changed_byte_of_a_checkpoint_loads_as_another_state(tmp_path):
    model, optimizer = run()
    save(tmp_path / "a", model, optimizer, step=2)
    saved, (other, target) = held(model, optimizer), fresh()
    before, chance = held(other, target), random.Random(0)
    files = sorted(path for path in (tmp_path / "a").iterdir())
    assert [file.name for file in files] == [".metadata", "__0_0.distcp", "extra.pt", "manifest.json"]
    for file in files * 6:
        content = bytearray(file.read_bytes())
        place = chance.randrange(len(content))
        file.write_bytes(bytes([*content[:place], content[place] ^ (1 << chance.randrange(8)), *content[place + 1 :]]))
        with pytest.raises(CheckpointError):
            load(tmp_path / "a", other, target)
        assert same(before, held(other, target))
        file.write_bytes(content)
    (tmp_path / "a" / "extra.pt").unlink()
    with pytest.raises(CheckpointError, match=r"`extra.pt` must be as it was written"):
        load(tmp_path / "a", other, target)
    assert same(before, held(other, target)) and not same(saved, before)


def test_50_what_cannot_be_saved_is_refused_before_the_first_byte(tmp_path):
    model, optimizer = run(steps=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    unnamed = Gefen(model.parameters())
    with torch.device("meta"):
        hollow = net()
    refused = [
        (CheckpointError, "must be new", lambda: save(tmp_path / "mine", model, optimizer)),
        (ValueError, "by name", lambda: save(tmp_path / "a", model, unnamed)),
        (CheckpointError, "`step` must hold", lambda: save(tmp_path / "a", model, optimizer, step={"x": [object()]})),
        (CheckpointError, "hold data", lambda: save(tmp_path / "a", hollow, Gefen(hollow.named_parameters()))),
        (CheckpointError, "must be a checkpoint", lambda: load(tmp_path / "mine", model, optimizer)),
    ]
    for kind, text, attempt in refused:
        with pytest.raises(kind, match=text):
            attempt()
    optimizer.param_groups[0]["tag"] = {1}
    with pytest.raises(CheckpointError, match="`tag`, a set"):
        save(tmp_path / "a", model, optimizer)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes"]


@pytest.mark.parametrize("extra", [np.float64(1.0), defaultdict(int), {1, 2}], ids=["numpy", "defaultdict", "set"])
def test_50_what_a_load_could_not_read_back_is_refused_before_the_first_byte(tmp_path, extra):
    with pytest.raises(CheckpointError, match="`extra` must hold"):
        save(tmp_path / "run", *run(), extra=extra)
    assert not (tmp_path / "run").exists()


PLACES_THAT_ARE_NONE = {
    "below a file": lambda here: here / "file" / "run",
    "a null byte": lambda here: f"{here}/a\0b",
    "a name too long for the file beside it": lambda here: here / ("x" * 252),
    "a link to nothing": lambda here: here / "link",
}


@pytest.mark.parametrize("place", PLACES_THAT_ARE_NONE)
def test_50_a_place_where_no_folder_can_be_is_refused_before_the_first_byte(tmp_path, monkeypatch, place):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    monkeypatch.setattr(folders, "prepare", lambda _: pytest.fail("it was to be refused before"))
    with pytest.raises(CheckpointError, match="`path` must lie where all processes may write"):
        save(PLACES_THAT_ARE_NONE[place](tmp_path), *run(steps=0))


@pytest.mark.parametrize("call", ["prepare", "publish", "write", "sums"])
def test_what_the_disk_refuses_is_told_as_the_save_s_own_error(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, call, full)
    with pytest.raises(CheckpointError, match=r"No space left.*Choose another folder"):
        save(tmp_path / "a", *run(steps=0))


def test_arguments_of_other_types_are_refused_by_name(tmp_path):
    model, optimizer = run(steps=0)
    endless = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="`step` must end somewhere"):
        save(tmp_path / "a", model, optimizer, step=endless)
    for call in (save, save_async, load):
        for given, text in (((3, model), "`path` must be"), ((tmp_path / "a", {}), "`model` must be a torch.nn.Mod")):
            with pytest.raises(TypeError, match=text):
                call(*given, optimizer)
    assert not list(tmp_path.iterdir())


class Wider(nn.Sequential):
    """A layer more than `net`."""

    def __init__(self):
        super().__init__(*net(), nn.Linear(48, 5))


OTHERS = {
    "fewer layers": (lambda: net()[:1], "unexpected `2.bias`, `2.weight`"),
    "more layers": (Wider, "missing `3.bias`, `3.weight`"),
    "another shape": (lambda: net(width=90), "must be"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_model_is_refused_by_name_and_otherwise_keeps_what_the_file_lacks(tmp_path, kind):
    make, text = OTHERS[kind]
    model, optimizer = run()
    save(tmp_path / "a", model, optimizer)
    other = make()
    target = Gefen(other.named_parameters())
    before = held(other, target)
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path / "a", other, target)
    assert same(before, held(other, target))
    if kind != "another shape":
        report = load(tmp_path / "a", other, target, strict=False)
        got, saved = held(other, target), held(model, optimizer)
        assert all(same_bits(got[key], before[key]) for key in got if key.startswith("3.") and ".mu" in key)
        assert all(same_bits(got[key], saved[key]) for key in got if not key.startswith("3."))
        assert ("model: 3.bias" in report.missing) == (kind == "more layers")
        assert ("model: 2.bias" in report.unexpected) == (kind == "fewer layers")


def test_another_expression_is_refused_by_the_leaves_it_lacks(tmp_path):
    model, optimizer = run()
    save(tmp_path / "a", model, optimizer)
    other = net()
    target = TransformOptimizer(other.named_parameters(), chain(trace(0.9), gefen(1e-3)))
    with pytest.raises(CheckpointError, match=r"^Saved from .*scale_by_gefen, yours is trace.*missing `trace.trace"):
        load(tmp_path / "a", other, target, strict=True)


def test_d11_state_of_a_parameter_frozen_since_is_loaded_and_that_of_one_frozen_before_may_be_missing(tmp_path):
    model, optimizer = run()
    save(tmp_path / "a", model, optimizer)
    other = net(1)
    other[0].requires_grad_(False)
    target = Gefen(other.named_parameters())
    save(tmp_path / "frozen", other, target)
    assert len(target.state) == 2
    load(tmp_path / "frozen", other, target)
    load(tmp_path / "a", other, target)
    assert same(held(model, optimizer), held(other, target))


def trees():
    model, _ = run()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    tx = gefen(1e-3)
    grads = {name: torch.sin(p * 100) for name, p in params.items()}
    return params, tx, tx.update(grads, tx.init(params), params)[1]


def test_a_functional_state_is_saved_as_it_is_and_loaded_into_a_tree_of_its_own(tmp_path):
    params, tx, state = trees()
    stock(dcp.save, {"x": StateTree(state, params)}, checkpoint_id=tmp_path / "a")
    start = tx.init(params)
    tree = StateTree(start, params)
    stock(dcp.load, {"x": tree}, checkpoint_id=tmp_path / "a")
    assert same(flatten_state(state), flatten_state(tree.state))
    assert same(flatten_state(start), flatten_state(tx.init(params)))


def _damaged(state):
    flat = flatten_state(state)
    flat["scale_by_gefen.mu.0%2Eweight.absmax"][3, 0] = -1.0
    return state


def _renamed(params):
    return {f"other.{name}": p for name, p in params.items()}


def test_41_what_stock_loads_into_state_objects_is_checked_before_anything_is_taken(tmp_path):
    params, tx, state = trees()
    stock(dcp.save, {"x": StateTree(_damaged(state), params)}, checkpoint_id=tmp_path / "a")
    start = tx.init(params)
    tree = StateTree(start, params)
    with pytest.raises(CheckpointError, match="absmax` must be >= 0"):
        stock(dcp.load, {"x": tree}, checkpoint_id=tmp_path / "a")
    assert tree.state is start and same(flatten_state(start), flatten_state(tx.init(params)))
    model, optimizer = fresh()
    stock(dcp.save, {"x": OptimizerState(optimizer)}, checkpoint_id=tmp_path / "b")
    other = TransformOptimizer(model.named_parameters(), adamw(1e-3))
    refused = [
        (CheckpointError, "missing `other.0.bias`", StateTree(chain().init({}), _renamed(params)), tmp_path / "a"),
        (BaseException, "Missing key in checkpoint", OptimizerState(other), tmp_path / "b"),
    ]
    before = held(model, optimizer)
    for kind, text, held_object, path in refused:
        with pytest.raises(kind, match=text):
            stock(dcp.load, {"x": held_object}, checkpoint_id=path)
    assert same(before, held(model, optimizer))
    with pytest.raises(CheckpointError, match="of a `StateTree`"):
        OptimizerState(optimizer).load_state_dict(tree.state_dict())
    with pytest.raises(CheckpointError, match="`index`"):
        tree.load_state_dict({"state": {}})
    with pytest.raises(CheckpointError, match="`format_version` must be 1: got 9"):
        tree.load_state_dict({"index": '{"format_version": 9}', "state": {}})


def test_37_38_39_a_hybrid_loads_both_parts_or_neither(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 80), nn.Linear(80, 48))
    optimizers = [GefenMuon(model, backup=backup) for backup in ("gefen", "adamw")]
    for optimizer in optimizers:
        model.zero_grad()
        model(torch.arange(9)).square().sum().backward()
        optimizer.step()
        saved, target = (
            copy.deepcopy(optimizer.state_dict()),
            GefenMuon(model, backup=optimizer.param_groups[1]["rule"]),
        )
        before = held(model, target)
        kinds = ("scale_by_gefen.count", "scale_by_adam.count")
        backup, count = next((own, key) for own in saved["state"].values() for key in own if key in kinds)
        lost = backup.pop(count)
        with pytest.raises(CheckpointError, match=count):
            target.load_state_dict(saved)
        backup[count] = lost - 5
        with pytest.raises(CheckpointError, match="from 0 upwards"):
            target.load_state_dict(saved)
        assert same(before, held(model, target))

        def fail(_):
            raise RuntimeError("a hook")

        target.register_load_state_dict_post_hook(fail)
        with pytest.raises(RuntimeError, match="a hook"):
            target.load_state_dict(optimizer.state_dict())
        assert same(held(model, optimizer), held(model, target))
