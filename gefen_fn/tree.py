"""Trees of tensors: the only file that knows optree.

Every map over gradients, updates or params goes through here, with `None` as a leaf: a parameter without a gradient
passes each stage as `None`, and its state comes back as the same tensors.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn

from gefen_fn.shards import PLAIN, on_pieces, placements_of

Tree = Any


class StructureError(ValueError):
    """Trees, names or shapes that should agree do not."""


def _flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(tree, is_leaf, none_is_leaf=True)


def _match(spec: optree.PyTreeSpec, tree: Tree) -> list[Any]:
    try:
        return spec.flatten_up_to(tree)
    except (ValueError, TypeError):  # whose text holds every value of the tree
        no_tree = filter(None, (how_to_pass(x, "") for x in tree_leaves(tree)))
        fix = next(no_tree, "Pass updates, state and params in this order, made for the same params.")
        raise StructureError(
            "Trees must have the structure of the first, such as the gradients: got one with "
            f"{_differences(spec, tree)}. {fix}"
        ) from None


def _differences(prefix: optree.PyTreeSpec, tree: Tree, *, is_right: str = "prefix") -> str:
    """What the one that is not right lacks, has too much, or holds in another container."""
    names, kinds = _apart(prefix, tree), _other_kinds(prefix, tree_structure(tree))
    if is_right == "tree":
        names, kinds = names[::-1], kinds and (kinds[1], kinds[0], kinds[2])
    container = f"{kinds[1]} for {kinds[0]}{kinds[2]}" if kinds else ""
    texts = filter(None, (container, list_names(missing=names[0], unexpected=names[1])))
    return ", ".join(texts) or "other empty containers"


def _apart(prefix: optree.PyTreeSpec, tree: Tree) -> tuple[list[str], list[str]]:
    """Paths of a prefix that lead nowhere in a tree, and those of the tree that the prefix does not cover."""
    heads, paths = _parts(prefix.accessors()), _parts(optree.tree_accessors(tree, none_is_leaf=True))
    covered = {path[:n] for path in paths for n in range(len(path) + 1)}
    lost = [head for head in heads if head not in covered]
    more = [path for path in paths if path and not any(path[:n] in heads for n in range(len(path) + 1))]
    return [readable(".".join(path)) for path in lost], [readable(".".join(path)) for path in more]


def _parts(accessors: Sequence[optree.PyTreeAccessor]) -> dict[tuple[str, ...], None]:
    """The paths in order."""
    return dict.fromkeys(tuple(path_part(entry) for entry in accessor) for accessor in accessors)


def _other_kinds(prefix: optree.PyTreeSpec, tree: optree.PyTreeSpec, path: str = "") -> tuple[str, str, str] | None:
    """The first two containers that differ, and the place."""
    if prefix.type is None:
        return None
    if _kind(prefix) != _kind(tree):
        return _kind(prefix), _kind(tree), f" at `{path[1:]}`" if path else ""
    below = dict(zip(tree.entries(), tree.children(), strict=True))
    rows = [(key, part) for key, part in zip(prefix.entries(), prefix.children(), strict=True) if key in below]
    return next(filter(None, (_other_kinds(part, below[key], f"{path}.{key}") for key, part in rows)), None)


def _kind(spec: optree.PyTreeSpec) -> str:
    if spec.type is None:
        return "leaf"
    return "dict" if issubclass(spec.type, dict) else spec.type.__name__


def list_names(**kinds: Sequence[str]) -> str:
    """Text such as "missing `a`, `b`, unexpected `c`": at most five names of a kind, as their keys are written."""
    return ", ".join(f"{kind} {_some(names)}" for kind, names in kinds.items() if names)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{readable(name)}`" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


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

    Example:
        >>> grads = {"w": torch.tensor(1.0), "b": None}
        >>> params = {"w": torch.tensor(10.0), "b": torch.tensor(5.0)}
        >>> tree_map(lambda g, p: g + 0.5 * p, grads, params)
        {'w': tensor(6.), 'b': None}
    """
    leaves, spec = _flatten(tree, is_leaf)
    columns = [_match(spec, r) for r in rest]
    out = [None if skip_none and x is None else f(x, *others) for x, *others in zip(leaves, *columns, strict=True)]
    return tree_unflatten(spec, out)


def map_update(
    f: Callable[..., tuple[Any, ...]],
    updates: Tree,
    states: tuple[Tree, ...],
    *others: Tree,
    each: Sequence[Sequence[Any]] = (),
) -> tuple[Tree, tuple[Tree, ...]]:
    """Map a leaf's update rule over trees, and un-zip what it returns.

    A sharded leaf is mapped as the plain tensors of its part, and what comes back is placed as what went in.

    Args:
        f: `f(u, *state_leaves, *other_leaves, *each) -> (update, *new_state_leaves)`.
        updates: the gradients; a `None` leaf is skipped and its state returned as the same tensors.
        states: the trees of state, one for each value `f` returns after the update.
        *others: further trees `f` reads, such as params or per-leaf scalars.
        each: further arguments as lists over the leaves; a compiled graph cannot rebuild trees of constants.

    Returns:
        The tree of updates, and the tuple of new state trees.

    Raises:
        StructureError: if the trees disagree, or a gradient is not a dense floating-point tensor.
    """
    check_leaves(updates)
    leaves, spec = _flatten(updates)
    columns = [_match(spec, s) for s in (*states, *others)]
    rows = list(zip(leaves, *columns, *each, strict=True))
    rule = on_pieces(f)
    out = [_skip(*row[1 : 1 + len(states)]) if row[0] is None else rule(*row) for row in rows]
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
    return [".".join(map(path_part, accessor)) for accessor in optree.tree_accessors(tree, none_is_leaf=True)]


def path_part(entry: Any) -> str:
    """One step of a path: a field name, a key or an index."""
    name = getattr(entry, "field", None)
    return str(name if isinstance(name, str) else entry.entry).replace("%", "%25").replace(".", "%2E")


def readable(path: str) -> str:
    """A path as its keys were written: `%2E` is a dot again."""
    return path.replace("%2E", ".").replace("%25", "%")


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
        choices = list(_spread(prefix, tree))
    if any(isinstance(choice, (dict, list)) for choice in choices):
        raise StructureError("Masks and labels must be no deeper than the tree: got several for one leaf. Give one.")
    return choices


def _spread(prefix: Tree, tree: Tree) -> Iterator[Any]:
    heads, spec = _flatten(prefix)
    try:
        parts = spec.flatten_up_to(tree)
    except (ValueError, TypeError):  # whose text holds every value of the tree
        differences = _differences(spec, tree, is_right="tree")
        raise StructureError(
            f"Masks and labels must have the structure of the tree: got some with {differences}. "
            "Give one for each leaf, or one for a whole part."
        ) from None
    for head, part in zip(heads, parts, strict=True):
        yield from [head] * len(tree_leaves(part))


def check_leaves(tree: Tree) -> None:
    """`check_floating` for every leaf that is not `None`."""
    for x in tree_leaves(tree):
        if x is not None:
            check_floating(x)


def check_tensors(tree: Tree, *others: type) -> None:
    """Refuse a module, an optimizer or the like in the place of a tree of tensors.

    Args:
        tree: the tree; `None` leaves pass.
        *others: what its leaves may be too, such as the numbers that a state holds.

    Raises:
        StructureError: naming what came, and how to make a tree of it.
    """
    for x in tree_leaves(tree):
        if x is not None and not isinstance(x, others):
            _check_tensor(x)


def _check_tensor(x: Any) -> None:
    if not isinstance(x, Tensor):
        fix = how_to_pass(x, "Check the order of the arguments.")
        raise StructureError(f"Leaves must be tensors or None: got {type(x).__name__}. {fix}")


def how_to_pass(x: Any, otherwise: str) -> str:
    """How the user makes a tree of tensors of what is none."""
    if isinstance(x, (nn.Module, Iterator, str)):  # a string, from a list of pairs
        return "Pass `dict(module.named_parameters())`."
    if hasattr(x, "state_tree"):
        return "Pass `optimizer.state_tree()`."
    if hasattr(x, "param_groups"):
        return "Pass `optimizer.state`."
    if dataclasses.is_dataclass(x):
        return "Pass `vars(it)`, or register its class by `optree.register_pytree_node` in the global namespace."
    return otherwise


def form_of(x: Any) -> tuple[Any, ...]:
    """All that `check_floating` looks at, and the device: what has passed need not be checked while its form stays."""
    if not isinstance(x, Tensor):
        return (type(x),)
    return type(x), x.layout, x.dtype, x.shape, x.device, placements_of(x)


def check_floating(x: Any, like: Any = None) -> None:
    """Refuse what no transform can take, before anything changes.

    Raises:
        StructureError: if `x` is not a dense real floating-point tensor, or not of the shape of the tensor `like`.
    """
    plain = type(x) in PLAIN and x.layout == torch.strided and x.is_floating_point()
    if plain and (like is None or (type(like) in PLAIN and x.shape == like.shape)):
        return
    for leaf in (x,) if like is None else (x, like):
        _check_tensor(leaf)
    if x.layout != torch.strided:
        raise StructureError(f"Gradients must be dense: got layout {x.layout}. Use sparse=False, or `.to_dense()`.")
    if not x.is_floating_point():
        raise StructureError(f"Leaves must be real floating point: got {x.dtype}. Leave this leaf out or convert it.")
    if like is not None and x.shape != like.shape:
        raise StructureError(
            f"Shapes must agree: got {tuple(x.shape)} for {tuple(like.shape)}. Check the tree's order."
        )
    if any(p.is_partial() for p in placements_of(x)) or (like is not None and placements_of(x) != placements_of(like)):
        wanted = "finished" if like is None else f"placed as {placements_of(like) or 'a whole tensor'}"
        raise StructureError(
            f"Shards must be {wanted}: got {placements_of(x) or 'a whole tensor'} for shape {tuple(x.shape)}. "
            "Let the last backward of an accumulation reduce, or call `redistribute` first."
        )
