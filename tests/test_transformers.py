"""Routing and a step on the real models of `transformers`, at tiny sizes; started by `make test-slow`."""

import re

import pytest
import torch

from gefen_nn import GefenMuon

pytestmark = pytest.mark.slow

WIDTHS = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1}
DECODER = {**WIDTHS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
VIT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 64}
PROJECTIONS = r"[qkvo]_proj.weight|(gate|up|down)_proj.weight"
EXPERTS = r"[qkvo]_proj.weight|experts.gate_up_proj|experts.down_proj"
# For each model type: of which kind, its sizes, and the names of what must be Muon's.
MODELS = {
    "llama": ("CausalLM", DECODER, PROJECTIONS),
    "qwen3": ("CausalLM", DECODER, PROJECTIONS),
    "mistral": ("CausalLM", DECODER, PROJECTIONS),
    "gemma2": ("CausalLM", {**DECODER, "bos_token_id": 1, "eos_token_id": 2}, PROJECTIONS),
    "mixtral": ("CausalLM", {**DECODER, "num_local_experts": 4}, EXPERTS),
    "qwen3_moe": ("CausalLM", {**DECODER, "num_experts": 4, "moe_intermediate_size": 96}, EXPERTS),
    "gpt2": (
        "CausalLM",
        {"vocab_size": 320, "n_embd": 64, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
        r"c_attn.weight|c_proj.weight|c_fc.weight",
    ),
    "mamba": (
        "CausalLM",
        {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1, "time_step_rank": 32},
        r"(in|x|dt|out)_proj.weight",
    ),
    "t5": (
        "Seq2SeqLM",
        {"vocab_size": 320, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2},
        r"Attention.[qkvo].weight|w[io].weight",
    ),
    "vit": (
        "ImageClassification",
        {**VIT, "image_size": 32, "patch_size": 8},
        r"[qkvo]_proj.weight|fc[12].weight|projection.weight",
    ),
    "resnet": (
        "ImageClassification",
        {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 1], "num_labels": 64},
        r"convolution.weight",
    ),
}


@pytest.mark.parametrize(("kind", "sizes", "muon"), MODELS.values(), ids=MODELS)
def test_real_models_are_divided_as_their_small_definitions_and_step(kind, sizes, muon, request):
    import transformers  # here, so that without the extra `integrations` each of these tests fails

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.node.callspec.id, **sizes)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    optimizer = GefenMuon(model, 1e-3)
    found = {path for path, rule in optimizer.routing().labels.items() if rule == "muon"}
    assert found == {name for name, p in model.named_parameters() if re.search(rf"({muon})$", name) and p.dim() > 1}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(p.isfinite().all() and not torch.equal(p, before[name]) for name, p in model.named_parameters())
