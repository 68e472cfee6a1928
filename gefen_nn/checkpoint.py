"""Reading a state dict back: validate everything, build the new tree, change nothing."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import OptState
from gefen_fn.quantize import check_codebooks
from gefen_fn.shards import like_piece, local
from gefen_fn.tree import StructureError, list_names
from gefen_nn import state_view
from gefen_nn.errors import CheckpointError
from gefen_nn.groups import FIXED_KEYS
from gefen_nn.leaves import check_leaf
from gefen_nn.meaning import check_kept_as

_NOT_VALUES = ("params", "param_names", *FIXED_KEYS)
_VERSIONS = ("format_version", "block")
_OURS = "Pass `optimizer.state_dict()`."


class Saved(NamedTuple):
    """A state dict by parameter name: the state's leaves, and the group's values."""

    leaves: dict[str, dict[str, Tensor]]
    values: dict[str, dict[str, Any]]


class LoadReport(NamedTuple):
    """What a load that is not strict left out: `<parameter>`, `<parameter>: <key>`, `group <n>: <key>`, or a path.

    Attributes:
        missing: kept as it was, for want of it in the file.
        unexpected: in the file, and not used.
        extra: what else `gefen_nn.save` was given.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    extra: Mapping[str, Any] = {}


class Loaded(NamedTuple):
    """All that a load puts in place, once it is checked.

    Attributes:
        seen: what the new state was made for, by parameter.
        before: the state that it replaces.
        after: the new state.
        values: of each group.
        report: what was left out.
    """

    seen: dict[str, tuple[Any, ...]]
    before: OptState
    after: OptState
    values: list[dict[str, Any]]
    report: LoadReport


def read(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
    frozen: Collection[str] = (),
    strict: bool = True,
) -> Saved:
    """Sort a state dict by parameter name.

    Args:
        state_dict: `{"state": ..., "param_groups": ...}` as `Optimizer.state_dict` makes it.
        groups: the target's groups.
        members: the names of each target group's parameters.
        frozen: parameters that may be left out.
        strict: refuse names that do not match.

    Raises:
        CheckpointError: for a missing part, another version or block, or names that do not match.
    """
    check_form(state_dict)
    stages = _stages(_keys(state_dict["state"]))
    for group in state_dict["param_groups"]:
        _check_fixed(group, groups[0], strict, stages)
    names = _match(state_dict["param_groups"], members, "param_names" in groups[0], frozen, strict)
    owner = {i: group for group in state_dict["param_groups"] for i in group["params"]}
    values = {name: {k: v for k, v in owner[i].items() if k not in _NOT_VALUES} for i, name in names.items()}
    stray = [i for i in state_dict["state"] if i not in names]
    if stray:
        raise CheckpointError(f"State must belong to a parameter of a group: got entries {stray}. The file is damaged.")
    return Saved({name: dict(state_dict["state"].get(i, {})) for i, name in names.items()}, values)


def check_form(state_dict: Any) -> None:
    """Refuse what `Optimizer.state_dict` cannot have made."""
    for index in _part(state_dict, "state", Mapping):
        _check_texts(f"State keys of {index!r}", _part(state_dict["state"], index, Mapping))
    for group in _part(state_dict, "param_groups", (list, tuple)):
        _check_texts("Keys of a group", group if isinstance(group, Mapping) else {})
        if not all(isinstance(i, (int, str)) for i in _part(group, "params", (list, tuple))):
            raise CheckpointError(f"`params` of a group must be indices or names: got {group['params']}. {_OURS}")
        if "param_names" in group:
            _check_texts("`param_names` of a group", _part(group, "param_names", (list, tuple)))


def _check_texts(what: str, keys: Collection[Any]) -> None:
    other = next((key for key in keys if not isinstance(key, str)), None)
    if other is not None:
        raise CheckpointError(f"{what} must be text: got {other!r}, a {type(other).__name__}. {_OURS}")


def _part(whole: Any, key: Any, kind: Any) -> Any:
    held = whole if isinstance(whole, Mapping) else {}
    if not isinstance(held.get(key), kind):
        came = f"a {type(held[key]).__name__} there" if key in held else sorted(map(str, held)) or type(whole).__name__
        raise CheckpointError(f"A state dict has `{key}`: got {came}. {_OURS}")
    return held[key]


def _check_fixed(group: Mapping[str, Any], target: Mapping[str, Any], strict: bool, stages: Sequence[str]) -> None:
    if group.keys() <= {"params", "param_names"}:
        if not strict:
            return
        raise CheckpointError(
            f"Groups must carry their values: got none with {list_names(parameters=list(map(str, group['params'])))}. "
            "torch's functions lose them between groups: use flatten_optimizer_state_dict=True, or `gefen_nn.save`."
        )
    if "format_version" not in group:
        raise CheckpointError(
            "A state dict must come from an optimizer of this package: got a group without `format_version`, another "
            "optimizer's state. `load_state_dict(convert_state(state, optimizer))` takes that of torch's Adam, "
            "AdamW and Muon, and of Gefen-X 0.5; of others load the model alone."
        )
    for key in _VERSIONS:
        if type(group.get(key)) is not int or group[key] != target[key]:
            raise CheckpointError(
                f"Saved from {', '.join(stages) or 'no stage'}. "
                f"`{key}` must be {_in_words(key, target[key])}: got {_in_words(key, group.get(key, 'nothing'))}. "
                "Build the optimizer as the one that saved, or update the package."
            )
    check_kept_as(group, target)


def _in_words(key: str, value: Any) -> str:
    return "no one length for the whole model" if key == "block" and value == 0 else str(value)


def _match(
    saved: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
    named: bool,
    frozen: Collection[str],
    strict: bool,
) -> dict[Any, str]:
    """The name of each saved index: itself, as torch's functions write it, or the saved name, else by position."""
    targets = [name for member in members for name in member]
    ids = [i for group in saved for i in group["params"]]
    if all(isinstance(i, str) for i in ids) and (named or set(ids) == set(targets)):
        names = ids
        _check_names(names, targets, frozen, strict)
    elif named and all("param_names" in group for group in saved):
        names = [name for group in saved for name in group["param_names"]]
        _check_names(names, targets, frozen, strict)
    else:
        names = targets
        _check_sizes([len(group["params"]) for group in saved], list(map(len, members)))
    if len(ids) != len(names):
        raise CheckpointError(f"Parameters must match: got {len(ids)} for {len(names)}. Build the same groups.")
    return dict(zip(ids, names, strict=True))


def _check_sizes(saved: Sequence[int], own: Sequence[int]) -> None:
    """Without names a parameter is known by its place, which other groups would give to another."""
    if saved != own:
        raise CheckpointError(
            f"Without names on both sides groups must match: got groups of {saved} parameters for {own}. "
            "Build the groups as they were saved, and give names to optimizers whose groups may change."
        )


def _check_names(names: Sequence[str], targets: Sequence[str], frozen: Collection[str], strict: bool) -> None:
    missing, extra = sorted(set(targets) - set(names) - set(frozen)), sorted(set(names) - set(targets))
    twice = sorted({name for name in names if names.count(name) > 1})
    if (strict and (missing or extra)) or twice:
        compiled = not twice and {_uncompiled(name) for name in names} == {_uncompiled(name) for name in targets}
        fix = (
            "torch.compile put `_orig_mod.` before the names: take them from the module before it is compiled, or "
            "rename those in `param_names`"
            if compiled
            else "Rename the entries, or load with strict=False"
        )
        differences = list_names(missing=missing, unexpected=extra, twice=twice)
        raise CheckpointError(f"Parameter names must match: got {differences}. {fix}.")


def _uncompiled(name: str) -> str:
    return name.replace("_orig_mod.", "")


def restore(
    state: OptState,
    names: Collection[str],
    saved: Mapping[str, Mapping[str, Tensor]],
    frozen: Collection[str],
    strict: bool = True,
) -> OptState:
    """The state tree with the saved leaves, each in storage of its own.

    Args:
        state: the target's state, for its structure, shapes, dtypes and devices.
        names: the parameters that have state.
        saved: the saved leaves by parameter.
        frozen: parameters whose state may be left out.
        strict: refuse keys that are missing or unexpected; else the target keeps its own leaf where one is missing.

    Raises:
        CheckpointError: naming the first key that does not fit or is damaged.
    """
    own = state_view.view(state, names)
    for name, leaves in own.items():
        if strict and (saved.get(name) or name not in frozen):
            _check_keys(name, own, saved)
        for key in leaves.keys() & saved.get(name, {}).keys():
            check_leaf(f"{name}: {key}", leaves[key], saved[name][key])
    values = [_load(slot, saved) for slot in state_view.slots(state, names)]
    return checked_codebooks(state, state_view.refill(state, names, values))


def checked_codebooks(before: OptState, after: OptState) -> OptState:
    """The state after a load, unless codes stand in it beside a codebook that they were not made with.

    Raises:
        CheckpointError: saying which of the two is missing.
    """
    try:
        check_codebooks(before, after)
    except StructureError as error:
        raise CheckpointError(str(error)) from error
    return after


def _load(slot: state_view.Slot, saved: Mapping[str, Mapping[str, Tensor]]) -> Tensor | None:
    owners = saved if slot.owner is None else [slot.owner]
    copies = [saved[name][slot.key] for name in owners if slot.key in saved.get(name, {})]
    if slot.value is None or not copies:
        return slot.value
    if any(other is not copies[0] and not same_bits(copies[0], other) for other in copies[1:]):
        raise CheckpointError(
            f"`{slot.key}` is shared and must be equal for all parameters: got different copies. Load an older file."
        )
    return _fresh(copies[0], slot.value)


def _fresh(x: Tensor, own: Tensor) -> Tensor:
    """A copy of `x`, or of this member's part of it, contiguous, in memory as `own`'s and placed as that."""
    part, there = local(state_view.own_part(x, own)).detach(), local(own)
    copy = part.to(there.device, copy=True, memory_format=torch.contiguous_format)
    return like_piece(copy.pin_memory() if there.is_pinned() else copy, own)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bytes, NaNs included; of sharded ones, this member's parts."""
    return x.shape == y.shape and torch.equal(_bits(local(x)), _bits(local(y)))


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def report(
    state: OptState,
    names: Collection[str],
    saved: Mapping[str, Mapping[str, Tensor]],
    values: Sequence[Mapping[str, Any]],
    keys: Collection[str],
) -> LoadReport:
    """What a load leaves out.

    Args:
        state: the target's state before it.
        names: the parameters that have state.
        saved: the saved leaves by parameter.
        values: what each target group gets.
        keys: what each target group holds.
    """
    own = state_view.view(state, names)
    kept = [f"group {i}: {key}" for i, given in enumerate(values) for key in keys if key not in given]
    return LoadReport((*_lacking(own, saved), *kept), tuple(_lacking(saved, own)))


def _lacking(has: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, Mapping[str, Tensor]]) -> Iterator[str]:
    """What `has` holds and `other` does not."""
    for name, leaves in has.items():
        if leaves and not other.get(name):
            yield name
        else:
            yield from (f"{name}: {key}" for key in sorted(leaves.keys() - other.get(name, {}).keys()))


def _check_keys(name: str, own: Mapping[str, Mapping[str, Tensor]], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse a parameter whose keys differ, in view of what all parameters have."""
    keys, came = own[name].keys(), saved.get(name, {}).keys()
    if keys != came:
        differences = list_names(missing=sorted(keys - came), unexpected=sorted(came - keys))
        raise CheckpointError(
            f"{other_stages(_keys(saved), _keys(own))}State keys of {name!r} must match: got {differences}. "
            "Build the optimizer with the transform that saved, or load with strict=False."
        )


def _keys(leaves: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    return [key for own in leaves.values() for key in own]


def other_stages(saved: Sequence[str], own: Sequence[str]) -> str:
    """The beginning of an error: whose state was saved, if stages differ; else nothing.

    Args:
        saved: names of its tensors.
        own: names of those that are wanted.
    """
    came, wanted = _stages(saved), _stages(own)
    if set(came) == set(wanted):
        return ""
    return f"Saved from {', '.join(came) or 'no stage'}, yours is {', '.join(wanted) or 'none'}. "


def _stages(keys: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(str(key).partition(".")[0] for key in keys))


def group_values(
    saved: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
    check: Callable[[Mapping[str, Any]], None],
    strict: bool = True,
) -> list[dict[str, Any]]:
    """The hyperparameters of each target group, taken from its parameters.

    Args:
        saved: the saved values by parameter.
        groups: the target's groups.
        members: the names of each target group's parameters.
        check: raises `ValueError` for values that a group cannot hold.
        strict: refuse a group whose parameters were saved with different values, or without one; else it keeps its own.

    Raises:
        CheckpointError: if a group's parameters were saved with different values, or with wrong ones.
    """
    out = []
    for group, member in zip(groups, members, strict=True):
        rows = [saved[name] for name in member if name in saved]
        differing = _differing(rows)
        if strict and differing:
            came = [row.get(differing[0]) for row in rows]
            raise CheckpointError(
                f"Parameters of one group must carry one `{differing[0]}`: got {list(dict.fromkeys(map(str, came)))}. "
                "Group the parameters as they were saved, or load with strict=False to keep the group's own."
            )
        values = {key: value for key, value in (rows[0] if rows else {}).items() if key not in differing}
        try:
            check(values if strict and rows else {**group, **values})
        except ValueError as error:
            raise CheckpointError(f"Group values must fit. {error}") from error
        out.append(values)
    return out


def _differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that not all rows have with one value."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(key not in row or not _equal(row[key], rows[0].get(key)) for row in rows)]


def _equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)


def fill_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Write restored hyperparameters into a group; a tensor is filled in place, as a captured graph reads it."""
    group.update({key: _filled(group.get(key), value) for key, value in values.items()})


def _filled(own: Any, value: Any) -> Any:
    if isinstance(own, Tensor):
        return own.copy_(value.reshape(own.shape)) if isinstance(value, Tensor) else own.fill_(value)
    if isinstance(own, (tuple, list)) and isinstance(value, (tuple, list)) and len(own) == len(value):
        return type(own)(map(_filled, own, value))
    if isinstance(value, Tensor):
        return float(value) if isinstance(own, float) else value.clone()
    return value
