"""What a transform keeps for each parameter, and why in that form."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, Params, Recipe
from gefen_fn.blocks import FlatBlocks, dense_reason, leaf_layout
from gefen_fn.contract import Capabilities, claims
from gefen_fn.fuse import fuse
from gefen_fn.program import inner_of
from gefen_fn.second_moment import Block, Factored, policy_for
from gefen_fn.shards import placed_shape, placements_of
from gefen_fn.state_io import flatten_state, state_bytes
from gefen_fn.tree import check_leaves, readable, tree_leaves, tree_map, tree_paths

_SHARED = ("hyperparams", "codebook", "learned")


class LeafReport(NamedTuple):
    """One parameter.

    Attributes:
        path: its keys joined by dots, as they are written; empty for a bare tensor.
        shape: its shape.
        dtype: its dtype.
        kept: from `<field>[.<subfield>]` to dtype and shape, as text, of every tensor but counters.
        bytes: of all its state.
        local_bytes: of the part of it that is held here.
        placements: how the parameter lies on its mesh; empty for a whole tensor.
        note: why it is not quantized, or not as asked for; empty if it is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: Mapping[str, str]
    bytes: int
    local_bytes: int
    placements: str
    note: str


class Report(NamedTuple):
    """What `describe` returns; printed, it is a table.

    Attributes:
        expression: the transform.
        fused: the stages that a back end does in one go, in place (see `fuse`); empty if there are none.
        leaves: one row per parameter.
        shared_bytes: state that belongs to no parameter, such as a codebook.
        entries: entries of all parameters.
        claims: the layouts it can train on, and what a checkpoint restores.
    """

    expression: str
    fused: str
    leaves: tuple[LeafReport, ...]
    shared_bytes: int
    entries: int
    claims: Capabilities

    @property
    def bytes(self) -> int:
        """All state."""
        return self.shared_bytes + sum(leaf.bytes for leaf in self.leaves)

    def __str__(self) -> str:
        """A table of the leaves, and the sum."""
        rows = [("leaf", "shape", "bytes", "state", "note")]
        for leaf in self.leaves:
            kept = ", ".join(f"{name} {form}" for name, form in leaf.kept.items())
            rows.append((leaf.path or ".", _shape(leaf.shape), f"{leaf.bytes:,}", kept, leaf.note))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        share = f", {self.bytes / self.entries:.4f} bytes per parameter" if self.entries else ""
        head = [self.expression, f"fused: {self.fused or 'nothing'}", f"trains on: {', '.join(self.claims.layouts)}"]
        head.append(f"checkpoints: {_guarantee(self.claims)}")
        return "\n".join([*head, *lines, f"{self.bytes:,} bytes of state{share}"])


def describe(tx: GradientTransformation, params: Params) -> Report:
    """Say what state a transform keeps for each parameter; reads shapes only and allocates nothing.

    Args:
        tx: the transform.
        params: the parameters, possibly on the meta device; `None` leaves are left out.

    Returns:
        A report; `print` it for a table.

    Raises:
        StructureError: if a leaf is not a dense floating-point tensor.
    """
    check_leaves(params)
    meta = tree_map(lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"), params)
    places = dict(zip(tree_paths(params), tree_leaves(params), strict=True))
    leaves = {path: p for path, p in zip(tree_paths(meta), tree_leaves(meta), strict=True) if p is not None}
    owned: dict[str | None, dict[str, Tensor]] = {path: {} for path in (None, *leaves)}
    for key, x in flatten_state(tx.init(meta)).items():
        owned[_owner(key, leaves)][key] = x
    rules = list(_gefen_rules(tx))
    reports = tuple(_leaf(path, places[path], owned[path], rules) for path in leaves)
    step, entries = fuse(tx), sum(p.numel() for p in leaves.values())
    return Report(repr(tx), "" if step is None else str(step), reports, state_bytes(owned[None]), entries, claims(tx))


def _guarantee(claims: Capabilities) -> str:
    """In words, what a checkpoint restores to the bit."""
    where = "on any mesh" if claims.resharding_exact else "on the mesh that saved it"
    kept = f"exact {where}" if claims.same_topology_exact else "not exact"
    return f"{kept} ({'; '.join(claims.refused)})" if claims.refused else kept


def _owner(key: str, leaves: Mapping[str, Tensor]) -> str | None:
    """The path in a key `<stage>.<field>.<path>[.<subfield>]`; a bare tensor has the empty path."""
    field, *rest = key.split(".")[1:]
    paths = [".".join(rest[:n]) for n in range(len(rest), -1, -1)]
    return None if field in _SHARED else next((path for path in paths if path in leaves), None)


def _leaf(path: str, p: Tensor, state: dict[str, Tensor], rules: list[Mapping[str, Any]]) -> LeafReport:
    below = f".{path}" if path else ""
    names = {key.split(".", 1)[1].replace(below, "", 1): x for key, x in state.items()}
    kept = {name: f"{str(x.dtype).removeprefix('torch.')}{_shape(x.shape)}" for name, x in names.items() if x.dim()}
    stages = [key.split(".")[0] for key in state if key.startswith("scale_by_gefen") and ".count" in key]
    numbers = [int(stage.partition("#")[2] or 1) - 1 for stage in stages]
    notes = [_note(tuple(p.shape), rules[i]) for i in numbers if i < len(rules)]
    placements = ", ".join(map(str, placements_of(p)))
    held = sum(math.prod(placed_shape(p, x.shape)) * x.itemsize for x in state.values())
    note = "; ".join(filter(None, notes))
    return LeafReport(readable(path), tuple(p.shape), p.dtype, kept, state_bytes(state), held, placements, note)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _note(shape: tuple[int, ...], rule: Mapping[str, Any]) -> str:
    layout = leaf_layout(shape, flat=isinstance(rule["block"], FlatBlocks))
    policy = rule["second_moment"]
    if layout.dense:
        return f"dense: {dense_reason(shape)}"
    if layout.start == 0:
        return "blocks over the flattened leaf: does not shard"
    fallen = isinstance(policy, Factored) and isinstance(policy_for(policy, layout), Block)
    return "block means: a side below 32" if fallen else ""


def _gefen_rules(tx: Any) -> Iterator[Mapping[str, Any]]:
    """The arguments of every `scale_by_gefen` in an expression, in the order of the state's stages."""
    recipe = getattr(getattr(tx, "update", None), "recipe", None)
    if isinstance(recipe, Recipe):
        if recipe.name == "scale_by_gefen":
            yield recipe.kwargs
        for inner in inner_of(recipe):
            yield from _gefen_rules(inner)
