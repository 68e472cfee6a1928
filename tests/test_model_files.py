"""Shapes of models from their descriptions; parameter counts are those that their authors publish."""

import json
import math

import pytest
import torch
from torch import nn

from gefen_nn import Gefen, GefenMuon
from gefen_nn.cli import main
from gefen_nn.memory import memory_of
from gefen_nn.model_files import model_of, of_config

WIDE = {"num_attention_heads": 32, "num_key_value_heads": 8}
CONFIGS = {
    "Llama-3-8B": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, **WIDE}
        | {"vocab_size": 128256},
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, **WIDE}
        | {"vocab_size": 32000},
        7_241_732_096,
    ),
    "Qwen3-8B": (
        {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, **WIDE}
        | {"vocab_size": 151936, "head_dim": 128},
        8_190_735_360,
    ),
    "Gemma-2-9B": (
        {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000},
        9_241_705_984,
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, **WIDE}
        | {"vocab_size": 32000, "num_local_experts": 8},
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
        | {"num_experts": 128, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []},
        30_532_122_624,
    ),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
        7_615_616_512,
    ),
}


def network():
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 300), nn.Linear(64, 300), nn.BatchNorm1d(300))


def no_network():
    return 3


def task(seed):
    return network()


@pytest.mark.parametrize(("config", "count"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_has_the_published_number_of_parameters(config, count):
    assert sum(math.prod(shape) for _, shape in of_config(config)) == count


def test_a_config_file_is_a_few_kinds_of_leaves_and_its_matrices_are_muons(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-30B-A3B"][0]))
    model = model_of(str(tmp_path))
    experts = model["model.layers.*.mlp.experts.up_proj"]
    assert (experts.shape, experts.copies, experts.muon, experts.experts) == ((128, 768, 2048), 48, True, True)
    assert not model["model.embed_tokens.weight"].muon and not model["lm_head.weight"].muon
    assert model["model.layers.*.self_attn.q_proj.weight"].muon and len(model) == 15


def write_header(path, names):
    held = {name: {"dtype": "BF16", "shape": [64, 300], "data_offsets": [0, 38400]} for name in names}
    text = json.dumps({"__metadata__": {"format": "pt"}, **held}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)  # and no weights: none is read


def test_headers_of_safetensors_are_enough(tmp_path):
    write_header(tmp_path / "a.safetensors", ["layers.0.w", "layers.1.w"])
    write_header(tmp_path / "b.safetensors", ["layers.2.w"])
    assert model_of(str(tmp_path / "a.safetensors"))["layers.*.w"].copies == 2
    files = {"layers.0.w": "a.safetensors", "layers.1.w": "a.safetensors", "layers.2.w": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert model_of(str(tmp_path))["layers.*.w"].copies == 3


def test_a_factory_is_built_on_meta_and_its_modules_tell_whose_each_leaf_is():
    model = model_of("tests.test_model_files:network")
    assert [(leaf.copies, leaf.muon) for leaf in model.values() if leaf.shape == (300, 64)] == [(2, True)]
    assert [leaf.muon for leaf in model.values() if leaf.shape == (100, 64)] == [False]
    assert sum(leaf.copies for leaf in model.values()) == len(list(network().parameters()))


def test_bytes_are_those_of_the_optimizers():
    memory = memory_of(model_of("tests.test_model_files:network"))
    net = network()
    adamw = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    adamw.step()
    moments = [x for held in adamw.state.values() for key, x in held.items() if key != "step"]
    assert memory.bytes["adamw"] == sum(x.numel() * x.itemsize for x in moments)
    for name, optimizer in {"gefen": Gefen(net.named_parameters()), "gefen_muon": GefenMuon(net)}.items():
        report = optimizer.describe()
        counters = 4 * sum("scale_by_gefen" in leaf.rule for leaf in report.leaves)
        assert memory.bytes[name] == sum(leaf.bytes for leaf in report.leaves) - counters


def header(shape):
    text = json.dumps({"w": {"dtype": "BF16", "shape": shape}}).encode()
    text = b"[" * 200_000 if shape == "deep" else text
    return len(text).to_bytes(8, "little") + text


BAD = {
    "nothing": ("no-such-model", 2, "must be of llama-3-70b"),
    "another kind": ({"model_type": "bert"}, 1, "`model_type` must be of llama"),
    "half a config": ({"model_type": "llama", "hidden_size": 8}, 1, "must have 'vocab_size'"),
    "no vocabulary": (
        {"model_type": "llama", "hidden_size": 8, "vocab_size": None, "num_hidden_layers": 1},
        1,
        "must have 'vocab_size'",
    ),
    "layers in no list": ({"model_type": "qwen3_moe", "mlp_only_layers": 5}, 1, "`mlp_only_layers` of a config must"),
    "JSON in JSON": (b"[" * 200_000, 1, "which is not (maximum recursion depth"),
    "a header of JSON in JSON": (header("deep"), 1, "must begin with its header"),
    "an endless leaf": (header([10**12, 10**6]), 1, "at most 134,217,728 entries along an axis"),
    "files elsewhere": ({"weight_map": {"w": "../../../etc/passwd"}}, 1, "An index must name files beside it"),
    "files of no name": ({"weight_map": {"w": 5, "v": "x"}}, 1, "An index must name files beside it: got 5"),
    "many layers": ({"model_type": "llama", "num_hidden_layers": 10**9}, 1, "from 0 to 10,000: got 1000000000"),
    "half a layer": ({"model_type": "llama", "num_hidden_layers": 1e9}, 1, "from 0 to 10,000: got 1000000000.0"),
    "no heads": ({"model_type": "llama", "num_attention_heads": 0}, 1, "must be an integer from 1"),
    "a list": ([1], 1, "must hold an object: got a list"),
    "no JSON": ("broken", 1, "broken.json', which is not"),
    "a task": ("tests.test_model_files:task", 2, "of nothing: got one of seed"),
    "no model": ("tests.test_model_files:no_network", 2, "must make a torch.nn.Module"),
    "no header": (b"\xff" * 40, 1, "must begin with its header"),
    "a negative shape": (header([-1, 3]), 1, "got [-1, 3] for 'w'"),
    "no folder": ("no/such/config.json", 1, "No such file"),
}


@pytest.mark.parametrize(("given", "code", "words"), BAD.values(), ids=BAD)
def test_what_describes_no_model_is_refused(given, code, words, tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    given = str(tmp_path / "broken.json") if given == "broken" else given
    path = tmp_path / ("x.safetensors" if isinstance(given, bytes) and given[:1] != b"[" else "config.json")
    if not isinstance(given, str):
        path.write_bytes(given if isinstance(given, bytes) else json.dumps(given).encode())
    assert main(["memory", "--model", given if isinstance(given, str) else str(path)]) == code
    assert words in capsys.readouterr().err


EXPERTS = {"of none": ("llama-3-8b", "4", "a model with experts"), "no divisor": ("moe-1t", "3", "must divide `world`")}


@pytest.mark.parametrize(("model", "over", "words"), EXPERTS.values(), ids=EXPERTS)
def test_experts_are_shared_out_where_there_are_some(model, over, words, capsys):
    assert main(["memory", "--model", model, "--world", "4", "--experts-over", over]) == 2
    assert words in capsys.readouterr().err
