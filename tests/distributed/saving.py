"""What workers run around saves and loads: trees of every policy, whole runs, and faults on one of the workers."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gefen_fn import apply_updates, flatten_state
from gefen_fn.shards import local
from gefen_nn import (
    CheckpointError,
    Gefen,
    GefenMuon,
    GroupFailure,
    OptimizerState,
    StateTree,
    convert_state,
    folders,
    load,
    save,
    save_async,
    saves,
)
from tests.distributed.adapter import build, give_gradients, tensors
from tests.distributed.pool import GROUP_SECONDS
from tests.distributed.training import TRANSFORMS, mesh_of, noise, spread, whole

# Uneven and empty parts, tiles cut by three of them, on odd rows, with a remainder, and fewer rows than a tile.
SHAPES = {"tall": (300, 256), "wide": (50, 512), "experts": (4, 32, 256), "bias": (70,), "two": (2, 4096)}
MATRICES = {key: SHAPES[key] for key in ("tall", "wide", "experts")}
POLICIES = {name: SHAPES for name in ("default", "one tile", "block", "dense", "hybrid")}
POLICIES |= {name: MATRICES for name in ("muon", "normuon")}
# Named by what four processes make of them.
EDGES = {
    "uneven": (50, 512),
    "empty": (5, 1024),
    "a tile of three": (45, 256),
    "odd rows": (34, 512),
    "remainder": (60, 256),
    "less than a tile": (20, 512),
    "fewer than processes": (3, 4096),
}
TALL = {key: (rows, 256) for key, (rows, _) in EDGES.items() if rows >= 32}
CUTS = {"tile16": EDGES, "whole columns": EDGES, "default": EDGES, "one tile": EDGES, "muon": TALL, "hybrid": TALL}
TREES = {"policies": POLICIES, "cuts": CUTS}
Where = tuple[Sequence[int] | None, str]


@contextmanager
def alone_or_not() -> Iterator[None]:
    """DCP warns where there is no group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _grown(
    which: str, where: Where, first: int, last: int, trees: dict[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Parameters and state of every transform after steps `first .. last - 1`."""
    sides, how = where
    out = {}
    for name, shapes in TREES[which].items():
        tx = TRANSFORMS[name]()
        params = {k: spread(noise(k, shape, 0), sides, how) for k, shape in shapes.items()}
        params, state = (params, tx.init(params)) if trees is None else trees[name]
        for step in range(first, last):
            grads = {k: spread(noise(k, shape, step), sides, how) for k, shape in shapes.items()}
            updates, state = tx.update(grads, state, params)
            params = apply_updates(params, updates)
        out[name] = params, state
    return out


def _whole(trees: dict[str, tuple[Any, Any]]) -> dict[str, Tensor]:
    named = {
        f"{tx} {k}": x for tx, (params, state) in trees.items() for k, x in {**params, **flatten_state(state)}.items()
    }
    return {key: whole(x).clone() for key, x in named.items()}


def trees_after(rank: int, which: str, where: Where, last: int) -> dict[str, Tensor]:
    """Every transform's tensors after `last` steps, whole."""
    return _whole(_grown(which, where, 1, last + 1))


def save_trees(rank: int, which: str, where: Where, folder: str) -> None:
    """Two steps of every transform, then a stock checkpoint."""
    trees = _grown(which, where, 1, 3)
    held = {tx: StateTree(state, params) for tx, (params, state) in trees.items()}
    with alone_or_not():
        dcp.save({**held, "params": {tx: params for tx, (params, _) in trees.items()}}, checkpoint_id=folder)


def load_trees(rank: int, which: str, where: Where, folder: str) -> Any:
    """What a stock load gives, and what one more step makes of it."""
    trees = _grown(which, where, 1, 1)
    held = {tx: StateTree(state, params) for tx, (params, state) in trees.items()}
    params = {tx: {k: torch.zeros_like(p) for k, p in params.items()} for tx, (params, _) in trees.items()}
    with alone_or_not():
        dcp.load({**held, "params": params}, checkpoint_id=folder)
    loaded = {tx: (params[tx], held[tx].state) for tx in trees}
    out = _whole(loaded), _whole(_grown(which, where, 3, 4, loaded))
    return out if rank == 0 else None


class Feed(nn.Module):
    """A decoder's feed-forward part, wide enough for tensor parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(512, 1024), nn.Linear(1024, 512), nn.LayerNorm(512)


def run_of(kind: str, sides: Sequence[int] | None) -> tuple[nn.Module, Gefen]:
    """A model of fixed weights and its optimizer.

    "net" and "hybrid" are the same model; "feed" is wide enough for "tp", which cuts it over the mesh's inner side too.
    """
    if kind == "net":
        return build(sides)
    if kind == "hybrid":
        model = build(sides)[0]
        return model, GefenMuon(model, lr=1e-2, weight_decay=0.1, normuon="norm_kept", fused=False)
    torch.manual_seed(0)
    model = Feed()
    if kind == "tp":
        mesh = mesh_of(sides or ())
        parallelize_module(model, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["outer"])
    elif sides is not None:
        fully_shard(model, mesh=mesh_of(sides))
    return model, Gefen(model.named_parameters(), lr=1e-2, weight_decay=0.1, fused=False)


def steps(model: nn.Module, optimizer: Gefen, first: int, last: int) -> None:
    """Steps `first .. last` with the gradients of any mesh."""
    for step in range(first, last + 1):
        give_gradients(model, step)
        optimizer.step()


def run_after(rank: int, kind: str, sides: Sequence[int] | None, last: int) -> dict[str, Tensor]:
    """The tensors of a run that nothing interrupted, whole."""
    model, optimizer = run_of(kind, sides)
    steps(model, optimizer, 1, last)
    return tensors(model, optimizer)


def save_run(rank: int, kind: str, sides: Sequence[int] | None, folder: str) -> None:
    """Two steps, then a save."""
    model, optimizer = run_of(kind, sides)
    steps(model, optimizer, 1, 2)
    save(folder, model, optimizer, step=2)


def load_run(rank: int, kind: str, sides: Sequence[int] | None, folder: str) -> Any:
    """What a load gives, and what one more step makes of it."""
    model, optimizer = run_of(kind, sides)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    report = load(folder, model, optimizer)
    loaded = tensors(model, optimizer)
    steps(model, optimizer, 3, 3)
    out = report, loaded, tensors(model, optimizer)
    return out if rank == 0 else None


def _bytes(model: nn.Module, optimizer: Gefen) -> list[Any]:
    """What a refusal must leave as it was."""
    held = [*model.parameters(), *(x for leaves in optimizer.state.values() for x in leaves.values())]
    values = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [str(values), *(bytes(local(x.detach()).contiguous().view(-1).view(torch.uint8).tolist()) for x in held)]


def _refusal(attempt: Callable[[], Any]) -> str:
    """How an attempt ends."""
    try:
        attempt()
    except (CheckpointError, GroupFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def save_without_end(rank: int, folder: str) -> None:
    """Steps, each saved over the one before."""
    model, optimizer = run_of("net", (2,))
    for step in range(1, 10_000):
        steps(model, optimizer, step, step)
        save(f"{folder}/run", model, optimizer, step=step)


def written(rank: int, sides: Sequence[int], folder: str) -> dict[str, int]:
    """The bytes of this worker's parts; none of them may be gathered or spread while they are saved and loaded."""
    model, optimizer = run_of("net", sides)
    steps(model, optimizer, 1, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a leaf was gathered")

    kept = DTensor.full_tensor, DTensor.redistribute
    DTensor.full_tensor = DTensor.redistribute = refuse
    try:
        save(folder, model, optimizer)
        load(folder, model, optimizer)
    finally:
        DTensor.full_tensor, DTensor.redistribute = kept
    leaves = {slot.path: slot.value for slot in optimizer.slots() if slot.value is not None}
    return {f"optimizer.state.{path}": local(x).nbytes for path, x in leaves.items()}


def save_while_training(rank: int, folder: str) -> None:
    """Saves that are written by a thread while steps are taken and the state is overwritten in place."""
    model, optimizer = run_of("net", (2,))
    steps(model, optimizer, 1, 2)
    overwritten, prepare = threading.Event(), folders.prepare
    folders.prepare = lambda path: prepare(path) if overwritten.wait(GROUP_SECONDS) else path
    ours = save_async(f"{folder}/ours", model, optimizer, step=2)
    own = dist.new_group()
    stock = dcp.async_save({"x": OptimizerState(optimizer)}, checkpoint_id=f"{folder}/stock", process_group=own)
    steps(model, optimizer, 3, 4)
    for x in (*model.parameters(), *(x for leaves in optimizer.state.values() for x in leaves.values())):
        local(x.detach()).fill_(1)
    overwritten.set()
    ours.result()
    folders.prepare = prepare
    stock.result()


def load_stock(rank: int, sides: Sequence[int] | None, folder: str) -> Any:
    """What a stock load of an `OptimizerState` gives."""
    model, optimizer = run_of("net", sides)
    with alone_or_not():
        dcp.load({"x": OptimizerState(optimizer)}, checkpoint_id=folder)
    out = {key: x for key, x in tensors(model, optimizer).items() if ": " in key}
    return out if rank == 0 else None


def _own_lr(optimizer: Gefen) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _own_tag(optimizer: Gefen) -> None:
    optimizer.param_groups[0]["tag"] = {1, 2}


def _own_count(optimizer: Gefen) -> None:
    next(iter(optimizer.state.values()))["scale_by_gefen.count"].add_(1)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
OWN: dict[str, tuple[Callable[[Gefen], None], dict[str, Any], str]] = {
    "another learning rate": (_own_lr, {}, "group values"),
    "a group value that is no plain one": (_own_tag, {}, "tag"),
    "another count": (_own_count, {}, "count"),
    "another extra value": (lambda _: None, {"step": 3}, "step"),
    "an extra value that is no plain one": (lambda _: None, {"step": object()}, "step"),
    "an extra value that holds itself": (lambda _: None, {"step": ENDLESS}, "step"),
    "a folder that is no checkpoint": (lambda _: None, {"path": "full"}, "path"),
    "a path that can be none": (lambda _: None, {"path": "a\0b"}, "`path` must lie where"),
}


def refused_saves(rank: int, folder: str) -> dict[str, tuple[str, bool]]:
    """How a save ends for which one worker has something of its own, and whether it wrote or changed something."""
    out = {}
    for name, (spoil, own, _) in OWN.items():
        model, optimizer = run_of("net", (2,))
        steps(model, optimizer, 1, 1)
        if rank == 1:
            spoil(optimizer)
        given = {"path": "new", "step": 2, **(own if rank == 1 else {})}
        before, path = _bytes(model, optimizer), Path(folder, given.pop("path"))
        ended = _refusal(lambda: save(path, model, optimizer, **given))  # noqa: B023  # called at once
        wrote = sorted(x.name for x in Path(folder).rglob("*")) != ["full", "mine"]
        out[name] = ended, wrote or before != _bytes(model, optimizer)
    return out


def writing_timeout(rank: int) -> float:
    """How long the group that saves are written in waits for a member, in seconds."""
    writers = saves._writers.__wrapped__(dist.group.WORLD)
    return writers._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def save_another_kind(rank: int, folder: str) -> tuple[str, str]:
    """How a save and a load end for which one worker passes a dict as its model."""
    model, optimizer = run_of("net", (2,))
    ended = []
    for call in (save, load):
        try:
            call(folder, {} if rank == 1 else model, optimizer)
        except (TypeError, GroupFailure) as error:
            ended.append(type(error).__name__)
    return tuple(ended)


def _change(key: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    """Damage this member's part of a leaf of the first parameter."""

    def damage(saved: dict[str, Any]) -> None:
        saved["state"][0][key] = saved["state"][0][key].clone()
        change(local(saved["state"][0][key]))

    return damage


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "absmax": _change("scale_by_gefen.mu.absmax", lambda x: x[:1].fill_(-1.0)),
    "row": _change("scale_by_gefen.nu.row", lambda x: x[-1:].fill_(float("nan"))),
    "count": _change("scale_by_gefen.count", lambda x: x.fill_(-1)),
    "codes": lambda saved: saved["state"][0].pop("scale_by_gefen.mu.codes"),
    "lr": lambda saved: saved["param_groups"][0].update(lr="fast"),
}


def refused_loads(rank: int, sides: Sequence[int]) -> dict[str, tuple[str, bool]]:
    """How a load ends of which one worker's part is damaged, and whether it changed something."""
    model, optimizer = run_of("net", sides)
    steps(model, optimizer, 1, 1)
    out = {}
    for name, damage in DAMAGE.items():
        saved = optimizer.state_dict()
        saved = {
            "state": {i: dict(leaves) for i, leaves in saved["state"].items()},
            "param_groups": [dict(group) for group in saved["param_groups"]],
        }
        if rank == 1:
            damage(saved)
        before = _bytes(model, optimizer)
        ended = _refusal(lambda: optimizer.load_state_dict(saved))  # noqa: B023  # called at once
        out[name] = ended, before != _bytes(model, optimizer)
    return out


def plain_loads(rank: int) -> tuple[str, dict[str, Tensor], bool]:
    """A plain load of another mesh's state, then of a whole one, then of its own."""
    model, optimizer = run_of("net", (2, 2))
    other = run_of("net", (4,))
    steps(*other, 1, 1)
    refused = _refusal(lambda: optimizer.load_state_dict(other[1].state_dict()))
    alone = run_of("net", None)
    steps(*alone, 1, 1)
    optimizer.load_state_dict(alone[1].state_dict())
    loaded = tensors(model, optimizer)
    groups, meshes = len(dist.distributed_c10d._world.pg_map), [p.device_mesh for p in model.parameters()]
    optimizer.load_state_dict(optimizer.state_dict())
    kept = all(x.device_mesh in meshes for leaves in optimizer.state.values() for x in leaves.values() if x.dim() > 1)
    same = len(dist.distributed_c10d._world.pg_map) == groups
    return refused, {key: x for key, x in loaded.items() if ": " in key}, kept and same


def readings(rank: int, sides: Sequence[int]) -> tuple[str, bool, Any]:
    """The text of an index, whether every leaf has its parameter's part only, and what stock gathering gives."""
    model, optimizer = run_of("net", sides)
    give_gradients(model, 1)
    next(iter(model.parameters())).grad = None
    optimizer.step()
    index = OptimizerState(optimizer).state_dict()["index"]
    if rank == 0:  # no other worker takes part
        optimizer.state_dict()
        OptimizerState(optimizer).state_dict()
    leaves = [(p, x) for p, own in optimizer.state.items() for key, x in own.items() if key.endswith("codes")]
    sized = all(local(p).shape == local(x).shape and type(x) is type(p.data) for p, x in leaves)
    gathered = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return index, sized, gathered if rank == 0 else None


def trees_index(rank: int, where: Where) -> str:
    """What a checkpoint of trees with empty parts says of itself."""
    tx = TRANSFORMS["default"]()
    params = {k: spread(noise(k, shape, 0), *where) for k, shape in SHAPES.items()}
    return str(StateTree(tx.init(params), params).state_dict()["index"])


def converted(rank: int, sides: Sequence[int] | None) -> dict[str, Tensor]:
    """State made of AdamW's whole one, which every member reads."""
    model, optimizer = run_of("net", sides)
    other = build(None)[0]
    source = torch.optim.AdamW(other.named_parameters())
    for step in (1, 2):
        give_gradients(other, step)
        source.step()
    optimizer.load_state_dict(convert_state(source.state_dict(), optimizer))
    return {key: x for key, x in tensors(model, optimizer).items() if ": " in key}


def shard_later(rank: int) -> dict[str, Tensor]:
    """A run whose parameters are sharded, and replaced in the groups, after its first step."""
    model, optimizer = run_of("feed", None)
    steps(model, optimizer, 1, 1)
    fully_shard(model, mesh=mesh_of((2,)))
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    steps(model, optimizer, 2, 3)
    return tensors(model, optimizer)
