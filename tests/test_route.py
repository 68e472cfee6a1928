"""Which parameter of a model is Muon's, on small definitions of well-known models."""

import re

import pytest
import torch
from torch import nn

from gefen_fn import MatrixAxes, gefen_muon, muon_labels
from gefen_nn import Choice, GefenMuon, route
from tests import model_zoo
from tests.model_zoo import Conv1D, Norm, Parts, linear

VECTOR = ("backup", "fewer than 2 axes")
EMBEDDING = ("backup", "an embedding")
POSITIONS = "learned positions by its name"
HEAD = ("backup", "an output layer by its name")
DECODER = {
    "embed_tokens.weight": EMBEDDING,
    "q_proj.weight": ("muon", "matrix 64 x 64"),
    "[kv]_proj.weight": ("muon", "matrix 32 x 64"),
    "o_proj.weight": ("muon", "matrix 64 x 64"),
    "(gate|up)_proj.weight": ("muon", "matrix 176 x 64"),
    "down_proj.weight": ("muon", "matrix 64 x 176"),
    "(layer|[.])norm.weight": VECTOR,
}
TIED = {**DECODER, "embed_tokens.weight": ("backup", "an embedding, tied to lm_head.weight")}
EXPECTED = {
    "llama": {**DECODER, "lm_head.weight": HEAD},
    "qwen3": {**TIED, "[qk]_norm.weight": VECTOR},
    "mistral": {**DECODER, "[kv]_proj.weight": ("muon", "matrix 64 x 64"), "lm_head.weight": HEAD},
    "mixtral": {
        "embed_tokens.weight": EMBEDDING,
        "[qkvo]_proj.weight": ("muon", "matrix 64 x 64"),
        "mlp.gate.weight": ("backup", "a side below 32"),
        "gate_up_proj": ("muon", "8 matrices 192 x 64; if fused, a MatrixAxes with `split` parts it"),
        "experts.down_proj": ("muon", "8 matrices 64 x 96"),
        "(layer|[.])norm.weight": VECTOR,
        "lm_head.weight": HEAD,
    },
    "gemma": {
        **TIED,
        "(gate|up)_proj.weight": ("muon", "matrix 256 x 64"),
        "down_proj.weight": ("muon", "matrix 64 x 256"),
    },
    "gpt2": {
        "wte.weight": ("backup", "an embedding, tied to lm_head.weight"),
        "wpe.weight": EMBEDDING,
        "c_attn.weight": ("muon", "matrix 192 x 64; if fused, a MatrixAxes with `split` parts it"),
        "attn.c_proj.weight": ("muon", "matrix 64 x 64"),
        "c_fc.weight": ("muon", "matrix 256 x 64"),
        "mlp.c_proj.weight": ("muon", "matrix 64 x 256"),
        "bias|ln_[12f].weight": VECTOR,
    },
    "t5": {
        "shared.weight": (
            "backup",
            "an embedding, tied to encoder.embed_tokens.weight, decoder.embed_tokens.weight, lm_head.weight",
        ),
        "relative_attention_bias.weight": EMBEDDING,
        "Attention.[qkvo].weight": ("muon", "matrix 64 x 64"),
        "wi.weight": ("muon", "matrix 128 x 64"),
        "wo.weight": ("muon", "matrix 64 x 128"),
        "layer_norm.weight": VECTOR,
    },
    "vit": {
        "cls_token": ("backup", "one row or column"),
        "pos_embed": ("backup", "an embedding by its name"),
        "patch_embed.proj.weight": ("muon", "matrix 64 x 192"),
        "qkv.weight": ("muon", "matrix 192 x 64; if fused, a MatrixAxes with `split` parts it"),
        "attn.proj.weight": ("muon", "matrix 64 x 64"),
        "fc1.weight": ("muon", "matrix 256 x 64"),
        "fc2.weight": ("muon", "matrix 64 x 256"),
        "head.weight": HEAD,
        "bias|norm[12]?.weight": VECTOR,
    },
    "resnet": {
        "^conv1.weight": ("muon", "matrix 32 x 147"),
        "layer1.0.conv1.weight": ("muon", "matrix 64 x 288"),
        "conv2.weight": ("muon", "matrix 64 x 576"),
        "downsample.0.weight": ("muon", "matrix 64 x 32"),
        "fc.weight": HEAD,
        "bias|bn1.weight|downsample.1.weight": VECTOR,
    },
    "mamba": {
        "embeddings.weight": ("backup", "an embedding, tied to lm_head.weight"),
        "A_log": ("backup", "a side below 32"),
        "conv1d.weight": ("backup", "a depthwise convolution"),
        "in_proj.weight": ("muon", "matrix 256 x 64"),
        "x_proj.weight": ("muon", "matrix 64 x 128"),
        "dt_proj.weight": ("muon", "matrix 128 x 32"),
        "out_proj.weight": ("muon", "matrix 64 x 128"),
        "mixer.D|bias|norm(_f)?.weight": VECTOR,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_kind_of_leaf_of_a_model_goes_where_it_should_m9(name):
    wrong, used = [], set()
    for leaf in route(getattr(model_zoo, name)(), backup="adamw").leaves:
        kinds = [kind for kind in EXPECTED[name] if re.search(f"({kind})$", leaf.path)]
        found = ("backup" if leaf.rule == "adamw" else leaf.rule, leaf.why)
        wrong += [(leaf.path, *found)] if [EXPECTED[name][kind] for kind in kinds] != [found] else []
        used |= set(kinds)
    assert wrong == [] and used == set(EXPECTED[name])


@pytest.mark.parametrize("name", EXPECTED)
def test_shapes_and_names_alone_divide_these_models_as_their_modules_do(name):
    model = getattr(model_zoo, name)()
    params = dict(model.named_parameters())
    by_name, by_module = route(params.items()).labels, route(model).labels
    assert by_name == muon_labels(params)
    # T5 calls its embedding "shared", which only its module can tell.
    assert {path for path in params if by_name[path] != by_module[path]} == ({"shared.weight"} & params.keys())


class VocabularyEmbedding(nn.Module):
    """An embedding that is no `nn.Embedding`, as a parallel one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(64, 64))


def head_first():
    model = Parts(out=linear(64, 320), table=nn.Embedding(320, 64))
    model.table.weight = model.out.weight
    return model


MODULES = {
    "a head before the embedding it is tied to": (head_first(), "out.weight", "an embedding, tied to table.weight"),
    "an embedding of another class": (Parts(v=VocabularyEmbedding()), "v.table", "an embedding"),
    "the scales of a norm over two axes": (Parts(n=nn.LayerNorm((40, 64))), "n.weight", "the scales of a norm"),
    "groups too small": (Parts(c=nn.Conv2d(128, 128, 3, groups=8)), "c.weight", "a side below 32"),
    "two filters a channel": (Parts(c=nn.Conv2d(64, 128, 7, groups=64)), "c.weight", "a side below 32"),
    "one filter a channel": (Parts(c=nn.Conv2d(64, 64, 7, groups=64)), "c.weight", "a depthwise convolution"),
    "a table of biases": (Parts(position_bias=torch.zeros(169, 32)), "position_bias", "a bias by its name"),
    "positions": (Parts(pos=torch.zeros(1, 196, 64)), "pos", POSITIONS),
    "an encoding of positions": (Parts(positional_encoding=torch.zeros(256, 64)), "positional_encoding", POSITIONS),
    "relative positions": (Parts(a=Parts(rel_pos=torch.zeros(127, 64))), "a.rel_pos", POSITIONS),
    "relative positions of one side": (Parts(rel_pos_h=torch.zeros(127, 64)), "rel_pos_h", POSITIONS),
    "a module of positions": (Parts(pos_encoding=Parts(weight=torch.zeros(256, 64))), "pos_encoding.weight", POSITIONS),
    "the last of a classifier": (Parts(classifier=nn.Sequential(linear(64, 64))), "classifier.0.weight", HEAD[1]),
    "a row m2": (Parts(a=linear(64, 1)), "a.weight", "one row or column"),
    "a column m2": (Parts(a=linear(1, 64)), "a.weight", "one row or column"),
}


@pytest.mark.parametrize(("model", "path", "why"), MODULES.values(), ids=MODULES)
def test_the_backup_gets_what_is_no_map_between_features_m2(model, path, why):
    leaf = next(leaf for leaf in route(model).leaves if leaf.path == path)
    assert leaf.rule == "gefen" and leaf.why.startswith(why)


AXES = {
    "a transposed weight": (Conv1D(192, 64), MatrixAxes(1, 0)),
    "groups": (nn.Conv2d(64, 96, 3, groups=2), MatrixAxes(0, (1, 2, 3), split=(48, 48))),
    "a linear layer": (linear(64, 64), None),
}


@pytest.mark.parametrize(("layer", "axes"), AXES.values(), ids=AXES)
def test_a_layer_that_uses_its_weight_otherwise_tells_its_matrices(layer, axes):
    assert route(Parts(c=layer)).spec["c.weight"] == axes
    assert route(Parts(c=layer)).labels["c.weight"] == "muon"


@pytest.mark.parametrize("name", ["pos_proj", "linear_pos", "position_wise", "compose", "opposite"])
def test_a_map_is_muons_though_its_name_speaks_of_positions(name):
    assert route(Parts(**{name: linear(64, 64)})).labels == {f"{name}.weight": "muon"}


def test_an_fc_is_an_output_layer_at_the_top_of_a_model_only():
    inner = Parts(fc=linear(64, 64))
    labels = route(Parts(fc=linear(64, 64), block=inner)).labels
    assert labels == {"fc.weight": "gefen", "block.fc.weight": "muon"}


SPLIT = MatrixAxes(0, 1, split=(64, 32, 32))
RULES = {
    "a name": ({"a.weight": "gefen"}, ("gefen", "your rule")),
    "a pattern": ({"a.*": "gefen"}, ("gefen", "your rule")),
    "the first that fits": ({"*.weight": "gefen", "a.weight": "muon"}, ("gefen", "your rule")),
    "axes": ({"a.weight": SPLIT}, ("muon", "your rule: 3 matrices 64 x 64 and 32 x 64")),
    "a function": (lambda name, p: "gefen" if p.shape[0] == 128 else None, ("gefen", "your rule")),
    "a function that leaves all": (lambda name, p: None, ("muon", "matrix 128 x 64")),
    "a choice": ({"a.weight": Choice("gefen", "as before")}, ("gefen", "as before")),
    "a choice of another model": ({"other.weight": Choice("gefen", "as before")}, ("muon", "matrix 128 x 64")),
}


@pytest.mark.parametrize(("rules", "expected"), RULES.values(), ids=RULES)
def test_your_rules_come_first(rules, expected):
    choice = route(Parts(a=linear(64, 128), b=linear(64, 64)), rules).choices["a.weight"]
    assert (choice.rule, choice.why) == expected


def test_a_name_may_be_of_a_parameter_that_is_left_out_where_no_model_is_given():
    rules = {"frozen.weight": "gefen", "a.weight": "gefen"}
    assert route([("a.weight", torch.zeros(64, 64))], rules).labels == {"a.weight": "gefen"}


def test_a_rule_for_a_module_is_for_all_its_parameters_and_may_send_an_embedding_to_muon():
    model = Parts(tower=Parts(a=linear(64, 64), b=linear(64, 64)), table=nn.Embedding(64, 64))
    labels = route(model, {model.tower: "gefen", model.table: "muon"}).labels
    assert labels == {"tower.a.weight": "gefen", "tower.b.weight": "gefen", "table.weight": "muon"}


BAD_RULES = {
    "unknown": ({"a.weight": "adamw"}, ValueError, r"'muon', 'gefen' or a MatrixAxes: got 'adamw' for 'a.weight'"),
    "no fit": ({"*.router.weight": "gefen"}, ValueError, r"'\*\.router\.weight', which fits none of 2"),
    "module": ({linear(64, 64): "gefen"}, ValueError, "got Linear, which fits none"),
    "a name": ({"a.wieght": "gefen"}, ValueError, "got 'a.wieght', which fits none of 2. Did you mean 'a.weight'"),
    "axes of a name": ({"b.weight": MatrixAxes(0, 1)}, ValueError, "Did you mean 'a.weight'"),
    "a module's name": ({"a": "muon"}, ValueError, r"got 'a', which fits none of 2. Did you mean 'a\.\*'\?"),
    "nothing near": ({"zzz": "muon"}, ValueError, "none of 2. Correct it"),
    "a value that is not reached": (
        {"*": "gefen", "a.weight": "nonsense"},
        ValueError,
        "got 'nonsense' for 'a.weight'",
    ),
    "a value of nothing": ({"a.weight": None}, ValueError, "got None for 'a.weight'"),
    "a choice": ({"b.weight": Choice("adamw", "")}, ValueError, "got Choice.* for 'b.weight'"),
    "vector": ({"a.*": "muon"}, ValueError, r"`a.bias` of shape \(64,\) cannot.* put '\*a.bias': 'gefen' first"),
    "axes": ({"a.weight": MatrixAxes(0, 2)}, ValueError, r"`a.weight` of shape \(64, 64\) cannot be Muon's"),
    "key": ({3: "muon"}, TypeError, "a name, a pattern or a module: got int"),
}


@pytest.mark.parametrize(("rules", "error", "text"), BAD_RULES.values(), ids=BAD_RULES)
def test_a_rule_that_is_none_or_fits_nothing_is_refused(rules, error, text):
    with pytest.raises(error, match=text):
        route(Parts(a=linear(64, 64, bias=True)), rules)


def test_a_tied_parameter_is_told_by_the_name_that_it_has():
    with pytest.raises(ValueError, match=r"got 'table.weight', which fits none of 1\. Did you mean 'out.weight'"):
        route(head_first(), {"table.weight": "muon"})


def test_the_advice_for_a_vector_can_be_followed():
    model = Parts(a=linear(64, 64, bias=True))
    assert route(model, {"*a.bias": "gefen", "a.*": "muon"}).labels == {"a.weight": "muon", "a.bias": "gefen"}


def test_the_report_tells_leaf_rule_why_lr_and_bytes_m28():
    model = Parts(a=linear(64, 96), norm=Norm(64), frozen=linear(64, 64))
    model.frozen.weight.requires_grad_(False)
    report = route(model, lr=0.002)
    table = [re.split(r"\s{2,}", line) for line in str(report).splitlines()]
    assert table == [
        ["leaf", "shape", "rule", "lr", "bytes", "why"],
        ["a.weight", "[96, 64]", "muon", "0.002 x 1.96", "6,528", "matrix 96 x 64"],
        ["norm.weight", "[64]", "gefen", "0.002", "516", "fewer than 2 axes"],
        ["frozen.weight", "[64, 64]", "muon", "0.002 x 1.6", "0", "frozen; matrix 64 x 64"],
        ["muon: 2 leaves, 10,240 entries (99.4%), 6,528 bytes of state"],
        ["gefen: 1 leaves, 64 entries (0.6%), 516 bytes of state"],
    ]
    without = [re.split(r"\s{2,}", line) for line in str(route(model)).splitlines()]
    assert without == [row[:3] + row[4:] for row in table[:4]] + table[4:]
    held = {leaf.path: leaf.bytes for leaf in GefenMuon(model).describe().leaves}
    assert {leaf.path: leaf.bytes for leaf in report.leaves if leaf.bytes} == held


def test_labels_and_spec_are_arguments_of_the_functional_optimizer():
    torch.manual_seed(0)
    model = model_zoo.gpt2()
    report, params = route(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    tx = gefen_muon(1e-3, param_labels=report.labels, spec=report.spec)
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    updates, _ = tx.update(grads, tx.init(params), params)
    for name, p in model.named_parameters():
        p.grad = grads[name]
    GefenMuon(model).step()
    assert all(torch.equal(p, params[name] + updates[name]) for name, p in model.named_parameters())


def test_muons_part_of_an_8b_model_costs_at_most_1_02_bytes_per_parameter():
    with torch.device("meta"):
        layer = Parts(
            q=linear(4096, 4096), k=linear(4096, 1024), o=linear(4096, 4096), mlp=model_zoo.gated(4096, 14336)
        )
    leaves = [leaf for leaf in route(layer).leaves if leaf.rule == "muon"]
    entries = sum(leaf.shape[0] * leaf.shape[1] for leaf in leaves)
    assert len(leaves) == 6 and sum(leaf.bytes for leaf in leaves) <= 1.02 * entries
