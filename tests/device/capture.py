"""A step captured in a CUDA graph: replayed with other numbers and gradients, it does what an uncaptured one does."""

from typing import Any

import torch

from gefen_fn import Block, Dense, Factored
from gefen_kernels import triton_step
from gefen_kernels.step import SCALARS, Leaf
from gefen_nn import Gefen
from tests import test_triton_step as cases
from tests.device.checks import Checks, Skip, difference
from tests.device.parity_optimizer import on, tensors

_SHAPES = [(300, 520), (2, 64, 150), (64, 65), (700,)]


def capture(checks: Checks) -> None:
    """`run_step` for every policy; whole optimizers refuse."""
    for policy in (Factored((128, 256)), Factored(), Block(), Dense()):
        for options in ({}, {"drive": "m_hat", "negate": True, "scaled": True}):
            checks.make(f"{policy} {options or ''}", lambda p=policy, o=options: _replayed(p, o))
    checks.make("a whole optimizer", _whole)


def _leaves(policy: Any) -> list[Leaf]:
    made = [
        on(cases.leaf_of(s, policy, dtypes=(torch.bfloat16, torch.bfloat16)), torch.device("cuda")) for s in _SHAPES
    ]
    return [leaf._replace(param=cases.noise(leaf.param.shape, 9, torch.bfloat16).cuda()) for leaf in made]


def _numbers(t: int) -> torch.Tensor:
    changes = {"b1": 0.9 - 0.01 * t, "step": -1e-2 * (t + 1), "weight_decay": 0.1 * t, "grad_scale": 1 / (t + 1)}
    assert changes.keys() <= set(SCALARS)
    return cases.numbers(len(_SHAPES), **changes)


def _replayed(policy: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps as usual, then four replays against four usual steps with the numbers and gradients of their time."""
    ours, theirs = _leaves(policy), _leaves(policy)
    grads = [torch.empty_like(leaf.grad) for leaf in ours]
    scalars, book = _numbers(0).cuda(), cases.BOOK.cuda()
    plan, graph = triton_step.plan_step([leaf._replace(grad=g) for leaf, g in zip(ours, grads, strict=True)]), None
    for t in range(6):
        for i, g in enumerate(grads):
            g.copy_(cases.noise(g.shape, 10 * t + i, g.dtype))
        scalars.copy_(_numbers(t))
        if t < 2:
            triton_step.run_step(plan, grads, scalars, book, **options)
        else:
            graph = graph or _captured(plan, grads, scalars, book, options)
            graph.replay()
        usual = [leaf._replace(grad=g.clone()) for leaf, g in zip(theirs, grads, strict=True)]
        triton_step.gefen_step(usual, _numbers(t), cases.BOOK, **options)
    torch.cuda.synchronize()
    pairs = [
        {f"{i} {k}": x.cpu() for i, leaf in enumerate(own) for k, x in tensors(leaf).items()} for own in (ours, theirs)
    ]
    return difference(*pairs)


def _captured(plan: Any, grads: Any, scalars: torch.Tensor, book: torch.Tensor, options: dict[str, Any]) -> Any:
    """What is captured is not run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_step.run_step(plan, grads, scalars, book, **options)
    return graph


def _whole() -> dict[str, Any]:
    p = torch.nn.Parameter(torch.zeros(64, 256, device="cuda"))
    try:
        Gefen([p], capturable=True)
    except ValueError as error:
        raise Skip(f"refused by design: {error}") from error
    return {"passed": False, "reason": "capturable=True was accepted: write a check for it here"}
