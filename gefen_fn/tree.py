"""Trees of tensors: the only file that knows optree.

Every map over gradients, updates or params goes through here, with `None` as a leaf: a parameter without a gradient
passes each stage as `None`, and its state comes back as the same tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

Tree = Any


class StructureError(ValueError):
    """Trees, names or shapes that should agree do not."""


def _flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(tree, is_leaf, none_is_leaf=True)


def _match(spec: optree.PyTreeSpec, tree: Tree) -> list[Any]:
    try:
        return spec.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise StructureError(
            f"Trees must have one structure: expected {spec}, got a {type(tree).__name__} that does not fit ({error}). "
            "Pass updates, state and params in this order, made for the same params."
        ) from error


def tree_leaves(tree: Tree) -> list[Any]:
    """The leaves in order, `None` included."""
    return _flatten(tree)[0]


def tree_structure(tree: Tree) -> optree.PyTreeSpec:
    """The tree without its leaves, `None` counted as a leaf."""
    return _flatten(tree)[1]


def tree_unflatten(spec: optree.PyTreeSpec, leaves: Sequence[Any]) -> Tree:
    """The tree of structure `spec` with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def tree_map(
    f: Callable[..., Any],
    tree: Tree,
    *rest: Tree,
    skip_none: bool = True,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Tree:
    """Map `f` over the leaves of `tree`; each of `rest` may hold a whole subtree where `tree` has a leaf.

    Args:
        f: called as `f(leaf, *subtrees)`.
        tree: the tree whose structure counts; it comes first because it must be a prefix of the others.
        *rest: trees that `tree` is a prefix of.
        skip_none: return `None` for a `None` leaf of `tree` without calling `f`.
        is_leaf: what to take as a leaf of `tree` besides its leaves.

    Raises:
        StructureError: if one of `rest` has another structure.
    """
    leaves, spec = _flatten(tree, is_leaf)
    columns = [_match(spec, r) for r in rest]
    out = [None if skip_none and x is None else f(x, *others) for x, *others in zip(leaves, *columns, strict=True)]
    return tree_unflatten(spec, out)


def map_update(
    f: Callable[..., tuple[Any, ...]], updates: Tree, states: tuple[Tree, ...], *others: Tree
) -> tuple[Tree, tuple[Tree, ...]]:
    """Map a leaf's update rule over trees, and un-zip what it returns.

    Args:
        f: `f(u, *state_leaves, *other_leaves) -> (update, *new_state_leaves)`.
        updates: the gradients; a `None` leaf is skipped and its state returned as the same tensors.
        states: the trees of state, one for each value `f` returns after the update.
        *others: further trees `f` reads, such as params or per-leaf scalars.

    Returns:
        The tree of updates, and the tuple of new state trees.

    Raises:
        StructureError: if the trees disagree, or a gradient is not a dense floating-point tensor.
    """
    check_leaves(updates)
    leaves, spec = _flatten(updates)
    columns = [_match(spec, s) for s in (*states, *others)]
    rows = list(zip(leaves, *columns, strict=True))
    out = [_skip(*row[1 : 1 + len(states)]) if row[0] is None else f(*row) for row in rows]
    trees = [tree_unflatten(spec, column) for column in zip(*out, strict=True)] if out else [updates, *states]
    return trees[0], tuple(trees[1:])


def _skip(*state: Any) -> tuple[Any, ...]:
    """What `map_update` returns for a leaf without gradient."""
    if state and isinstance(state[0], (dict, list)):
        raise StructureError(
            f"`None` stands for one leaf: got it for a whole {type(state[0]).__name__}. "
            "Pass the tree of gradients, with `None` at the leaves that have none."
        )
    return None, *state


def tree_paths(tree: Tree) -> list[str]:
    """Dotted path of every leaf, `None` leaves included; a dot inside a key is written `%2E`."""
    accessors = optree.tree_accessors(tree, none_is_leaf=True)
    return [".".join(path_part(entry) for entry in accessor) for accessor in accessors]


def path_part(entry: Any) -> str:
    """One step of a path: a field name, a key or an index."""
    name = getattr(entry, "field", None)
    return str(name if isinstance(name, str) else entry.entry).replace("%", "%25").replace(".", "%2E")


def broadcast(value: Any, tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """A tree like `tree` that holds `value` at every leaf; a `value` that is such a tree is returned as it is."""
    if isinstance(value, (int, float, Tensor)):
        return optree.tree_map(lambda _: value, tree, is_leaf=is_leaf, none_is_leaf=True)
    return tree_map(lambda _, v: v, tree, value, skip_none=False, is_leaf=is_leaf)


def tree_parts(tree: Tree, other: Tree) -> list[Any]:
    """What stands in `other` at each leaf of `tree`, in order.

    Raises:
        StructureError: if `tree` is no prefix of `other`.
    """
    return _match(tree_structure(tree), other)


def leaf_choices(prefix: Tree, tree: Tree) -> list[Any]:
    """The choice in `prefix` for each leaf of `tree`, in order; a leaf of `prefix` may stand for a whole subtree.

    A list and not a tree, because a compiled graph cannot rebuild trees of constants.

    Raises:
        StructureError: if `prefix` is deeper than `tree`, or of another structure.
    """
    spec = tree_structure(tree)
    try:
        choices = spec.flatten_up_to(prefix)
    except (ValueError, TypeError):
        heads, head_spec = _flatten(prefix)
        parts = _match(head_spec, tree)
        choices = [head for head, part in zip(heads, parts, strict=True) for _ in tree_leaves(part)]
    if any(isinstance(choice, (dict, list)) for choice in choices):
        raise StructureError("Masks and labels must be no deeper than the tree: got several for one leaf. Give one.")
    return choices


def check_leaves(tree: Tree) -> None:
    """`check_floating` for every leaf that is not `None`."""
    for x in tree_leaves(tree):
        if x is not None:
            check_floating(x)


def check_floating(x: Any, like: Any = None) -> None:
    """Refuse what no transform can take, before anything changes.

    Raises:
        StructureError: if `x` is not a dense real floating-point tensor, or not of the shape of the tensor `like`.
    """
    for leaf in (x,) if like is None else (x, like):
        if not isinstance(leaf, Tensor):
            raise StructureError(
                f"Leaves must be tensors or None: got {type(leaf).__name__}. Check the order of the arguments."
            )
    if x.layout != torch.strided:
        raise StructureError(f"Gradients must be dense: got layout {x.layout}. Use sparse=False, or `.to_dense()`.")
    if not x.is_floating_point():
        raise StructureError(f"Leaves must be real floating point: got {x.dtype}. Leave this leaf out or convert it.")
    if like is not None and x.shape != like.shape:
        raise StructureError(
            f"Shapes must agree: got {tuple(x.shape)} for {tuple(like.shape)}. Check the tree's order."
        )
