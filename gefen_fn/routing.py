"""Which leaves of a tree are Muon's, from their paths and shapes alone."""

import re
from collections.abc import Sequence

from gefen_fn.base import Params
from gefen_fn.spec import MatrixAxes, Spec, not_muon_reason, spec_of
from gefen_fn.tree import Tree, check_tensors, readable, tree_leaves, tree_paths, tree_structure, tree_unflatten

MUON = "muon"
_EMBEDDING = re.compile(r"embed|(^|_)(wte|wpe|emb)\d*(_|$)", re.IGNORECASE)
_POSITIONS = re.compile(r"(^|_)pos(itional|itions?)?\d*(_|$)", re.IGNORECASE)
_POSITIONS_MODULE = re.compile(
    r"((rel|abs)(ative|olute)?_)?pos(itional|itions?)?\d*(_enc(od(ing|er))?s?)?", re.IGNORECASE
)
_OUTPUT = re.compile(r"^(lm_)?head$|(^|_)(classifier|score)(_|$)", re.IGNORECASE)
_OUTPUT_OF_ALL = re.compile(r"((module|_orig_mod)\.)*(fc|output)\.weight")  # a block may have an `fc` of its own
_BIAS = re.compile(r"(^|_)bias(_|$)", re.IGNORECASE)


def other_reason(path: str, shape: Sequence[int]) -> str | None:
    """Why a leaf is not Muon's by its path and shape; None if it is.

    Embeddings and output layers are rows looked up or scored one by one, not maps between features: their names tell,
    the leaf's own or its module's, places in a list not counted. A table of biases or of positions is no map either.

    Args:
        path: its keys joined by dots.
        shape: its shape.
    """
    reason = not_muon_reason(shape)
    if reason is not None:
        return reason
    names = [name for name in readable(path).split(".") if not name.isdigit()][-2:]
    if any(_EMBEDDING.search(name) for name in names):
        return "an embedding by its name"
    if _OUTPUT_OF_ALL.fullmatch(readable(path)) or any(_OUTPUT.search(name) for name in names):
        return "an output layer by its name"
    if names and _BIAS.search(names[-1]):
        return "a bias by its name"
    return "learned positions by its name" if _is_of_positions(names) else None


def _is_of_positions(names: Sequence[str]) -> bool:
    """Whether the leaf's own name speaks of positions, or its module's of nothing else: `pos_proj` is a map."""
    own = bool(names) and _POSITIONS.search(names[-1]) is not None
    return own or any(_POSITIONS_MODULE.fullmatch(name) for name in names[:-1])


def muon_reasons(params: Params, spec: Spec = None) -> list[str | None]:
    """Why each leaf is not Muon's, in order; None for those that are, and for `None`.

    Args:
        params: the parameters; only paths and shapes are read.
        spec: as of `scale_by_muon`; a leaf that a tree of specs names is Muon's.

    Raises:
        StructureError: if a leaf is no tensor, as a module is none.
    """
    check_tensors(params)
    one_for_all = spec is None or isinstance(spec, MatrixAxes)
    named: Sequence[MatrixAxes | None] = (
        [None] * len(tree_leaves(params)) if one_for_all else spec_of(spec, params, None)
    )
    rows = zip(tree_paths(params), tree_leaves(params), named, strict=True)
    return [None if x is None or own is not None else other_reason(path, x.shape) for path, x, own in rows]


def muon_labels(params: Params, backup: str = "gefen", spec: Spec = None) -> Tree:
    """Label the leaves that are Muon's `"muon"`, and the others as the backup: what `gefen_muon` does by default.

    A matrix is Muon's unless it is an embedding or an output layer by its name, a depthwise convolution, or has a side
    below 32. A module tells more than names do: see `gefen_nn.route`.

    Args:
        params: the parameters; only paths and shapes are read, so meta tensors do.
        backup: the label of the others, and of `None`.
        spec: as of `scale_by_muon`; a leaf that a tree of specs names is Muon's.

    Returns:
        A tree of labels like `params`.

    Raises:
        StructureError: if a leaf is no tensor, as a module is none.

    Example:
        >>> layer = {"weight": torch.ones(64, 64), "bias": torch.ones(64)}
        >>> muon_labels({"embed": torch.ones(100, 64), "layer": layer}, backup="adamw")
        {'embed': 'adamw', 'layer': {'weight': 'muon', 'bias': 'adamw'}}
    """
    pairs = zip(tree_leaves(params), muon_reasons(params, spec), strict=True)
    labels = [backup if x is None or reason is not None else MUON for x, reason in pairs]
    return tree_unflatten(tree_structure(params), labels)


def check_muon(params: Params, labels: Sequence[str]) -> None:
    """Raise `ValueError`, with examples, if no leaf is labelled Muon's."""
    if MUON in labels:
        return
    reasons = zip(tree_paths(params), muon_reasons(params), strict=True)
    told = [f"`{readable(path)}`: {reason or 'labelled otherwise'}" for path, reason in reasons][:3]
    raise ValueError(
        f"Muon needs at least one matrix: got none among {len(labels)} leaves ({'; '.join(told)}). "
        "Pass `param_labels` or a `spec` that says which leaves are Muon's, or require_muon=False."
    )
