"""State as a flat dictionary of named tensors, and back; parts of it by name; its size."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import OptState
from gefen_fn.quantize import check_codebooks
from gefen_fn.tree import (
    StructureError,
    Tree,
    check_tensors,
    how_to_pass,
    list_names,
    tree_leaves,
    tree_paths,
    tree_structure,
    tree_unflatten,
)

Path = tuple[str, ...]
Filter = Callable[[Path, Any], bool]


def flatten_state(state: OptState) -> dict[str, Tensor]:
    """Name every tensor of a state `<stage>.<field>[.<leaf path>][.<subfield>]`.

    The stage is the name of the state's class (`ScaleByAdamState` gives `scale_by_adam`), not its place in a chain, so
    inserting another stage keeps the names; the second of a kind is `scale_by_adam#2`, and a state that is no
    NamedTuple is `state`. A stage's inner state, the fields that begin with `inner`, is named for itself. A dot inside
    of a key is written `%2E`, a percent sign `%25`: `layer.weight` is `layer%2Eweight`. `None` leaves are left out.

    Args:
        state: the state of any transform.

    Returns:
        The state's own tensors by name, in the state's order; nothing is copied.

    Raises:
        StructureError: if two tensors get one name.
        TypeError: if the state holds something else than tensors.

    Example:
        >>> tx = chain(clip_by_global_norm(1.0), adam(1e-3))
        >>> list(flatten_state(tx.init({"w": torch.ones(2)})))
        ['scale_by_adam.count.w', 'scale_by_adam.mu.w', 'scale_by_adam.nu.w']
    """
    flat: dict[str, Tensor] = {}

    def take(key: str, leaf: Tensor) -> Tensor:
        if key in flat:
            raise StructureError(f"Names of state tensors must be distinct: got `{key}` twice. Rename one of the keys.")
        flat[key] = leaf
        return leaf

    _map_stages(take, state, {})
    return flat


class NamesReport(NamedTuple):
    """Names of `like` that a dictionary lacks, and names of the dictionary that `like` has not."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def compare_names(flat: Mapping[str, Tensor], like: OptState) -> NamesReport:
    """What `unflatten_state(flat, like, strict=False)` would keep of `like`, and leave out of `flat`.

    Raises:
        TypeError: if `flat` is no dictionary, or `like` holds something else than tensors.

    Example:
        >>> old = flatten_state(adam(1e-3).init({"w": torch.ones(2)}))
        >>> report = compare_names(old, lion(1e-4).init({"w": torch.ones(2)}))
        >>> report.missing
        ('scale_by_lion.mu.w',)
    """
    if not isinstance(flat, Mapping):
        raise TypeError(f"`flat` must be a dict of tensors: got {type(flat).__name__}. Pass what flatten_state gave.")
    wanted = flatten_state(like)
    return NamesReport(tuple(sorted(wanted.keys() - flat.keys())), tuple(sorted(flat.keys() - wanted.keys())))


def unflatten_state(flat: Mapping[str, Tensor], like: OptState, *, strict: bool = True) -> OptState:
    """Build the state that `flatten_state` would name like `flat`.

    Args:
        flat: tensors by name; they are used as they are.
        like: a state of the same structure, such as `tx.init(params)`, possibly on the meta device.
        strict: refuse names that differ; else a tensor of `like` stays where `flat` has none, and names that `like`
            has not are left out: `compare_names` tells which.

    Raises:
        StructureError: if names, shapes or dtypes differ, or if codes would stand beside another codebook.
        TypeError: if `flat` is no dictionary, or `like` holds something else than tensors.

    Example:
        >>> tx, params = gefen(1e-3), {"w": torch.ones(64, 64)}
        >>> torch.save(flatten_state(tx.init(params)), "state.pt")
        >>> state = unflatten_state(torch.load("state.pt"), like=tx.init(params))
        >>> tree_get(state, "mu")["w"].codes.shape
        torch.Size([64, 64])
    """
    wanted = flatten_state(like)
    missing, extra = compare_names(flat, like)
    if strict and (missing or extra):
        raise StructureError(
            f"Names must agree with the state's: got {list_names(missing=missing, unknown=extra)}. "
            "Use the transform and params that the dictionary was made from."
        )
    for key in wanted.keys() & flat.keys():
        _check_like(key, flat[key], wanted[key])
    state = _map_stages(lambda key, own: flat.get(key, own), like, {})
    if not strict:
        check_codebooks(like, state)
    return state


def tree_get(state: OptState, key: str, default: Any = None, filtering: Filter | None = None) -> Any:
    """The part of a state under a field name, a dictionary key or the class name of a state.

    Args:
        state: the state of any transform.
        key: such as `"count"`, `"learning_rate"` or `"ScaleByAdamState"`.
        default: returned if nothing is called `key`.
        filtering: `filtering(path, value)` keeps only some of the matches; `path` holds the names from the root.

    Raises:
        KeyError: if more than one part matches.
        StructureError: for a module or an optimizer in the place of a state.

    Example:
        >>> state = inject_hyperparams(adam)(1e-3).init({"w": torch.ones(2)})
        >>> tree_get(state, "learning_rate").item()
        0.001
        >>> tree_get(state, "mu")
        {'w': tensor([0., 0.])}
    """
    check_tensors(state, int, float)
    found = [(path, value) for path, value in _named_parts(state, ()) if _matches(key, path, value, filtering)]
    if len(found) > 1:
        paths = [".".join(path) for path, _ in found]
        raise KeyError(f"`key` must name one part: got {key!r}, found at {paths}. Pass `filtering`.")
    return found[0][1] if found else default


def tree_set(state: OptState, filtering: Filter | None = None, /, **parts: Any) -> OptState:
    """A state in which every part called like a keyword is replaced by its value.

    Args:
        state: the state of any transform; it is not changed.
        filtering: `filtering(path, value)` keeps only some of the matches.
        **parts: new values by field name or dictionary key. A number or 0-dim tensor in the place of a 0-dim tensor
            becomes one of that tensor's dtype, on its device; all else is put there as it is.

    Raises:
        KeyError: if a keyword names no part.
        StructureError: for a module or an optimizer in the place of a state.

    Example:
        >>> state = inject_hyperparams(adam)(1e-3).init(torch.ones(2))
        >>> state = tree_set(state, learning_rate=1e-4)
        >>> tree_get(state, "learning_rate").item()
        0.0001
    """
    check_tensors(state, int, float)
    used: set[str] = set()
    new = _replace_parts(state, (), parts, filtering, used)
    unknown = sorted(parts.keys() - used)
    if unknown:
        raise KeyError(f"Keywords must name parts of the state: got {unknown}. See flatten_state(state).")
    return new


def state_bytes(state: OptState, *, world: Literal["local", "global"] = "local") -> int:
    """Bytes of a state's tensors, each distinct one counted once; works on the meta device.

    Args:
        state: any tree of tensors, such as `optimizer.state_tree()`; a torch optimizer's `state` too.
        world: `"local"` counts this process's shards of distributed tensors, `"global"` the whole tensors.

    Raises:
        ValueError: if `world` is neither.
        TypeError: if a leaf is no tensor, as an optimizer or a module is none.

    Example:
        >>> params = {"w": torch.empty(4096, 4096, device="meta")}  # allocates nothing
        >>> state_bytes(gefen(1e-3).init(params)) // 2**20, state_bytes(adam(1e-3).init(params)) // 2**20
        (17, 128)
    """
    if world not in ("local", "global"):
        raise ValueError(f'`world` must be "local" or "global": got {world!r}. Use "local" for this process.')
    parts = list(state.values()) if isinstance(state, dict) else state  # keys may be tensors, which have no order
    leaves = [leaf for leaf in tree_leaves(parts) if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            fix = how_to_pass(leaf, "Pass a transform's state, or `optimizer.state_tree()`.")
            raise TypeError(f"State must hold tensors: got {type(leaf).__name__}. {fix}")
    local = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in leaves]
    sized = local if world == "local" else leaves
    return sum({_identity(x): t.numel() * t.element_size() for x, t in zip(local, sized, strict=True)}.values())


def _map_stages(f: Callable[[str, Tensor], Tensor], node: Any, seen: dict[str, int]) -> Any:
    """Map `f(key, tensor)` over a state, stage by stage."""
    if _is_namedtuple(node):
        stage = _stage_name(type(node), seen)
        parts = {name: _map_field(f, stage, name, getattr(node, name), seen) for name in node._fields}
        return type(node)(**parts)
    if holds_stages(node):
        return _like(node, {key: _map_stages(f, value, seen) for key, value in _items(node)})
    return _map_leaves(f, _numbered("state", seen), node)


def _map_field(f: Callable[[str, Tensor], Tensor], stage: str, name: str, value: Any, seen: dict[str, int]) -> Any:
    is_inner = name.startswith("inner") and (_is_namedtuple(value) or holds_stages(value))
    return _map_stages(f, value, seen) if is_inner else _map_leaves(f, f"{stage}.{name}", value)


def _map_leaves(f: Callable[[str, Tensor], Tensor], prefix: str, tree: Tree) -> Tree:
    keys = [f"{prefix}.{path}" if path else prefix for path in tree_paths(tree)]
    leaves = tree_leaves(tree)
    for key, leaf in zip(keys, leaves, strict=True):
        if leaf is not None and not isinstance(leaf, Tensor):
            fix = how_to_pass(leaf, "Make it a 0-dim tensor.")
            raise TypeError(f"State must hold tensors: got {type(leaf).__name__} at `{key}`. {fix}")
    out = [None if leaf is None else f(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
    return tree_unflatten(tree_structure(tree), out)


def _is_namedtuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _is_stage(node: Any) -> bool:
    return _is_namedtuple(node) and type(node).__name__.endswith("State")


def holds_stages(node: Any) -> bool:
    """Whether a part of a state is a chain's tuple, a partition's dictionary, or the like, with stages inside.

    One that is known tells: beside it may stand what somebody's own transform keeps, whatever that is called.
    """
    if _is_namedtuple(node) or not isinstance(node, (tuple, list, dict)):
        return False
    is_chain = isinstance(node, tuple)
    return any(_is_stage(x) or holds_stages(x) or (is_chain and _is_namedtuple(x)) for _, x in _items(node))


def _stage_name(cls: type, seen: dict[str, int]) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__.removesuffix("State").lstrip("_"))
    return _numbered(words.lower() or "state", seen)


def _numbered(name: str, seen: dict[str, int]) -> str:
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def _items(node: Any) -> list[tuple[Any, Any]]:
    """Children by field name, key or index; dictionaries in sorted order, so that all processes agree."""
    if _is_namedtuple(node):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, dict):
        return sorted(node.items(), key=lambda item: (type(item[0]).__name__, item[0]))
    return list(enumerate(node)) if isinstance(node, (tuple, list)) else []


def _like(node: Any, children: dict[Any, Any]) -> Any:
    """A container of `node`'s type with these children."""
    if _is_namedtuple(node):
        return type(node)(**children)
    if isinstance(node, dict):
        copy = node.copy()
        copy.update(children)
        return copy
    return type(node)(children.values())


def _named_parts(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    yield path, node
    for key, value in _items(node):
        yield from _named_parts(value, (*path, str(key)))


def _matches(key: str, path: Path, value: Any, filtering: Filter | None) -> bool:
    is_called = path[-1:] == (key,) or (_is_namedtuple(value) and type(value).__name__ == key)
    return is_called and (filtering is None or filtering(path, value))


def _replace_parts(node: Any, path: Path, parts: dict[str, Any], filtering: Filter | None, used: set[str]) -> Any:
    for key, new in parts.items():
        if _matches(key, path, node, filtering):
            used.add(key)
            return _as_scalar(new, node)
    items = _items(node)
    if not items:
        return node
    return _like(node, {key: _replace_parts(x, (*path, str(key)), parts, filtering, used) for key, x in items})


def _as_scalar(new: Any, old: Any) -> Any:
    """A number in the place of a 0-dim tensor, as such a tensor; all else as it is."""
    if not isinstance(old, Tensor) or old.dim():
        return new
    if isinstance(new, Tensor):
        return new if new.dim() else new.to(old)
    return torch.tensor(new, dtype=old.dtype, device=old.device) if isinstance(new, (int, float)) else new


def _check_like(key: str, got: Any, wanted: Tensor) -> None:
    if not isinstance(got, Tensor):
        raise StructureError(f"`{key}` must be a tensor: got {type(got).__name__}. Make it a 0-dim tensor.")
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise StructureError(
            f"`{key}` must be {wanted.dtype} {tuple(wanted.shape)}: got {got.dtype} {tuple(got.shape)}. "
            "Do not cast or reshape a saved state; use the same blocks and policies."
        )


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
