"""What workers run: a few steps with the same gradients on any mesh, and the whole tensors that come out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from gefen_fn import (
    MatrixAxes,
    MultiSteps,
    StructureError,
    adamw,
    adaptive_grad_clip,
    apply_if_finite,
    apply_updates,
    chain,
    clip_by_block_rms,
    clip_by_global_norm,
    compensated,
    flatten_state,
    gefen_muon,
    inject_hyperparams,
    lion,
    masked,
    muon,
    named_chain,
    partition,
    stochastic_rounding,
    trace,
    zero_nans,
)
from gefen_fn import gefen as gefen_alias
from gefen_fn.second_moment import Block, Dense, Factored

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "default": lambda: gefen_alias(1e-2, weight_decay=0.1),
    "tile16": lambda: gefen_alias(1e-2, second_moment=Factored((16, 256))),
    "whole columns": lambda: gefen_alias(1e-2, second_moment=Factored((16, None))),
    "one tile": lambda: gefen_alias(1e-2, second_moment=Factored()),
    "block": lambda: gefen_alias(1e-2, second_moment=Block(), b2_warmup=None, drive="m_hat"),
    "dense": lambda: gefen_alias(1e-2, second_moment=Dense()),
    "adamw": lambda: adamw(1e-2),
    "chores": lambda: apply_if_finite(
        chain(zero_nans(), clip_by_block_rms(0.5), adaptive_grad_clip(0.1), trace(0.9), lion(1e-2)), 3
    ),
    "accumulated": lambda: MultiSteps(chain(clip_by_global_norm(0.5), gefen_alias(1e-2)), 2),
    "muon": lambda: muon(1e-2, spec=_qkv),
    "exact muon": lambda: muon(1e-2, sharded="exact"),
    "normuon": lambda: muon(1e-2, quantize=False, normuon="norm_kept"),
    "hybrid": lambda: gefen_muon(1e-2, normuon="paper", weight_decay=0.1),
    "random": lambda: chain(gefen_alias(1e-2, rounding="stochastic"), stochastic_rounding()),
    "compensated": lambda: chain(gefen_alias(1e-2), compensated()),
    "clip": lambda: chain(clip_by_global_norm(0.5), gefen_alias(1e-2, weight_decay=0.1)),
    "nested": lambda: nested(),
}


def nested() -> Any:
    """Three transforms that exchange, each deep inside: Muon and two kinds of tiles."""

    def parts(learning_rate: Any) -> Any:
        tiles = gefen_alias(learning_rate, second_moment=Factored((16, 256)))
        return partition(
            {
                "tall": MultiSteps(gefen_alias(learning_rate), 1),
                "masks": named_chain(
                    ("both", chain(masked(muon(learning_rate), _is("wide")), masked(tiles, _is("few"))))
                ),
                "rest": adamw(learning_rate),
            },
            lambda params: {k: {"tall": "tall", "wide": "masks", "few": "masks"}.get(k, "rest") for k in params},
        )

    return chain(clip_by_global_norm(0.5), inject_hyperparams(parts)(1e-2))


def _is(name: str) -> Callable[[Any], dict[str, bool]]:
    """The mask that shows one leaf."""
    return lambda params: {k: k == name for k in params}


def _qkv(params: Any) -> dict[str, MatrixAxes | None]:
    return {k: MatrixAxes(0, 1, split=(100, 100, 100)) if k == "tall" else None for k in params}


PLACEMENTS = {
    "replicated": (Replicate(),),
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "last": (Shard(-1),),
    "hsdp": (Replicate(), Shard(0)),
    "rows and columns": (Shard(0), Shard(1)),
    "strided": (_StridedShard(0, split_factor=2), Shard(0)),
}
MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(sides: Sequence[int]) -> DeviceMesh:
    """The mesh of all workers with these sides, made once."""
    key = tuple(sides)
    if key not in MESHES:
        MESHES[key] = init_device_mesh("cpu", key, mesh_dim_names=("outer", "inner")[-len(key) :])
    return MESHES[key]


def noise(name: str, shape: Sequence[int], step: int) -> Tensor:
    """The same numbers everywhere, of another size for each leaf."""
    seed = sum(map(ord, name)) * 1000 + step
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator) * 10.0 ** -(seed % 3)


def spread(x: Tensor, sides: Sequence[int] | None, how: str) -> Tensor:
    """`x` as a DTensor; an axis that it lacks is not cut. None: `x` itself."""
    if sides is None:
        return x
    kept = [p if p.is_replicate() or p.dim < x.ndim else Replicate() for p in PLACEMENTS[how]]
    return distribute_tensor(x, mesh_of(sides), kept)


def whole(x: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def dtype_of(tx_name: str) -> torch.dtype:
    """Of the parameters that a transform of `TRANSFORMS` is tried with."""
    return torch.bfloat16 if tx_name in ("random", "compensated") else torch.float32


def train(
    rank: int, tx_name: str, shapes: dict[str, Sequence[int]], steps: int, sides: Sequence[int] | None, how: str
) -> dict[str, Tensor]:
    """Parameters and state after some steps, whole."""
    tx = TRANSFORMS[tx_name]()
    dtype = dtype_of(tx_name)
    params = {k: spread(noise(k, shape, 0).to(dtype), sides, how) for k, shape in shapes.items()}
    state = tx.init(params)
    for step in range(1, steps + 1):
        grads = {k: spread(noise(k, shape, step), sides, how) for k, shape in shapes.items()}
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
    named = {**{f"params.{k}": p for k, p in params.items()}, **flatten_state(state)}
    result = {k: whole(x).clone() for k, x in named.items()}
    return result if rank == 0 else {k: result[k] for k in ()}


def refused_cut(rank: int, shape: Sequence[int], sides: Sequence[int], how: str) -> str:
    """What `init` says of a leaf whose shards would cut a block, or what is kept of a row."""
    try:
        gefen_alias(1e-2).init({"x": spread(torch.zeros(tuple(shape)), sides, how)})
    except StructureError as error:
        return str(error)
    return "none"


def members() -> int:
    """Workers of the default group."""
    return dist.get_world_size()
