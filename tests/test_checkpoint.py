"""State dicts of any transform: exact, by name, all or nothing."""

import copy
import io
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from gefen_fn.alias import adam, gefen, sgd
from gefen_fn.base import GradientTransformation
from gefen_fn.combine import chain
from gefen_fn.scale import trace
from gefen_fn.state_io import flatten_state, unflatten_state
from gefen_fn.tree import StructureError, tree_map
from gefen_nn import Gefen
from gefen_nn.errors import CheckpointError
from gefen_nn.optimizer import TransformOptimizer
from tests.small_net import bits, flat, injected, model, same, train


def reloaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ROWS: list[tuple[str, Callable[[], GradientTransformation]]] = [
    ("sgd", lambda: sgd(0.1, momentum=0.9)),
    ("plain sgd", lambda: sgd(0.1)),
    ("adam", lambda: adam(0.01)),
    ("injected adamw", injected),
]


@pytest.mark.parametrize("make", [row[1] for row in ROWS], ids=[row[0] for row in ROWS])
@pytest.mark.parametrize("named", [True, False])
def test_a_saved_and_loaded_run_takes_the_same_next_step_to_the_bit(make: Callable, named: bool) -> None:
    def build(net: nn.Module) -> TransformOptimizer:
        return TransformOptimizer(net.named_parameters() if named else net.parameters(), make())

    net, other = model(), model(1)
    optimizer, loaded = build(net), build(other)
    train(net, optimizer, range(3))
    other.load_state_dict(net.state_dict())
    loaded.load_state_dict(reloaded(optimizer.state_dict()))
    train(net, optimizer, range(3, 5))
    train(other, loaded, range(3, 5))
    assert same(bits(net), bits(other))
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(flat(optimizer), flat(loaded), strict=True))


OTHERS = {
    "another direction": (chain(trace(0.9)), adam(0.01), "^Saved from trace, yours is scale_by_adam. State keys"),
    "another block": (chain(trace(0.9)), None, "^Saved from trace. `block` must be 256"),
}


@pytest.mark.parametrize(("tx", "own", "text"), OTHERS.values(), ids=OTHERS)
def test_a_file_of_another_optimizer_is_told_by_its_stages_first(tx, own, text) -> None:
    named = list(model().named_parameters())
    saved = TransformOptimizer(named, tx).state_dict()
    optimizer = Gefen(named) if own is None else TransformOptimizer(named, own)
    with pytest.raises(CheckpointError, match=text):
        optimizer.load_state_dict(saved)


def test_names_in_errors_are_shown_as_they_are_written() -> None:
    params = {"0.weight": torch.ones(3)}
    with pytest.raises(StructureError, match=r"missing .*`scale_by_adam.mu.0.weight`"):
        unflatten_state(flatten_state(trace(0.9).init(params)), adam(0.01).init(params))


def test_a_state_of_ones_own_under_any_name_is_saved_and_loaded() -> None:
    class Kept(NamedTuple):
        seen: dict

    def update(updates, state, params=None, **extra):
        return updates, Kept(tree_map(lambda x, u: x + u, state.seen, updates))

    own = GradientTransformation(lambda params: Kept(tree_map(torch.zeros_like, params)), update)
    net, other = model(), model(1)
    optimizer, loaded = (TransformOptimizer(n.named_parameters(), chain(own, adam(0.01))) for n in (net, other))
    train(net, optimizer, range(2))
    loaded.load_state_dict(reloaded(optimizer.state_dict()))
    assert {"kept.seen", "scale_by_adam.mu"} <= set(optimizer.state_dict()["state"][0])
    assert all(torch.equal(x, y) for x, y in zip(flat(optimizer), flat(loaded), strict=True))


def test_names_match_whatever_the_order_and_grouping() -> None:
    net, other = model(), model()
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    train(net, optimizer, range(2))
    named = list(other.named_parameters())
    other.load_state_dict(net.state_dict())
    regrouped = TransformOptimizer([{"params": named[2:]}, {"params": named[:2]}], injected())
    regrouped.load_state_dict(optimizer.state_dict())
    train(net, optimizer, range(2, 4))
    train(other, regrouped, range(2, 4))
    assert same(bits(net), bits(other))


def test_positions_are_not_taken_for_those_of_other_groups() -> None:
    net = model()
    saved = TransformOptimizer([{"params": net[0].parameters()}, {"params": net[2].parameters()}], injected())
    joined = TransformOptimizer(net.named_parameters(), injected())
    with pytest.raises(CheckpointError, match=r"groups must match: got groups of \[2, 2\] parameters for \[4\]"):
        joined.load_state_dict(saved.state_dict())


def everything(optimizer: torch.optim.Optimizer) -> list:
    """The bytes of what a load may change, and the values of the groups."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    values = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    held = [*params, *flat(optimizer)]
    return [str(values), *(x.detach().flatten().contiguous().view(torch.uint8).tolist() for x in held)]


def leaf(i: int, key: str, change: Callable) -> Callable:
    """Replace a leaf of parameter `i` by what `change` makes of a copy; shared leaves for every parameter."""

    def damage(d: dict) -> None:
        for n, leaves in d["state"].items():
            if n == i or "codebook" in key or "learned" in key:
                leaves[f"scale_by_gefen.{key}"] = change(leaves[f"scale_by_gefen.{key}"].clone())

    return damage


def filled(value: float, *at: int) -> Callable:
    return lambda x: (
        x.index_put_(tuple(map(torch.tensor, at)), torch.tensor(value, dtype=x.dtype)) if at else x.fill_(value)
    )


def group(**values: object) -> Callable:
    return lambda d: d["param_groups"][0].update(values)


def _swap_names(d: dict) -> None:
    names = d["param_groups"][0]["param_names"]
    names[0], names[1] = names[1], names[0]


# The first parameter is quantized, the others are dense.
DAMAGE = {
    "codebook without its end": (leaf(0, "codebook", filled(0.5, 255)), "codebook"),
    "codebook out of order": (leaf(0, "codebook", filled(0.9, 200)), "codebook"),
    "codebook without zero": (leaf(0, "codebook", filled(1e-3, 128)), "0 twice"),
    "codebook with nan": (leaf(0, "codebook", filled(float("nan"), 3)), "codebook"),
    "codebooks that differ": (lambda d: d["state"][1]["scale_by_gefen.codebook"].fill_(1.0), "codebook"),
    "negative scale": (leaf(0, "mu.absmax", filled(-1.0, 7, 0)), "mu.absmax"),
    "infinite scale": (leaf(0, "mu.absmax", filled(float("inf"), 7, 0)), "mu.absmax"),
    "negative row": (leaf(0, "nu.row", filled(-1e-9, 2, 0)), "nu.row"),
    "column with nan": (leaf(0, "nu.col", filled(float("nan"), 2, 0)), "nu.col"),
    "dense second moment below zero": (leaf(1, "nu", filled(-1e-9, 2)), "0.bias: .*nu"),
    "dense moment with nan": (leaf(1, "mu", filled(float("nan"), 2)), "0.bias: .*mu"),
    "negative count": (leaf(2, "count", filled(-1)), "1.weight: .*count"),
    "count that is not whole": (leaf(2, "count", lambda x: x.float() + 0.5), "1.weight: .*count"),
    "codes as integers": (leaf(0, "mu.codes", lambda x: x.int()), "mu.codes"),
    "scales cast to bf16": (leaf(0, "mu.absmax", lambda x: x.bfloat16()), "mu.absmax"),
    "reshaped": (leaf(0, "mu.codes", lambda x: x.reshape(40, 128)), "mu.codes"),
    "cut": (leaf(1, "mu", lambda x: x[:-1]), "0.bias: .*mu"),
    "no tensor": (leaf(1, "mu", lambda x: x.tolist()), "0.bias: .*mu"),
    "missing leaf": (lambda d: d["state"][0].pop("scale_by_gefen.nu.row"), "missing .*nu.row"),
    "extra leaf": (lambda d: d["state"][0].update(more=torch.ones(2)), "unexpected `more`"),
    "missing parameter": (lambda d: d["state"].pop(1), "0.bias"),
    "stray parameter": (lambda d: d["state"].update({9: {}}), "9"),
    "another name": (lambda d: d["param_groups"][0]["param_names"].__setitem__(0, "other"), "other"),
    "one name twice": (lambda d: d["param_groups"][0]["param_names"].__setitem__(0, "0.bias"), "twice `0.bias`"),
    "no names": (group(param_names=None), "`param_names`: got a NoneType"),
    "numbers as names": (group(param_names=[1, 2, 3, 4]), "`param_names` of a group must be text: got 1, a int"),
    "a key that is no text": (
        lambda d: d["state"][0].update({3: torch.ones(2)}),
        "State keys of 0 must be text: got 3",
    ),
    "a group's key that is no text": (
        lambda d: d["param_groups"][0].update({3: 4}),
        "Keys of a group must be text: got 3",
    ),
    "parameters that are lists": (group(params=[[0], [1], [2], [3]]), "`params` of a group must be indices or names"),
    "swapped names": (_swap_names, "0.weight"),
    "later version": (group(format_version=99), "format_version"),
    "version that is a flag": (group(format_version=True), "format_version"),
    "no version": (lambda d: d["param_groups"][0].pop("format_version"), "format_version"),
    "another block": (group(block=128), "block"),
    "no block": (lambda d: d["param_groups"][0].pop("block"), "block"),
    "no learning rate": (lambda d: d["param_groups"][0].pop("lr"), "lr"),
    "learning rate that is text": (group(lr="fast"), "lr"),
    "betas out of range": (group(betas=(0.9, 1.5)), "betas"),
    "no groups": (lambda d: d.pop("param_groups"), "param_groups"),
    "no state": (lambda d: d.update(state=[1, 2]), "state"),
}


@pytest.fixture(scope="module")
def gefen_and_older_state() -> tuple[Gefen, dict]:
    net = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 3))
    optimizer = Gefen(net.named_parameters(), lr=0.1)
    for _ in range(2):
        saved = copy.deepcopy(optimizer.state_dict())
        net(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    return optimizer, saved


@pytest.mark.parametrize("fault", DAMAGE)
def test_41_42_q22_every_corruption_is_refused_by_name_and_changes_nothing(gefen_and_older_state, fault: str) -> None:
    optimizer, saved = gefen_and_older_state[0], copy.deepcopy(gefen_and_older_state[1])
    before = everything(optimizer)
    DAMAGE[fault][0](saved)
    with pytest.raises(CheckpointError, match=DAMAGE[fault][1]):
        optimizer.load_state_dict(saved)
    assert everything(optimizer) == before


BLOCKS = {
    "a length": ({}, {"block": {"w": 64}}, "`block` must be no one length for the whole model: got 256"),
    "a tree": ({"block": {"w": 64}}, {}, "`block` must be 256: got no one length for the whole model"),
}


@pytest.mark.parametrize(("saved", "own", "text"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_by_leaf_are_called_so_beside_one_length(saved: dict, own: dict, text: str) -> None:
    given, target = (Gefen([("w", nn.Parameter(torch.ones(64, 128)))], **options) for options in (saved, own))
    with pytest.raises(CheckpointError, match=text):
        target.load_state_dict(given.state_dict())


@pytest.mark.parametrize("capturable", [False, True], ids=["numbers", "tensors"])
def test_a_load_where_new_tensors_would_lie_on_meta_is_a_load(capturable: bool) -> None:
    net, other = model(), model(1)
    saved = Gefen(net.named_parameters(), 0.25, capturable=capturable).state_dict()
    optimizer = Gefen(other.named_parameters(), 0.5, capturable=True)
    with torch.device("meta"):
        optimizer.load_state_dict(saved)
    train(other, optimizer, range(1))
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_the_comparison_sees_each_entry_that_a_load_may_change(gefen_and_older_state) -> None:
    optimizer = copy.deepcopy(gefen_and_older_state[0])
    before = everything(optimizer)
    for x in flat(optimizer):
        old = x.clone()
        x.view(-1).view(torch.uint8)[-1] ^= 1
        assert everything(optimizer) != before
        x.copy_(old)
    assert everything(optimizer) == before


def test_torchs_own_state_dict_functions_restore_the_same_bits() -> None:
    net, other = model(), model()
    optimizer, loaded = (TransformOptimizer(m.named_parameters(), injected()) for m in (net, other))
    train(net, optimizer, range(2))
    set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(net, optimizer))
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(flat(optimizer), flat(loaded), strict=True))


def test_a_checkpoint_gives_state_to_a_parameter_frozen_since_and_may_omit_it() -> None:
    net, other = model(), model()
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    train(net, optimizer, range(2))
    other[0].requires_grad_(False)
    frozen = TransformOptimizer(other.named_parameters(), injected())
    without = copy.deepcopy(frozen.state_dict())
    frozen.load_state_dict(optimizer.state_dict())
    assert set(frozen.state) == set(other.parameters())
    frozen.load_state_dict(without)
    assert all(not leaf.any() for leaf in frozen.state[other[2].weight].values())


def test_parameters_of_one_group_saved_with_different_values_are_refused() -> None:
    named = list(model().named_parameters())
    apart = TransformOptimizer([{"params": named[:2], "lr": 0.5}, {"params": named[2:], "lr": 0.25}], injected())
    target = TransformOptimizer(model().named_parameters(), injected())
    with pytest.raises(CheckpointError, match=r"`lr`: got .*0.5.*0.25"):
        target.load_state_dict(apart.state_dict())
    report = target.load_state_dict(apart.state_dict(), strict=False)
    assert report.missing == ("group 0: lr",) and target.param_groups[0]["lr"] == 0.1


def test_d17_torchs_flat_form_restores_other_groups_and_its_nested_form_is_refused_for_want_of_values() -> None:
    net, other = model(), model()
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    train(net, optimizer, range(2))
    named = list(other.named_parameters())
    regrouped = TransformOptimizer([{"params": named[3:]}, {"params": named[:3]}], injected(0.5))
    nested = get_optimizer_state_dict(net, optimizer)
    with pytest.raises(CheckpointError, match=r"must carry .* flatten_optimizer_state_dict"):
        set_optimizer_state_dict(other, regrouped, copy.copy(nested))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    set_optimizer_state_dict(other, regrouped, saved, options=options)
    assert [g["lr"] for g in regrouped.param_groups] == [0.1, 0.1]
    state = {n: regrouped.state[p] for n, p in other.named_parameters()}
    for name, p in net.named_parameters():
        assert all(torch.equal(x, state[name][key]) for key, x in optimizer.state[p].items())


def gefen_run(net: nn.Module) -> TransformOptimizer:
    optimizer = TransformOptimizer(net.named_parameters(), gefen(1e-3))
    net(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return optimizer


def test_f6_a_load_that_is_not_strict_keeps_what_is_missing_and_reports_it() -> None:
    saved = gefen_run(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 80))).state_dict()
    with pytest.raises(CheckpointError, match="strict=False"):
        TransformOptimizer(nn.Sequential(nn.Linear(64, 64)).named_parameters(), gefen(1e-3)).load_state_dict(saved)
    target = TransformOptimizer(
        nn.Sequential(nn.Linear(64, 64), nn.Identity(), nn.Linear(64, 64)).named_parameters(),
        chain(trace(0.9), gefen(1e-3)),
    )
    report = target.load_state_dict(reloaded(saved), strict=False)
    assert report.missing == ("0.weight: trace.trace", "0.bias: trace.trace", "2.weight", "2.bias")
    assert report.unexpected == ("1.weight", "1.bias")
    state = flatten_state(target.state_tree())
    assert torch.equal(state["scale_by_gefen.mu.0%2Eweight.codes"], saved["state"][0]["scale_by_gefen.mu.codes"])
    assert state["scale_by_gefen.learned"] and state["scale_by_gefen.count.2%2Eweight"] == 0


def test_q21_codes_and_codebook_are_loaded_together_or_not_at_all() -> None:
    target, source = (gefen_run(nn.Sequential(nn.Linear(64, 64))) for _ in range(2))
    before = copy.deepcopy(target.state_dict())
    for lost, text in ((".codebook", "got codes alone"), (".codes", "no saved codes")):
        saved = source.state_dict()
        for i, leaves in saved["state"].items():
            saved["state"][i] = {k: v for k, v in leaves.items() if not k.endswith(lost)}
        with pytest.raises(CheckpointError, match=text):
            target.load_state_dict(saved, strict=False)
    after = target.state_dict()
    assert all(torch.equal(x, after["state"][i][k]) for i, leaves in before["state"].items() for k, x in leaves.items())


def test_loaded_leaves_lie_as_fresh_ones_whatever_the_strides_of_the_file() -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    saved = gefen_run(net).state_dict()
    for i, leaves in saved["state"].items():
        saved["state"][i] = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in leaves.items()}
    target = TransformOptimizer(net.named_parameters(), gefen(1e-3))
    target.load_state_dict(saved)
    assert all(leaf.is_contiguous() for leaf in flat(target))
