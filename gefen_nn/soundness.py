"""What keeps state of ours from being loaded, found without the model and optimizer that saved it.

Where groups say that it was kept by the usual rules, leaves are held against those of a fresh optimizer, a parameter
at a time; else each is held against what its field may contain.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gefen_nn.errors import CheckpointError
from gefen_nn.groups import FIXED_KEYS, FORMAT_VERSION
from gefen_nn.leaves import check_leaf
from gefen_nn.meaning import check_kept_as
from gefen_nn.muon import Muon
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.presets import Gefen

_MAKERS: Mapping[str, Callable[..., TransformOptimizer]] = {"scale_by_gefen": Gefen, "scale_by_muon": Muon}
_NOT_VALUES = ("params", "param_names", "rule", *FIXED_KEYS)


def fresh_leaves(stages: Sequence[str], shape: tuple[int, ...], group: Mapping[str, Any]) -> dict[str, Tensor]:
    """The leaves that one of our stages makes for a parameter of this shape, as this group says; none if it does not.

    Args:
        stages: that keep state of the parameter.
        shape: of the parameter.
        group: its group.

    Returns:
        Tensors by stage and field, what belongs to all parameters among them.
    """
    own = [stage for stage in stages if stage in _MAKERS]
    if len(own) != 1 or own[0] not in str(group.get("kept_as", "")):
        return {}
    try:
        optimizer = _optimizer(own[0], shape, {}, group)
        check_kept_as(group, optimizer.param_groups[0])
    except (KeyError, TypeError, ValueError):  # other rules, which only the optimizer that saved knows
        return {}
    leaves = optimizer.state_dict()["state"].get(0, {})
    return {key: x for key, x in leaves.items() if key.startswith(f"{own[0]}.")}


def _optimizer(
    stage: str, shape: tuple[int, ...], values: Mapping[str, Any], group: Mapping[str, Any]
) -> TransformOptimizer:
    pairs = [("p", nn.Parameter(torch.empty(shape, device="cpu")))]
    return _MAKERS[stage]([{"params": pairs, **values}], block=group["block"])


def leaf_fault(key: str, x: Tensor, wanted: Mapping[str, Tensor]) -> str | None:
    """Why a leaf cannot take the place of the one that is wanted; of one that nobody wants, what its field forbids."""
    try:
        check_leaf(key, wanted.get(key, x), x)
    except CheckpointError as error:
        return str(error)
    return None


def group_faults(n: int, group: Mapping[str, Any], stages: Sequence[str]) -> list[str]:
    """What is wrong with the values of a group of ours.

    Args:
        n: its number.
        group: its values.
        stages: that keep state of its parameters.
    """
    numbers = {key: x for key, value in group.items() for x in _numbers(value) if not math.isfinite(x)}
    found = [f"group {n}: `{key}` must be finite: got {x}" for key, x in numbers.items()]
    if group["format_version"] != FORMAT_VERSION:
        found.append(f"group {n}: `format_version` must be {FORMAT_VERSION}: got {group['format_version']}")
    try:
        check_kept_as(group, {"kept_as": "{}"})
        if not found:
            _check_values(group, [stage for stage in stages if stage in _MAKERS])
    except ValueError as error:
        found.append(f"group {n}: {error}")
    return found


def _numbers(value: Any) -> list[float]:
    if isinstance(value, Tensor):
        value = value.tolist()
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [float(x) for x in parts if isinstance(x, (int, float))]


def _check_values(group: Mapping[str, Any], stages: Sequence[str]) -> None:
    """Build the usual optimizer with the values that it knows, which refuses those that it cannot have."""
    for stage in stages:
        try:
            known = _optimizer(stage, (1, 1), {}, group).param_groups[0].keys() - set(_NOT_VALUES)
        except (KeyError, TypeError, ValueError):  # another block, which only the optimizer that saved knows
            continue
        _optimizer(stage, (1, 1), {key: group[key] for key in known & group.keys()}, group)
