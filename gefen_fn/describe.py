"""What a transform keeps for each parameter, and why in that form."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, Params, Recipe
from gefen_fn.blocks import FlatBlocks, dense_reason, leaf_layout
from gefen_fn.fuse import fuse
from gefen_fn.program import opened
from gefen_fn.second_moment import Block, Factored, policy_for
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
        note: why it is not quantized, or not as asked for; empty if it is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: Mapping[str, str]
    bytes: int
    note: str


class Report(NamedTuple):
    """What `describe` returns; printed, it is a table.

    Attributes:
        expression: the transform.
        fused: the stages that a back end does in one go, in place (see `fuse`); empty if there are none.
        leaves: one row per parameter.
        shared_bytes: state that belongs to no parameter, such as a codebook.
        entries: entries of all parameters.
    """

    expression: str
    fused: str
    leaves: tuple[LeafReport, ...]
    shared_bytes: int
    entries: int

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
        fused = f"fused: {self.fused or 'nothing'}"
        return "\n".join([self.expression, fused, *lines, f"{self.bytes:,} bytes of state{share}"])


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
    meta = tree_map(lambda p: torch.empty_like(p, device="meta"), params)
    leaves = {path: p for path, p in zip(tree_paths(meta), tree_leaves(meta), strict=True) if p is not None}
    owned: dict[str | None, dict[str, Tensor]] = {path: {} for path in (None, *leaves)}
    for key, x in flatten_state(tx.init(meta)).items():
        owned[_owner(key, leaves)][key] = x
    rules = list(_gefen_rules(tx))
    reports = tuple(_leaf(path, p, owned[path], rules) for path, p in leaves.items())
    step, entries = fuse(tx), sum(p.numel() for p in leaves.values())
    return Report(repr(tx), "" if step is None else str(step), reports, state_bytes(owned[None]), entries)


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
    return LeafReport(readable(path), tuple(p.shape), p.dtype, kept, state_bytes(state), "; ".join(filter(None, notes)))


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
        for inner in _inner(recipe):
            yield from _gefen_rules(inner)


def _inner(recipe: Recipe) -> list[Any]:
    """The transforms that a recipe puts together; labels in the order in which dictionaries of state are walked."""
    if recipe.marked is not None:
        inner = opened(recipe)
        return [] if inner is None else [inner]
    if recipe.name == "named_chain":
        return [tx for _, tx in sorted(recipe.args)]
    if recipe.name == "partition":
        return [recipe.args[0][label] for label in sorted(recipe.args[0], key=lambda x: (type(x).__name__, x))]
    return [tx for tx in recipe.args if isinstance(tx, GradientTransformation)]
