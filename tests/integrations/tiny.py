"""A Llama of two layers with a few sentences to learn, and what of a run must come back to the bit."""

from typing import Any

import torch
from torch import Tensor, nn

from gefen_fn import decay_mask

Batch = dict[str, Tensor]


def llama() -> nn.Module:
    """A model of fixed weights, of which the matrices from 4,096 entries on have quantized state."""
    from transformers import LlamaConfig, LlamaForCausalLM  # here, as these tests are collected without it too

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def samples(count: int) -> list[Batch]:
    """Sequences of 16 tokens, each to be continued by itself."""
    tokens = torch.randint(0, 256, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def batches(count: int, size: int = 4) -> list[Batch]:
    """The samples, `size` at a time."""
    rows = samples(count * size)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups with names, of which norms, biases and embeddings do not decay."""
    named = dict(model.named_parameters())
    decayed = decay_mask(named)
    return [
        {"params": [(n, p) for n, p in named.items() if decayed[n]], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in named.items() if not decayed[n]], "weight_decay": 0.0},
    ]


def bits(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of the parameters and of the optimizer's whole state, by name."""
    names = {p: name for name, p in model.named_parameters()}
    out = {name: p.detach().clone() for p, name in names.items()}
    for p, leaves in optimizer.state.items():
        out.update({f"{names[p]}: {key}": x.clone() for key, x in leaves.items()})
    return out


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Fail with the names of what differs."""
    assert first.keys() == second.keys() and first
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_quantized(optimizer: Any) -> None:
    """Fail unless some of the state is codes that are not all alike."""
    codes = [x for leaves in optimizer.state.values() for x in leaves.values() if x.dtype == torch.uint8]
    assert codes and all(x.float().var() > 0 for x in codes)
