"""The demo's model: a small byte-level decoder with about one million parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Decoder(nn.Module):
    """A causal language model over bytes: learnt positions, pre-norm blocks, a final norm and a linear head.

    Args:
        dim: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads; must divide `dim`.
        hidden: Width of the gated feed-forward layer.
        context: Longest sequence, in bytes.

    Raises:
        ValueError: If `heads` does not divide `dim`.
    """

    def __init__(self, dim: int = 128, layers: int = 4, heads: int = 4, hidden: int = 384, context: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            tokens: int64 bytes, `[N, T]` with `T <= context`.

        Returns:
            fp32 logits, `[N, T, 256]`.
        """
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each next byte.

    Args:
        model: Maps int64 `[N, T]` to logits `[N, T, 256]`.
        tokens: int64 bytes, `[N, T + 1]`.

    Returns:
        0-dim loss, in nats per byte.
    """
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim), _Attention(dim, heads)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(dim), _SwiGLU(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"`heads` must divide `dim`: got heads={heads} for dim={dim}. Use a divisor of {dim}.")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [N, T, 3, H, D]
        query, key, value = qkv.transpose(1, 3).unbind(2)  # each [N, H, T, D]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class _SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        torch.nn.init.normal_(module.weight, std=0.02)
