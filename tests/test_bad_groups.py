"""Keys that a group may have, flags and the rates of parts: what is taken, and what is refused with the key meant."""

import copy

import pytest
import torch
from torch import nn

from gefen_fn import adamw
from gefen_nn import Gefen, GefenMuon, Muon, TransformOptimizer
from tests.test_bad_input import refuse
from tests.test_bad_optimizer import linear

FILLED = {
    "AdamW": (torch.optim.AdamW, Gefen),
    "Adam": (torch.optim.Adam, Gefen),
    "SGD": (torch.optim.SGD, Gefen),
    "GefenMuon": (torch.optim.AdamW, GefenMuon),
}


@pytest.mark.parametrize(("other", "ours"), FILLED.values(), ids=FILLED)
def test_groups_that_an_optimizer_of_torch_has_filled_are_taken(other, ours):
    groups = [{"params": list(linear().named_parameters()), "lr": 0.5}]
    other(groups)
    optimizer = ours(groups)
    again = ours(optimizer.param_groups)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0]["lr"] == again.param_groups[0]["lr"] == 0.5


MEANT = {
    "weight_decy": "weight_decay",
    "weightDecay": "weight_decay",
    "wd": "weight_decay",
    "learning_rate": "lr",
    "learn_rate": "lr",
    "lrate": "lr",
    "LR": "lr",
    "lr_": "lr",
    "Lr": "lr",
    "beta": "betas",
    "beta_1": "betas",
    "epsilon": "eps",
}


@pytest.mark.parametrize(("key", "meant"), MEANT.items(), ids=MEANT)
def test_a_key_that_is_nearly_right_is_told_the_right_one(key, meant):
    group = {"params": [nn.Parameter(torch.ones(3))], key: 0.1}
    refuse(ValueError, lambda: Gefen([group]), f"Did you mean `{meant}`?")


NOTES = "rate late slr llr plr mlr lr0 swd bets moment decoy max_momentum lr_scale rates".split()


@pytest.mark.parametrize("key", NOTES)
@pytest.mark.parametrize("make", [Gefen, lambda params: TransformOptimizer(params, adamw(0.1))], ids=["Gefen", "plain"])
def test_a_note_of_the_user_that_only_resembles_a_key_is_kept(make, key):
    assert make([{"params": [nn.Parameter(torch.ones(3))], key: 7}]).param_groups[0][key] == 7


FIXES = {
    "an argument of all": (Gefen, "maximize", "Give it to the optimizer: Gefen(maximize=...)."),
    "an argument": (Muon, "nesterov", "Give it to the optimizer: Muon(nesterov=...)."),
    "no argument": (Gefen, "nesterov", "must be one of ['betas', 'eps', 'lr', 'weight_decay']"),
    "nor this": (Gefen, "momentum", "Leave it out."),
}


@pytest.mark.parametrize(("make", "key", "fix"), FIXES.values(), ids=FIXES)
def test_a_key_that_no_group_of_a_preset_has_is_told_the_argument(make, key, fix):
    refuse(ValueError, lambda: make([{"params": [nn.Parameter(torch.ones(64, 64))], key: "yes"}]), fix)


ASKED = {
    "amsgrad": (True, "`amsgrad` must be False"),
    "decoupled_weight_decay": (False, "`decoupled_weight_decay` must be True"),
    "differentiable": (True, "`differentiable` must be False"),
}


@pytest.mark.parametrize(("key", "row"), ASKED.items(), ids=ASKED)
def test_what_torch_writes_into_groups_is_refused_where_it_asks_for_something(key, row):
    refuse(
        ValueError, lambda: Gefen([{"params": [nn.Parameter(torch.ones(3))], "weight_decay": 0.1, key: row[0]}]), row[1]
    )


FLAGS = {
    Gefen: "amsgrad foreach maximize capturable differentiable fused stochastic_rounding deterministic "
    "error_if_nonfinite",
    Muon: "nesterov quantize maximize capturable stochastic_rounding fused error_if_nonfinite",
    GefenMuon: "nesterov quantize require_muon maximize capturable stochastic_rounding fused error_if_nonfinite",
    TransformOptimizer: "capturable fused",
}
ALL_FLAGS = [(make, name) for make, names in FLAGS.items() for name in names.split()]


@pytest.mark.parametrize(("make", "name"), ALL_FLAGS, ids=[f"{make.__name__} {name}" for make, name in ALL_FLAGS])
@pytest.mark.parametrize("value", ["no", "true", 3, 0, torch.tensor(False)], ids=str)
def test_a_flag_is_a_bool(make, name, value):
    rest = {"tx": adamw(0.1)} if make is TransformOptimizer else {}
    refuse(ValueError, lambda: make([("w", nn.Parameter(torch.ones(64, 64)))], **rest, **{name: value}), f"`{name}`")


RATES = {"text": "1e-3", "negative": -1.0, "True": True, "vector": torch.ones(2), "huge": 10**400}


@pytest.mark.parametrize("value", RATES.values(), ids=RATES)
@pytest.mark.parametrize("name", ["muon_lr", "backup_lr"])
def test_a_learning_rate_of_a_part_is_refused_by_its_own_name(name, value):
    refuse(ValueError, lambda: GefenMuon([("w", nn.Parameter(torch.ones(64, 64)))], **{name: value}), f"`{name}`")
