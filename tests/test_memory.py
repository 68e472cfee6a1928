"""State bytes per parameter on the leaf shapes of real models, computed on meta tensors (cases q18, q25)."""

import pytest
import torch

from gefen_fn import Factored, gefen, state_bytes
from gefen_fn.tree import tree_leaves


def decoder(width, hidden, key_value, vocabulary, head_width=None, untied=True):
    """One layer's leaves and the embeddings; further layers repeat the ratio of a layer."""
    query = head_width or width
    shapes = {"embed": (vocabulary, width), "norm": (width,), "q": (query, width), "k": (key_value, width)}
    shapes |= {"v": (key_value, width), "o": (width, query), "gate": (hidden, width), "up": (hidden, width)}
    shapes |= {"down": (width, hidden)}
    return shapes | ({"lm_head": (vocabulary, width)} if untied else {})


MODELS = {
    "Llama-3-8B": (decoder(4096, 14336, 1024, 128256), 1.02),
    "Qwen3-8B": (decoder(4096, 12288, 1024, 151936), 1.02),
    "Mistral-7B": (decoder(4096, 14336, 1024, 32000), 1.02),
    "Gemma-2-9B": (decoder(3584, 14336, 2048, 256000, 4096, untied=False), 1.02),
    "MoE 128 experts": ({"up": (128, 768, 2048), "gate": (128, 768, 2048), "down": (128, 2048, 768)}, 1.025),
}
POLICIES = {"one tile": (Factored(), None), "default": (Factored(tile=(128, 256)), 1.065)}


def bytes_per_parameter(shapes, policy):
    params = {name: torch.empty(shape, device="meta", dtype=torch.bfloat16) for name, shape in shapes.items()}
    state = gefen(1e-3, second_moment=policy).init(params)
    return state_bytes(state) / sum(p.numel() for p in tree_leaves(params))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_state_stays_near_one_byte_per_parameter_q18(model, policy):
    shapes, one_tile_limit = MODELS[model]
    form, limit = POLICIES[policy]
    assert 1.0 < bytes_per_parameter(shapes, form) <= (limit or one_tile_limit)
