"""Small models with the modules, names, shapes and ties of well-known ones; they have parameters, and no `forward`."""

from typing import Any

import torch
from torch import nn

D, HEADS, VOCABULARY = 64, 2, 320  # 32 a head; vocabularies are longer than wide, as real ones


class Parts(nn.Module):
    """A module of given parts: modules as they are, tensors as parameters."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))


class Conv1D(nn.Module):
    """GPT-2's linear layer, which keeps its weight as `[inputs, outputs]`."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))


class Norm(nn.Module):
    """A scale per channel, as the many norms of language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def gated(width: int, hidden: int) -> Parts:
    return Parts(gate_proj=linear(width, hidden), up_proj=linear(width, hidden), down_proj=linear(hidden, width))


def attention(kv_heads: int = HEADS, **more: nn.Module) -> Parts:
    narrow = D * kv_heads // HEADS
    return Parts(q_proj=linear(D, D), k_proj=linear(D, narrow), v_proj=linear(D, narrow), o_proj=linear(D, D), **more)


def decoder(layer: nn.Module, *, tied: bool) -> Parts:
    model = Parts(embed_tokens=nn.Embedding(VOCABULARY, D), layers=nn.ModuleList([layer]), norm=Norm(D))
    whole = Parts(model=model, lm_head=linear(D, VOCABULARY))
    if tied:
        whole.lm_head.weight = model.embed_tokens.weight
    return whole


def llama(kv_heads: int = 1, tied: bool = False, **more: nn.Module) -> Parts:
    norms = {"input_layernorm": Norm(D), "post_attention_layernorm": Norm(D)}
    return decoder(Parts(self_attn=attention(kv_heads, **more), mlp=gated(D, 176), **norms), tied=tied)


def qwen3() -> Parts:
    return llama(tied=True, q_norm=Norm(D // HEADS), k_norm=Norm(D // HEADS))


def mistral() -> Parts:
    return llama(kv_heads=2)


def mixtral() -> Parts:
    experts = Parts(gate_up_proj=torch.randn(8, 2 * 96, D), down_proj=torch.randn(8, D, 96))
    layer = Parts(self_attn=attention(2), mlp=Parts(gate=linear(D, 8), experts=experts), input_layernorm=Norm(D))
    return decoder(layer, tied=False)


def gemma() -> Parts:
    norms = {f"{name}_layernorm": Norm(D) for name in ("input", "post_attention", "pre_feedforward")}
    whole = decoder(Parts(self_attn=attention(1), mlp=gated(D, 256), **norms), tied=True)
    whole.model.embed_tokens.register_buffer("embed_scale", torch.tensor(D**0.5))
    return whole


def gpt2() -> Parts:
    attn = Parts(c_attn=Conv1D(3 * D, D), c_proj=Conv1D(D, D))
    mlp = Parts(c_fc=Conv1D(4 * D, D), c_proj=Conv1D(D, 4 * D))
    block = Parts(ln_1=nn.LayerNorm(D), attn=attn, ln_2=nn.LayerNorm(D), mlp=mlp)
    embeddings = {"wte": nn.Embedding(VOCABULARY, D), "wpe": nn.Embedding(128, D)}
    whole = Parts(
        transformer=Parts(**embeddings, h=nn.ModuleList([block]), ln_f=nn.LayerNorm(D)), lm_head=linear(D, VOCABULARY)
    )
    whole.lm_head.weight = whole.transformer.wte.weight
    return whole


def t5() -> Parts:
    def attend(**more: nn.Module) -> Parts:
        return Parts(**{name: linear(D, D) for name in "qkvo"}, **more)

    def stack(*more: nn.Module) -> Parts:
        first = Parts(SelfAttention=attend(relative_attention_bias=nn.Embedding(32, HEADS)), layer_norm=Norm(D))
        last = Parts(DenseReluDense=Parts(wi=linear(D, 128), wo=linear(128, D)), layer_norm=Norm(D))
        block = nn.ModuleList([Parts(layer=nn.ModuleList([first, *more, last]))])
        return Parts(embed_tokens=shared, block=block, final_layer_norm=Norm(D))

    shared = nn.Embedding(VOCABULARY, D)
    cross = Parts(EncDecAttention=attend(), layer_norm=Norm(D))
    whole = Parts(shared=shared, encoder=stack(), decoder=stack(cross), lm_head=linear(D, VOCABULARY))
    whole.lm_head.weight = shared.weight
    return whole


def vit() -> Parts:
    attn, mlp = (
        Parts(qkv=linear(D, 3 * D, True), proj=linear(D, D, True)),
        Parts(fc1=linear(D, 256), fc2=linear(256, D)),
    )
    block = Parts(norm1=nn.LayerNorm(D), attn=attn, norm2=nn.LayerNorm(D), mlp=mlp)
    return Parts(
        cls_token=torch.zeros(1, 1, D),
        pos_embed=torch.randn(1, 65, D),
        patch_embed=Parts(proj=nn.Conv2d(3, D, 8, 8)),
        blocks=nn.Sequential(block),
        norm=nn.LayerNorm(D),
        head=linear(D, 100, True),
    )


def resnet() -> Parts:
    def conv(inputs: int, outputs: int, side: int) -> nn.Conv2d:
        return nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False)

    down = nn.Sequential(conv(32, 64, 1), nn.BatchNorm2d(64))
    block = Parts(conv1=conv(32, 64, 3), bn1=nn.BatchNorm2d(64), conv2=conv(64, 64, 3), downsample=down)
    return Parts(conv1=conv(3, 32, 7), bn1=nn.BatchNorm2d(32), layer1=nn.Sequential(block), fc=linear(64, 100, True))


def mamba() -> Parts:
    inner, states, rank = 2 * D, 16, 32
    mixer = Parts(
        A_log=torch.randn(inner, states),
        D=torch.ones(inner),
        conv1d=nn.Conv1d(inner, inner, 4, groups=inner, padding=3),
        in_proj=linear(D, 2 * inner),
        x_proj=linear(inner, rank + 2 * states),
        dt_proj=linear(rank, inner, True),
        out_proj=linear(inner, D),
    )
    layers = nn.ModuleList([Parts(mixer=mixer, norm=Norm(D))])
    backbone = Parts(embeddings=nn.Embedding(VOCABULARY, D), layers=layers, norm_f=Norm(D))
    whole = Parts(backbone=backbone, lm_head=linear(D, VOCABULARY))
    whole.lm_head.weight = backbone.embeddings.weight
    return whole
