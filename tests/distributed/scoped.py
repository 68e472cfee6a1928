"""What workers run with scopes given by hand: plain tensors whose gradients differ between the members."""

import copy
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gefen_fn import (
    Scope,
    StructureError,
    calibrate,
    describe,
    fuse,
    gefen,
    gradient_histogram,
    muon,
    partition,
    refresh,
)
from gefen_fn.quantize import has_codebook
from gefen_fn.tree import tree_map
from gefen_nn import Gefen, GefenMuon
from tests.distributed.training import mesh_of, noise, spread

SCOPES: dict[tuple[int, ...], Scope] = {}


def scope_of(members: tuple[int, ...]) -> Scope:
    """The scope of a pair of workers; every worker of the pool asks for its own at the same time, at the first call."""
    if not SCOPES:
        pairs = [(n, n + 1) for n in range(0, dist.get_world_size(), 2)]
        groups = {pair: dist.new_group(list(pair)) for pair in pairs}
        SCOPES.update({pair: Scope("replicas", pair, groups[pair]) for pair in pairs if dist.get_rank() in pair})
    return SCOPES[members]


def codebook_of(scoped: bool) -> Any:
    """The argument that workers 0 and 1 learn together with, or each for itself."""
    return scope_of((0, 1)) if scoped else "learned"


def gradients(rank: int) -> dict[str, Tensor]:
    """Other ones on each worker, of other distributions."""
    return {k: noise(k, shape, rank + 1) ** (1 + 2 * rank) for k, shape in (("up", (96, 64)), ("down", (64, 128)))}


def _pure(tx: Any, grads: dict[str, Tensor]) -> Any:
    return tx.update(grads, tx.init(grads), grads)[1]


def _stepped(kind: Any, codebook: Any, grads: dict[str, Tensor]) -> Any:
    params = {k: nn.Parameter(torch.zeros_like(g)) for k, g in grads.items()}
    optimizer = kind(list(params.items()), codebook=codebook)
    for k, p in params.items():
        p.grad = grads[k]
    optimizer.step()
    return optimizer.state_tree()


WAYS = {
    "update": lambda book, g: _pure(gefen(0.1, codebook=book), g),
    "update of Muon": lambda book, g: _pure(muon(0.1, codebook=book), g),
    "calibrate": lambda book, g: calibrate(gefen(0.1, codebook=book), g, gefen(0.1).init(g), g),
    "refresh": lambda book, g: refresh(gefen(0.1, codebook=book), g, _pure(gefen(0.1), g), g),
    "step": lambda book, g: _stepped(Gefen, book, g),
    "step of a hybrid": lambda book, g: _stepped(GefenMuon, book, g),
}


def learn(rank: int, way: str, scoped: bool) -> list[Tensor]:
    """The codebooks that come out."""
    return _books(WAYS[way](codebook_of(scoped), gradients(rank)))


def _books(state: Any) -> list[Tensor]:
    books: list[Tensor] = []
    tree_map(lambda x: books.append(x.codebook) if has_codebook(x) else None, state, is_leaf=has_codebook)
    return books


def histogram(rank: int) -> Tensor:
    """The counts of what this worker learns from."""
    return gradient_histogram(gradients(rank))


def described(rank: int) -> tuple[str, str, str]:
    """Who learns a codebook: in a scope, without one, and on a mesh."""
    grads = gradients(rank)
    sharded = {k: DTensor.from_local(g, mesh_of((2,)), [Shard(0)]) for k, g in grads.items()}
    rows = [(codebook_of(True), grads), ("learned", grads), ("learned", sharded)]
    texts = [str(describe(gefen(0.1, codebook=book), params)).splitlines() for book, params in rows]
    return tuple(next(line for line in text if line.startswith("codebook of")) for text in texts)  # type: ignore[return-value]


def other_names(rank: int) -> str:
    """The error where members call one scope by two names."""
    scope = Scope(f"mine {rank}", (0, 1), scope_of((0, 1)).group)
    try:
        WAYS["update"](scope, gradients(rank))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def narrow(rank: int) -> tuple[list[Tensor], str]:
    """On a mesh of four: what each replica learns by itself, and the refusal of a scope that holds half a leaf."""
    tx = gefen(0.1, codebook=scope_of((0, 1) if rank < 2 else (2, 3)))
    replicas, rows = (
        {k: spread(noise(k, (96, 64), 1), sides, how) for k in ("up", "down")}
        for sides, how in (((2, 2), "hsdp"), ((4,), "rows"))
    )
    try:
        tx.init(rows)
    except StructureError as error:
        return _books(_pure(tx, replicas)), str(error)
    return [], "none"


def copied(rank: int) -> bool:
    """Whether a copy of an optimizer votes in the scope itself, no process group being copied."""
    params = {k: nn.Parameter(torch.zeros_like(g)) for k, g in gradients(rank).items()}
    optimizer = Gefen(list(params.items()), codebook=codebook_of(True))
    return copy.deepcopy(optimizer)._group() is optimizer._group() is codebook_of(True)


def of_parts(rank: int, plain: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The codebooks of a part on a mesh and of one of plain tensors, learned in place and by the pure path.

    The members `plain` have no back end.
    """
    tx = partition({"mesh": gefen(0.1), "own": gefen(0.1)}, {"up": "mesh", "down": "own"})
    grads = {**gradients(rank), "up": DTensor.from_local(gradients(rank)["up"], mesh_of((2,)), [Shard(0)])}
    params, step = tree_map(torch.zeros_like, grads), fuse(tx)
    assert step is not None
    expected = _books(_pure(tx, grads))
    with mock.patch.dict(os.environ, {"GEFEN_REFERENCE": "1"} if rank in plain else {}):
        return _books(step(grads, tx.init(params), params)), expected
