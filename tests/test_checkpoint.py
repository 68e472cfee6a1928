"""State dicts of any transform: exact, by name, all or nothing."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from gefen_fn.alias import adam, gefen, sgd
from gefen_fn.base import GradientTransformation
from gefen_fn.combine import chain
from gefen_fn.scale import trace
from gefen_fn.state_io import flatten_state
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


def _drop_state(d: dict) -> None:
    del d["state"][1]


def _drop_leaf(d: dict) -> None:
    d["state"][0].pop(next(k for k in d["state"][0] if ".mu" in k))


def _cast_leaf(d: dict) -> None:
    d["state"][0] = {k: v.bfloat16() if v.dim() else v for k, v in d["state"][0].items()}


def _cut_leaf(d: dict) -> None:
    d["state"][3] = {k: v[:-1] if v.dim() else v for k, v in d["state"][3].items()}


def _negative_count(d: dict) -> None:
    d["state"][2] = {k: -v if "count" in k else v for k, v in d["state"][2].items()}


def _rename(d: dict) -> None:
    d["param_groups"][0]["param_names"][0] = "other.weight"


def _version(d: dict) -> None:
    d["param_groups"][0]["format_version"] = 99


def _block(d: dict) -> None:
    del d["param_groups"][0]["block"]


def _no_lr(d: dict) -> None:
    del d["param_groups"][0]["lr"]


def _odd_lr(d: dict) -> None:
    d["param_groups"][0]["lr"] = "fast"


def _no_groups(d: dict) -> None:
    del d["param_groups"]


DAMAGE = [
    (_drop_state, "0.bias"),
    (_drop_leaf, r"\.mu"),
    (_cast_leaf, "float32"),
    (_cut_leaf, "2.bias"),
    (_negative_count, "count"),
    (_rename, "other.weight"),
    (_version, "format_version"),
    (_block, "block"),
    (_no_lr, "lr"),
    (_odd_lr, "lr"),
    (_no_groups, "param_groups"),
]


@pytest.mark.parametrize(("damage", "key"), DAMAGE, ids=[d[0].__name__ for d in DAMAGE])
def test_q22_a_damaged_checkpoint_is_refused_by_name_and_changes_nothing(damage: Callable, key: str) -> None:
    net = model()
    optimizer = TransformOptimizer(net.named_parameters(), injected())
    train(net, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(2, 3))
    before = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(CheckpointError, match=key):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(v, after["state"][i][k]) for i, d in before["state"].items() for k, v in d.items())


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
    apart = TransformOptimizer([{"params": named[:2], "lr": 0.5}, {"params": named[2:]}], injected())
    with pytest.raises(CheckpointError, match="lr"):
        TransformOptimizer(model().named_parameters(), injected()).load_state_dict(apart.state_dict())


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
