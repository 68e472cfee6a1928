"""What `describe` says of each leaf."""

import math
from typing import NamedTuple

import pytest
import torch

from gefen_fn import (
    Block,
    FlatBlocks,
    GradientTransformation,
    MultiSteps,
    adamw,
    chain,
    clip,
    clip_by_global_norm,
    describe,
    gefen,
    identity,
    inject_hyperparams,
    masked,
    named_chain,
    partition,
    scale_by_gefen,
    state_bytes,
    tree_map,
)
from gefen_nn import Gefen

SHAPES = {"w": (300, 300), "b1": (300,), "gate": (20, 500), "small": (10, 10), "thin": (5000, 1), "none": None}
PARAMS = {name: shape and torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
NOTES = {
    "w": "",
    "b1": "dense: fewer than 2 axes",
    "gate": "block means: a side below 32",
    "small": "dense: fewer than 4,096 entries",
    "thin": "dense: one entry per row",
}
WRAPPED = {
    "alone": gefen(1e-3),
    "injected": inject_hyperparams(gefen)(1e-3),
    "chain": chain(clip(1.0), gefen(1e-3)),
    "named chain": named_chain(("z", clip(1.0)), ("a", gefen(1e-3))),
    "masked": masked(gefen(1e-3), {k: True for k in SHAPES}),
    "partition": partition({"b": gefen(1e-3), "a": identity()}, {k: "b" for k in SHAPES}),
    "accumulating": MultiSteps(gefen(1e-3), 1),
}


@pytest.mark.parametrize("tx", WRAPPED.values(), ids=WRAPPED)
def test_every_leaf_has_a_row_with_its_reason_and_the_bytes_add_up(tx):
    report = describe(tx, PARAMS)
    assert {leaf.path: leaf.note for leaf in report.leaves} == NOTES
    assert report.bytes == state_bytes(tx.init(PARAMS))
    assert set(report.leaves[-1].kept) == {"mu.codes", "mu.absmax", "nu.row", "nu.col"}


class Agreement(NamedTuple):
    mu: dict


def damp(state):
    """A transform as a user writes it."""

    def update(updates, state, params=None, **extra):
        return updates, state

    return GradientTransformation(lambda params: state(tree_map(torch.zeros_like, params)), update)


OWN = {
    "a NamedTuple": (chain(damp(Agreement), gefen(1e-3)), "agreement"),
    "a tree": (named_chain(("own", damp(lambda tree: tree)), ("rest", gefen(1e-3))), "state"),
    "accumulating": (chain(MultiSteps(damp(Agreement), 1), gefen(1e-3)), "agreement"),
}


@pytest.mark.parametrize(("tx", "stage"), OWN.values(), ids=OWN)
def test_a_transform_of_ones_own_is_reported_beside_the_others(tx, stage):
    report = describe(tx, PARAMS)
    plain = {leaf.path: leaf for leaf in describe(gefen(1e-3), PARAMS).leaves}
    for leaf in report.leaves:
        known = plain[leaf.path]
        assert {stage, known.rule} <= set(leaf.rule.split(", ")) and leaf.note == known.note
        assert leaf.bytes >= known.bytes + 4 * math.prod(leaf.shape)
    assert report.bytes == state_bytes(tx.init(PARAMS))
    text = str(report)
    assert "codebook of scale_by_gefen: learned by" in text
    assert "offloaded: not stated by damp)" in text and "unknown stage, publishes no contract" in text


def test_fields_of_one_name_are_told_apart_by_their_stages():
    kept = describe(chain(damp(Agreement), gefen(1e-3)), {"b": torch.empty(300)}).leaves[0].kept
    assert list(kept) == ["agreement.mu", "scale_by_gefen.mu", "nu"]


def test_parts_of_a_partition_are_described_by_their_own_rule():
    labels = {k: "adam" if k == "w" else "gefen" for k in SHAPES}
    tx = partition({"gefen": gefen(1e-3, second_moment=Block()), "adam": adamw(1e-3)}, labels)
    rows = {leaf.path: leaf for leaf in describe(tx, PARAMS).leaves}
    assert rows["w"].kept == {"mu": "float32[300, 300]", "nu": "float32[300, 300]"}
    assert rows["gate"].note == "" and rows["gate"].kept["nu"] == "float32[20, 2]"


def test_flattened_leaves_say_that_they_do_not_shard():
    params = [torch.empty(70_000), torch.empty(64, 100)]
    notes = [leaf.note for leaf in describe(gefen(1e-3, block=FlatBlocks(256)), params).leaves]
    assert notes == ["blocks over the flattened leaf: does not shard"] * 2


@pytest.mark.parametrize(
    "params", [{}, torch.empty(64, 100), {"x.y": torch.empty(64, 100)}], ids=["none", "bare", "dot"]
)
def test_it_prints_as_a_table_for_any_tree(params):
    lines = str(describe(gefen(1e-3), params)).splitlines()
    here = params != {}  # a line for the leaf, and one for its device
    assert lines[0].startswith("chain(scale_by_gefen(") and lines[5 + here].startswith("leaf")
    assert "bytes of state" in lines[-1] and len(lines) == 7 + 2 * here


@pytest.mark.parametrize("key", ["0.weight", "50%", "a%2Eb"])
def test_paths_are_shown_as_they_are_written(key):
    report = describe(gefen(1e-3), {"net": {key: torch.empty(64, 100)}})
    assert report.leaves[0].path == f"net.{key}" and report.leaves[0].bytes > 6400
    assert str(report).splitlines()[7].startswith(f"net.{key} ")


@pytest.mark.parametrize(
    ("tx", "fused"),
    [
        (gefen(1e-3), "scale_by_gefen + add_decayed_weights + scale_by_learning_rate"),
        (chain(clip_by_global_norm(1.0), scale_by_gefen()), "clip_by_global_norm + scale_by_gefen"),
        (adamw(1e-3), ""),
    ],
    ids=["gefen", "clip", "adamw"],
)
def test_it_says_what_is_fused(tx, fused):
    report = describe(tx, PARAMS)
    assert report.fused == fused and f"fused: {fused or 'nothing'}" in str(report).splitlines()


def test_an_optimizer_describes_the_parameters_that_have_state():
    net = torch.nn.Linear(100, 64)
    net.bias.requires_grad_(False)
    optimizer = Gefen(net.named_parameters())
    report = optimizer.describe()
    assert [leaf.path for leaf in report.leaves] == ["weight"]
    assert report.bytes == state_bytes(optimizer.state_tree())
