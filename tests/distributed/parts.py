"""What workers run to compare what each of them holds with its part of one process's, and to count what syncs."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gefen_fn import MultiSteps, flatten_state, gefen, has_updated, masked, zero_nans
from gefen_nn import Gefen
from tests.distributed.adapter import Net, tensors
from tests.distributed.training import TRANSFORMS, mesh_of, noise, spread

SHAPES = {"square": (512, 512), "tall": (300, 512)}


def own_parts(rank: int, tx: str, sides: tuple[int, ...], how: str, expected: dict[str, Tensor]) -> list[str]:
    """The names of what differs in this worker's part of state and updates from that part of one process's."""
    params = {k: spread(noise(k, shape, 0), sides, how).bfloat16() for k, shape in SHAPES.items()}
    state = TRANSFORMS[tx]().init(params)
    for step in (1, 2, 3):
        grads = {k: spread(noise(k, shape, step), sides, how) for k, shape in SHAPES.items()}
        updates, state = TRANSFORMS[tx]().update(grads, state, params)
    named = {**flatten_state(state), **{f"updates.{k}": u for k, u in updates.items()}}
    return [key for key, x in named.items() if not torch.equal(_held(x, x), _held(expected[key], x))]


def _held(x: Tensor, like: Tensor) -> Tensor:
    """What this worker holds of `x`, or would if it lay as `like`."""
    if not isinstance(like, DTensor):
        return x
    laid = x if isinstance(x, DTensor) else distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    return laid.to_local()


def of_one(tx: str) -> dict[str, Tensor]:
    """State and updates of one process."""
    params = {k: noise(k, shape, 0).bfloat16() for k, shape in SHAPES.items()}
    state = TRANSFORMS[tx]().init(params)
    for step in (1, 2, 3):
        updates, state = TRANSFORMS[tx]().update({k: noise(k, s, step) for k, s in SHAPES.items()}, state, params)
    return {**flatten_state(state), **{f"updates.{k}": u for k, u in updates.items()}}


def accumulated(rank: int, kind: str, sync: bool) -> tuple[int, Any]:
    """What four micro-steps send, of which each syncs or the last alone; parameters after the step."""
    torch.manual_seed(0)
    net = Net()
    model, sent = (_fully_sharded if kind == "fsdp2" else _replicated)(net)
    optimizer = Gefen(net.named_parameters(), lr=1e-2)
    with sent as count:
        for micro in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * micro + rank))
            with _syncing(model, sync or micro == 3):
                (model(x).square().mean() / 4).backward()
    optimizer.step()
    return count.call_count, {k: x for k, x in tensors(net, optimizer).items() if ": " not in k}


def _fully_sharded(net: Net) -> tuple[Any, Any]:
    """The model, and what counts its reduce-scatters."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return fully_shard(net, mesh=mesh_of((2,))), mock.patch.object(dist, name, wraps=getattr(dist, name))


def _replicated(net: Net) -> tuple[Any, Any]:
    """The model, and what counts its all-reduces."""
    model, hook = DistributedDataParallel(net), mock.Mock(wraps=default_hooks.allreduce_hook)
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return model, nullcontext(hook)


def _syncing(model: Any, sync: bool) -> Any:
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if sync else model.no_sync()
    model.set_requires_gradient_sync(sync)
    return nullcontext()


def with_nans(rank: int) -> dict[str, bool]:
    """Of which leaves it is told that there were NaN, where member 1 has some of two leaves and a mask hides one."""
    tx = masked(zero_nans(), {"hidden": False, "square": True, "tall": True})
    leaves = {k: spread(noise("tall", SHAPES["tall"], 0), (2,), "rows") for k in ("hidden", "square", "tall")}
    for k in ("hidden", "tall"):
        leaves[k].to_local()[:rank] = torch.nan
    _, state = tx.update(leaves, tx.init(leaves), leaves)
    return {k.rsplit(".", 1)[-1]: bool(x) for k, x in flatten_state(state).items()}


def left_out(rank: int, every: int) -> list[bool]:
    """Whether updates were made of gradients of which member 1 alone wants one left out, by what it holds of them."""

    def skip(updates: Any, step: Tensor, params: Any) -> tuple[bool, tuple[()]]:
        return not bool(updates["tall"].to_local().isfinite().all()), ()

    tx = MultiSteps(gefen(0.1), every, should_skip_update_fn=skip)
    params = {"tall": spread(noise("tall", SHAPES["tall"], 0), (2,), "rows")}
    state, made = tx.init(params), []
    for step in range(4):
        grads = {"tall": spread(noise("tall", SHAPES["tall"], step), (2,), "rows")}
        if step == 1 and rank == 1:
            grads["tall"].to_local()[0, 0] = torch.nan
        state = tx.update(grads, state, params)[1]
        made.append(bool(has_updated(state)))
    return made
