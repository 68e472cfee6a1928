"""Shapes of the leaves of large models, and how a world of processes cuts them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

Cut = Mapping[int, int]
"""Into how many parts each axis is cut."""


class LeafShape(NamedTuple):
    """One leaf, and how often it stands in the model.

    Attributes:
        shape: of the leaf.
        copies: leaves of this kind.
        muon: whether it is Muon's in a hybrid.
        experts: whether its first axis numbers experts.
    """

    shape: tuple[int, ...]
    copies: int
    muon: bool = True
    experts: bool = False


Model = Mapping[str, LeafShape]


def _decoder(width: int, hidden: int, key_value: int, vocabulary: int, layers: int) -> Model:
    return {
        "embedding": LeafShape((vocabulary, width), 1, muon=False),
        "head": LeafShape((vocabulary, width), 1, muon=False),
        "query, output": LeafShape((width, width), 2 * layers),
        "key, value": LeafShape((key_value, width), 2 * layers),
        "gate, up": LeafShape((hidden, width), 2 * layers),
        "down": LeafShape((width, hidden), layers),
        "norm": LeafShape((width,), 2 * layers + 1, muon=False),
    }


def _experts(width: int, hidden: int, experts: int, vocabulary: int, layers: int) -> Model:
    return {
        **_decoder(width, hidden, width // 8, vocabulary, layers),
        "router": LeafShape((experts, width), layers),
        "experts' gate, up": LeafShape((experts, hidden, width), 2 * layers, experts=True),
        "experts' down": LeafShape((experts, width, hidden), layers, experts=True),
    }


MODELS: Mapping[str, Callable[[], Model]] = {
    "llama-3-8b": lambda: _decoder(4096, 14336, 1024, 128256, 32),
    "llama-3-70b": lambda: _decoder(8192, 28672, 1024, 128256, 80),
    "moe-1t": lambda: _experts(7168, 2048, 384, 163840, 60),
}
"""Models by name; `moe-1t` has 384 experts in each of 60 layers, about 10^12 parameters."""


def cut_of(leaf: LeafShape, world: int, expert_parallel: int) -> Cut:
    """How FSDP2 cuts a leaf: rows by all of the world, experts by `expert_parallel` and their rows by the others."""
    if leaf.experts and expert_parallel > 1:
        return {0: expert_parallel, 1: world // expert_parallel}
    return {0: world}
