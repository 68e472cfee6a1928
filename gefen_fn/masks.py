"""Masks made from a tree of parameters."""

import re

from torch import Tensor

from gefen_fn.base import Params
from gefen_fn.tree import Tree, check_leaves, tree_leaves, tree_paths, tree_structure, tree_unflatten

_UNDECAYED = re.compile(
    r"bias(es)?|ln|bn|wte|wpe"
    r"|(layer|rms|batch|group|instance|channel|spatial|scale|pre|post|sub|ada|q|k|qk|attn|ffn|mlp|final)?"
    r"norm(s|ali[sz](e|er|ation))?"
    r"|(word|tok|token|pos|position|patch|time|timestep|type|label|class)?emb(s|eds?|edders?|eddings?)?",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def decay_mask(params: Params) -> Tree:
    """Say which leaves weight decay should touch: matrices, but not norms, biases or embeddings.

    A leaf is False if it has fewer than 2 axes, or if its own name or its module's (the last two parts of the path) has
    a word for a norm, a bias or an embedding: `input_layernorm`, `ln_1` and `LayerNorm` do, `normal` does not. Reads
    shapes only, so it works on meta tensors.

    Args:
        params: the parameters.

    Returns:
        A tree of bool like `params`; False for `None`.

    Raises:
        StructureError: if a leaf is no tensor, as a module is none.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> decay_mask(dict(model.named_parameters()))
        {'0.weight': True, '0.bias': False, '1.weight': False, '1.bias': False}
    """
    check_leaves(params)
    keep = [_is_decayed(path, leaf) for path, leaf in zip(tree_paths(params), tree_leaves(params), strict=True)]
    return tree_unflatten(tree_structure(params), keep)


def _is_decayed(path: str, leaf: Tensor | None) -> bool:
    names = re.split(r"\.|%2E", path)[-2:]
    return leaf is not None and leaf.ndim >= 2 and not any(map(_UNDECAYED.fullmatch, _words(names)))


def _words(names: list[str]) -> list[str]:
    """What stands between underscores and digits, whole and cut at its capitals: `RMSNorm`, `RMS` and `Norm`."""
    whole = re.findall(r"[A-Za-z]+", "_".join(names))
    return [*whole, *(part for word in whole for part in _CAMEL.findall(word))]
