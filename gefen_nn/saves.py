"""Whole checkpoints of a training run, in one folder: model, optimizer and what else belongs to the moment.

They are written and read by torch.distributed.checkpoint with its own planner and writer. All processes of the default
group call these functions, or the one process that there is; a refusal is a refusal on all of them, before a byte is
written or a tensor changed.
"""

import copy
import functools
import io
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gefen_fn.agree import together
from gefen_fn.shards import is_sharded, placements_of
from gefen_fn.tree import list_names
from gefen_nn import folders
from gefen_nn.checkpoint import LoadReport
from gefen_nn.checks import as_path
from gefen_nn.control import timeout_of
from gefen_nn.dcp import OptimizerState, fits, index_of, own_slots, put_back
from gefen_nn.errors import CheckpointError
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.saved_index import Index, read_index

_EXTRA = "extra.pt"


def save(path: str | Path, model: nn.Module, optimizer: TransformOptimizer, **extra: Any) -> None:
    """Write a checkpoint, which stands at `path` when it is complete; until then an older one there stays as it is.

    All processes call this, each for its own part: never under `if rank == 0`. What a save that failed has written is
    beside `path`, in `.NAME.part`, and stays until the next save there.

    Args:
        path: a folder; new, or an older checkpoint.
        model: its `state_dict()` is saved.
        optimizer: state and group values.
        **extra: what else `load` is to return: numbers, text, tensors that are not sharded, and dicts and lists of
            those, such as `scheduler.state_dict()`; the same on all processes.

    Raises:
        CheckpointError: for what cannot be saved, or cannot be written.
        TypeError: for a path, a model or an optimizer that is none.
        GroupFailure: if another process cannot save its part, or does not call this.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = Gefen(model.named_parameters())
        >>> save("run", model, optimizer, step=10)
        >>> load("run", model, optimizer).extra["step"]
        10
    """
    _begin(path, model, optimizer, extra, copies=False).result()


def save_async(path: str | Path, model: nn.Module, optimizer: TransformOptimizer, **extra: Any) -> "Future[None]":
    """`save` of this moment while training goes on: everything is copied to the host first, and written by a thread.

    All processes call this, never under `if rank == 0`. Saves are written one after the other; the process waits for
    them before it ends. Wait for the last one before the process group is destroyed.

    Returns:
        A future, whose `result()` waits until the checkpoint stands at `path`, and raises what `save` would.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> written = save_async("run", model, Gefen(model.named_parameters()))
        >>> written.result()  # after the steps that went on meanwhile
    """
    return _begin(path, model, optimizer, extra, copies=True)


def load(path: str | Path, model: nn.Module, optimizer: TransformOptimizer, strict: bool = True) -> LoadReport:
    """Read a checkpoint into a model and its optimizer, on any number of processes.

    All processes call this, never under `if rank == 0`. Everything is read and checked beside what is there, which
    needs as much memory again; then all of it is put in place, or nothing.

    Args:
        path: what `save` wrote.
        model: one with the names and shapes of the one saved.
        optimizer: likewise; parameters may be in another order, and in other groups.
        strict: refuse a checkpoint that lacks something or has something that finds no place; else keep what is there.

    Returns:
        What was missing and unexpected, the model's as `model: <key>`, and `extra`.

    Raises:
        CheckpointError: for what is missing, unexpected, damaged or of another shape.
        TypeError: for a path, a model or an optimizer that is none.
        GroupFailure: if another process refuses its part, or does not call this.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = Gefen(model.named_parameters(), lr=1e-3)
        >>> save("run", model, optimizer, epoch=3)
        >>> report = load("run", model, optimizer, strict=False)
        >>> report.missing, report.extra
        ((), {'epoch': 3})
    """
    world = _world()
    place = together(lambda: _given(path, model, optimizer), world, "load")
    _written()
    folder = together(lambda: _checked(place, world), world, "load")
    said = _read({"optimizer": {"index": ""}}, folder)["optimizer"]["index"]
    index = together(lambda: read_index(said), world, "load")
    wanted = together(lambda: _wanted(folder, index, model, optimizer, strict), world, "load")
    held = _read({"model": wanted.model, "optimizer": {"state": wanted.state}}, folder)
    extra = together(lambda: torch.load(folder / _EXTRA, weights_only=True), world, "load")
    with optimizer.kept.loading(lambda: model.load_state_dict(held["model"], strict=not wanted.missing)):
        report = put_back(optimizer, index, held["optimizer"]["state"], strict)
    missing, unexpected = ([f"model: {key}" for key in keys] for keys in (wanted.missing, wanted.unexpected))
    return LoadReport((*missing, *report.missing), (*unexpected, *report.unexpected), extra)


class _Wanted(NamedTuple):
    """Tensors for what is to be read, and the model's keys that only one side has."""

    model: dict[str, Any]
    state: dict[str, Tensor]
    missing: list[str]
    unexpected: list[str]


def _world() -> Any:
    """The default group; None in a process that is alone."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


@functools.cache
def _writer() -> ThreadPoolExecutor:
    """One thread, so that all processes write their saves in one order."""
    return ThreadPoolExecutor(1, thread_name_prefix="gefen_nn.save")


def _written() -> None:
    """Wait for the saves that were begun."""
    _writer().submit(lambda: None).result()


@functools.lru_cache(maxsize=1)
def _writers(world: Any) -> Any:
    """A group for writing alone, because its thread talks while the steps of the training do."""
    return None if world is None else dist.new_group(timeout=timeout_of(world), backend="gloo")


def _begin(
    path: str | Path, model: nn.Module, optimizer: TransformOptimizer, extra: Mapping[str, Any], copies: bool
) -> "Future[None]":
    world = _world()
    place = together(lambda: _given(path, model, optimizer), world, "save")
    state = together(lambda: _collected(place, model, optimizer, extra), world, "save")
    if world is not None:
        _check_same(together(lambda: _said(place, state, extra), world, "save"), world)
    held = together(lambda: _held(state, extra, copies), world, "save")
    write = functools.partial(_write, place, held, _writers(world))
    if copies:
        return _writer().submit(write)
    _written()
    done: Future[None] = Future()
    done.set_result(write())
    return done


def _given(path: str | Path, model: nn.Module, optimizer: TransformOptimizer) -> Path:
    """The path, if the three are what they are to be, and parameters have names."""
    place = as_path(path).absolute()
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module: got a {type(model).__name__}. Pass the model itself.")
    OptimizerState(optimizer)  # refuses other optimizers
    return place


def _collected(path: Path, model: nn.Module, optimizer: TransformOptimizer, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved, once nothing in it is to be refused."""
    folders.check_place(path)
    optimizer.kept.check_whole()
    slots = own_slots(optimizer)
    leaves = {key: slot.value for key, slot in slots.items() if slot.value is not None}
    tensors = model.state_dict()
    for x in (*leaves.values(), *tensors.values()):
        if isinstance(x, Tensor):
            _form(x)
    _check_extra(extra)
    return {"model": tensors, "optimizer": {"index": index_of(optimizer, slots).text(), "state": leaves}}


def _said(path: Path, state: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, str]:
    """What all processes must say alike of what they save."""
    leaves, index = state["optimizer"]["state"], read_index(state["optimizer"]["index"])
    said = {"path": str(path), "group values": str(index.groups)} | {f"`{k}`": _text(k, x) for k, x in extra.items()}
    said |= {f"model: {key}": _form(x) if isinstance(x, Tensor) else "" for key, x in state["model"].items()}
    return said | {f"`{key}`": f"{_form(x)} {0 if is_sharded(x) else _sum(x)}" for key, x in leaves.items()}


def _form(x: Tensor) -> str:
    if x.is_meta:
        raise CheckpointError("Tensors must hold data: got one on meta. Materialize the model first, by `to_empty`.")
    return f"{x.dtype} {tuple(x.shape)} {placements_of(x)}"


def _sum(x: Tensor) -> int:
    """A number that replicas have in common: the sum of all words, which has one value in any order."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    aligned = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    words = len(aligned) // 8 * 8
    return int(aligned[:words].view(torch.int64).sum()) + int(aligned[words:].sum())


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse what a load could not read back."""
    for key, value in extra.items():
        try:
            _text(key, value)
        except RecursionError:
            raise CheckpointError(
                f"`{key}` must end somewhere: got a {type(value).__name__} that holds itself, or is nested as deep as "
                "Python can go. Save what is in it flat."
            ) from None


def _text(key: str, x: Any) -> str:
    """What an extra value holds, as text that is equal for equal values."""
    if type(x) in (dict, OrderedDict, Counter):  # what torch.load(weights_only=True) makes
        return str({str(k): _text(key, value) for k, value in x.items()})
    if type(x) in (tuple, list):
        return str([_text(key, value) for value in x])
    if isinstance(x, Tensor) and not is_sharded(x):
        return f"{_form(x)} {_sum(x)}"
    if not (x is None or type(x) in (bool, int, float, str)):
        came = "a sharded tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise CheckpointError(
            f"`{key}` must hold numbers, text, whole tensors, and dicts and lists of those: got {came}. "
            "Pass its `state_dict()`, or what it is made from."
        )
    return repr(x)


def _check_same(said: dict[str, str], world: Any) -> None:
    """Refuse what processes do not say alike: of leaves that are not sharded one process's copy is written."""
    first = [said]
    dist.broadcast_object_list(first, src=0)

    def check() -> None:
        differing = sorted(key for key in said.keys() | first[0].keys() if said.get(key) != first[0].get(key))
        if differing:
            shown = [f"{key} ({said.get(key, 'nothing')} for {first[0].get(key, 'nothing')})" for key in differing[:5]]
            raise CheckpointError(
                f"Processes must save the same: got {len(differing)} that differ from the first process's, "
                f"{', '.join(shown)}. Shard what differs as DTensors, or save it elsewhere."
            )

    together(check, world, "save")


class _Held(NamedTuple):
    """What is written: the state, and the content of the file of extra values."""

    state: dict[str, Any]
    extra: bytes


def _held(state: dict[str, Any], extra: Mapping[str, Any], copies: bool) -> _Held:
    stream = io.BytesIO()
    torch.save(extra, stream)
    return _Held(_copied(state) if copies else state, stream.getvalue())


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """The same on the host, in memory of its own."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    staged = stager.stage(state)
    stager.close()
    return staged  # type: ignore[return-value]  # a future only if it stages by a thread


def _write(path: Path, held: _Held, group: Any) -> None:
    """Write beside `path`, then publish; by all processes together."""
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    first = _rank(group) == 0
    part = folders.beside(path, "part")
    with _as_checkpoint_errors(path), _without_group_warning():
        together(lambda: folders.prepare(path) if first else None, group, "save")
        dcp_save(held.state, checkpoint_id=part, process_group=group)
        own = together(lambda: folders.sums(part, f"__{_rank(group)}_*"), group, "save")
        files = [own] if group is None else _gathered(own, group)
        together(lambda: _finish(part, path, held.extra, files) if first else None, group, "save")


def _gathered(own: folders.Sums, group: Any) -> list[folders.Sums]:
    files: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(files, own, group=group)
    return files


def _finish(part: Path, path: Path, extra: bytes, files: list[folders.Sums]) -> None:
    folders.write(part / _EXTRA, extra)
    others = {**folders.sums(part, ".metadata"), **folders.sums(part, _EXTRA)}
    folders.publish(part, path, {**others, **{name: sums for each in files for name, sums in each.items()}})


def _checked(path: Path, world: Any) -> Path:
    with _as_checkpoint_errors(path):
        folder = folders.published(path)
        folders.check_files(folder, _rank(world), 1 if world is None else dist.get_world_size(world))
    return folder


def _read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill tensors from a checkpoint, which may hold more, and less."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

    with _as_checkpoint_errors(folder), _without_group_warning():
        dcp_load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    return state


def _wanted(folder: Path, index: Index, model: nn.Module, optimizer: TransformOptimizer, strict: bool) -> _Wanted:
    slots = own_slots(optimizer, index.owners())
    fits(optimizer, slots, index, strict)
    own = model.state_dict()
    missing, unexpected = _compare_model(folder, own)
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"The model must be the one saved: got {list_names(missing=missing, unexpected=unexpected)}. "
            "Build the same model, or load with strict=False."
        )
    model_part = {key: _like(x) for key, x in own.items() if key not in missing}
    state = {path: _like(slot.value) for path, slot in slots.items() if path in index.leaves}
    return _Wanted(model_part, state, missing, unexpected)


def _compare_model(folder: Path, own: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Keys that the checkpoint lacks, and that the model lacks; a tensor of another shape is refused."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    held = FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {key.removeprefix("model."): x for key, x in held.items() if key.startswith("model.")}
    for key, x in own.items():
        came = getattr(saved.get(key), "size", None)
        if isinstance(x, Tensor) and came is not None and came != x.shape:
            raise CheckpointError(
                f"`{key}` of the model must be {tuple(x.shape)}: got {tuple(came)}. Build the model that was saved."
            )
    tensors = {key for key, x in own.items() if isinstance(x, Tensor)}
    others = tuple(f"{key}." for key in own.keys() - tensors)
    return sorted(tensors - saved.keys()), sorted(k for k in saved.keys() - own.keys() if not k.startswith(others))


def _like(x: Any) -> Any:
    """A tensor to read into, on the same device; a copy of what is no tensor."""
    if isinstance(x, Tensor):
        _form(x)
        return torch.empty_like(x)
    return copy.deepcopy(x)


@contextmanager
def _as_checkpoint_errors(path: Path) -> Iterator[None]:
    """What the disk raises, and DCP, which raises no `Exception`, as one of ours with its first cause."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(folders.failure(path, f"{cause!r} on process {rank}")) from error
    except (OSError, UnicodeError) as error:
        raise CheckpointError(folders.failure(path, repr(error))) from error


@contextmanager
def _without_group_warning() -> Iterator[None]:
    """One process needs no group, and no warning that it has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
