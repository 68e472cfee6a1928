"""What workers run with state away from its parameters, and with parameters that are offloaded themselves."""

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from gefen_fn import flatten_state
from gefen_fn.shards import local, wrap
from gefen_fn.tree import tree_leaves
from gefen_kernels import cpu
from gefen_nn import Gefen, GefenMuon, load, offload, restore, save
from tests.distributed.adapter import Net, build, give_gradients, tensors
from tests.distributed.failing import BAD, raw
from tests.distributed.training import mesh_of, noise
from tests.stand import Stand


def optimizer_of(model: nn.Module, kind: str) -> Any:
    """A new optimizer of a model."""
    if kind == "hybrid":
        return GefenMuon(model, lr=1e-2)
    return Gefen(model.named_parameters(), lr=1e-2, weight_decay=0.1)


def trained(rank: int, sides: tuple[int, ...] | None, kind: str, away: bool, folder: str, steps: range) -> Any:
    """Whole tensors after some steps; they begin with the load of a folder that is there, and end with a save."""
    model, _ = build(sides)
    optimizer = optimizer_of(model, kind)
    host = Stand()
    optimizer.keep_state(host if away else None)
    if steps.start > 1:
        load(folder, model, optimizer)
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
    if folder:
        save(folder, model, optimizer)
    assert host.held == 0 and (host.done["write"] > 0) == away
    out = tensors(model, optimizer)
    return out if rank == 0 else None


def failures(rank: int, sides: tuple[int, ...]) -> list[tuple[str, str, bool]]:
    """The error of each fault on one member, and whether nothing changed: two moves, a leaf, none, a broken step."""
    model, optimizer = build(sides)
    host = Stand()
    give_gradients(model, 1)
    optimizer.step()
    found = [_error(rank, optimizer, lambda: optimizer.keep_state(host), host, "copy", 3)]
    optimizer.keep_state(host)
    found.append(_error(rank, optimizer, lambda: restore(optimizer), host, "copy", 3))
    give_gradients(model, 2)
    scale = [x for key, x in flatten_state(optimizer.state_tree()).items() if key.endswith("absmax")][-1]
    kept = local(scale).clone()
    if rank == BAD:
        local(scale).fill_(-1.0)
    found.append(_error(rank, optimizer, optimizer.step, host))
    local(scale).copy_(kept)
    found.append(_error(rank, optimizer, optimizer.step, host))
    _error(rank, optimizer, optimizer.step, host, "write", host.done["write"])  # the last: nobody waits for it
    found.append(_error(rank, optimizer, optimizer.step, host))
    return found


def _error(
    rank: int, optimizer: Any, attempt: Any, host: Stand, kind: str = "copy", after: int = 0
) -> tuple[str, str, bool]:
    def bits() -> list[bytes]:
        held = (p for group in optimizer.param_groups for p in group["params"])
        return [raw(x) for x in (*held, *tree_leaves(optimizer.state_tree()))]

    before = bits()
    host.fail(kind, after if rank == BAD else 0)
    try:
        attempt()
    except Exception as error:
        return type(error).__name__, str(error.__cause__ or error), bits() == before
    return "none", "", bits() == before


def offloaded(rank: int, sides: tuple[int, ...]) -> tuple[bool, int, str, Any]:
    """FSDP2's `CPUOffloadPolicy`: whether `offload` moves nothing, shards stepped where they live, words, tensors."""
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=mesh_of(sides), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = optimizer_of(model, "gefen")
    kept = tree_leaves(optimizer.state_tree())
    offload(optimizer, "cpu")
    stays = all(x is y for x, y in zip(kept, tree_leaves(optimizer.state_tree()), strict=True))
    homes, stepped = {local(p).data_ptr() for p in model.parameters()}, set()
    plan_step = cpu.plan_step

    def planned(leaves: Any) -> Any:
        stepped.update(leaf.param.data_ptr() for leaf in leaves)
        return plan_step(leaves)

    with mock.patch.object(cpu, "plan_step", planned):
        for step in (1, 2, 3):
            give_gradients(model, step)
            optimizer.step()
    out = tensors(model, optimizer)
    return stays, len(stepped & homes), str(optimizer.describe()), out if rank == 0 else None


def on_a_mesh_of_another_device(rank: int) -> dict[str, bool]:
    """Shards on the CPU in a mesh of GPUs, as FSDP2 leaves them: whether each tensor has the bits of a CPU mesh's."""
    gpus = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    cpus, results = mesh_of((dist.get_world_size(),)), []
    for mesh in (gpus, cpus):
        like = DTensor.from_local(torch.zeros(1, 4), cpus, [Shard(0)])
        named = {k: nn.Parameter(_spread(noise(k, shape, 0), mesh, like)) for k, shape in _SHAPES.items()}
        optimizer = Gefen(named.items(), lr=1e-2)
        for step in (1, 2):
            for k, p in named.items():
                p.grad = _spread(noise(k, p.shape, step), mesh, like)
            optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
        results.append({**named, **flatten_state(optimizer.state_tree())})
    one, two = results
    return {k: torch.equal(local(one[k]), local(two[k])) and not local(one[k]).is_cuda for k in two}


_SHAPES = {"tall": (300, 64), "uneven": (65, 64), "norm": (1,)}


def _spread(x: Tensor, mesh: DeviceMesh, like: DTensor) -> Tensor:
    """The rows of `x` that belong here, as a part of a DTensor of any mesh."""
    placed = mock.Mock(device_mesh=mesh, placements=like.placements)
    rows = x.chunk(mesh.size())
    part = rows[mesh.get_local_rank()] if mesh.get_local_rank() < len(rows) else x[:0]
    return wrap(part.clone(), placed, x.shape)
