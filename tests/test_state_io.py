"""States as flat dictionaries, parts by name, sizes; and masks for decay."""

from typing import NamedTuple

import pytest
import torch

from gefen_fn.accumulate import MultiSteps
from gefen_fn.adam import scale_by_adam
from gefen_fn.combine import chain, masked, named_chain, partition
from gefen_fn.gefen import scale_by_gefen
from gefen_fn.inject import inject_hyperparams
from gefen_fn.masks import decay_mask
from gefen_fn.scale import add_decayed_weights, scale, scale_by_learning_rate, scale_by_schedule, trace
from gefen_fn.state_io import compare_names, flatten_state, state_bytes, tree_get, tree_set, unflatten_state
from gefen_fn.tree import StructureError, tree_leaves, tree_structure
from gefen_nn import TransformOptimizer


class Codes(NamedTuple):
    codes: torch.Tensor
    absmax: torch.Tensor


class ScaleByCodesState(NamedTuple):
    mu: object


def params():
    return {"layer.0": {"w": torch.ones(3, 4), "b": torch.ones(4)}, "list": [torch.ones(2), None]}


def rated(learning_rate):
    return chain(scale_by_adam(), scale_by_learning_rate(learning_rate))


TRANSFORMS = {
    "plain": scale_by_adam(),
    "chain": chain(trace(0.9), scale(2.0), scale_by_adam()),
    "twice": chain(trace(0.9), trace(0.8), chain(trace(0.7))),
    "named": named_chain(("first", trace(0.9)), ("second", scale_by_adam())),
    "masked": masked(trace(0.9), lambda p: {"layer.0": {"w": True, "b": False}, "list": [True, False]}),
    "partition": partition({"x": trace(0.9), "y": trace(0.8)}, {"layer.0": {"w": "x", "b": "y"}, "list": ["x", "y"]}),
    "injected": inject_hyperparams(rated)(0.1),
    "accumulated": MultiSteps(rated(0.1), 2),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_flatten_then_unflatten_is_the_identity(name):
    state = TRANSFORMS[name].init(params())
    flat = flatten_state(state)
    back = unflatten_state(dict(reversed(flat.items())), state)
    assert tree_structure(back) == tree_structure(state) and type(back) is type(state)
    assert all(a is b for a, b in zip(tree_leaves(back), tree_leaves(state), strict=True))
    assert len(flat) == sum(leaf is not None for leaf in tree_leaves(state))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("plain", {"scale_by_adam.mu.layer%2E0.w", "scale_by_adam.count.list.0"}),
        ("chain", {"trace.trace.layer%2E0.w", "scale_by_adam.nu.layer%2E0.b"}),
        ("twice", {"trace.trace.list.0", "trace#2.trace.list.0", "trace#3.trace.list.0"}),
        ("named", {"trace.trace.list.0", "scale_by_adam.mu.list.0"}),
        ("masked", {"trace.trace.layer%2E0.w"}),
        ("partition", {"trace.trace.layer%2E0.w", "trace#2.trace.layer%2E0.b"}),
        ("injected", {"inject_hyperparams.hyperparams.learning_rate", "scale_by_adam.mu.list.0"}),
        ("accumulated", {"multi_steps.acc_grads.list.0", "multi_steps.mini_step", "scale_by_adam.mu.list.0"}),
    ],
)
def test_keys_are_stage_field_and_path(name, keys):
    assert keys <= flatten_state(TRANSFORMS[name].init(params())).keys()


def test_f6_inserting_a_stage_keeps_every_old_key():
    old = flatten_state(chain(trace(0.9), scale_by_adam()).init(params()))
    wider = chain(scale(1.0), trace(0.9), scale_by_schedule(lambda c: 1.0), add_decayed_weights(0.1), scale_by_adam())
    assert old.keys() <= flatten_state(wider.init(params())).keys()


def test_subfields_and_bare_tensors_have_keys():
    state = (
        ScaleByCodesState({"w": Codes(torch.zeros(2, dtype=torch.uint8), torch.zeros(1))}),
        ScaleByCodesState(torch.ones(1)),
    )
    assert list(flatten_state(state)) == [
        "scale_by_codes.mu.w.codes",
        "scale_by_codes.mu.w.absmax",
        "scale_by_codes#2.mu",
    ]


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (StructureError, "missing", lambda flat: flat.pop("trace.trace.a")),
        (StructureError, "unknown", lambda flat: flat.update(more=torch.ones(1))),
        (StructureError, "trace.trace.a", lambda flat: flat.update({"trace.trace.a": torch.ones(3)})),
        (StructureError, "bfloat16", lambda flat: flat.update({"trace.trace.a": flat["trace.trace.a"].bfloat16()})),
    ],
)
def test_q6_a_dictionary_that_does_not_fit_is_refused(error, text, change):
    state = trace(0.9).init({"a": torch.ones(2)})
    flat = flatten_state(state)
    change(flat)
    with pytest.raises(error, match=text):
        unflatten_state(flat, state)


def test_two_tensors_of_one_name_and_values_that_are_no_tensors_are_refused():
    with pytest.raises(StructureError, match="twice"):
        flatten_state(ScaleByCodesState({"a": {1: torch.ones(1), "1": torch.ones(1)}}))
    with pytest.raises(TypeError, match="must hold tensors"):
        flatten_state(ScaleByCodesState({"w": 3}))


def test_a_state_on_meta_takes_tensors_from_a_dictionary():
    tx = scale_by_adam()
    real = tx.init(params())
    with torch.device("meta"):
        like = tx.init(params())
    assert tree_get(unflatten_state(flatten_state(real), like), "mu")["layer.0"]["w"].device.type == "cpu"


def test_tree_get_finds_one_part_by_field_key_or_class():
    state = chain(trace(0.9), inject_hyperparams(rated)(0.1)).init({"w": torch.ones(2)})
    assert tree_get(state, "trace", filtering=lambda path, value: isinstance(value, dict))["w"].shape == (2,)
    assert float(tree_get(state, "learning_rate")) == pytest.approx(0.1)
    assert type(tree_get(state, "ScaleByAdamState")).__name__ == "ScaleByAdamState"
    assert tree_get(state, "absent", default=7) == 7
    with pytest.raises(KeyError, match="one part"):
        tree_get(state, "count")


def test_tree_set_replaces_every_match_and_leaves_the_state_alone():
    state = chain(trace(0.9), inject_hyperparams(rated)(0.1)).init({"w": torch.ones(2)})
    new = tree_set(state, learning_rate=torch.tensor(0.5))
    assert float(tree_get(new, "learning_rate")) == 0.5 and float(tree_get(state, "learning_rate")) == pytest.approx(
        0.1
    )
    assert tree_structure(new) == tree_structure(state)
    with pytest.raises(KeyError, match="absent"):
        tree_set(state, absent=1.0)


RATES = {
    "float": 0.25,
    "int": 1,
    "fp32": torch.tensor(0.25),
    "bf16": torch.tensor(0.25, dtype=torch.bfloat16),
    "float64": torch.tensor(0.25, dtype=torch.float64),
}


@pytest.mark.parametrize("put", ["tree_set", "by hand"])
@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
def test_a_number_put_into_a_state_takes_the_dtype_of_what_it_replaces(rate, put):
    tx, grads = inject_hyperparams(rated)(0.1), {"w": torch.ones(2)}
    state = tx.init(grads)
    if put == "tree_set":
        new = tree_set(state, learning_rate=rate)
        assert new.hyperparams["learning_rate"].dtype == torch.float64
    else:
        new = state._replace(hyperparams={"learning_rate": rate})
    _, new = tx.update(grads, new)
    assert torch.equal(tree_get(new, "learning_rate"), torch.tensor(float(rate), dtype=torch.float64))
    unflatten_state(flatten_state(new), state)


@pytest.mark.parametrize(
    ("field", "value"),
    [("learned", True), ("learned", torch.tensor(True)), ("mini_step", 1), ("mini_step", torch.tensor(1))],
)
def test_flags_and_counters_keep_their_dtype(field, value):
    tx = MultiSteps(scale_by_gefen(), 2)
    state = tree_set(tx.init(params()), **{field: value})
    assert int(tree_get(state, field)) == 1
    unflatten_state(flatten_state(state), tx.init(params()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_distinct_tensors_are_counted_once(device):
    shared, codes = torch.zeros(10, device=device), torch.zeros(7, dtype=torch.uint8, device=device)
    state = ({"a": shared, "b": shared, "c": shared.view(10)}, ScaleByCodesState(codes), None)
    assert state_bytes(state) == state_bytes(state, world="global") == 47


def test_the_state_of_an_optimizer_is_counted_by_parameter_as_well_as_the_tree():
    net = torch.nn.Linear(100, 64)
    optimizer = TransformOptimizer(net.named_parameters(), scale_by_gefen())
    assert state_bytes(optimizer.state) == state_bytes(optimizer.state_tree()) > 6400


def test_an_unknown_world_is_refused():
    with pytest.raises(ValueError, match="world"):
        state_bytes((), world="all")


NORMS = "norm norm1 layer_norm LayerNorm layerNorm rmsnorm RMSNorm RMSnorm input_layernorm q_norm norms".split()
NORMS += "ln_1 LN bn1 batchnorm2d BatchNorm2d GroupNorm batch_normalization PositionEmbedding posemb".split()
NO_NORMS = "normal normalRouter abnormal enormous normality member unembed unbiased debias lnear".split()


@pytest.mark.parametrize(
    ("path", "shape", "decayed"),
    [
        ("layers.0.mlp.weight", (4, 4), True),
        ("layers.0.mlp.bias", (4,), False),
        ("lm_head.weight", (9, 4), True),
        ("patch_embed.proj.weight", (4, 3, 2, 2), True),
        ("tok_embeddings.weight", (9, 4), False),
        ("wte", (9, 4), False),
        ("input_layernorm.weight", (4, 4), False),
        ("ln_1.scale", (2, 4), False),
        ("bias", (2, 4), False),
        *[(f"layers.{name}.weight", (2, 4), False) for name in NORMS],
        *[(f"layers.{name}.weight", (2, 4), True) for name in NO_NORMS],
    ],
)
def test_decay_spares_norms_biases_and_embeddings(path, shape, decayed):
    leaf = torch.empty(shape, device="meta")
    nested = leaf
    for part in reversed(path.split(".")):
        nested = {part: nested}
    assert decay_mask({path: leaf, "none": None}) == {path: decayed, "none": False}
    assert tree_leaves(decay_mask(nested)) == [decayed]


def test_f6_a_partial_dictionary_is_taken_if_asked_and_its_names_are_compared():
    old, new = scale_by_adam(), chain(trace(0.9), scale_by_adam())
    flat, like = flatten_state(old.init(params())), new.init(params())
    flat["unknown.x"] = torch.zeros(())
    report = compare_names(flat, like)
    assert all(name.startswith("trace.trace.") for name in report.missing) and report.unexpected == ("unknown.x",)
    state = unflatten_state(flat, like, strict=False)
    assert state[0] is not None and all(
        a is b for a, b in zip(tree_leaves(state[0]), tree_leaves(like[0]), strict=True)
    )
    assert flatten_state(state)["scale_by_adam.mu.list.0"] is flat["scale_by_adam.mu.list.0"]


def test_q21_codes_are_not_taken_without_their_codebook():
    tx, leaf = scale_by_gefen(), torch.randn(64, 100)
    flat = flatten_state(tx.update(leaf, tx.init(leaf))[1])
    del flat["scale_by_gefen.codebook"]
    with pytest.raises(StructureError, match="got codes alone"):
        unflatten_state(flat, tx.init(leaf), strict=False)
