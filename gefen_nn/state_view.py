"""Seeing one state tree as torch sees state: a dictionary per parameter.

A dictionary in the state whose keys are the parameters' names, and whose values are no stages, holds one subtree per
parameter; every other leaf belongs to no parameter and is shown in each parameter's dictionary.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import OptState
from gefen_fn.shards import is_sharded, like_piece, piece_of
from gefen_fn.state_io import flatten_state, holds_stages
from gefen_fn.tree import StructureError


class Slot(NamedTuple):
    """One leaf of the state.

    Attributes:
        owner: the parameter it belongs to; None: to all.
        path: its name in `flatten_state`; empty for `None`.
        key: the same without the owner's name.
        value: its tensor.
    """

    owner: str | None
    path: str
    key: str
    value: Tensor | None


Visit = Callable[[Any, str | None, int], Any]


def _map_dict(
    f: Visit, node: dict[Any, Any], names: Collection[str], owner: str | None, below: int, stages: bool
) -> Any:
    out = copy.copy(node)
    owned = owner is None and bool(names) and set(node) == set(names) and not (stages and holds_stages(node))
    for key in sorted(node, key=str):
        out[key] = _map_leaves(f, node[key], names, key if owned else owner, below, stages)
    return out


def _map_leaves(
    f: Visit, node: Any, names: Collection[str], owner: str | None = None, depth: int = 0, stages: bool = True
) -> Any:
    """Rebuild `node` with `f(leaf, owner, depth)`, depth counted in path parts below the owner's name.

    `stages` says whether stages may lie in it, as they do at the top and in fields that begin with `inner`.
    """
    below = depth + (owner is not None)
    if isinstance(node, dict):
        return _map_dict(f, node, names, owner, below, stages)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        parts = zip(node._fields, node, strict=True)
        return type(node)(*(_map_leaves(f, x, names, owner, below, field.startswith("inner")) for field, x in parts))
    if isinstance(node, (tuple, list)):
        return type(node)([_map_leaves(f, x, names, owner, below, stages) for x in node])
    return f(node, owner, depth)


def _drop_name(key: str, owner: str | None, depth: int) -> str:
    parts = key.split(".")
    if owner is not None:
        del parts[-1 - depth]
    return ".".join(parts)


def slots(state: OptState, names: Collection[str]) -> list[Slot]:
    """Every leaf of the state, in a fixed order.

    Args:
        state: a state tree made for `{name: parameter}`.
        names: the names of those parameters.
    """
    found: list[tuple[Any, str | None, int]] = []

    def tag(leaf: Any, owner: str | None, depth: int) -> Any:
        found.append((leaf, owner, depth))
        return None if leaf is None else torch.tensor(len(found) - 1, device="cpu")

    keys = {int(index): key for key, index in flatten_state(_map_leaves(tag, state, names)).items()}
    rows = [(o, keys.get(i, ""), d, leaf) for i, (leaf, o, d) in enumerate(found)]
    return [Slot(o, path, _drop_name(path, o, d), leaf) for o, path, d, leaf in rows]


def refill(state: OptState, names: Collection[str], values: Sequence[Any]) -> OptState:
    """The same tree with `values`, one per slot in the order of `slots`."""
    rest = iter(values)
    return _map_leaves(lambda *_: next(rest), state, names)


def view(state: OptState, names: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """The state per parameter: `{name: {"<stage>.<field>[.<subfield>]": tensor}}`; the tensors are the state's own."""
    out: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for slot in slots(state, names):
        for name in names if slot.owner is None else [slot.owner]:
            if slot.value is not None:
                out[name][slot.key] = slot.value
    return out


def check_shapes(params: Mapping[str, Tensor], known: Mapping[str, torch.Size]) -> None:
    """Raise `StructureError` for a parameter that has another shape than it had."""
    for name, p in params.items():
        if p.shape != known.get(name, p.shape):
            raise StructureError(
                f"A parameter must keep its shape: got {tuple(p.shape)} for {name!r}, whose state is for "
                f"{tuple(known[name])}. Build the optimizer after reshaping; instead of DeepSpeed's ZeRO use FSDP2."
            )


def merge(fresh: OptState, names: Collection[str], old: OptState, old_names: Collection[str]) -> OptState:
    """A fresh state that keeps every leaf the old one had.

    A meta leaf gives way to a real one, so that parameters built on meta and then materialized get real state; of a
    whole leaf each member keeps its part, so that parameters may be sharded after the optimizer was built.
    """
    kept = {(s.owner, s.key): s.value for s in slots(old, old_names) if s.value is not None}
    return refill(fresh, names, [_keep(s, kept.get((s.owner, s.key))) for s in slots(fresh, names)])


def _keep(slot: Slot, old: Tensor | None) -> Tensor | None:
    if old is None or slot.value is None or (old.is_meta and not slot.value.is_meta):
        return slot.value
    return own_part(old, slot.value)


def own_part(x: Tensor, like: Tensor) -> Tensor:
    """`x`, if it is whole and `like` a DTensor, as what this member holds of it: contiguous, and placed as `like`."""
    if not is_sharded(like) or is_sharded(x):
        return x
    piece = piece_of(like)
    part = x[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
    return like_piece(part.clone(memory_format=torch.contiguous_format), like)


def place(
    state: OptState,
    params: Mapping[str, Tensor],
    capturable: bool = False,
    put: Callable[[Tensor, torch.device], Tensor] | None = None,
) -> OptState:
    """Move leaves of rank >= 1 to their parameter's device (shared ones to the first's), 0-dim ones to the CPU.

    Args:
        state: a state tree made for `params`.
        params: by name.
        capturable: move 0-dim numbers too, and 0-dim bools of one parameter; shared ones the host asks for.
        put: moves a leaf of rank >= 1 of one parameter, given that one's device, if not simply there.
    """
    first = next((p.device for p in params.values() if not p.is_meta), torch.device("cpu"))

    def move(leaf: Any, owner: str | None, depth: int) -> Any:
        target = first if owner is None else params[owner].device
        if put is not None and owner is not None and isinstance(leaf, Tensor) and leaf.dim():
            return put(leaf, target)
        moves = isinstance(leaf, Tensor) and (leaf.dim() or (capturable and (owner or leaf.dtype != torch.bool)))
        return _move(leaf, target if moves else torch.device("cpu"))

    return _map_leaves(move, state, params.keys())


def _move(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) and not leaf.is_meta and device.type != "meta" else leaf
