"""What is in a checkpoint, and whether it is sound: leaves, steps, codebooks, and what codes and scales look like."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.health import code_shares, scale_range
from gefen_fn.quantize import is_codebook
from gefen_fn.text import table
from gefen_fn.tree import list_names
from gefen_nn.checks import as_path
from gefen_nn.console import Watch, silent, size
from gefen_nn.soundness import fresh_leaves, group_faults, leaf_fault
from gefen_nn.stored import Stored, StoredLeaf, is_shared, read_stored

_KINDS = {"exp_avg": "Adam of torch", "m_codebook": "Gefen-X", "momentum_buffer": "torch.optim"}
_COUNTS = ("count", "step")
_POSITIVE = (*_COUNTS, "mu.absmax", "nu", "nu.row", "nu.col", "exp_avg_sq")


class LeafContents(NamedTuple):
    """The state of one parameter.

    Attributes:
        name: of the parameter.
        shape: its shape, or that of its first moment.
        rule: the stage that keeps its moments.
        steps: updates it has had; None where nobody counts them.
        kept: dtype and shape of every tensor but counters, by its field.
        bytes: of all its state.
        at_ends: share of codes that stand for -1 or 1; at least one in each block that is not zero. None without codes.
        at_zero: share of codes that stand for 0.
        scales: the least scale above zero, and the largest.
        empty_blocks: share of blocks whose scale is zero.
        faults: what makes it unfit to go on from.
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    steps: int | None
    kept: dict[str, str]
    bytes: int
    at_ends: float | None
    at_zero: float | None
    scales: tuple[float, float] | None
    empty_blocks: float | None
    faults: tuple[str, ...]


class Codebook(NamedTuple):
    """The levels of one stage and how often its codes use them.

    Attributes:
        levels: in ascending order.
        learned: whether they were learned from gradients.
        used: codes at each level, of all leaves.
        faults: what makes it none.
    """

    levels: tuple[float, ...]
    learned: bool
    used: tuple[int, ...]
    faults: tuple[str, ...]

    @property
    def dead(self) -> int:
        """Distinct levels that no code stands for; zero stands twice in a symmetric codebook."""
        return len(set(self.levels) - {x for x, count in zip(self.levels, self.used, strict=True) if count})


class Contents(NamedTuple):
    """What `inspect_checkpoint` found; printed, it is a table.

    Attributes:
        kind: what wrote it.
        leaves: one row per parameter that has state.
        codebooks: by stage.
        groups: values of the optimizer's groups, names under `params`.
        state_bytes: of all state.
        other_bytes: of tensors beside it, such as the model's.
        stateless: parameters of a group that have no state, which fits only where they are frozen, or had no gradient.
        others: faults that are no one leaf's: of groups, and of copies that differ.
    """

    kind: str
    leaves: tuple[LeafContents, ...]
    codebooks: dict[str, Codebook]
    groups: list[dict[str, Any]]
    state_bytes: int
    other_bytes: int
    stateless: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """All of them, with whose they are."""
        rows = [(leaf.name, leaf.faults) for leaf in self.leaves]
        rows += [(f"codebook of {stage or 'all'}", book.faults) for stage, book in self.codebooks.items()]
        return [*(f"{name}: {fault}" for name, faults in rows for fault in faults), *self.others]

    def __str__(self) -> str:
        """The leaves, the codebooks, the groups and the faults."""
        head = ("leaf", "shape", "rule", "steps", "bytes", "at ends", "at zero", "empty", "scales")
        rows = [head, *map(_row, self.leaves)]
        lines = [f"{self.kind}: {size(self.state_bytes)} of state, {size(self.other_bytes)} beside it"]
        lines += [table(rows, left=3), *(_book_line(*item) for item in self.codebooks.items())]
        lines += [_group_line(n, group) for n, group in enumerate(self.groups)]
        if self.stateless:
            lines.append(f"without state, as frozen parameters are: {list_names(parameters=self.stateless)}")
        return "\n".join([*lines, *(f"FAULT {fault}" for fault in self.faults)])


def _row(leaf: LeafContents) -> tuple[str, ...]:
    shape, steps = "x".join(map(str, leaf.shape)) or "scalar", "" if leaf.steps is None else f"{leaf.steps:,}"
    shares = ("" if x is None else f"{x:.2%}" for x in (leaf.at_ends, leaf.at_zero, leaf.empty_blocks))
    scales = "" if leaf.scales is None else "{:.1e} to {:.1e}".format(*leaf.scales)
    return (leaf.name or ".", shape, leaf.rule, steps, f"{leaf.bytes:,}", *shares, scales)


def _book_line(stage: str, book: Codebook) -> str:
    kind = "learned" if book.learned else "not learned"
    used = f"{book.dead} of them unused by {sum(book.used):,} codes" if sum(book.used) else "no codes"
    return f"codebook of {stage or 'all'}: {len(set(book.levels))} levels, {kind}, {used}"


def _group_line(n: int, group: dict[str, Any]) -> str:
    values = {k: x for k, x in group.items() if k != "params" and isinstance(x, (int, float, str, list, tuple))}
    return f"group {n}: {len(group['params'])} parameters, {', '.join(f'{k}={x}' for k, x in values.items())}"


def inspect_checkpoint(path: str | Path, *, key: str | None = None, watch: Watch | None = None) -> Contents:
    """Look at every tensor of the state in a file or folder, a parameter at a time.

    Args:
        path: a folder of `gefen_nn.save` or of torch.distributed.checkpoint, or a file of `torch.save`.
        key: which of several states in it.
        watch: shows progress; None for none.

    Raises:
        TypeError: if `path` is none.
        CheckpointError: if it cannot be read, or holds no state.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> save("run", model, Gefen(model.named_parameters()))
        >>> contents = inspect_checkpoint("run")  # print it for a table
        >>> [leaf.name for leaf in contents.leaves], contents.faults
        (['bias', 'weight'], [])
    """
    stored = read_stored(as_path(path), key)
    owned: dict[str | None, list[StoredLeaf]] = {}
    for leaf in stored.leaves:
        owned.setdefault(leaf.owner, []).append(leaf)
    common = {(x.stage, x.field): _fetched(stored, x) for x in owned.pop(None, [])}
    books = {stage: x for (stage, field), x in common.items() if field in ("codebook", "gefen_codebook")}
    used = {stage: torch.zeros(book.numel(), dtype=torch.int64) for stage, book in books.items()}
    groups = {name: group for group in stored.groups if "format_version" in group for name in group["params"]}
    stages: dict[str, set[str]] = {}  # that keep state of each parameter
    wanted: dict[str, Tensor] = {}
    rows = []
    with (watch or silent)("reading", len(owned)) as advance:
        for name, leaves in owned.items():
            stages[str(name)] = {leaf.stage for leaf in leaves}
            fresh = _fresh(str(name), leaves, stored, groups)
            wanted |= {key: x for key, x in fresh.items() if is_shared(key)}
            rows.append(_health(str(name), leaves, stored, books, used, fresh))
            advance()
    found = {}
    for stage, book in books.items():
        learned = common.get((stage, "learned"), torch.ones(1))
        found[stage] = _codebook(stage, book, bool(learned.any()), used[stage], wanted)
    others = [*stored.faults, *_common_faults(common, wanted), *_group_faults(stored, stages)]
    stateless = tuple(name for group in stored.groups for name in group["params"] if name not in stages)
    total = sum(leaf.bytes for leaf in stored.leaves)
    return Contents(stored.kind, tuple(rows), found, stored.groups, total, stored.other_bytes, stateless, tuple(others))


def _fresh(
    name: str, leaves: Sequence[StoredLeaf], stored: Stored, groups: Mapping[str, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """What a fresh optimizer keeps of the parameter; nothing where that is not known."""
    stages = list(dict.fromkeys(leaf.stage for leaf in leaves))
    return fresh_leaves(stages, stored.shapes.get(name, _shape(leaves)), groups[name]) if name in groups else {}


def _common_faults(common: Mapping[tuple[str, str], Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Of what belongs to all parameters but codebooks, which tell their own; and what of it is missing."""
    keys = {f"{stage}.{field}": x for (stage, field), x in common.items() if stage and field != "codebook"}
    found = [fault for key, x in keys.items() if (fault := leaf_fault(key, x, wanted)) is not None]
    have = {f"{stage}.{field}" for stage, field in common}
    return [*found, *(f"{key} is missing" for key in sorted(wanted.keys() - have))]


def _group_faults(stored: Stored, stages: Mapping[str, set[str]]) -> list[str]:
    """Of groups of ours."""
    found = []
    for n, group in enumerate(stored.groups):
        if "format_version" in group:
            found += group_faults(n, group, sorted(set().union(*(stages.get(name, ()) for name in group["params"]))))
    ours = any("format_version" in group for group in stored.groups)
    return [*found, *["no parameter has state"] * (ours and not stages)]


def _fetched(stored: Stored, leaf: StoredLeaf) -> Tensor:
    return stored.fetch([leaf.key])[leaf.key]


def _codebook(stage: str, book: Tensor, learned: bool, used: Tensor, wanted: Mapping[str, Tensor]) -> Codebook:
    if stage:
        fault = leaf_fault(f"{stage}.codebook", book, wanted)
    else:
        fault = None if is_codebook(book) else "must be sorted, finite and end at -1 and 1"
    return Codebook(tuple(book.reshape(-1).tolist()), learned, tuple(used.tolist()), () if fault is None else (fault,))


def _health(
    name: str,
    leaves: Sequence[StoredLeaf],
    stored: Stored,
    books: dict[str, Tensor],
    used: dict[str, Tensor],
    fresh: Mapping[str, Tensor],
) -> LeafContents:
    """Look at the tensors of one parameter, and count the levels that its codes use."""
    held = stored.fetch([leaf.key for leaf in leaves])
    tensors = {(leaf.stage, leaf.field): held[leaf.key] for leaf in leaves}
    steps = [int(x) for (_, field), x in tensors.items() if field in _COUNTS and x.numel() == 1 and x.isfinite()]
    kept = {leaf.field: _form(leaf) for leaf in leaves if leaf.shape}
    codes = [(leaf.stage, held[leaf.key]) for leaf in leaves if leaf.field in ("mu.codes", "m_codebook")]
    codes = [(stage, x) for stage, x in codes if stage in books and _is_read_by(books[stage], x)]
    scales = [x for (_, field), x in tensors.items() if field in ("mu.absmax", "m_magnitude")]
    ends, zero = _shares(codes, books, used)
    scale, empty = _scales(scales)
    faults = _leaf_faults(tensors, fresh)
    shape = stored.shapes.get(name) or _shape(leaves)
    total = sum(leaf.bytes for leaf in leaves)
    return LeafContents(
        name, shape, _rule(leaves), max(steps, default=None), kept, total, ends, zero, scale, empty, faults
    )


def _form(leaf: StoredLeaf) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(map(str, leaf.shape))}]"


def _shape(leaves: Sequence[StoredLeaf]) -> tuple[int, ...]:
    """Of the first moment, else of the largest tensor."""
    first = [leaf for leaf in leaves if leaf.field in ("mu", "mu.codes", "exp_avg")]
    return (first or sorted(leaves, key=lambda leaf: -math.prod(leaf.shape)))[0].shape


def _rule(leaves: Sequence[StoredLeaf]) -> str:
    stages = dict.fromkeys(leaf.stage for leaf in leaves if leaf.stage and leaf.shape)
    other = next((word for leaf in leaves for field, word in _KINDS.items() if leaf.field == field), "")
    return ", ".join(stages) or other


def _shares(
    codes: Sequence[tuple[str, Tensor]], books: dict[str, Tensor], used: dict[str, Tensor]
) -> tuple[float | None, float | None]:
    """The shares of codes at either end and at zero, which `used` counts too; None without codes."""
    for stage, x in codes:
        used[stage] += torch.bincount(x.reshape(-1).long(), minlength=len(books[stage]))[: len(books[stage])]
    if not any(x.numel() for _, x in codes):
        return None, None
    at_ends, at_zero = torch.tensor([code_shares(x, books[stage]) for stage, x in codes]).mean(0).tolist()
    return at_ends, at_zero


def _scales(scales: Sequence[Tensor]) -> tuple[tuple[float, float] | None, float | None]:
    """The least and the largest scale above zero, and the share of those that are zero; None without scales."""
    flat = torch.cat([x.reshape(-1) for x in scales]) if scales else torch.empty(0)
    least, largest, empty = map(float, scale_range(flat))
    if not flat.numel():
        return None, None
    return None if largest == 0 else (least, largest), empty


def _is_read_by(book: Tensor, codes: Tensor) -> bool:
    """Whether each code is a number of a level."""
    return codes.dtype == torch.uint8 and book.dim() == 1 and (not codes.numel() or int(codes.max()) < len(book))


def _leaf_faults(tensors: Mapping[tuple[str, str], Tensor], fresh: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Of each leaf of a parameter, and what a fresh one has that is missing, or lacks."""
    found = []
    for (stage, field), x in tensors.items():
        told = _faults(field, x)
        fault = None if told or not stage else leaf_fault(f"{stage}.{field}", x, fresh)
        found += told if fault is None else [fault]
    own, have = {key for key in fresh if not is_shared(key)}, {f"{stage}.{field}" for stage, field in tensors}
    known = {key.partition(".")[0] for key in own}
    found += [f"{key} is missing" for key in sorted(own - have)]
    return (*found, *(f"{key} is not expected" for key in sorted(have - own) if key.partition(".")[0] in known))


def _faults(field: str, x: Tensor) -> list[str]:
    """What a tensor of this field may not hold."""
    found = []
    if x.is_floating_point() and x.numel():
        broken = int((~x.isfinite()).sum())
        found += [f"{field} has {broken:,} values that are not finite"] * bool(broken)
        found += [f"{field} has values below 0"] * (field in _POSITIVE and bool((x < 0).any()))
    return found
