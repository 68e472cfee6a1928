"""What workers run to find out who is told of a failure: meshes of parts of a model, and meshes that overlap."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gefen_fn import StructureError
from gefen_nn import Gefen, GefenMuon
from tests.distributed.counting import counted
from tests.distributed.failing import BAD, raw
from tests.distributed.training import mesh_of, noise, whole

MESHES: dict[Any, DeviceMesh] = {}
SHAPES = {"up": (96, 64), "down": (64, 512), "bias": (96,)}


def mesh_over(ranks: tuple[int, ...]) -> DeviceMesh:
    """The mesh of some workers, made once by all of them."""
    if ranks not in MESHES:
        MESHES[ranks] = DeviceMesh("cpu", list(ranks))
    return MESHES[ranks]


def unsorted_mesh() -> DeviceMesh:
    """A 2-D mesh over four, whose second axis had its groups first and so under the names that sort first."""
    if "unsorted" not in MESHES:
        rank, ranks = dist.get_rank(), torch.arange(4).reshape(2, 2)
        inner = [dist.new_group(row.tolist()) for row in ranks][rank // 2]
        outer = [dist.new_group(column.tolist()) for column in ranks.T][rank % 2]
        MESHES["unsorted"] = DeviceMesh.from_group([outer, inner], "cpu", ranks, mesh_dim_names=("z", "a"))
        assert inner.group_name < outer.group_name
    return MESHES["unsorted"]


def model(places: dict[str, tuple[DeviceMesh, Any] | None]) -> dict[str, nn.Parameter]:
    """Parameters of fixed values, each on its mesh, or plain."""
    out = {}
    for name, place in places.items():
        x = noise(name, SHAPES[name], 0)
        out[name] = nn.Parameter(x if place is None else distribute_tensor(x, *place, src_data_rank=None))
    return out


def give(params: dict[str, nn.Parameter], step: int) -> None:
    """Gradients of fixed values."""
    for name, p in params.items():
        g = noise(name, SHAPES[name], step)
        sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None) if sharded else g


def _told(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter], bad: int) -> tuple[str, bool]:
    """The error where the closure fails on one member, and whether nothing changed."""
    give(params, 1)
    optimizer.step()
    give(params, 2)
    before = [raw(x) for x in params.values()]

    def closure() -> None:
        if dist.get_rank() == bad:
            raise OSError("the disk is full")

    try:
        optimizer.step(closure)
    except Exception as error:
        return type(error).__name__, before == [raw(x) for x in params.values()]
    return "none", False


def hybrid(rank: int, part: str) -> tuple[str, bool]:
    """A failure where the mesh is that of the backup's parameters alone, or where no parameter is Muon's."""
    rows = mesh_of((2,)), (Shard(0),)
    alone = {"bias": rows} if part == "no Muon leaf" else {"up": None, "bias": rows}
    params = model(alone)
    optimizer = GefenMuon(list(params.items()), require_muon=part != "no Muon leaf")
    return _told(optimizer, params, BAD)


OVERLAPS: dict[str, Callable[[int], list[tuple[int, ...]]]] = {
    "each its own": lambda rank: [ranks for ranks in ((0, 1, 2), (2, 3)) if rank in ranks],
    "one sees less": lambda rank: [(2, 3)] if rank == 3 else [(0, 1, 2), (2, 3)],
    "a chain": lambda rank: [ranks for ranks in ((0, 1), (1, 2), (2, 3)) if rank in ranks],
    "one left out": lambda rank: [ranks for ranks in ((0, 1), (1, 2)) if rank in ranks],
}


def overlap(rank: int, case: str) -> str:
    """What building an optimizer says where members see other meshes."""
    for ranks in ((0, 1, 2), (2, 3), (0, 1), (1, 2)):
        mesh_over(ranks)
    places = dict(zip(SHAPES, [(mesh_over(ranks), (Shard(0),)) for ranks in OVERLAPS[case](rank)], strict=False))
    params = model({**places, "bias": None})
    try:
        Gefen(list(params.items()))
    except StructureError as error:
        return str(error)
    return "none"


def union(rank: int, bad: int) -> tuple[str, bool]:
    """A failure where all members see both of two meshes that overlap, and are the whole world together."""
    params = model({"up": (mesh_over((0, 1, 2)), (Shard(0),)), "down": (mesh_over((2, 3)), (Shard(0),))})
    return _told(Gefen(list(params.items())), params, bad)


def unsorted(rank: int, sharded: bool, kind: str) -> dict[str, Tensor]:
    """Parameters after three steps on the unsorted mesh, or in one process, whole."""
    how = (Replicate(), Shard(0)) if kind == "hsdp" else (Shard(0), Shard(1))
    names = ("up", "down") if kind == "hsdp" else ("down",)
    params = model({k: (unsorted_mesh(), how) if sharded else None for k in names})
    optimizer = GefenMuon(list(params.items()))
    for step in (1, 2, 3):
        give(params, step)
        optimizer.step()
    return {k: whole(p.detach()).clone() for k, p in params.items()}


def compiled(rank: int) -> tuple[list[str], int, int, bool]:
    """Of compiled steps: the functions in graphs, how many graphs after two and five, and whether bits are the same."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    made = [model({k: (mesh_of((2,)), (Shard(0),)) for k in SHAPES}) for _ in range(2)]
    optimizers = [Gefen(list(params.items())) for params in made]

    def train(x: Tensor, optimizer: Gefen) -> Tensor:
        loss = (2 * x).sum()
        optimizer.step()
        return loss + 1

    ways, counts = (train, torch.compile(train, backend=record)), []
    for step in range(1, 6):
        for params, optimizer, way in zip(made, optimizers, ways, strict=True):
            give(params, step)
            optimizer.param_groups[0]["lr"] = 0.1 / step
            way(torch.ones(3), optimizer)
        counts.append(len(graphs))
    functions = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    same = [raw(x) for x in made[0].values()] == [raw(x) for x in made[1].values()]
    return functions, counts[1], counts[-1], same


def captured(rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """The collectives of a step, and of one while a graph is said to be captured."""
    params = model({k: (mesh_of((2,)), (Shard(0),)) for k in SHAPES})
    optimizer = Gefen(list(params.items()))
    give(params, 1)
    optimizer.step()
    with counted() as voting:
        optimizer.step()
    with counted() as silent, mock.patch("gefen_nn.control.capturing", lambda: True):
        optimizer.step()
    return dict(voting), dict(silent)


def vote_group(rank: int) -> tuple[bool, bool, float, bool]:
    """Whether votes have a group of their own, made at construction, its timeout, and whether optimizers share it."""
    params = model({k: (mesh_of((2,)), (Shard(0),)) for k in SHAPES})
    one, two = Gefen(list(params.items())), Gefen(list(params.items()))
    own = one._group().group
    timeout = own._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return own is not dist.group.WORLD, own is not mesh_of((2,)).get_group(), timeout, two._group().group is own


def local_collectives(rank: int, where: str) -> dict[str, int]:
    """The collectives of construction and a step without a group: plain tensors, or a mesh of one process."""
    mesh = mesh_over((rank,)) if where == "one process" else None
    for other in (0, 1):
        mesh_over((other,))
    place = None if mesh is None else (mesh_over((rank,)), (Shard(0),))
    params = model(dict.fromkeys(SHAPES, place))
    give(params, 1)
    with counted() as seen:
        Gefen(list(params.items())).step()
    return dict(seen)
