"""What workers run where one member holds no entry of any parameter, or does something that the others do not."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gefen_fn import flatten_state, gefen, refresh
from gefen_nn import Gefen
from tests.distributed.failing import BAD, raw
from tests.distributed.training import mesh_of, noise, whole

SHAPES = {"row": (1, 8192), "few": (1, 33, 256)}  # of two members the second has no part of these


def spread(x: Tensor, alone: bool) -> Tensor:
    """`x` by rows over two members, or whole."""
    return x if alone else distribute_tensor(x, mesh_of((2,)), [Shard(0)])


def build(alone: bool, **options: Any) -> tuple[dict[str, nn.Parameter], Gefen]:
    """Parameters of fixed values and their optimizer."""
    params = {k: nn.Parameter(spread(noise(k, shape, 0), alone)) for k, shape in SHAPES.items()}
    return params, Gefen(list(params.items()), lr=0.1, **options)


def take_step(params: dict[str, nn.Parameter], optimizer: Gefen, step: int, lacking: bool = False) -> None:
    """A step of fixed gradients; `lacking`: none where there are no entries."""
    for k, p in params.items():
        held = p.to_local().numel() if isinstance(p, DTensor) else p.numel()
        g = spread(noise(k, SHAPES[k], step), not isinstance(p, DTensor))
        p.grad = None if lacking and not held else g
    optimizer.step()


def tensors(params: dict[str, nn.Parameter], optimizer: Gefen) -> dict[str, Tensor]:
    """Parameters and state, whole."""
    named = {**params, **flatten_state(optimizer.state_tree())}
    return {k: whole(x.detach()).clone() for k, x in named.items() if isinstance(x, Tensor)}


def steps(rank: int, alone: bool, lacking: bool) -> tuple[dict[str, Tensor], list[int], list[int]]:
    """Three steps: what comes out, the sizes of the state that this member holds, and its counts."""
    params, optimizer = build(alone)
    for step in (1, 2, 3):
        take_step(params, optimizer, step, lacking)
    flat = flatten_state(optimizer.state_tree())
    sizes = [x.to_local().numel() for x in flat.values() if isinstance(x, DTensor)]
    counts = [int(x) for key, x in flat.items() if ".count." in key]
    return tensors(params, optimizer), sizes, counts


def refreshed(rank: int, alone: bool) -> dict[str, Tensor]:
    """A state whose codebook is learned anew from other gradients."""
    tx = gefen(0.1)
    grads = [{k: spread(noise(k, shape, step) ** step, alone) for k, shape in SHAPES.items()} for step in (1, 3)]
    state = tx.update(grads[0], tx.init(grads[0]), grads[0])[1]
    return {k: whole(x).clone() for k, x in flatten_state(refresh(tx, grads[1], state, grads[0])).items()}


def resumed(rank: int, alone: bool) -> dict[str, Tensor]:
    """A codebook learned after a load that brought codes of the fixed one, which one member has and the other not."""
    params, fixed = build(alone, codebook="fixed")
    for step in (1, 2):
        take_step(params, fixed, step)
    learned = Gefen(list(params.items()), lr=0.1)
    learned.load_state_dict(copy.deepcopy(fixed.state_dict()))
    take_step(params, learned, 3)
    return tensors(params, learned)


@contextmanager
def failing_solver() -> Iterator[None]:
    """No codebook can be learned."""
    with mock.patch.object(import_module("gefen_fn.calibrate"), "learn_codebook", side_effect=MemoryError("no room")):
        yield


def solver_fails(rank: int, fused: bool | None) -> tuple[str, bool, dict[str, Tensor]]:
    """The error where one member cannot learn, whether nothing changed, and what a retry makes of it."""
    params, optimizer = build(False, fused=fused)
    before = _bits(params, optimizer)
    error = "none"
    try:
        with failing_solver() if rank == BAD else nullcontext():
            take_step(params, optimizer, 1)
    except Exception as raised:
        error = type(raised).__name__
    unchanged = before == _bits(params, optimizer)
    take_step(params, optimizer, 1)
    return error, unchanged, tensors(params, optimizer)


def _bits(params: dict[str, nn.Parameter], optimizer: Gefen) -> list[bytes]:
    return [raw(x) for x in (*params.values(), *flatten_state(optimizer.state_tree()).values())]


def loaded_alone(rank: int, what: str) -> tuple[str, bool, bool]:
    """The error after one member alone wrote into its state, whether nothing changed, and whether it goes on after."""
    params, optimizer = build(False)
    take_step(params, optimizer, 1)
    leaf = optimizer.state[params["row"]][f"scale_by_gefen.{what}"]
    kept = leaf.clone()
    if rank == BAD:
        leaf.copy_(leaf + 1 if what == "count" else leaf.sign() * leaf.abs() ** 2)
    before, error = _bits(params, optimizer), "none"
    try:
        take_step(params, optimizer, 2)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    unchanged = before == _bits(params, optimizer)
    leaf.copy_(kept)
    take_step(params, optimizer, 2)
    return error, unchanged, int(optimizer.state[params["row"]]["scale_by_gefen.count"]) == 2


def digests(rank: int) -> tuple[int, int]:
    """How often a structure was digested in five steps, and in five more after a group was added."""
    seen: Counter[str] = Counter()

    def counting(x: Any) -> str:
        seen["digests"] += 1
        return repr(x)

    vote = import_module("gefen_nn.vote")
    params = {f"of this test {k}": p for k, p in build(False)[0].items()}
    optimizer = Gefen(list(params.items()))
    with mock.patch.object(vote, "repr", counting, create=True):
        for _ in range(5):
            optimizer.step()
        first = seen["digests"]
        optimizer.add_param_group({"params": [("one more", nn.Parameter(spread(noise("x", (4, 8), 0), False)))]})
        for _ in range(5):
            optimizer.step()
    return first, seen["digests"] - first
