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
    apply_updates,
    chain,
    clip,
    clip_by_global_norm,
    constant_schedule,
    cosine_decay_schedule,
    default_codebook,
    dequantize,
    ema,
    find_blocks,
    gefen,
    global_norm,
    gradient_histogram,
    incremental_update,
    inject_hyperparams,
    join_schedules,
    learn_codebook,
    lion,
    masked,
    named_chain,
    orthogonalize,
    partition,
    piecewise_constant_schedule,
    quantize,
    scale,
    scale_by_adam,
    scale_by_gefen,
    scale_by_learning_rate,
    scale_by_lion,
    set_to_zero,
    sgd,
    trace,
    unflatten_state,
    zero_nans,
)
from gefen_fn.tree import tree_leaves

NAN, INF = math.nan, math.inf
W, B = torch.linspace(-1, 1, 64 * 72).reshape(64, 72), torch.linspace(1, 2, 5)
PARAMS = {"w": W, "b": B}


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
    "block as text": (ValueError, "`block`", lambda: gefen(0.1, block="256")),
    "flat block as text": (ValueError, "`block`", lambda: gefen(0.1, block=FlatBlocks("256"))),
    "quantize with a block as text": (ValueError, "`block`", lambda: quantize(W, default_codebook(), block="256")),
    "step size as text": (ValueError, "a string, '0.1'", lambda: incremental_update(W, W, "0.1")),
    "eps as text": (TypeError, "a string, '1e-7'", lambda: orthogonalize(W, eps="1e-7")),
    "levels as text": (ValueError, "`levels`", lambda: learn_codebook(gradient_histogram(W), levels="16")),
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
    "injected learning rate": (ValueError, "learning_rate", lambda: inject_hyperparams(adamw)(-1.0)),
    "injected NaN": (ValueError, "learning_rate", lambda: inject_hyperparams(adamw)(NAN)),
    "injected b1": (ValueError, "b1", lambda: inject_hyperparams(adamw)(0.1, b1=1.0)),
    "b2 beside a schedule": (ValueError, "b2", lambda: adamw(0.1, b1=lambda count: 0.9, b2=1.0)),
    "a transform to inject": (TypeError, "factory", lambda: inject_hyperparams(adamw(0.1))),
    "learning rate True": (ValueError, "learning_rate", lambda: adamw(True)),
    "learning rate as a vector": (ValueError, "learning_rate", lambda: adamw(torch.ones(5))),
    "tree of texts": (ValueError, "learning_rate", lambda: adamw({"w": "x", "b": 0.1})),
    "negative in a tree": (ValueError, "learning_rate", lambda: adamw({"w": -0.1, "b": 0.1})),
    "norm as text": (ValueError, "max_norm", lambda: clip_by_global_norm("1")),
    "norm per leaf": (ValueError, "max_norm", lambda: clip_by_global_norm({"w": 1.0, "b": 2.0})),
    "factor NaN": (ValueError, "step_size", lambda: scale(NAN)),
    "moments in text": (ValueError, "mu_dtype", lambda: adamw(0.1, mu_dtype="bf16")),
    "moments in integers": (ValueError, "mu_dtype", lambda: lion(0.1, mu_dtype=torch.int8)),
    "trace in integers": (ValueError, "accumulator_dtype", lambda: sgd(0.1, 0.9, accumulator_dtype=torch.int8)),
    "warm-up True": (ValueError, "b2_warmup", lambda: gefen(0.1, b2_warmup=True)),
    "warm-up inf": (ValueError, "b2_warmup", lambda: gefen(0.1, b2_warmup=INF)),
    "codebook None": (ValueError, "codebook", lambda: gefen(0.1, codebook=None)),
    "codebook as a list": (ValueError, "codebook", lambda: gefen(0.1, codebook=[0.0] * 256)),
    "codebook of NaN": (ValueError, "codebook", lambda: gefen(0.1, codebook=torch.full((256,), NAN))),
    "codebook of zeros": (ValueError, "codebook", lambda: gefen(0.1, codebook=torch.zeros(256))),
    "codebook to 2": (ValueError, "codebook", lambda: gefen(0.1, codebook=torch.linspace(-2, 2, 256))),
    "quantize by a text": (ValueError, "codebook", lambda: quantize(PARAMS, "fixed")),
    "quantize in bf16": (ValueError, "codebook", lambda: quantize(PARAMS, default_codebook().bfloat16())),
    "policy as text": (ValueError, "second_moment", lambda: gefen(0.1, second_moment="block")),
    "policy as a class": (ValueError, "second_moment", lambda: gefen(0.1, second_moment=Block)),
    "policy None": (ValueError, "second_moment", lambda: gefen(0.1, second_moment=None)),
    "tile of one side": (ValueError, "tile", lambda: Factored((16,))),
    "tile of three": (ValueError, "tile", lambda: Factored((16, 16, 16))),
    "tile as a number": (ValueError, "tile", lambda: Factored(16)),
    "tile of bools": (ValueError, "tile", lambda: Factored((True, True))),
    "MultiSteps of 2.5": (ValueError, "every_k_schedule", lambda: MultiSteps(adamw(0.1), 2.5)),
    "MultiSteps of a text": (ValueError, "every_k_schedule", lambda: MultiSteps(adamw(0.1), "2")),
    "MultiSteps of None": (ValueError, "every_k_schedule", lambda: MultiSteps(adamw(0.1), None)),
    "MultiSteps, swapped": (TypeError, "transform", lambda: MultiSteps(2, adamw(0.1))),
    "errors NaN": (ValueError, "max_consecutive_errors", lambda: apply_if_finite(adamw(0.1), NAN)),
    "errors as text": (ValueError, "max_consecutive_errors", lambda: apply_if_finite(adamw(0.1), "x")),
    "apply_if_finite, swapped": (TypeError, "transform", lambda: apply_if_finite(3, adamw(0.1))),
    "a list to partition": (TypeError, "transforms", lambda: partition([adamw(0.1)], {"w": 0, "b": 0})),
    "label as a list": (ValueError, "label", lambda: run(partition({"a": adamw(0.1)}, {"w": ["a"], "b": "a"}))),
    "a chain without names": (TypeError, "pairs", lambda: named_chain("a", scale(1.0))),
    "boundary as text": (ValueError, "a string, '5'", lambda: join_schedules([constant_schedule(1.0)] * 2, ["5"])),
    "factor as text": (ValueError, "a string, '0.1'", lambda: piecewise_constant_schedule(1.0, {5: "0.1"})),
    "count as text": (ValueError, "a string, '5'", lambda: piecewise_constant_schedule(1.0, {"5": 0.1})),
    "names of a module": (TypeError, "`flat`", lambda: unflatten_state(nn.Linear(2, 2), trace(0.9).init(W))),
    "steps as text": (ValueError, "decay_steps", lambda: cosine_decay_schedule(1.0, "10")),
    "numbers to join": (TypeError, "functions", lambda: join_schedules([1.0], [])),
    "params left out": (ValueError, "params", lambda: adamw(0.1).update(PARAMS, adamw(0.1).init(PARAMS))),
    "init of integers": (StructureError, "floating", lambda: gefen(0.1).init({"w": torch.ones(3).int()})),
    "init of a module": (StructureError, "tensors", lambda: gefen(0.1).init(nn.Linear(2, 2))),
    "adam for integers": (StructureError, "floating", lambda: adamw(0.1).init({"w": torch.ones(3).int()})),
    "adam for complex": (StructureError, "floating", lambda: adamw(0.1).init({"w": torch.ones(3).cfloat()})),
    "adam for sparse": (StructureError, "dense", lambda: adamw(0.1).init({"w": torch.ones(3).to_sparse()})),
    "adam for a module": (StructureError, "tensors", lambda: adamw(0.1).init(nn.Linear(2, 2))),
    "adam for a generator": (StructureError, "tensors", lambda: adamw(0.1).init(nn.Linear(2, 2).parameters())),
    "adam for numbers": (StructureError, "tensors", lambda: adamw(0.1).init({"w": 1.0})),
    "update of a number": (StructureError, "tensors", lambda: apply_updates({"w": 1.0}, {"w": torch.ones(1)})),
    "update None of a tree": (StructureError, "tensors", lambda: apply_updates(PARAMS, None)),
    "average of two shapes": (StructureError, "Shapes", lambda: incremental_update([W], [B], 0.1)),
    "average with None": (StructureError, "tensors", lambda: incremental_update([W], [None], 0.1)),
    "norm of numbers": (StructureError, "tensors", lambda: global_norm({"w": 1.0})),
    "norm of sparse": (StructureError, "dense", lambda: global_norm({"w": W.to_sparse()})),
    "a number in a state": (StructureError, "tensor", lambda: unflatten_state({"trace.trace": 3}, trace(0.9).init(W))),
}


MANY = {f"l{i}.w": B for i in range(9)}
FIRST = {"l.0": W, "list": [B]}
TREES = {
    "one missing": (MANY, {**MANY, "x": B}, "missing `x`."),
    "one unexpected": (FIRST, {"l.0": W}, "unexpected `list.0`."),
    "many": (MANY, {"y": B}, "missing `y`, unexpected `l0.w`, `l1.w`, `l2.w`, `l3.w`, `l4.w` and 4 more."),
    "a leaf for a dict": ({"a": W}, {"a": {"b": W}}, "missing `a.b`, unexpected `a`."),
    "a tuple": (FIRST, {"l.0": W, "list": (B,)}, "list for tuple at `list`."),
    "a list": ([W], {"0": W}, "list for dict."),
    "containers alone": ({"a": {}}, {}, "other empty containers."),
}


@pytest.mark.parametrize(("old", "first", "text"), TREES.values(), ids=TREES)
def test_trees_that_differ_are_told_by_a_few_paths_and_no_values(old, first, text):
    refuse(StructureError, lambda: incremental_update(first, old, 0.1), text)
    with pytest.raises(StructureError) as caught:
        incremental_update(first, old, 0.1)
    assert len(str(caught.value)) < 400 and caught.value.__suppress_context__


MASKS = {
    "too few": ({"l.0": True}, "missing `list.0`."),
    "too many": ({"l.0": True, "list": False, "z": True}, "unexpected `z`."),
    "a tuple": ({"l.0": True, "list": (True,)}, "tuple for list at `list`."),
}


@pytest.mark.parametrize(("mask", "text"), MASKS.values(), ids=MASKS)
def test_masks_that_do_not_fit_are_told_by_paths(mask, text):
    refuse(StructureError, lambda: masked(trace(0.9), mask).init(FIRST), text)


def test_a_chain_tells_how_many_states_it_has_for_how_many_stages():
    refuse(StructureError, lambda: chain(clip(1.0), clip(2.0)).update(W, ((),) * 3), "2 stages, got 3 states.")


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
    "masked, all": masked(adamw(0.1), lambda params: True),
    "partition": partition({"a": adamw(0.1)}, "a"),
    "clipped": chain(clip_by_global_norm(1.0), adamw(0.1)),
    "MultiSteps": MultiSteps(adamw(0.1), 2),
    "MultiSteps of 1": MultiSteps(adamw(0.1), 1),
    "apply_if_finite": apply_if_finite(adamw(0.1), 3),
    "injected": inject_hyperparams(gefen)(0.1),
}
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
    "a bare tensor": W,
}


def stepped(tx):
    """The state after one step, with the bits it holds."""
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    return state, copy.deepcopy(state)


@pytest.mark.parametrize("grads", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("tx", KEEPING.values(), ids=KEEPING)
def test_gradients_that_do_not_fit_are_refused_and_the_state_stays(tx, grads):
    state, before = stepped(tx)
    refuse(StructureError, lambda: tx.update(grads, state, PARAMS))
    assert equal(before, state)


SWAPPED = {
    "state, grads, params": lambda tx, state: tx.update(state, PARAMS, PARAMS),
    "grads, params, state": lambda tx, state: tx.update(PARAMS, PARAMS, state),
    "params, params": lambda tx, state: tx.update(PARAMS, PARAMS),
    "no state": lambda tx, state: tx.update(PARAMS, None, PARAMS),
    "params alone": lambda tx, state: tx.update(None, state, PARAMS),
    "the state of another": lambda tx, state: tx.update(PARAMS, zero_nans().init(PARAMS), PARAMS),
}


@pytest.mark.parametrize("call", SWAPPED.values(), ids=SWAPPED)
@pytest.mark.parametrize("tx", KEEPING.values(), ids=KEEPING)
def test_arguments_in_another_order_are_refused_and_the_state_stays_f12(tx, call):
    state, before = stepped(tx)
    refuse(StructureError, lambda: call(tx, state))
    assert equal(before, state)


OTHERS = {
    "another tile": (gefen(0.1, second_moment=Factored((16, 32))), gefen(0.1, second_moment=Factored((32, 32)))),
    "dense from factored": (gefen(0.1, second_moment=Dense()), gefen(0.1)),
    "dense from block": (gefen(0.1, second_moment=Dense()), gefen(0.1, second_moment=Block())),
    "factored from dense": (gefen(0.1), gefen(0.1, second_moment=Dense())),
    "block from factored": (gefen(0.1, second_moment=Block()), gefen(0.1)),
    "other labels": (partition({"x": trace(0.9)}, "x"), partition({"y": trace(0.9)}, "y")),
    "other hyperparameters": (inject_hyperparams(adamw)(0.1), inject_hyperparams(lion)(0.1)),
}


@pytest.mark.parametrize(("tx", "other"), OTHERS.values(), ids=OTHERS)
def test_the_state_of_the_same_transform_with_other_arguments_is_refused_f12(tx, other):
    refuse(StructureError, lambda: tx.update(PARAMS, other.init(PARAMS), PARAMS))


@pytest.mark.parametrize("tx", [adamw(0.1), gefen(0.1, weight_decay=0.1)], ids=["adamw", "gefen"])
@pytest.mark.parametrize("params", [{"w": W}, [W, B], {"w": W.t(), "b": B}, {"w": W.int(), "b": B}, (W, B)])
def test_params_that_do_not_fit_are_refused_where_they_are_read(tx, params):
    state, before = stepped(tx)
    refuse(StructureError, lambda: tx.update(PARAMS, state, params))
    assert equal(before, state)


FINITE_TOO = {
    **{k: tx for k, tx in KEEPING.items() if k != "masked"},
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
