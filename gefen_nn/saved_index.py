"""What a checkpoint says about itself, as JSON: the parameters, leaves and group values that it holds."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.tree import list_names
from gefen_nn import groups
from gefen_nn.checkpoint import other_stages
from gefen_nn.errors import CheckpointError

_FIX = "Build the same model and optimizer as those that saved"


class IndexedLeaf(NamedTuple):
    """A saved tensor: the parameter it belongs to (None: to all), its dtype and its shape."""

    owner: str | None
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, owner: str | None = None) -> "IndexedLeaf":
        """What is written down of a tensor."""
        return cls(owner, str(x.dtype).removeprefix("torch."), tuple(x.shape))


class Index(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        params: shape of each parameter, by name.
        leaves: every tensor of the state by its name in `flatten_state`.
        groups: values of each group, with the names of its parameters under `params`.
    """

    params: dict[str, tuple[int, ...]]
    leaves: dict[str, IndexedLeaf]
    groups: list[dict[str, Any]]

    def text(self) -> str:
        """The index as it is saved.

        Raises:
            CheckpointError: for a group's value that is no number, text or sequence of those.
        """
        whole = {"format_version": groups.FORMAT_VERSION, **self._asdict(), "groups": list(map(_plain, self.groups))}
        return json.dumps(whole)

    def owners(self) -> set[str]:
        """The parameters that have state."""
        return {leaf.owner for leaf in self.leaves.values() if leaf.owner is not None}


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain_value(key, value) for key, value in group.items()}


def _plain_value(key: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain_value(key, x) for x in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise CheckpointError(
            f"Group values must be numbers, text or sequences of those: got `{key}`, a {type(value).__name__}. "
            "Take it out of the group."
        )
    return value


def read_index(text: Any) -> Index:
    """The index that `text` is.

    Raises:
        CheckpointError: if it is none, or of another version.
    """
    try:
        whole = json.loads(text)
        version = whole["format_version"]
    except (TypeError, KeyError, ValueError, RecursionError):
        raise _damaged() from None
    if version != groups.FORMAT_VERSION:
        raise CheckpointError(f"`format_version` must be {groups.FORMAT_VERSION}: got {version}. Update the package.")
    told = json.dumps(whole.get("rules", {}))  # where older packages wrote what now is in the groups
    try:
        params = {name: _lengths(shape) for name, shape in whole["params"].items()}
        leaves = {key: _leaf(*row) for key, row in whole["leaves"].items()}
        rows = [{"kept_as": told, **group} for group in whole["groups"]]
        known = all(isinstance(name, str) for group in rows for name in group["params"])
    except (AttributeError, TypeError, KeyError, ValueError):
        raise _damaged() from None
    if not known:
        raise _damaged()
    return Index(params, leaves, rows)


def _damaged() -> CheckpointError:
    return CheckpointError(
        "A checkpoint must hold the `index` that this package writes: got none, or a damaged one. Load what "
        "`gefen_nn.save`, `OptimizerState` or `StateTree` saved, under the same name."
    )


def _lengths(shape: Sequence[int]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError
    return tuple(shape)


def _leaf(owner: str | None, dtype: str, shape: Sequence[int]) -> IndexedLeaf:
    if not isinstance(getattr(torch, dtype), torch.dtype) or not isinstance(owner, str | None):
        raise ValueError
    return IndexedLeaf(owner, dtype, _lengths(shape))


def check_params(
    saved: Index, own: Mapping[str, Sequence[int]], optional: Collection[str] = (), strict: bool = True
) -> None:
    """Refuse parameters of other names or shapes.

    Args:
        saved: the checkpoint's.
        own: the target's shapes.
        optional: parameters that may be missing on either side.
        strict: refuse other names; shapes are refused anyway.

    Raises:
        CheckpointError: naming them.
    """
    missing = sorted(own.keys() - saved.params.keys() - set(optional))
    extra = sorted(saved.params.keys() - own.keys() - set(optional))
    if strict and (missing or extra):
        differences = list_names(missing=missing, unexpected=extra)
        raise CheckpointError(
            f"Parameter names must match: got {differences}. {_FIX}, or use `gefen_nn.load` with strict=False."
        )
    for name in own.keys() & saved.params.keys():
        if tuple(own[name]) != saved.params[name]:
            raise CheckpointError(
                f"Parameter {name!r} must be {tuple(own[name])}, as the target's: got {saved.params[name]}. {_FIX}."
            )


def check_leaves(
    saved: Index, own: Mapping[str, IndexedLeaf], optional: Collection[str] = (), strict: bool = True
) -> None:
    """Refuse leaves of other names, dtypes or shapes.

    Args:
        saved: the checkpoint's.
        own: the target's.
        optional: leaves of these parameters may be missing on either side.
        strict: refuse other names; dtypes and shapes are refused anyway.

    Raises:
        CheckpointError: naming them.
    """
    missing = sorted(key for key in own.keys() - saved.leaves.keys() if own[key].owner not in optional)
    extra = sorted(key for key in saved.leaves.keys() - own.keys() if saved.leaves[key].owner not in optional)
    if strict and (missing or extra):
        differences = list_names(missing=missing, unexpected=extra)
        raise CheckpointError(
            f"{other_stages(list(saved.leaves), list(own))}State must have the target's leaves: got {differences}. "
            f"{_FIX}, or use `gefen_nn.load` with strict=False."
        )
    for key in sorted(own.keys() & saved.leaves.keys()):
        if own[key][1:] != saved.leaves[key][1:]:
            wanted, came = ("{1} {2}".format(*leaf) for leaf in (own[key], saved.leaves[key]))
            raise CheckpointError(f"`{key}` must be {wanted}: got {came}. {_FIX}.")
