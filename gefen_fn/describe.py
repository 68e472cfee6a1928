"""What a transform keeps for each parameter, and why in that form."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.base import GradientTransformation, Params, Recipe
from gefen_fn.blocks import FlatBlocks, dense_reason, leaf_layout
from gefen_fn.contract import Capabilities, claims
from gefen_fn.fuse import fuse
from gefen_fn.program import inner_of
from gefen_fn.runs import runs
from gefen_fn.scope import Scope, learns
from gefen_fn.second_moment import Block, Factored, policy_for
from gefen_fn.shards import placed_shape, placements_of
from gefen_fn.state_io import flatten_state, state_bytes
from gefen_fn.text import table
from gefen_fn.tree import check_leaves, readable, tree_leaves, tree_map, tree_paths

_SHARED = ("hyperparams", "codebook", "learned")


class LeafReport(NamedTuple):
    """One parameter.

    Attributes:
        path: its keys joined by dots, as they are written; empty for a bare tensor.
        shape: its shape.
        dtype: its dtype.
        rule: the stages that keep state for it, such as `scale_by_muon`; empty if none does.
        kept: from `<field>[.<subfield>]` to dtype and shape, as text, of every tensor but counters.
        bytes: of all its state.
        local_bytes: of the part of it that is held here.
        placements: how the parameter lies on its mesh; empty for a whole tensor.
        note: why it is not quantized, or not as asked for; empty if it is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: str
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
        learners: who learns the codebook of each stage that learns one, in words.
        stepped_on: devices of the parameters that are there, each once; of offloaded shards the CPU.
        kept_on: where the state is kept, if elsewhere (see `gefen_nn.offload`); else empty.
        runs: for each device, what steps leaves there, and why not a back end where it does not.
    """

    expression: str
    fused: str
    leaves: tuple[LeafReport, ...]
    shared_bytes: int
    entries: int
    claims: Capabilities
    learners: Mapping[str, str]
    stepped_on: tuple[str, ...] = ()
    kept_on: str = ""
    runs: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """All state."""
        return self.shared_bytes + sum(leaf.bytes for leaf in self.leaves)

    def __str__(self) -> str:
        """A table of the leaves, and the sum."""
        rows = [("leaf", "shape", "rule", "bytes", "state", "note")]
        for leaf in self.leaves:
            kept = ", ".join(f"{name} {form}" for name, form in leaf.kept.items())
            rows.append((leaf.path or ".", _shape(leaf.shape), leaf.rule, f"{leaf.bytes:,}", kept, leaf.note))
        share = f", {self.bytes / self.entries:.4f} bytes per parameter" if self.entries else ""
        head = [self.expression, f"fused: {self.fused or 'nothing'}", f"trains on: {self._where()}"]
        head += [*(f"runs: {line}" for line in self.runs), f"checkpoints: {_guarantee(self.claims)}"]
        head += [f"codebook of {stage}: learned by {who}" for stage, who in self.learners.items()]
        return "\n".join([*head, table(rows, left=len(rows[0])), f"{self.bytes:,} bytes of state{share}"])

    def _where(self) -> str:
        """The layouts, and where leaves are stepped here."""
        layouts, devices = ", ".join(self.claims.layouts), ", ".join(self.stepped_on)
        if self.claims.unstated:
            layouts += f" ({', '.join(self.claims.unstated)}: not stated by {', '.join(self.claims.silent)})"
        state = f"fetched from {self.kept_on}" if self.kept_on else "beside the parameters"
        return f"{layouts}; here on {devices}, state {state}" if devices else layouts


def describe(tx: GradientTransformation, params: Params) -> Report:
    """Say what state a transform keeps for each parameter; reads shapes only and allocates nothing.

    Of leaves on meshes of several axes all processes call this together.

    Args:
        tx: the transform.
        params: the parameters, possibly on the meta device; `None` leaves are left out.

    Returns:
        A report; `print` it for a table.

    Raises:
        StructureError: if a leaf is not a dense floating-point tensor, or if their meshes overlap.

    Example:
        >>> report = describe(gefen(1e-3), {"w": torch.ones(64, 64), "b": torch.ones(64)})
        >>> [(leaf.path, leaf.bytes, leaf.note) for leaf in report.leaves]
        [('b', 516, 'dense: fewer than 2 axes'), ('w', 4868, '')]
        >>> print(str(report).splitlines()[-1])
        6,409 bytes of state, 1.5406 bytes per parameter
    """
    check_leaves(params)
    meta = tree_map(lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"), params)
    places = dict(zip(tree_paths(params), tree_leaves(params), strict=True))
    leaves = {path: p for path, p in zip(tree_paths(meta), tree_leaves(meta), strict=True) if p is not None}
    owned: dict[str | None, dict[str, Tensor]] = {path: {} for path in (None, *leaves)}
    for key, x in flatten_state(tx.init(meta)).items():
        owned[_owner(key, leaves)][key] = x
    rules = quantizing(tx)
    reports = tuple(_leaf(path, places[path], owned[path], rules) for path in leaves)
    step, entries = fuse(tx), sum(p.numel() for p in leaves.values())
    fused, shared = "" if step is None else str(step), state_bytes(owned[None])
    held = {stage: [places[key] for key in leaves if any(_is_of(x, stage) for x in owned[key])] for stage in rules}
    who = {stage: _learners(rule["codebook"], held[stage]) for stage, rule in rules.items() if learns(rule["codebook"])}
    devices = tuple(dict.fromkeys(str(places[path].device) for path in leaves))
    own = repr(tx), fused, reports, shared, entries, claims(tx), who, devices
    return Report(*own, runs=runs(tx, params))


def _is_of(key: str, stage: str) -> bool:
    return key.split(".")[0] == stage


def _learners(codebook: Any, leaves: list[Any]) -> str:
    """Who learns a codebook, in words."""
    scope, meshes = Scope.of(codebook), agree.meshes_of(leaves)
    if scope is None and not meshes:
        return "this process alone"
    ranks = agree.members_of(meshes) if scope is None else scope.members
    listed = f"members {', '.join(map(str, ranks))}" if len(ranks) <= 8 else f"{len(ranks)} members"
    return f"{listed} of {'the meshes' if scope is None else f'scope {scope.name!r}'}"


def _guarantee(claims: Capabilities) -> str:
    """In words, what a checkpoint restores to the bit."""
    where = "on any mesh" if claims.resharding_exact else "on the mesh that saved it"
    kept = f"exact {where}" if claims.same_topology_exact else "not exact"
    return f"{kept} ({'; '.join(claims.refused)})" if claims.refused else kept


def _owner(key: str, leaves: Mapping[str, Tensor]) -> str | None:
    """The path in a key `<stage>.<field>.<path>[.<subfield>]`; a bare tensor has the empty path.

    A state that is no NamedTuple has no field.
    """
    stage, *rest = key.split(".")
    field = "" if stage.partition("#")[0] == "state" or not rest else rest.pop(0)
    paths = [".".join(rest[:n]) for n in range(len(rest), -1, -1)]
    return None if field in _SHARED else next((path for path in paths if path in leaves), None)


def _leaf(path: str, p: Tensor, state: dict[str, Tensor], rules: Mapping[str, Mapping[str, Any]]) -> LeafReport:
    shown = [(_field(key, path), key, x) for key, x in state.items() if x.dim()]
    fields = [field for field, *_ in shown]
    kept = {field if fields.count(field) == 1 else f"{key.split('.')[0]}.{field}": _form(x) for field, key, x in shown}
    stages = dict.fromkeys(key.split(".")[0] for key in state)
    notes = [_note(tuple(p.shape), rules[stage]) for stage in stages if stage in rules]
    placements = ", ".join(map(str, placements_of(p)))
    held = sum(math.prod(placed_shape(p, x.shape)) * x.itemsize for x in state.values())
    own = readable(path), tuple(p.shape), p.dtype, ", ".join(stages), kept, state_bytes(state), held, placements
    return LeafReport(*own, "; ".join(filter(None, notes)))


def _field(key: str, path: str) -> str:
    """The names in a key but the stage's and the path's; a state without fields is called `state`."""
    stage, _, rest = key.partition(".")
    return f".{rest}.".replace(f".{path}." if path else ".", ".", 1).strip(".") or stage


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{_shape(x.shape)}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _note(shape: tuple[int, ...], rule: Mapping[str, Any]) -> str:
    layout = leaf_layout(shape, flat=isinstance(rule["block"], FlatBlocks))
    policy = rule.get("second_moment")
    if not rule.get("quantize", True):
        return "dense: as asked"
    if layout.dense:
        return f"dense: {dense_reason(shape)}"
    if layout.start == 0:
        return "blocks over the flattened leaf: does not shard"
    fallen = isinstance(policy, Factored) and isinstance(policy_for(policy, layout), Block)
    return "block means: a side below 32" if fallen else ""


def quantizing(tx: GradientTransformation) -> dict[str, Mapping[str, Any]]:
    """The arguments of the stages that keep codes, by the names that their states have in `flatten_state`."""
    named: dict[str, Mapping[str, Any]] = {}
    for recipe in _cores(tx):
        number = sum(name.partition("#")[0] == recipe.name for name in named)
        named[recipe.name if not number else f"{recipe.name}#{number + 1}"] = recipe.kwargs
    return named


def _cores(tx: Any) -> Iterator[Recipe]:
    """The stages of an expression that keep codes, in the order of the state's stages."""
    recipe = getattr(getattr(tx, "update", None), "recipe", None)
    if isinstance(recipe, Recipe):
        if recipe.name in ("scale_by_gefen", "scale_by_muon"):
            yield recipe
        for inner in inner_of(recipe):
            yield from _cores(inner)
