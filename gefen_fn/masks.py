"""Masks made from a tree of parameters."""

import re

from torch import Tensor

from gefen_fn.base import Params
from gefen_fn.tree import Tree, check_leaves, tree_leaves, tree_paths, tree_structure, tree_unflatten

_UNDECAYED = re.compile(r"norm|embed|(^|_)(bias|ln|bn|emb|wte|wpe)\d*(_|$)", re.IGNORECASE)


def decay_mask(params: Params) -> Tree:
    """Say which leaves weight decay should touch: matrices, but not norms, biases or embeddings.

    A leaf is False if it has fewer than 2 axes, or if its own name or its module's (the last two parts of the path)
    speaks of a norm, a bias or an embedding. Reads shapes only, so it works on meta tensors.

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
    return leaf is not None and leaf.ndim >= 2 and not any(_UNDECAYED.search(name) for name in names)
