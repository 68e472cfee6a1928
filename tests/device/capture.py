"""A step captured in a CUDA graph: replayed with other numbers and gradients, it does what an uncaptured one does."""

from typing import Any

import torch
from torch.nn import Parameter

from gefen_fn import Block, Dense, Factored, flatten_state
from gefen_kernels import triton_step
from gefen_kernels.step import SCALARS, Leaf
from gefen_nn import Gefen
from tests import test_capture as whole
from tests import test_triton_step as cases
from tests.device.checks import Checks, difference, nearness
from tests.device.parity_optimizer import on, tensors

_SHAPES = [(300, 520), (2, 64, 150), (64, 65), (700,)]


def capture(checks: Checks) -> None:
    """`run_step` for every policy, then whole optimizers."""
    for policy in (Factored((128, 256)), Factored(), Block(), Dense()):
        for options in ({}, {"drive": "m_hat", "negate": True, "scaled": True}):
            checks.make(f"{policy} {options or ''}", lambda p=policy, o=options: _replayed(p, o))
    for name, make in whole.LIVE.items():
        for dtype in (torch.float32, torch.bfloat16):
            checks.make(f"optimizer, {name} {dtype}", lambda m=make, d=dtype: _trained(m, d))
    for name in ("Gefen", "clip"):
        checks.make(f"optimizer, {name}, its backward captured too", lambda m=whole.LIVE[name]: _with_backward(m))
    checks.make("a step captured too early", _too_early)


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


def _trained(make: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Three usual steps and four replays, with other numbers and gradients each time, against seven usual steps."""
    (ours, first), (theirs, second) = (_optimizer(make, dtype) for _ in range(2))
    graph, torch_graph = None, torch.cuda.CUDAGraph()
    for t in range(7):
        for params, optimizer in ((ours, first), (theirs, second)):
            whole.change(optimizer, t)
            for i, (_, p) in enumerate(params):
                p.grad.copy_(cases.noise(p.shape, 10 * t + i, dtype))
        second.step()
        if t < 3:
            first.step()
            continue
        if graph is None:
            with torch.cuda.graph(torch_graph):
                first.step()
            graph = torch_graph
        graph.replay()
    torch.cuda.synchronize()
    pairs = [
        {k: x.detach().cpu() for k, x in (dict(params) | flatten_state(optimizer.state_tree())).items()}
        for params, optimizer in ((ours, first), (theirs, second))
    ]
    return difference(*pairs)


def _with_backward(make: Any) -> dict[str, Any]:
    """A whole training step: the gradients lie in the graph's own memory, elsewhere than those of the steps before."""
    nets = [_net() for _ in range(2)]
    start = {k: p.detach().cpu() for k, p in nets[0].named_parameters()}
    (first, ours), (second, theirs) = ((net, make(list(net.named_parameters()), capturable=True)) for net in nets)
    x, graph, side = torch.empty(32, 96, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def train(net: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    for t in range(7):
        x.copy_(cases.noise(x.shape, t))
        for optimizer in (ours, theirs):
            whole.change(optimizer, t)
        train(second, theirs)
        if t < 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                train(first, ours)
            torch.cuda.current_stream().wait_stream(side)
            continue
        if t == 3:
            ours.zero_grad()
            with torch.cuda.graph(graph):
                train(first, ours)
        graph.replay()
    torch.cuda.synchronize()
    ends = [{k: p.detach().cpu() for k, p in net.named_parameters()} for net in nets]
    return nearness(*ends, start, 1e-3)


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)).cuda()


def _optimizer(make: Any, dtype: torch.dtype) -> tuple[list[Any], Any]:
    named = enumerate(whole.SHAPES.items())
    params = [(name, Parameter(cases.noise(shape, 50 + i, dtype).cuda())) for i, (name, shape) in named]
    for _, p in params:
        p.grad = torch.zeros_like(p)
    return params, make(params, capturable=True)


def _too_early() -> dict[str, Any]:
    p = Parameter(torch.zeros(64, 256, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = Gefen([p], capturable=True)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    except RuntimeError as error:
        return {"passed": "take one step first" in str(error), "reason": str(error)}
    return {"passed": False, "reason": "a first step was captured"}
