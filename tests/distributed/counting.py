"""What workers run to count the collectives of a step."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gefen_fn import Factored, chain, clip_by_global_norm, gefen, gefen_muon, named_chain, partition
from gefen_nn import TransformOptimizer
from tests.distributed.adapter import give_gradients
from tests.distributed.training import TRANSFORMS as TRAINED
from tests.distributed.training import nested, spread

Shapes = dict[str, tuple[int, ...]]
WIDE = {"up": (512, 256), "down": (256, 512)}
CUT = {"up": (300, 256), "down": (256, 512)}
BOTH = {**CUT, "embed": (300, 256)}
DEEP = {"tall": (300, 256), "wide": (50, 512), "few": (33, 1024), "bias": (70,)}
TRANSFORMS = {
    "clip": chain(clip_by_global_norm(1.0), gefen(1e-2)),
    "hybrid": gefen_muon(1e-2),
    "two kinds": partition(
        {"up": gefen(1e-2), "other": gefen(1e-2, second_moment=Factored((16, 256)))},
        lambda params: {k: "up" if k == "up" else "other" for k in params},
    ),
    "in a row": named_chain(("gefen", gefen(1e-2)), ("muon", gefen_muon(1e-2))),
    "nested": nested(),
}
DTYPES = {"embed": torch.bfloat16}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives issued inside, by name."""
    seen: Counter[str] = Counter()
    names = ("all_gather", "all_reduce", "all_to_all_single")
    kept = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return kept[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def collectives(rank: int, tx: str, shapes: Shapes, sides: tuple[int, ...], how: str, fused: bool) -> dict[str, int]:
    """The collectives of the third step: what a structure asks once is asked by then."""
    torch.manual_seed(0)
    whole = {k: torch.randn(shape, dtype=DTYPES.get(k)) for k, shape in shapes.items()}
    params = {k: nn.Parameter(spread(x, sides, how)) for k, x in whole.items()}
    holder = nn.ParameterDict(params)
    optimizer = TransformOptimizer(holder.named_parameters(), TRANSFORMS[tx], fused=None if fused else False)
    for step in (1, 2):
        give_gradients(holder, step)
        optimizer.step()
    give_gradients(holder, 3)
    with counted() as seen:
        optimizer.step()
    return dict(seen)


def groups_made(rank: int, tx: str) -> tuple[int, int]:
    """How many process groups `init`, and the first update after it, make for leaves on a mesh within the world."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("other", "outer", "inner"))["outer", "inner"]
    params = {k: distribute_tensor(torch.randn(shape), mesh, [Replicate(), Shard(0)]) for k, shape in DEEP.items()}
    transform, groups = TRAINED[tx](), [len(_world.pg_map)]
    state = transform.init(params)
    groups.append(len(_world.pg_map))
    transform.update(params, state, params)
    return groups[1] - groups[0], len(_world.pg_map) - groups[1]


def bytes_sent(rank: int, tx: str, shapes: Shapes, sides: tuple[int, ...]) -> int:
    """What this member sends in the exchanges of a step."""
    params = {k: spread(torch.randn(shape), sides, "rows") for k, shape in shapes.items()}
    state = TRANSFORMS[tx].init(params)
    sent, kept = [], dist.all_to_all_single

    def counting(came: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(out.numel() * out.itemsize)
        return kept(came, out, *args, **kwargs)

    dist.all_to_all_single = counting
    try:
        TRANSFORMS[tx].update(params, state, params)
    finally:
        dist.all_to_all_single = kept
    return sum(sent)
