"""What cannot work is refused by rule, what came and fix, and nothing changes; NaN and inf gradients never raise."""

import copy
import math
import re

import pytest
import torch
from torch import nn

from gefen_fn import (
    Block,
    Dense,
    Factored,
    FlatBlocks,
    MultiSteps,
    StructureError,
    adam,
    adamw,
    apply_if_finite,
    chain,
    clip,
    clip_by_global_norm,
    default_codebook,
    dequantize,
    ema,
    find_blocks,
    flatten_state,
    gefen,
    gradient_histogram,
    inject_hyperparams,
    lion,
    masked,
    named_chain,
    partition,
    quantize,
    scale,
    scale_by_adam,
    scale_by_gefen,
    scale_by_learning_rate,
    scale_by_lion,
    set_to_zero,
    sgd,
    trace,
    zero_nans,
)
from gefen_fn.tree import tree_leaves
from gefen_nn import CheckpointError, Gefen, TransformOptimizer

NAN, INF = math.nan, math.inf
PARAMS = {"w": torch.linspace(-1, 1, 64 * 72).reshape(64, 72), "b": torch.linspace(1, 2, 5)}


def refuse(error, call, text=""):
    """Check that `call` raises `error` with `text` in a message of three parts: the rule, what came, the fix."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value.args[0])
    assert text in message
    assert re.search(r"\w.* (got|missing) .*\. \S", message, re.DOTALL), message


def equal(before, after):
    pairs = list(zip(tree_leaves(before), tree_leaves(after), strict=True))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


ALIASES = {"sgd": sgd, "adam": adam, "adamw": adamw, "lion": lion, "gefen": gefen}
DECAYING = [(scale_by_adam, "b1"), (scale_by_adam, "b2"), (scale_by_lion, "b1"), (scale_by_lion, "b2")]
DECAYING += [(scale_by_gefen, "b1"), (scale_by_gefen, "b2"), (trace, "decay"), (ema, "decay")]


@pytest.mark.parametrize("lr", [-0.1, NAN, INF, -INF])
@pytest.mark.parametrize("factory", [*ALIASES.values(), scale_by_learning_rate], ids=lambda f: f.__name__)
def test_a_learning_rate_that_is_negative_or_not_finite_is_refused(factory, lr):
    refuse(ValueError, lambda: factory(lr), "learning_rate")


@pytest.mark.parametrize("value", [1.0, 1, True, -0.1, NAN, INF])
@pytest.mark.parametrize(("factory", "name"), DECAYING, ids=[f"{f.__name__} {name}" for f, name in DECAYING])
def test_a_decay_outside_of_0_to_1_is_refused(factory, name, value):
    refuse(ValueError, lambda: factory(**{name: value}), name)


FUNCTIONS = {
    "momentum": (ValueError, "decay", lambda: sgd(0.1, 1.0)),
    "weight decay": (ValueError, "weight_decay", lambda: adamw(0.1, weight_decay=NAN)),
    "eps": (ValueError, "eps", lambda: gefen(0.1, eps=INF)),
    "warm-up": (ValueError, "b2_warmup", lambda: gefen(0.1, b2_warmup=NAN)),
    "no warm-up as False": (ValueError, "b2_warmup", lambda: gefen(0.1, b2_warmup=False)),
    "drive": (ValueError, "drive", lambda: gefen(0.1, drive="v")),
    "drive as a list": (ValueError, "drive", lambda: gefen(0.1, drive=["m"])),
    "rounding": (ValueError, "rounding", lambda: gefen(0.1, rounding="up")),
    "codebook": (ValueError, "codebook", lambda: gefen(0.1, codebook="learnt")),
    "codebook of 16": (ValueError, "codebook", lambda: gefen(0.1, codebook=torch.linspace(-1, 1, 16))),
    "codebook in bf16": (ValueError, "codebook", lambda: gefen(0.1, codebook=default_codebook().bfloat16())),
    "unsorted codebook": (ValueError, "codebook", lambda: gefen(0.1, codebook=default_codebook().flip(0))),
    "block 0": (ValueError, "block", lambda: gefen(0.1, block=0)),
    "block 2.5": (ValueError, "block", lambda: gefen(0.1, block=2.5)),
    "block True": (ValueError, "block", lambda: gefen(0.1, block=True)),
    "flat block 0": (ValueError, "block", lambda: gefen(0.1, block=FlatBlocks(0))),
    "block 0 of one leaf": (ValueError, "block", lambda: gefen(0.1, block={"w": 0, "b": 1}).init(PARAMS)),
    "block as text": (StructureError, "structure", lambda: gefen(0.1, block="256").init(PARAMS)),
    "blocks of another tree": (StructureError, "structure", lambda: gefen(0.1, block={"w": 256}).init(PARAMS)),
    "tile": (ValueError, "tile", lambda: Factored(tile=(100, 256))),
    "rule": (ValueError, "rule", lambda: find_blocks(PARAMS, rule="variance")),
    "quantize integers": (StructureError, "floating", lambda: quantize(torch.ones(3).int(), default_codebook())),
    "quantize with block 0": (ValueError, "block", lambda: quantize(PARAMS, default_codebook(), block=0)),
    "dequantize another block": (
        ValueError,
        "block",
        lambda: dequantize(quantize(torch.ones(2, 300), default_codebook(), block=100), default_codebook(), block=200),
    ),
    "count integers": (StructureError, "floating", lambda: gradient_histogram({"w": torch.ones(64, 64).int()})),
    "learning rate of another tree": (StructureError, "structure", lambda: run(adamw({"w": 0.1}))),
    "learning rate as text": (ValueError, "learning_rate", lambda: adamw("1e-3")),
    "learning rate None": (ValueError, "learning_rate", lambda: adamw(None)),
    "betas as one pair": (StructureError, "structure", lambda: run(adamw(0.1, (0.9, 0.999)))),
    "mask as text": (TypeError, "Masks", lambda: run(adamw(0.1, mask="yes"))),
    "mask of integers": (TypeError, "Masks", lambda: run(adamw(0.1, mask={"w": 1, "b": 0}))),
    "mask of tensors": (TypeError, "Masks", lambda: run(masked(adam(0.1), {"w": torch.tensor(True), "b": False}))),
    "mask without a leaf": (StructureError, "structure", lambda: run(adamw(0.1, mask={"w": True}))),
    "mask of other keys": (StructureError, "structure", lambda: run(adamw(0.1, mask={"w": True, "c": False}))),
    "mask as a list": (StructureError, "structure", lambda: run(adamw(0.1, mask=[True, False]))),
    "mask function of nothing": (TypeError, "Masks", lambda: run(adamw(0.1, mask=lambda p: None))),
    "masked, swapped": (TypeError, "transform", lambda: masked({"w": True}, adamw(0.1))),
    "label": (ValueError, "label", lambda: run(partition({"a": adamw(0.1)}, {"w": "a", "b": "c"}))),
    "labels without a leaf": (StructureError, "structure", lambda: run(partition({"a": adamw(0.1)}, {"w": "a"}))),
    "a constructor in a chain": (TypeError, "transform", lambda: chain(scale_by_adam)),
    "a list in a chain": (TypeError, "transform", lambda: chain([scale(1.0)])),
    "MultiSteps of 0": (ValueError, "every_k_schedule", lambda: MultiSteps(adamw(0.1), 0)),
    "errors below 0": (ValueError, "max_consecutive_errors", lambda: apply_if_finite(adamw(0.1), -1)),
    "params left out": (ValueError, "params", lambda: adamw(0.1).update(PARAMS, adamw(0.1).init(PARAMS))),
    "init of integers": (StructureError, "floating", lambda: gefen(0.1).init({"w": torch.ones(3).int()})),
    "init of a module": (StructureError, "tensors", lambda: gefen(0.1).init(nn.Linear(2, 2))),
}


def run(tx):
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(("error", "text", "call"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_an_argument_that_means_nothing_is_refused(error, text, call):
    refuse(error, call, text)


KEEPING = {
    "adam": scale_by_adam(),
    "nadam": scale_by_adam(nesterov=True),
    "lion": scale_by_lion(),
    "trace": trace(0.9),
    "ema": ema(0.9),
    "sgd": sgd(0.1, 0.9),
    "adamw": adamw(0.1),
    "gefen": gefen(0.1, weight_decay=0.1),
    "gefen, block": gefen(0.1, second_moment=Block()),
    "gefen, dense": gefen(0.1, second_moment=Dense(), codebook="fixed"),
    "gefen, stochastic": gefen(0.1, rounding="stochastic"),
    "chain": named_chain(("clip", clip(1.0)), ("adam", scale_by_adam())),
    "masked": masked(adamw(0.1), {"w": True, "b": False}),
}
WRAPPED = {"MultiSteps": MultiSteps(adamw(0.1), 2), "injected": inject_hyperparams(gefen)(0.1)}
W, B = PARAMS["w"], PARAMS["b"]
GRADIENTS = {
    "sparse": {"w": W.to_sparse(), "b": B},
    "complex": {"w": W.to(torch.complex64), "b": B},
    "integer": {"w": W.int(), "b": B},
    "bool": {"w": W.bool(), "b": B},
    "transposed": {"w": W.t(), "b": B},
    "to broadcast": {"w": W[:1], "b": B},
    "a text": {"w": "w", "b": B},
    "an array": {"w": W.numpy(), "b": B},
    "a leaf missing": {"w": W},
    "a leaf too many": {**PARAMS, "c": B},
    "a list": [W, B],
    "a deeper tree": {"w": [W], "b": B},
}


def stepped(tx):
    """The state after one step, with the bits it holds."""
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    return state, copy.deepcopy(state)


@pytest.mark.parametrize("grads", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("tx", [*KEEPING.values(), *WRAPPED.values()], ids=[*KEEPING, *WRAPPED])
def test_gradients_that_do_not_fit_are_refused_and_the_state_stays(tx, grads):
    state, before = stepped(tx)
    refuse(StructureError, lambda: tx.update(grads, state, PARAMS))
    assert equal(before, state)


SWAPPED = {
    "state, grads, params": lambda tx, state: tx.update(state, PARAMS, PARAMS),
    "grads, params, state": lambda tx, state: tx.update(PARAMS, PARAMS, state),
    "params, params": lambda tx, state: tx.update(PARAMS, PARAMS),
    "no state": lambda tx, state: tx.update(PARAMS, None, PARAMS),
    "the state of another": lambda tx, state: tx.update(PARAMS, zero_nans().init(PARAMS), PARAMS),
}


@pytest.mark.parametrize("call", SWAPPED.values(), ids=SWAPPED)
@pytest.mark.parametrize("tx", KEEPING.values(), ids=KEEPING)
def test_arguments_in_another_order_are_refused_and_the_state_stays_f12(tx, call):
    state, before = stepped(tx)
    refuse(StructureError, lambda: call(tx, state))
    assert equal(before, state)


@pytest.mark.parametrize("tx", [adamw(0.1), gefen(0.1, weight_decay=0.1)], ids=["adamw", "gefen"])
@pytest.mark.parametrize("params", [{"w": W}, [W, B], {"w": W.t(), "b": B}, {"w": W.int(), "b": B}, (W, B)])
def test_params_that_do_not_fit_are_refused_where_they_are_read(tx, params):
    state, before = stepped(tx)
    refuse(StructureError, lambda: tx.update(PARAMS, state, params))
    assert equal(before, state)


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


GROUPS = {
    "integers": (StructureError, "floating", {"params": [("x", torch.ones(3).int())]}),
    "complex": (StructureError, "floating", {"params": [("x", nn.Parameter(torch.ones(3, dtype=torch.complex64)))]}),
    "sparse": (StructureError, "dense", {"params": [("x", torch.ones(3).to_sparse().requires_grad_())]}),
    "a name twice": (ValueError, "weight", {"params": [("weight", nn.Parameter(torch.ones(3)))]}),
    "a foreign key": (ValueError, "momentum", {"params": [("x", nn.Parameter(torch.ones(3)))], "momentum": 0.9}),
    "negative lr": (ValueError, "lr", {"params": [("x", nn.Parameter(torch.ones(3)))], "lr": -1.0}),
    "lr NaN": (ValueError, "lr", {"params": [("x", nn.Parameter(torch.ones(3)))], "lr": NAN}),
    "lr inf": (ValueError, "lr", {"params": [("x", nn.Parameter(torch.ones(3)))], "lr": torch.tensor(INF)}),
    "b2 = 1": (ValueError, "betas", {"params": [("x", nn.Parameter(torch.ones(3)))], "betas": (0.9, 1.0)}),
}


@pytest.mark.parametrize(("error", "text", "group"), GROUPS.values(), ids=GROUPS)
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(error, text, group):
    net, optimizer = made(OPTIMIZERS["Gefen"])
    refuse_and_keep(error, net, optimizer, lambda: optimizer.add_param_group(dict(group)), text)
    optimizer.step()


@pytest.mark.parametrize("key", ["lr", "betas", "weight_decay", "momentum", "b1"])
def test_a_group_key_that_a_plain_transform_does_not_read_is_refused(key):
    net, optimizer = made(OPTIMIZERS["plain"])
    group = {"params": [("x", nn.Parameter(torch.ones(3)))], key: 0.9}
    refuse_and_keep(ValueError, net, optimizer, lambda: optimizer.add_param_group(group), key)
    refuse_and_keep(KeyError, net, optimizer, lambda: optimizer.param_groups[0][key], key)
    refuse_and_keep(KeyError, net, optimizer, lambda: optimizer.param_groups[0].__setitem__(key, 0.9), key)


STATES = {
    "nothing": ("state", lambda saved: {}),
    "a network's": ("state", lambda saved: linear().state_dict()),
    "AdamW's": ("format_version", lambda saved: torch.optim.AdamW(linear().parameters()).state_dict()),
    "a smaller network's": ("bias", lambda saved: Gefen([("weight", nn.Parameter(torch.ones(64, 72)))]).state_dict()),
    "lr as text": ("lr", lambda saved: edited(saved, lr="fast")),
    "three betas": ("betas", lambda saved: edited(saved, betas=(0.9, 0.9, 0.9))),
    "lr NaN": ("lr", lambda saved: edited(saved, lr=NAN)),
    "another version": ("format_version", lambda saved: edited(saved, format_version=2)),
    "other names": ("other", lambda saved: edited(saved, param_names=["other", "bias"])),
}


def edited(saved, **values):
    saved["param_groups"][0].update(values)
    return saved


@pytest.mark.parametrize(("text", "change"), STATES.values(), ids=STATES)
def test_a_state_dict_that_does_not_fit_changes_nothing(text, change):
    net, optimizer = made(OPTIMIZERS["Gefen"])
    saved = change(copy.deepcopy(optimizer.state_dict()))
    refuse_and_keep(CheckpointError, net, optimizer, lambda: optimizer.load_state_dict(saved), text)


PRESET = {
    "negative lr": ("lr", {"lr": -1e-3}),
    "lr NaN": ("lr", {"lr": NAN}),
    "lr inf": ("lr", {"lr": INF}),
    "a negative tensor": ("lr", {"lr": torch.tensor(-1.0)}),
    "b1 = 1": ("betas", {"betas": (1.0, 0.999)}),
    "b2 NaN": ("betas", {"betas": (0.9, NAN)}),
    "one beta": ("betas", {"betas": (0.9,)}),
    "three betas": ("betas", {"betas": (0.9, 0.99, 0.999)}),
    "eps": ("eps", {"eps": -1e-8}),
    "weight decay": ("weight_decay", {"weight_decay": INF}),
    "block 0": ("block", {"block": 0}),
    "block 2.5": ("block", {"block": 2.5}),
    "codebook": ("codebook", {"codebook": "learnt"}),
    "warm-up": ("b2_warmup", {"b2_warmup": 0.0}),
    "amsgrad": ("amsgrad", {"amsgrad": True}),
}


@pytest.mark.parametrize(("text", "arguments"), PRESET.values(), ids=PRESET)
def test_a_preset_refuses_an_argument_out_of_range(text, arguments):
    refuse(ValueError, lambda: Gefen(linear().parameters(), **arguments), text)


@pytest.mark.parametrize(
    ("text", "leaf"),
    [("floating", torch.ones(3).int()), ("floating", torch.ones(3, dtype=torch.complex64)), ("dense", None)],
    ids=["integer", "complex", "sparse"],
)
@pytest.mark.parametrize("build", [Gefen, lambda p: TransformOptimizer(p, adamw(0.1))], ids=["Gefen", "plain"])
def test_a_parameter_that_no_transform_takes_is_refused(build, text, leaf):
    refuse(StructureError, lambda: build([torch.ones(3).to_sparse() if leaf is None else leaf]), text)


FINITE_TOO = {
    **{k: tx for k, tx in KEEPING.items() if k != "masked"},
    **WRAPPED,
    "set to zero": set_to_zero(),
    "global norm": clip_by_global_norm(1.0),
    "one tile": gefen(0.1, second_moment=Factored()),
    "published": gefen(0.1, second_moment=Block(), drive="m_hat", b2_warmup=None),
}


def with_bad(value, seed=0):
    grads = {k: torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) for k, p in PARAMS.items()}
    for g in grads.values():
        g.view(-1)[3] = value
    return grads


def codes_of(state):
    return [x for x in tree_leaves(state) if isinstance(x, torch.Tensor) and x.dtype == torch.uint8]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("tx", FINITE_TOO.values(), ids=FINITE_TOO)
def test_non_finite_gradients_never_raise_and_codes_stay_codes(tx, value):
    state = tx.init(PARAMS)
    for t, bad in enumerate((value, 0.5, value, 0.5)):
        _, state = tx.update(with_bad(bad, t), state, PARAMS)
        assert all(codes.view(-1)[3] == 128 and not (codes == 127).any() for codes in codes_of(state))


@pytest.mark.parametrize("bad_step", [0, 1, 2])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("inner", [*ALIASES.values()], ids=ALIASES)
def test_apply_if_finite_leaves_the_state_as_if_the_bad_step_had_not_been_f4(inner, value, bad_step):
    tx, good = inner(0.1), [with_bad(0.5, seed) for seed in range(3)]
    guarded, state, clean = apply_if_finite(tx, 5), apply_if_finite(tx, 5).init(PARAMS), tx.init(PARAMS)
    for t, grads in enumerate(good):
        if t == bad_step:
            zeros, state = guarded.update(with_bad(value), state, PARAMS)
            assert all(not u.any() for u in zeros.values())
        updates, state = guarded.update(grads, state, PARAMS)
        expected, clean = tx.update(grads, clean, PARAMS)
        assert equal(expected, updates)
    assert equal(clean, state.inner_state) and int(state.total_notfinite) == 1
