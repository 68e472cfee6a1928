"""A string in the place of a number, and an object in the place of a tree of tensors, are told by what they are."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn

from gefen_fn import (
    EmptyState,
    StructureError,
    adamw,
    adaptive_grad_clip,
    add_decayed_weights,
    apply_updates,
    calibrate,
    clip,
    clip_by_block_rms,
    clip_by_global_norm,
    clip_by_qk,
    constant_schedule,
    cosine_decay_schedule,
    decay_mask,
    default_codebook,
    dequantize,
    describe,
    ema,
    exponential_decay,
    find_block,
    find_blocks,
    flatten_state,
    gefen,
    gefen_muon,
    global_norm,
    gradient_histogram,
    health,
    identity,
    learn_codebook,
    linear_schedule,
    lion,
    move_state,
    muon,
    muon_labels,
    orthogonalize,
    partition,
    piecewise_constant_schedule,
    polynomial_schedule,
    quantize,
    requantize,
    scale,
    set_to_zero,
    sgd,
    state_bytes,
    trace,
    tree_get,
    tree_set,
    warmup_cosine_decay_schedule,
    warmup_stable_decay_schedule,
    zero_nans,
)
from gefen_nn import Gefen, StateTree, adamw_state, convert_state, inspect_checkpoint, load, lr_find, route, save
from tests.test_bad_input import PARAMS, W, refuse

NUMBERS = {
    sgd: ["learning_rate", "momentum"],
    adamw: ["learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"],
    lion: ["learning_rate", "b1", "b2", "weight_decay"],
    gefen: ["learning_rate", "b1", "b2", "eps", "weight_decay", "b2_warmup"],
    muon: ["learning_rate", "momentum", "weight_decay", "eps"],
    gefen_muon: ["learning_rate", "muon_learning_rate", "momentum", "weight_decay", "b1", "b2", "eps", "b2_warmup"],
    scale: ["step_size"],
    ema: ["decay"],
    add_decayed_weights: ["weight_decay"],
    clip: ["max_delta"],
    clip_by_global_norm: ["max_norm"],
    clip_by_block_rms: ["threshold"],
    clip_by_qk: ["threshold"],
    adaptive_grad_clip: ["clipping", "eps"],
    constant_schedule: ["value"],
    linear_schedule: ["init_value", "end_value"],
    polynomial_schedule: ["init_value", "end_value", "power"],
    exponential_decay: ["init_value", "decay_rate", "end_value"],
    cosine_decay_schedule: ["init_value", "alpha", "exponent"],
    piecewise_constant_schedule: ["init_value"],
    warmup_cosine_decay_schedule: ["init_value", "peak_value", "end_value", "exponent"],
    warmup_stable_decay_schedule: ["init_value", "peak_value", "end_value"],
}
STEPS = {"transition_steps": 9, "warmup_steps": 1, "stable_steps": 9, "decay_steps": 10}
AS_TEXT = [(factory, name) for factory, names in NUMBERS.items() for name in names]


@pytest.mark.parametrize(("factory", "name"), AS_TEXT, ids=[f"{f.__name__} {name}" for f, name in AS_TEXT])
def test_a_number_given_as_text_is_called_a_string_and_the_fix_named(factory, name):
    wanted = [p.name for p in inspect.signature(factory).parameters.values() if p.default is p.empty]
    given = {**{key: STEPS.get(key, 0.5) for key in wanted}, name: "1e-3"}
    refuse(ValueError, lambda: factory(**given), "got a string, '1e-3'. Write a float; YAML reads 1e-3 as a string")


@dataclasses.dataclass
class Weights:
    w: torch.Tensor


NET = nn.Linear(72, 64)
NO_TREES = {
    "a module": (NET, "dict(module.named_parameters())"),
    "a generator": (NET.parameters(), "dict(module.named_parameters())"),
    "pairs": (list(NET.named_parameters()), "dict(module.named_parameters())"),
    "a dataclass": (Weights(W), "optree.register_pytree_node"),
    "an optimizer": (Gefen(NET.named_parameters()), "optimizer.state_tree()"),
    "an optimizer of torch": (torch.optim.SGD(NET.parameters()), "optimizer.state"),
}
BOOK = default_codebook()
TRANSFORMS = [identity(), sgd(0.1), clip(1.0), clip_by_qk(), zero_nans(), gefen(0.1), gefen_muon(0.1)]
TAKE_TREES = [
    *(tx.init for tx in TRANSFORMS),
    partition({0: sgd(0.1)}, 0).init,
    lambda tree: describe(sgd(0.1), tree),
    lambda tree: adamw(0.1).update(tree, adamw(0.1).init({}), tree),
    lambda tree: adamw(0.1).update(PARAMS, adamw(0.1).init(PARAMS), tree),
    lambda tree: set_to_zero().update(tree, EmptyState()),
    lambda tree: apply_updates(tree, PARAMS),
    lambda tree: apply_updates(tree, tree),
    lambda tree: calibrate(adamw(0.1), PARAMS, adamw(0.1).init(PARAMS), tree),
    decay_mask,
    muon_labels,
    find_blocks,
    global_norm,
    gradient_histogram,
    lambda tree: quantize(tree, BOOK),
    lambda tree: dequantize(tree, BOOK),
    lambda tree: requantize(tree, BOOK, BOOK),
    lambda tree: health(tree),
    lambda tree: health(trace(0.9).init(W), tree),
    state_bytes,
    flatten_state,
    lambda tree: tree_get(tree, "mu"),
    lambda tree: tree_set(tree, mu=0.0),
    lambda tree: move_state(tree, "cpu"),
    lambda tree: StateTree(tree, PARAMS),
    lambda tree: StateTree(EmptyState(), tree),
]


@pytest.mark.parametrize(("given", "fix"), NO_TREES.values(), ids=NO_TREES)
def test_what_is_no_tree_of_tensors_is_refused_and_the_way_to_one_named(given, fix):
    for call in TAKE_TREES:
        refuse((StructureError, TypeError), lambda call=call: call(given), fix)


NO_TENSORS = {
    "orthogonalize": orthogonalize,
    "find_block": lambda module: find_block(module, (64, 72)),
    "learn_codebook": learn_codebook,
}


@pytest.mark.parametrize("call", NO_TENSORS.values(), ids=NO_TENSORS)
def test_a_module_in_the_place_of_one_tensor_is_refused(call):
    refuse(TypeError, lambda: call(NET), "got Linear. Pass ")


NO_OPTIMIZERS = {"adamw_state": adamw_state, "convert_state": lambda net: convert_state({}, net)}


@pytest.mark.parametrize("call", NO_OPTIMIZERS.values(), ids=NO_OPTIMIZERS)
def test_a_module_in_the_place_of_its_optimizer_is_refused(call):
    refuse(TypeError, lambda: call(NET), "must be one of gefen_nn")


OTHERS = {
    "route of a dict": (TypeError, lambda: route(dict(NET.named_parameters())), ".items()"),
    "route of parameters": (TypeError, lambda: route(NET.parameters()), "named_parameters()"),
    "lr_find of a module": (TypeError, lambda: lr_find(NET), "`make_run` must be a function of a seed"),
    "lr_find of an optimizer": (TypeError, lambda: lr_find(lambda seed: None, 0.1), "`optimizer` must be a function"),
    "a rate as text": (ValueError, lambda: lr_find(lambda seed: None, low="1e-6"), "must be numbers"),
    "a count as text": (
        ValueError,
        lambda: lr_find(lambda seed: None, steps="10"),
        "`steps` must be at least 10, an int",
    ),
    "inspect_checkpoint of a module": (TypeError, lambda: inspect_checkpoint(NET), "`path` must be text or a path"),
    "save of a module": (TypeError, lambda: save(NET, "run", Gefen(NET.named_parameters())), "`path` must be"),
    "load of a module": (TypeError, lambda: load(NET, "run", Gefen(NET.named_parameters())), "`path` must be"),
}


@pytest.mark.parametrize(("error", "call", "text"), OTHERS.values(), ids=OTHERS)
def test_a_tool_that_is_given_something_else_says_what_it_takes(error, call, text):
    refuse(error, call, text)
