"""Group keys and hyperparameters: the one place where torch's names become the transform's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation

FORMAT_VERSION = 1
FIXED_KEYS = ("format_version", "block")
Pairs = Mapping[str, tuple[str, ...]]
_TORCH_NAMES = {"learning_rate": "lr"}
_HYPERPARAMETERS = frozenset(
    {"lr", "learning_rate", "betas", "b1", "b2", "eps", "weight_decay", "momentum", "nesterov", "decay"}
)


class ExpressionGroup(dict[str, Any]):
    """A group of a transform without injected hyperparameters: reading or writing `lr` says how to get one."""

    def __missing__(self, key: str) -> Any:
        """Raise with the fix for a hyperparameter, plainly for another key."""
        raise KeyError(_no_such_key(key) if key in _HYPERPARAMETERS else key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Refuse a hyperparameter that no step would read."""
        if key in _HYPERPARAMETERS:
            raise KeyError(_no_such_key(key))
        super().__setitem__(key, value)


def _no_such_key(key: str) -> str:
    return (
        f"A group has `{key}` only if the transform injects it: got a transform without it. "
        "Wrap the factory, `inject_hyperparams(adamw)(learning_rate=1e-3)`, or pass a schedule as the learning rate."
    )


def injected_names(tx: GradientTransformation) -> tuple[str, ...]:
    """Names of the hyperparameters that `tx` reads from its state; empty without `inject_hyperparams`."""
    return tuple(getattr(tx.update, "hyperparams", ()))


def group_defaults(tx: GradientTransformation, pairs: Pairs, block: int) -> dict[str, Any]:
    """What every group starts from: the injected values under torch's names, `format_version` and `block`.

    Args:
        tx: the transform.
        pairs: group keys that hold several hyperparameters, such as `{"betas": ("b1", "b2")}`.
        block: the block length, 0 if there is none for the whole model.
    """
    values = _start_values(tx)
    joined = {key: tuple(values[name] for name in names) for key, names in pairs.items()}
    inside = {name for names in pairs.values() for name in names}
    single = {_TORCH_NAMES.get(name, name): value for name, value in values.items() if name not in inside}
    return {**single, **joined, "format_version": FORMAT_VERSION, "block": block}


def _start_values(tx: GradientTransformation) -> dict[str, Any]:
    floats = getattr(tx.update, "defaults", {})
    names = injected_names(tx)
    made = tx.init({}).hyperparams if any(name not in floats for name in names) else {}
    return {name: floats[name] if name in floats else made[name] for name in names}


def check_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a group's own hyperparameter that no step would read.

    Raises:
        ValueError: naming the key and the fix.
    """
    for key in group:
        if key in _HYPERPARAMETERS and key not in defaults:
            raise ValueError(_no_such_key(key))


def _read(group: Mapping[str, Any], name: str, pairs: Pairs) -> Any:
    for key, names in pairs.items():
        if name in names:
            return group[key][names.index(name)]
    return group[_TORCH_NAMES.get(name, name)]


def _scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64).reshape(())
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def group_hyperparams(
    groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]], injected: Sequence[str], pairs: Pairs
) -> dict[str, Any]:
    """Read the groups into the values that the transform's state carries.

    Args:
        groups: the parameter groups.
        members: the names of each group's parameters that have state.
        injected: names of the hyperparameters to read.
        pairs: see `group_defaults`.

    Returns:
        For each name a 0-dim float64 tensor, or `{parameter: 0-dim tensor}` where groups differ.
    """
    rows = [(group, names) for group, names in zip(groups, members, strict=True) if names]
    owners = [names for _, names in rows]
    read = {name: [_scalar(_read(group, name, pairs)) for group, _ in rows] for name in injected if rows}
    return {name: _spread(values, owners) for name, values in read.items()}


def _spread(values: list[Tensor], members: list[Sequence[str]]) -> Tensor | dict[str, Tensor]:
    if all(torch.equal(value.cpu(), values[0].cpu()) for value in values[1:]):
        return values[0]
    return {name: value.clone() for value, names in zip(values, members, strict=True) for name in names}
