"""What an optimizer cannot take is refused by rule, what came and fix; parameters, state and groups stay."""

import copy

import pytest
import torch
from torch import nn

from gefen_fn import (
    EmptyState,
    GradientTransformation,
    StructureError,
    adamw,
    chain,
    flatten_state,
    inject_hyperparams,
)
from gefen_nn import CheckpointError, Gefen, Muon, TransformOptimizer
from tests.test_bad_input import INF, NAN, equal, refuse


def linear():
    torch.manual_seed(0)
    return nn.Linear(72, 64)


OPTIMIZERS = {
    "Gefen": lambda net: Gefen(net.named_parameters(), 0.1),
    "unnamed": lambda net: Gefen(net.parameters(), 0.1),
    "plain": lambda net: TransformOptimizer(net.named_parameters(), adamw(0.1)),
    "injected": lambda net: TransformOptimizer(net.named_parameters(), inject_hyperparams(adamw)(0.1)),
}
on_every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def made(make):
    """A network whose optimizer took one step and has gradients for the next."""
    net = linear()
    optimizer = make(net)
    for seed in range(2):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        if seed == 0:
            optimizer.step()
    return net, optimizer


def snapshot(net, optimizer):
    """Everything a refused call may not change."""
    flat = flatten_state(optimizer.state_tree())
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return copy.deepcopy((list(net.parameters()), flat, groups)), [g["params"] for g in optimizer.param_groups]


def refuse_and_keep(error, net, optimizer, call, text):
    before, members = snapshot(net, optimizer)
    refuse(error, call, text)
    after, still = snapshot(net, optimizer)
    assert equal(before, after) and [list(map(id, m)) for m in members] == [list(map(id, m)) for m in still]


WEIGHT_GRADIENTS = {
    "sparse": lambda g: g.to_sparse(),
    "complex": lambda g: g.to(torch.complex64),
    "integer": lambda g: g.int(),
    "transposed": lambda g: g.t().contiguous(),
    "one row": lambda g: g[:1].clone(),
}


@on_every_optimizer
@pytest.mark.parametrize("change", WEIGHT_GRADIENTS.values(), ids=WEIGHT_GRADIENTS)
def test_a_step_with_a_gradient_that_does_not_fit_changes_nothing(make, change):
    net, optimizer = made(make)
    bad = change(net.weight.grad)
    if bad.layout == torch.strided:
        net.weight.grad.data = bad  # torch refuses to assign it openly
    else:
        net.weight.grad = bad
    refuse_and_keep(StructureError, net, optimizer, optimizer.step, "Gradient of '")


PARAMETERS = {
    "integers": (StructureError, "floating", torch.ones(3).int()),
    "complex": (StructureError, "floating", nn.Parameter(torch.ones(3, dtype=torch.complex64))),
    "sparse": (StructureError, "dense", torch.ones(3).to_sparse().requires_grad_()),
}


@pytest.mark.parametrize(("error", "text", "leaf"), PARAMETERS.values(), ids=PARAMETERS)
def test_a_group_of_parameters_that_no_transform_takes_is_refused(error, text, leaf):
    net, optimizer = made(OPTIMIZERS["Gefen"])
    refuse_and_keep(error, net, optimizer, lambda: optimizer.add_param_group({"params": [("x", leaf)]}), text)
    optimizer.step()


def test_a_group_of_a_name_that_another_has_is_refused():
    net, optimizer = made(OPTIMIZERS["Gefen"])
    group = {"params": [("weight", nn.Parameter(torch.ones(3)))]}
    refuse_and_keep(ValueError, net, optimizer, lambda: optimizer.add_param_group(group), "weight")


VALUES = {
    "negative": {"lr": -1.0},
    "NaN": {"lr": NAN},
    "inf": {"lr": INF},
    "text": {"lr": "x"},
    "a number as text": {"lr": "1e-3"},
    "None": {"lr": None},
    "True": {"lr": True},
    "vector": {"lr": torch.ones(2)},
    "schedule": {"lr": lambda count: 0.1},
    "an int beyond float64": {"lr": 10**400},
    "a tensor of bool": {"lr": torch.tensor(False)},
    "list": {"lr": [0.1]},
    "eps": {"eps": -1e-8},
    "eps None": {"eps": None},
    "weight decay": {"weight_decay": INF},
    "weight decay as text": {"weight_decay": "0.1"},
    "b1 = 1": {"betas": (1.0, 0.999)},
    "b2 = 1": {"betas": (0.9, 1.0)},
    "b2 NaN": {"betas": (0.9, NAN)},
    "one beta": {"betas": (0.9,)},
    "three betas": {"betas": (0.9, 0.99, 0.999)},
    "beta as a number": {"betas": 0.9},
    "betas None": {"betas": None},
    "betas as text": {"betas": ("0.9", "0.9")},
    "betas as a dict": {"betas": {0.9: 1, 0.99: 2}},
}
READ = {"tensor inf": {"lr": torch.tensor(INF)}, "negative tensor": {"lr": torch.tensor(-1.0)}}
every_value = pytest.mark.parametrize("values", [*VALUES.values(), *READ.values()], ids=[*VALUES, *READ])


@every_value
def test_a_preset_refuses_a_value_out_of_range(values):
    refuse(ValueError, lambda: Gefen(linear().parameters(), **values), f"`{next(iter(values))}`")


@every_value
def test_a_group_with_a_value_out_of_range_is_refused(values):
    net, optimizer = made(OPTIMIZERS["Gefen"])
    group = {"params": [("x", nn.Parameter(torch.ones(3)))], **values}
    refuse_and_keep(ValueError, net, optimizer, lambda: optimizer.add_param_group(group), f"`{next(iter(values))}`")
    optimizer.step()


@every_value
def test_a_state_dict_with_a_value_out_of_range_is_refused(values):
    net, optimizer = made(OPTIMIZERS["Gefen"])
    saved = edited(copy.deepcopy(optimizer.state_dict()), **values)
    key = f"`{next(iter(values))}`"
    refuse_and_keep(CheckpointError, net, optimizer, lambda: optimizer.load_state_dict(saved), key)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_step_refuses_a_value_out_of_range_that_was_written_into_its_group(values):
    net, optimizer = made(OPTIMIZERS["Gefen"])
    optimizer.param_groups[0].update(values)
    weight, before = net.weight.detach().clone(), copy.deepcopy(flatten_state(optimizer.state_tree()))
    refuse(ValueError, optimizer.step, f"`{next(iter(values))}`")
    assert torch.equal(weight, net.weight) and equal(before, flatten_state(optimizer.state_tree()))


@pytest.mark.parametrize("values", [{"lr": -1.0}, {"lr": NAN}, {"lr": "x"}, {"b1": 1.0}, {"weight_decy": 0.1}], ids=str)
def test_a_value_that_an_injected_factory_refuses_is_refused_everywhere(values):
    net, optimizer = made(OPTIMIZERS["injected"])
    group, key = {"params": [("x", nn.Parameter(torch.ones(3)))], **values}, f"`{next(iter(values))}`"
    refuse_and_keep(ValueError, net, optimizer, lambda: optimizer.add_param_group(group), key)
    saved = edited(copy.deepcopy(optimizer.state_dict()), **values)
    refuse_and_keep(CheckpointError, net, optimizer, lambda: optimizer.load_state_dict(saved), key)


@pytest.mark.parametrize("key", ["weight_decy", "beta", "momentum", "amsgrad", "maximize", "block", "format_version"])
@pytest.mark.parametrize("make", [Gefen, lambda params: TransformOptimizer(params, adamw(0.1))], ids=["Gefen", "plain"])
def test_a_group_key_that_no_step_reads_is_refused(make, key):
    refuse(ValueError, lambda: make([{"params": [nn.Parameter(torch.ones(3))], key: 7}]), f"`{key}`")


TEXT = {
    "preset": lambda: Gefen(linear().parameters(), lr="1e-3"),
    "betas": lambda: Gefen(linear().parameters(), betas=("0.9", "0.99")),
}


@pytest.mark.parametrize("make", TEXT.values(), ids=TEXT)
def test_a_number_as_text_is_called_a_string(make):
    refuse(ValueError, make, "string")


MODULES = {
    "Gefen": Gefen,
    "Muon": Muon,
    "expression": lambda net: TransformOptimizer(net, adamw(0.1)),
}


@pytest.mark.parametrize("call", MODULES.values(), ids=MODULES)
def test_a_module_in_the_place_of_its_parameters_is_told_how_to_give_them(call):
    refuse(TypeError, lambda: call(linear()), ".named_parameters()")


UPDATES = {
    "one value": lambda updates, state, params=None, **extra: updates,
    "three": lambda updates, state, params=None, **extra: (updates, state, state),
    "no params": lambda updates, state: (updates, state),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: chain(tx, adamw(0.1))], ids=["alone", "chain"])
def test_an_update_of_ones_own_that_keeps_no_contract_is_told_it(around, update):
    net = linear()
    tx = around(GradientTransformation(lambda params: EmptyState(), update))
    optimizer = TransformOptimizer(net.named_parameters(), tx)
    net.weight.grad = torch.ones(64, 72)
    call = "update(updates, state, params=None, **extra) -> (updates, state)"
    refuse_and_keep(StructureError, net, optimizer, optimizer.step, call)


def test_an_error_inside_an_update_of_ones_own_stays_what_it_is():
    def update(updates, state, params=None, **extra):
        return len(3), state

    tx = chain(GradientTransformation(lambda params: EmptyState(), update))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        tx.update({}, tx.init({}))


def test_a_scheduler_may_miss_0_by_a_rounding():
    _, optimizer = made(OPTIMIZERS["Gefen"])
    optimizer.param_groups[0]["lr"] = 3e-4
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 3, 0.0, 25)
    for _ in range(25):
        optimizer.step()
        scheduler.step()
    assert -1e-19 < optimizer.param_groups[0]["lr"] < 0
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@on_every_optimizer
def test_a_group_may_carry_what_schedulers_and_loggers_write_into_it(make):
    _, optimizer = made(make)
    notes = {"name": "head", "initial_lr": 0.1, "max_lr": 0.2, "max_momentum": 0.95, "lr_scale": 0.5}
    notes |= {"lr_mult": 2.0, "wd_mult": 0.0, "use_muon": True, "layer_id": 3, "rank": 128, "scale": 0.25, "lang": "en"}
    optimizer.param_groups[0].update(notes)
    other = make(linear())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {key: other.param_groups[0][key] for key in notes} == notes


@pytest.mark.parametrize("key", ["lr", "betas", "weight_decay", "momentum", "b1"])
def test_a_group_key_that_a_plain_transform_does_not_read_is_refused(key):
    net, optimizer = made(OPTIMIZERS["plain"])
    group = {"params": [("x", nn.Parameter(torch.ones(3)))], key: 0.9}
    refuse_and_keep(ValueError, net, optimizer, lambda: optimizer.add_param_group(group), key)
    refuse_and_keep(KeyError, net, optimizer, lambda: optimizer.param_groups[0][key], key)
    refuse_and_keep(KeyError, net, optimizer, lambda: optimizer.param_groups[0].__setitem__(key, 0.9), key)


def edited(saved, **values):
    saved["param_groups"][0].update(values)
    return saved


def leaf(suffix, change):
    """Change every saved leaf whose key ends so."""

    def changed(saved):
        state = {
            i: {key: change(x) if key.endswith(suffix) else x for key, x in leaves.items()}
            for i, leaves in saved["state"].items()
        }
        return {**saved, "state": state}

    return changed


STATES = {
    "nothing": ("state", lambda saved: {}),
    "a network's": ("state", lambda saved: linear().state_dict()),
    "AdamW's": ("another optimizer's state", lambda saved: torch.optim.AdamW(linear().parameters()).state_dict()),
    "a smaller network's": ("bias", lambda saved: Gefen([("weight", nn.Parameter(torch.ones(64, 72)))]).state_dict()),
    "another version": ("format_version", lambda saved: edited(saved, format_version=2)),
    "other names": (
        "got missing `weight`, unexpected `other`.",
        lambda saved: edited(saved, param_names=["other", "bias"]),
    ),
    "names of a compiled module": (
        "torch.compile put `_orig_mod.`",
        lambda saved: edited(saved, param_names=["_orig_mod.weight", "_orig_mod.bias"]),
    ),
    "text": ("state", lambda saved: "x"),
    "None": ("state", lambda saved: None),
    "a foreign key": ("momentum", lambda saved: edited(saved, momentum=3)),
    "a key misspelt": ("weight_decy", lambda saved: edited(saved, weight_decy=0.1)),
    "no params": ("params", lambda saved: {**saved, "param_groups": [{"lr": 0.1}]}),
    "groups None": ("param_groups", lambda saved: {**saved, "param_groups": None}),
    "state None": ("state", lambda saved: {**saved, "state": None}),
    "state as a list": ("state", lambda saved: {**saved, "state": []}),
    "a number as an entry": ("0", lambda saved: {**saved, "state": {**saved["state"], 0: 3}}),
    "a name twice": ("twice `weight`.", lambda saved: edited(saved, param_names=["weight", "weight"])),
    "negative nu": ("nu", leaf(".nu", lambda x: -x)),
    "nu NaN": ("nu", leaf(".nu", lambda x: x * NAN)),
    "mu NaN": ("mu", leaf(".mu", lambda x: x * NAN)),
    "codes on meta": ("codes", leaf(".codes", lambda x: x.to("meta"))),
    "sparse codes": ("codes", leaf(".codes", lambda x: x.to_sparse())),
}


@pytest.mark.parametrize(("text", "change"), STATES.values(), ids=STATES)
def test_a_state_dict_that_does_not_fit_changes_nothing(text, change):
    net, optimizer = made(OPTIMIZERS["Gefen"])
    saved = change(copy.deepcopy(optimizer.state_dict()))
    refuse_and_keep(CheckpointError, net, optimizer, lambda: optimizer.load_state_dict(saved), text)


PRESET = {
    "block 0": ("block", {"block": 0}),
    "block 2.5": ("block", {"block": 2.5}),
    "codebook": ("codebook", {"codebook": "learnt"}),
    "codebook None": ("codebook", {"codebook": None}),
    "policy as text": ("second_moment", {"second_moment": "dense"}),
    "warm-up": ("b2_warmup", {"b2_warmup": 0.0}),
    "lr and betas swapped": ("lr", {"lr": (0.9, 0.9), "betas": 1e-3}),
    "amsgrad": ("amsgrad", {"amsgrad": True}),
}


@pytest.mark.parametrize(("text", "arguments"), PRESET.values(), ids=PRESET)
def test_a_preset_refuses_an_argument_that_means_nothing(text, arguments):
    refuse(ValueError, lambda: Gefen(linear().parameters(), **arguments), text)


@pytest.mark.parametrize(
    ("text", "leaf"),
    [("floating", torch.ones(3).int()), ("floating", torch.ones(3, dtype=torch.complex64)), ("dense", None)],
    ids=["integer", "complex", "sparse"],
)
@pytest.mark.parametrize("build", [Gefen, lambda p: TransformOptimizer(p, adamw(0.1))], ids=["Gefen", "plain"])
def test_a_parameter_that_no_transform_takes_is_refused(build, text, leaf):
    refuse(StructureError, lambda: build([torch.ones(3).to_sparse() if leaf is None else leaf]), text)


TRANSFORMS = {"None": None, "constructor": adamw, "injected constructor": inject_hyperparams(adamw), "number": 0.1}


@pytest.mark.parametrize("tx", TRANSFORMS.values(), ids=TRANSFORMS)
def test_what_is_no_transform_is_refused(tx):
    refuse(TypeError, lambda: TransformOptimizer([nn.Parameter(torch.ones(3))], tx), "transform")


def test_parameters_and_transform_in_another_order_are_refused_f12():
    refuse(TypeError, lambda: TransformOptimizer(adamw(0.1), [nn.Parameter(torch.ones(3))]), "transform")


def test_parameters_replaced_by_another_number_of_them_are_refused():
    net, optimizer = made(OPTIMIZERS["Gefen"])
    optimizer.param_groups[0]["params"] = [net.weight]
    refuse(StructureError, optimizer.step, "param_names")
