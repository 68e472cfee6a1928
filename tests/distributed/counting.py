"""What workers run to count the collectives of a step."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gefen_fn import chain, clip_by_global_norm, gefen, gefen_muon
from gefen_nn import TransformOptimizer
from tests.distributed.adapter import give_gradients
from tests.distributed.training import spread

WIDE = {"up": (512, 256), "down": (256, 512)}
CUT = {"up": (300, 256), "down": (256, 512)}
TRANSFORMS = {
    "clip": chain(clip_by_global_norm(1.0), gefen(1e-2)),
    "hybrid": gefen_muon(1e-2),
}


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


def collectives(rank: int, tx: str, shapes: dict[str, tuple[int, int]], sides: tuple[int, ...]) -> dict[str, int]:
    """The collectives of the third step: what a structure asks once is asked by then."""
    torch.manual_seed(0)
    params = {k: nn.Parameter(spread(torch.randn(shape), sides, "rows")) for k, shape in shapes.items()}
    holder = nn.ParameterDict(params)
    optimizer = TransformOptimizer(holder.named_parameters(), TRANSFORMS[tx])
    for step in (1, 2):
        give_gradients(holder, step)
        optimizer.step()
    give_gradients(holder, 3)
    with counted() as seen:
        optimizer.step()
    return dict(seen)


def bytes_sent(rank: int, tx: str, shapes: dict[str, tuple[int, int]], sides: tuple[int, ...]) -> int:
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
