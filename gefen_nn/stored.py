"""Optimizer state as it lies in a file or folder, leaf by leaf, without the model and optimizer that it was saved from.

Read are folders of `gefen_nn.save` and of torch.distributed.checkpoint, and files of `torch.save`; state of other
packages too, as far as it is a torch state dict.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.tree import list_names, readable
from gefen_nn import folders
from gefen_nn.checkpoint import check_form, same_bits
from gefen_nn.errors import CheckpointError
from gefen_nn.saved_index import Index, read_index

_SHARED = ("codebook", "learned", "hyperparams")


class StoredLeaf(NamedTuple):
    """A tensor of the state.

    Attributes:
        owner: the parameter it belongs to; None: to all.
        stage: of the expression that keeps it; empty in other packages' state.
        field: its name there, such as `mu.codes`.
        dtype: of the tensor.
        shape: of the tensor, whole.
        key: what `fetch` knows it by.
    """

    owner: str | None
    stage: str
    field: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    key: str

    @property
    def bytes(self) -> int:
        """Of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Stored(NamedTuple):
    """The state in a file or folder.

    Attributes:
        kind: what wrote it, in words.
        shapes: of the parameters, as far as they are written down.
        leaves: each tensor once.
        groups: values of each group, names of its parameters under `params`.
        other_bytes: of tensors beside the state, such as the model's.
        fetch: reads tensors by their keys.
        faults: what does not fit together, that `leaves` do not show.
    """

    kind: str
    shapes: dict[str, tuple[int, ...]]
    leaves: tuple[StoredLeaf, ...]
    groups: list[dict[str, Any]]
    other_bytes: int
    fetch: Callable[[Iterable[str]], dict[str, Tensor]]
    faults: tuple[str, ...] = ()


def read_stored(path: Path, key: str | None = None) -> Stored:
    """What a file or folder holds; tensors are read later, by `fetch`.

    Args:
        path: the file or folder.
        key: which of several states in it.

    Raises:
        CheckpointError: if it is none of those that are read, holds no state, or is damaged.
    """
    if path.is_dir():
        if (path / "manifest.json").exists() or not (path / ".metadata").exists():
            folders.check_files(folders.published(path), 0, 1)
        return _read_folder(path, key)
    source, others = state_dict_in(path, key)
    return _of_state_dict("a file of torch.save", source, others)


def as_state_dict(stored: Stored) -> dict[str, Any]:
    """The state as `Optimizer.state_dict` makes it, with names."""
    tensors = stored.fetch([leaf.key for leaf in stored.leaves])
    own: dict[str | None, dict[str, Tensor]] = {}
    for leaf in stored.leaves:
        name = f"{leaf.stage}.{leaf.field}" if leaf.stage else leaf.field
        own.setdefault(leaf.owner, {})[name] = tensors[leaf.key]
    common, names = own.pop(None, {}), [name for group in stored.groups for name in group["params"]]
    ids = {name: i for i, name in enumerate(names)}
    groups = [
        {**group, "params": [ids[name] for name in group["params"]], "param_names": group["params"]}
        for group in stored.groups
    ]
    return {"state": {ids[str(name)]: {**common, **held} for name, held in own.items()}, "param_groups": groups}


def state_dict_in(path: Path, key: str | None = None) -> tuple[Mapping[str, Any], int]:
    """The optimizer's state dict in a file of `torch.save`, and the bytes of the other tensors there.

    Raises:
        CheckpointError: if the file cannot be read, or holds no state, or several and `key` does not say which.
    """
    with path.open("rb") as stream:
        try:
            held = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # a pickle that is damaged may raise anything
            raise CheckpointError(
                f"`path` must be a file of torch.save that holds tensors and plain values: got {path}, which "
                f"torch.load(weights_only=True) refuses with {type(error).__name__}. Save `optimizer.state_dict()`."
            ) from error
    found = _state_dicts(held)
    name = _choose(path, found, key)
    return found[name], _bytes_of({k: x for k, x in held.items() if k != name}) if name else 0


def _state_dicts(held: Any) -> dict[str, Any]:
    """The state dicts in a file by their keys; the empty one is the whole file's."""
    named = {"": held, **held} if isinstance(held, Mapping) else {}
    return {
        str(name): x for name, x in named.items() if isinstance(x, Mapping) and {"state", "param_groups"} <= x.keys()
    }


def _choose(path: Path, found: Mapping[str, Any], key: str | None) -> str:
    """The key of the one state that is meant."""
    if key is None and len(found) == 1:
        return next(iter(found))
    if key is None or key not in found:
        came = sorted(found) or "none"
        fix = "Choose one by --key" if found else "Save `optimizer.state_dict()`"
        raise CheckpointError(f"There must be one optimizer's state to look at: got {came} in {path}. {fix}.")
    return key


def _bytes_of(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.itemsize
    children = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
    return sum(map(_bytes_of, children))


def _of_state_dict(kind: str, source: Mapping[str, Any], other_bytes: int) -> Stored:
    check_form(source)
    groups = [dict(group) for group in source["param_groups"]]
    names = _names(groups, source["state"])
    tensors: dict[str, Tensor] = {}
    leaves: dict[str, StoredLeaf] = {}
    copies: dict[str, set[str | None]] = {}  # who has what belongs to all
    faults = []
    loose = {k: x for k, x in source.items() if isinstance(x, Tensor)}  # Gefen-X has its codebook beside the state
    for i, held in [*source["state"].items(), (None, loose)]:
        name = None if i is None else names[str(i)]
        for key, x in _tensors_in(name, held).items():
            leaf = _leaf(name, key, x)
            if leaf.key in tensors and not same_bits(tensors[leaf.key], x):
                faults.append(f"{name}: {key} must be equal for all parameters, and differs here")
            if leaf.owner is None:
                copies.setdefault(key, set()).add(name)
            leaves.setdefault(leaf.key, leaf)
            tensors.setdefault(leaf.key, x)
    if any("format_version" in group for group in groups):
        faults += [f"{names[str(i)]}: state is empty" for i, held in source["state"].items() if not held]
    holders = [names[str(i)] for i, held in source["state"].items() if held]
    lacking = [(name, key) for key, own in copies.items() for name in holders if not {name, None} & own]
    faults += [f"{name}: {key} is missing" for name, key in lacking]
    for group in groups:
        group["params"] = [names[str(i)] for i in group["params"]]
        group.pop("param_names", None)
    return Stored(
        kind, {}, tuple(leaves.values()), groups, other_bytes, lambda keys: {k: tensors[k] for k in keys}, tuple(faults)
    )


def _tensors_in(name: str | None, held: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors and numbers of a parameter's dictionary; what else it holds is left out.

    Raises:
        CheckpointError: for a key that is no text, or a tensor without data.
    """
    found = {}
    for key, x in held.items():
        x = x if isinstance(x, Tensor) else torch.tensor(x, device="cpu") if isinstance(x, (int, float)) else None
        if not isinstance(key, str):
            raise CheckpointError(f"State of {name!r} must have names: got the key {key!r}. The file is damaged.")
        if x is not None and (x.is_meta or x.layout != torch.strided):
            kind = "on meta" if x.is_meta else x.layout
            raise CheckpointError(
                f"`{name}: {key}` must be a dense tensor with data: got one {kind}. Save the tensors' data."
            )
        if x is not None:
            found[key] = x
    return found


def _names(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> dict[str, str]:
    """The name of each index in a state dict, which is the index itself where names were not saved."""
    ids = [str(i) for group in groups for i in group["params"]]
    given = [str(x) for group in groups for x in (group["param_names"] if "param_names" in group else group["params"])]
    stray = sorted(set(map(str, state)) - set(ids))
    if stray or len(ids) != len(given):
        came = f"entries {stray}" if stray else f"{len(given)} names for {len(ids)} parameters"
        raise CheckpointError(f"State must belong to a parameter of a group: got {came}. The file is damaged.")
    return dict(zip(ids, given, strict=True))


def is_shared(key: str) -> bool:
    """Whether a tensor of this name, of a stage and a field, belongs to all parameters."""
    stage, dot, field = key.partition(".")
    return (field if dot else stage).split(".")[0] in _SHARED or (bool(dot) and stage.startswith("inject_hyperparams"))


def _leaf(owner: str | None, key: str, x: Tensor) -> StoredLeaf:
    """A tensor of a parameter's dictionary; what belongs to all stands there once more for each of them."""
    stage, dot, field = key.partition(".")
    if not dot:
        stage, field = "", key
    own = None if is_shared(key) else owner
    return StoredLeaf(own, stage, field, x.dtype, tuple(x.shape), f"{own or ''}: {key}")


def _read_folder(path: Path, key: str | None) -> Stored:
    from gefen_nn.untrusted import loaded, read_metadata  # torch.distributed is for those who name a folder

    folder = folders.published(path) if not (path / ".metadata").exists() else path
    metadata = read_metadata(folder)
    tensors: dict[str, Any] = {k: x for k, x in metadata.state_dict_metadata.items() if hasattr(x, "size")}
    sizes = {k: torch.Size(x.size).numel() * x.properties.dtype.itemsize for k, x in tensors.items()}

    def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
        wanted = {k: _blank(tensors[k]) for k in keys}
        return loaded(folder, wanted)

    paths: Mapping[str, Any] = metadata.planner_data or {}
    indices = [k for k, at in paths.items() if at[-1] == "index" and k not in tensors]
    found = {".".join(map(str, paths[k][:-1])): k for k in indices}
    if not found:
        return _of_flat(path, folder, paths, tensors, sizes, key)
    name = _choose(path, found, key)
    index = read_index(loaded(folder, {found[name]: ""})[found[name]])
    leaves = tuple(_of_index(f"{name}.state.", index))
    absent = [leaf.key for leaf in leaves if leaf.key not in tensors]
    if absent:
        raise CheckpointError(
            f"A folder must hold what its index lists: got none of {list_names(tensors=absent)}. Load an older one."
        )
    own = sum(sizes[leaf.key] for leaf in leaves)
    kind = "a folder of gefen_nn.save" if folders.is_complete(folder) else "a folder of torch.distributed.checkpoint"
    return Stored(kind, index.params, leaves, index.groups, sum(sizes.values()) - own, fetch)


def _of_index(prefix: str, index: Index) -> Iterable[StoredLeaf]:
    """The leaves of an index; a functional user's names no owners, which are then read off the paths."""
    for path, (owner, dtype, shape) in index.leaves.items():
        stage, field, *rest = path.split(".")
        below = readable(".".join(rest))
        fits = [name for name in index.params if below == name or below.startswith(f"{name}.")]
        name = owner if owner is not None else max(fits, key=len, default=None)
        sub = "" if name is None else below.removeprefix(name).strip(".")
        kind = getattr(torch, dtype)
        yield StoredLeaf(name, stage, f"{field}.{sub}".rstrip("."), kind, shape, f"{prefix}{path}")


def _of_flat(
    path: Path, folder: Path, paths: Mapping[str, Any], tensors: Mapping[str, Any], sizes: Mapping[str, int], key: Any
) -> Stored:
    """A state dict that was handed to torch.distributed.checkpoint as it is."""
    from gefen_nn.untrusted import loaded

    found: dict[str, dict[str, Any]] = {}
    for k, at in paths.items():
        for n, part in enumerate(at):
            if part in ("state", "param_groups") and len(at) > n + 2:
                name = ".".join(map(str, at[:n]))
                found.setdefault(name, {})[k] = at[n:]
                break
    name = _choose(path, found, key)
    blank = {k: _blank(x) for k, x in tensors.items() if k in found[name]}
    held = loaded(folder, {**{k: "" for k in found[name]}, **blank})
    source: dict[str, Any] = {"state": {}, "param_groups": {}}
    for k, (part, at, *rest) in found[name].items():
        source[part].setdefault(at, {})[".".join(map(str, rest))] = held[k]
    source["param_groups"] = [source["param_groups"][i] for i in sorted(source["param_groups"])]
    others = sum(sizes.values()) - sum(sizes.get(k, 0) for k in found[name])
    return _of_state_dict("a folder of torch.distributed.checkpoint", source, others)


def _blank(x: Any) -> Tensor:
    """A tensor to read one into, of which the metadata tell."""
    return torch.empty(x.size, dtype=x.properties.dtype, device="cpu")
