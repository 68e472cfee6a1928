"""State is loaded where it means what it meant, though shapes may agree by chance, and refused by name where not."""

import json

import pytest
import torch
from torch import nn

from gefen_fn import Block, Factored, FlatBlocks, default_codebook, scale_by_gefen, scale_by_muon
from gefen_nn import CheckpointError, Gefen, GefenMuon, TransformOptimizer, load, save
from gefen_nn.checkpoint import same_bits
from gefen_nn.meaning import kept_as
from gefen_nn.saved_index import Index, read_index

LEANING = default_codebook().index_fill(0, torch.tensor(200), (default_codebook()[199] + default_codebook()[200]) / 2)


def run(make, options):
    """A matrix [80, 64] and a bias, and what `make` keeps for them after two steps; without one of a matrix alone."""
    torch.manual_seed(0)
    model = nn.Linear(64, 80, bias="bias" in str(options))
    optimizer = TransformOptimizer(model.named_parameters(), make(**options))
    for _ in range(2):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def by_state_dict(folder, saved, target):
    target[1].load_state_dict(saved[1].state_dict())


def by_folder(folder, saved, target):
    save(folder / "run", *saved)
    load(folder / "run", *target)


def held(optimizer):
    return [x.clone() for own in optimizer.state.values() for x in own.values()]


def same(left, right):
    return all(map(same_bits, left, right))


WAYS = pytest.mark.parametrize("way", [by_state_dict, by_folder])
REFUSED = {
    "blocks": (scale_by_gefen, {"block": 64}, {"block": 256}, "`block` of scale_by_gefen must be 256, .* got 64"),
    "flat blocks": (
        scale_by_gefen,
        {"block": FlatBlocks(64), "second_moment": Block()},
        {"block": FlatBlocks(32), "second_moment": Block()},
        r"`block` of scale_by_gefen must be FlatBlocks.*32.* got FlatBlocks.*64",
    ),
    "blocks by leaf": (
        scale_by_gefen,
        {"block": {"weight": 64}},
        {"block": {"weight": 32}},
        "`block` of scale_by_gefen must be a tree of 1, .* got a tree of 1, ",
    ),
    "tiles": (
        scale_by_gefen,
        {"second_moment": Factored()},
        {},
        r"`second_moment` of scale_by_gefen must be Factored\(tile=\(128, 256\)\), .* got Factored\(tile=None\)",
    ),
    "a second moment with its bias": (scale_by_gefen, {"b2_warmup": None}, {}, "`b2_warmup` .* a number, .* got None"),
    "one without": (scale_by_gefen, {}, {"b2_warmup": None}, "`b2_warmup` .* must be None, .* got a number"),
    "ties": (scale_by_gefen, {"codebook": LEANING}, {}, "`ties` of scale_by_gefen must be zero, .* got published"),
    "momentum": (scale_by_muon, {}, {"convention": "sum"}, "`convention` of scale_by_muon must be sum, .* got ema"),
    "blocks of momentum": (scale_by_muon, {"block": 64}, {}, "`block` of scale_by_muon must be 256, .* got 64"),
}


@WAYS
@pytest.mark.parametrize(("make", "before", "after", "text"), REFUSED.values(), ids=REFUSED)
def test_state_that_would_mean_something_else_is_refused_with_both_values(make, before, after, text, way, tmp_path):
    saved, target = run(make, before), run(make, after)
    own = held(target[1])
    with pytest.raises(CheckpointError, match=text):
        way(tmp_path, saved, target)
    assert same(own, held(target[1]))


FREE = {
    "warm-up": (scale_by_gefen, {}, {"b2_warmup": 0.5}),
    "decays": (scale_by_gefen, {}, {"b1": 0.5, "b2": 0.9, "eps": 1e-3}),
    "drive and rounding": (scale_by_gefen, {"drive": "m_hat"}, {"rounding": "stochastic"}),
    "codebook": (scale_by_gefen, {"codebook": "fixed"}, {"codebook": "learned"}),
    "the order of blocks by leaf": (
        scale_by_gefen,
        {"block": {"weight": 64, "bias": 64}},
        {"block": {"bias": 64, "weight": 64}},
    ),
    "Muon's": (scale_by_muon, {}, {"nesterov": False, "momentum": 0.5, "eps": 1e-3, "sharded": "exact"}),
}


@WAYS
@pytest.mark.parametrize(("make", "before", "after"), FREE.values(), ids=FREE)
def test_what_changes_no_meaning_may_differ(make, before, after, way, tmp_path):
    saved, target = run(make, before), run(make, after)
    way(tmp_path, saved, target)
    assert same(held(saved[1]), held(target[1]))


def test_older_state_dicts_that_tell_nothing_are_loaded():
    saved, (_, target) = run(scale_by_gefen, {"b2_warmup": None})[1], run(scale_by_gefen, {})
    older = saved.state_dict()
    del older["param_groups"][0]["kept_as"]
    target.load_state_dict(older)
    assert same(held(saved), held(target))


def test_older_folders_told_of_all_groups_at_once():
    told = {"scale_by_gefen": {"block": "256"}}
    older = {"format_version": 1, "params": {}, "leaves": {}, "rules": told, "groups": [{"params": ["weight"]}]}
    (group,) = read_index(json.dumps(older)).groups
    assert group["params"] == ["weight"] and json.loads(group["kept_as"]) == told
    (group,) = read_index(Index({}, {}, [{"params": [], "kept_as": "{}"}]).text()).groups
    assert group["kept_as"] == "{}"


DAMAGED = ["{", 3, None, "[]", "[1]", "3", "null", '{"scale_by_gefen": 3}', "[" * 100_000]


@pytest.mark.parametrize("told", DAMAGED, ids=lambda told: str(told)[:22])
def test_a_damaged_record_is_refused(told):
    _, optimizer = run(scale_by_gefen, {})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["kept_as"] = told
    with pytest.raises(CheckpointError, match="`kept_as` of a group must be as it was saved"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("make", [Gefen, GefenMuon])
def test_every_group_of_a_preset_tells_how_its_state_is_kept(make):
    model = nn.Sequential(nn.Linear(64, 80), nn.LayerNorm(80))
    optimizer = make([{"params": list(model[0].named_parameters())}, {"params": list(model[1].named_parameters("1"))}])
    assert len({group["kept_as"] for group in optimizer.param_groups}) == 1
    assert json.loads(optimizer.param_groups[0]["kept_as"])["scale_by_gefen"]["ties"] == "zero"
    assert "kept_as" not in repr(optimizer)


def test_what_a_group_carries_of_a_tree_of_blocks_is_short():
    told = kept_as(scale_by_gefen(block={f"layers.{n}.weight": 64 for n in range(1000)}))
    assert len(told) < 300
    assert len(kept_as(scale_by_gefen(block=FlatBlocks({f"{n}": 64 for n in range(1000)})))) < 300
