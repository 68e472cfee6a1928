"""Reading a state dict back: validate everything, build the new tree, change nothing."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import OptState
from gefen_fn.quantize import check_codebooks, is_codebook
from gefen_fn.tree import StructureError, list_names
from gefen_nn import state_view
from gefen_nn.errors import CheckpointError
from gefen_nn.groups import FIXED_KEYS

_NOT_VALUES = ("params", "param_names", *FIXED_KEYS)
_SCALES = ("absmax", "nu", "row", "col")
_MOMENTS = ("mu", "trace", "ema")


class Saved(NamedTuple):
    """A state dict by parameter name: the state's leaves, and the group's values."""

    leaves: dict[str, dict[str, Tensor]]
    values: dict[str, dict[str, Any]]


class LoadReport(NamedTuple):
    """What a load that is not strict left out, as `<parameter>: <key>`, or `<parameter>` for all of it.

    Attributes:
        missing: kept as it was, for want of it in the file.
        unexpected: in the file, and not used.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def read(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
    strict: bool = True,
) -> Saved:
    """Sort a state dict by parameter name.

    Args:
        state_dict: `{"state": ..., "param_groups": ...}` as `Optimizer.state_dict` makes it.
        groups: the target's groups.
        members: the names of each target group's parameters.
        strict: refuse names that do not match.

    Raises:
        CheckpointError: for a missing part, another version or block, or names that do not match.
    """
    _check_form(state_dict)
    for group in state_dict["param_groups"]:
        _check_fixed(group, groups[0])
    names = _match(state_dict["param_groups"], members, "param_names" in groups[0], strict)
    owner = {i: group for group in state_dict["param_groups"] for i in group["params"]}
    values = {name: {k: v for k, v in owner[i].items() if k not in _NOT_VALUES} for i, name in names.items()}
    stray = [i for i in state_dict["state"] if i not in names]
    if stray:
        raise CheckpointError(f"State must belong to a parameter of a group: got entries {stray}. The file is damaged.")
    return Saved({name: dict(state_dict["state"].get(i, {})) for i, name in names.items()}, values)


def _check_form(state_dict: Any) -> None:
    """Refuse what `Optimizer.state_dict` cannot have made."""
    for index in _part(state_dict, "state", Mapping):
        _part(state_dict["state"], index, Mapping)
    for group in _part(state_dict, "param_groups", (list, tuple)):
        _part(group, "params", (list, tuple))


def _part(whole: Any, key: Any, kind: Any) -> Any:
    held = whole if isinstance(whole, Mapping) else {}
    if not isinstance(held.get(key), kind):
        came = f"a {type(held[key]).__name__} there" if key in held else sorted(map(str, held)) or type(whole).__name__
        raise CheckpointError(f"A state dict has `{key}`: got {came}. Pass `optimizer.state_dict()`.")
    return held[key]


def _check_fixed(group: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    if "format_version" not in group:
        raise CheckpointError(
            "A state dict must come from an optimizer of this package: got a group without `format_version`, so it is "
            "another optimizer's state, whose moments mean something else. Load the model alone and start fresh."
        )
    for key in FIXED_KEYS:
        if key not in group or group[key] != target[key]:
            raise CheckpointError(
                f"`{key}` must be {target[key]}: got {group.get(key, 'nothing')}. "
                "Build the optimizer as the one that saved, or update the package."
            )


def _match(
    saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]], named: bool, strict: bool
) -> dict[Any, str]:
    """The name of each saved index: the saved one where both sides have names, else that of the position."""
    targets = [name for member in members for name in member]
    ids = [i for group in saved for i in group["params"]]
    if set(ids) == set(targets) and all(isinstance(i, str) for i in ids):
        return {i: i for i in ids}
    if named and all("param_names" in group for group in saved):
        names = [name for group in saved for name in group["param_names"]]
        _check_names(names, targets, strict)
    else:
        names = targets
    if len(ids) != len(names):
        raise CheckpointError(f"Parameters must match: got {len(ids)} for {len(names)}. Build the same groups.")
    return dict(zip(ids, names, strict=True))


def _check_names(names: Sequence[str], targets: Sequence[str], strict: bool) -> None:
    missing, extra = sorted(set(targets) - set(names)), sorted(set(names) - set(targets))
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
    for name, leaves in state_view.view(state, names).items():
        if strict and (saved.get(name) or name not in frozen):
            _check_keys(name, leaves, saved.get(name, {}))
        for key in leaves.keys() & saved.get(name, {}).keys():
            _check_leaf(f"{name}: {key}", leaves[key], saved[name][key])
    loaded = state_view.refill(state, names, [_load(slot, saved) for slot in state_view.slots(state, names)])
    try:
        check_codebooks(state, loaded)
    except StructureError as error:
        raise CheckpointError(str(error)) from error
    return loaded


def _load(slot: state_view.Slot, saved: Mapping[str, Mapping[str, Tensor]]) -> Tensor | None:
    owners = saved if slot.owner is None else [slot.owner]
    copies = [saved[name][slot.key] for name in owners if slot.key in saved.get(name, {})]
    if slot.value is None or not copies:
        return slot.value
    if any(not same_bits(copies[0], other) for other in copies[1:]):
        raise CheckpointError(
            f"`{slot.key}` is shared and must be equal for all parameters: got different copies. Load an older file."
        )
    return copies[0].detach().to(slot.value.device, copy=True, memory_format=torch.contiguous_format)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bytes, NaNs included."""
    return x.shape == y.shape and torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def report(state: OptState, names: Collection[str], saved: Mapping[str, Mapping[str, Tensor]]) -> LoadReport:
    """Which saved leaves have no place in the target, and which of its leaves have no saved one."""
    own = state_view.view(state, names)
    return LoadReport(tuple(_lacking(own, saved)), tuple(_lacking(saved, own)))


def _lacking(has: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, Mapping[str, Tensor]]) -> Iterator[str]:
    """What `has` holds and `other` does not."""
    for name, leaves in has.items():
        if leaves and not other.get(name):
            yield name
        else:
            yield from (f"{name}: {key}" for key in sorted(leaves.keys() - other.get(name, {}).keys()))


def _check_keys(name: str, own: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            f"State keys of {name!r} must match: got {list_names(missing=missing, unexpected=extra)}. "
            "Build the optimizer with the transform that saved, or load with strict=False."
        )


def _check_leaf(key: str, own: Tensor, saved: Any) -> None:
    if not isinstance(saved, Tensor):
        raise CheckpointError(f"`{key}` must be a tensor: got {type(saved).__name__}. The file is damaged.")
    if saved.layout != torch.strided or (saved.is_meta and not own.is_meta):
        kind = "on meta" if saved.is_meta else saved.layout
        raise CheckpointError(f"`{key}` must be a dense tensor with data: got one {kind}. The file is damaged.")
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise CheckpointError(
            f"`{key}` must be {own.dtype} {tuple(own.shape)}: got {saved.dtype} {tuple(saved.shape)}. "
            "Load it without casting, into an optimizer of the same structure."
        )
    rule = None if saved.is_meta else _broken_rule(key.rsplit(".", 1)[-1], saved, own)
    if rule is not None:
        raise CheckpointError(f"`{key}` must {rule}: got {_summary(saved)}. The file is damaged; load an older one.")


def _broken_rule(field: str, x: Tensor, own: Tensor) -> str | None:
    if field == "codebook" and not is_codebook(x):
        return "be sorted, finite and end at -1 and 1"
    if field == "codebook" and _is_symmetric(own) and not _is_symmetric(x):
        return "be symmetric, with 0 twice in the middle"
    if field in (*_SCALES, *_MOMENTS) and not bool(x.isfinite().all()):
        return "be finite"
    if field in _SCALES and bool((x < 0).any()):
        return "be >= 0"
    counts = x.dtype in (torch.int32, torch.int64) and x.dim() == 0
    return "count from 0 upwards" if counts and int(x) < 0 else None


def _is_symmetric(x: Tensor) -> bool:
    return torch.equal(x, -x.flip(0))


def _summary(x: Tensor) -> str:
    return f"values from {float(x.min())} to {float(x.max())}" if x.numel() else "an empty tensor"


def group_values(
    saved: Mapping[str, Mapping[str, Any]], members: Sequence[Sequence[str]], check: Callable[[Mapping[str, Any]], None]
) -> list[dict[str, Any]]:
    """The hyperparameters of each target group, taken from its parameters.

    Args:
        saved: the saved values by parameter.
        members: the names of each target group's parameters.
        check: raises `ValueError` for values that a group cannot hold.

    Raises:
        CheckpointError: if a group's parameters were saved with different values, or with wrong ones.
    """
    values = [_agree([saved[name] for name in member if name in saved]) for member in members]
    try:
        for own in filter(None, values):
            check(own)
    except ValueError as error:
        raise CheckpointError(f"Group values must fit. {error}") from error
    return values


def _agree(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for row in rows[1:]:
        for key in rows[0].keys() | row.keys():
            if key not in row or key not in rows[0] or not _equal(row[key], rows[0][key]):
                raise CheckpointError(
                    f"Parameters of one group must carry one `{key}`: got {rows[0].get(key)} and {row.get(key)}. "
                    "Group the parameters as they were saved."
                )
    return dict(rows[0]) if rows else {}


def _equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)


def fill_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Write restored hyperparameters into a group; a tensor is filled in place, as a captured graph reads it."""
    group.update({key: _filled(group.get(key), value) for key, value in values.items()})


def _filled(own: Any, value: Any) -> Any:
    if isinstance(own, Tensor):
        return own.copy_(torch.as_tensor(value))
    if isinstance(own, (tuple, list)) and isinstance(value, (tuple, list)) and len(own) == len(value):
        return type(value)(map(_filled, own, value))
    return value.clone() if isinstance(value, Tensor) else value
