"""The torch optimizers with and without kernels, repeated steps, and leaves of more than 2^31 entries."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gefen_fn import Block, Dense, Factored, chain, clip_by_global_norm, gefen, inject_hyperparams
from gefen_kernels import triton_codec, triton_step
from gefen_kernels.step import Leaf
from gefen_nn import Gefen, TransformOptimizer
from tests import test_triton_step as cases
from tests.device.checks import Checks, Skip, difference, kernels, nearness, stepping

_SHAPES = {
    "embed": (1000, 256),
    "w": (512, 700),
    "conv": (64, 32, 3, 3),
    "experts": (3, 64, 96),
    "norm": (512,),
    "b": (),
}
_LARGE, _HUGE = (4096, 2000), (128 * 1050, 16512)
_TINY = {"w": (40, 128), "norm": (40,)}


def clipped(named: list[Any], **options: Any) -> torch.optim.Optimizer:
    def rule(learning_rate: Any) -> Any:
        return chain(clip_by_global_norm(0.5), gefen(learning_rate, weight_decay=0.1))

    return TransformOptimizer(named, inject_hyperparams(rule)(1e-2), **options)


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Gefen": lambda named, **kw: Gefen(named, lr=1e-2, weight_decay=0.1, **kw),
    "Gefen, Block": lambda named, **kw: Gefen(named, lr=1e-2, second_moment=Block(), **kw),
    "Gefen, maximize": lambda named, **kw: Gefen(named, lr=1e-2, maximize=True, **kw),
    "Gefen, stochastic_rounding": lambda named, **kw: Gefen(named, lr=1e-2, stochastic_rounding=True, **kw),
    "TransformOptimizer, clipped": clipped,
}


def optimizers(checks: Checks) -> None:
    """Five steps under a scheduler: fused against fused=False there, against the CPU, and repeated."""
    for name, build in list(_OPTIMIZERS.items())[:: 4 if checks.dry else 1]:
        for dtype in (torch.float32,) if checks.dry else (torch.float32, torch.bfloat16):
            _compare(checks, f"{name} {str(dtype).removeprefix('torch.')}", build, dtype)


def _compare(checks: Checks, name: str, build: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> None:
    cpu, bound = torch.device("cpu"), 1e-5 if dtype == torch.float32 else 1e-2
    shapes = _TINY if checks.dry else _SHAPES
    start = {k: cases.noise(s, 50 + i, dtype) for i, (k, s) in enumerate(shapes.items())}

    def trained(device: torch.device, fused: bool | None) -> dict[str, Tensor]:
        return _trained(checks, build, start, device, fused)

    checks.make(
        f"{name}: fused is near the CPU's pure path",
        lambda: nearness(trained(checks.device, None), trained(cpu, False), start, bound),
    )
    if not checks.dry:
        checks.make(
            f"{name}: fused is near fused=False",
            lambda: nearness(trained(checks.device, None), trained(checks.device, False), start, bound),
        )
        checks.make(
            f"{name}: repeated, the same bits",
            lambda: difference(trained(checks.device, None), trained(checks.device, None)),
        )


def _trained(
    checks: Checks,
    build: Callable[..., torch.optim.Optimizer],
    start: dict[str, Tensor],
    device: torch.device,
    fused: bool | None,
) -> dict[str, Tensor]:
    """Parameters and state after the steps, on the CPU.

    Raises:
        AssertionError: if the kernels took no step, or one that was not theirs.
    """
    named = [(k, Parameter(p.to(device, copy=True))) for k, p in start.items()]
    optimizer, taken = build(named, fused=fused), list[int]()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with stepping(kernels(checks, cases.run, triton_step), taken):
        for t in range(2 if checks.dry else 5):
            for i, (_, p) in enumerate(named):
                p.grad = cases.noise(p.shape, 100 * t + i, p.dtype).to(device)
            optimizer.step()
            scheduler.step()
    assert bool(taken) == (fused is not False), f"kernels took {taken} with fused={fused}"
    own = {f"{i} {k}": x for i, leaves in enumerate(optimizer.state.values()) for k, x in leaves.items()}
    return {k: x.detach().cpu() for k, x in (dict(named) | own).items()}


def repeats(checks: Checks) -> None:
    """Ten runs of one step of large leaves, each from the same state, in changing company."""
    for policy in (Factored((128, 256)), Factored(), Block(), Dense()):
        for dtype in (torch.bfloat16, torch.float32):
            checks.make(f"ten runs of {policy} {dtype}", lambda p=policy, d=dtype: _repeated(p, d, checks.device))


def _repeated(policy: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    kept = on(cases.leaf_of(_LARGE, policy, dtypes=(dtype, dtype)), device)
    first: dict[str, Tensor] | None = None
    for n in range(10):
        leaf = cases.copied(kept)
        others = [on(cases.leaf_of((64 * (i + 1), 512), policy), device) for i in range(n % 3)]
        triton_step.gefen_step([*others, leaf], cases.numbers(1 + len(others)), cases.BOOK)
        found = tensors(leaf)
        first = first or found
        same = difference(found, first)
        if not same["passed"]:
            return same | {"run": n}
    return same


def on(leaf: Leaf, device: torch.device) -> Leaf:
    """The leaf on a device."""
    moved = {k: v.to(device) for k, v in leaf._asdict().items() if isinstance(v, Tensor)}
    return leaf._replace(**moved, nu=tuple(x.to(device) for x in leaf.nu))


def tensors(leaf: Leaf) -> dict[str, Tensor]:
    """What a step writes."""
    own = {"param": leaf.param, "mu": leaf.mu, **{f"nu {i}": x for i, x in enumerate(leaf.nu)}}
    return own if leaf.absmax is None else own | {"absmax": leaf.absmax}


def huge(checks: Checks) -> None:
    """The last rows of a leaf of 2.2e9 entries are as if they stood alone."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        checks.make("leaves beyond 2^31 entries", _no_room)
        return
    (rows, columns), last = _HUGE, 128
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    book = cases.BOOK.to("cuda")

    def encoded() -> dict[str, Any]:
        whole = triton_codec.encode(x, book, block=256)
        return difference(tuple(t[-last:] for t in whole), triton_codec.encode(x[-last:].contiguous(), book, block=256))

    checks.make(f"encode {rows} x {columns}", encoded)
    for policy in (Factored((128, 256)), Block()):
        checks.make(f"step {rows} x {columns} {policy}", lambda p=policy: _last_rows(p, x, last))


def _no_room() -> dict[str, Any]:
    raise Skip("less than 40 GiB of the card's memory are free")


def _last_rows(policy: Any, grad: Tensor, last: int) -> dict[str, Any]:
    """Where a tile ends before the last rows, they have statistics of their own."""
    whole, alone = (_empty_leaf(g, policy) for g in (grad, grad[-last:].contiguous()))
    for leaf in (whole, alone):
        triton_step.gefen_step([leaf], cases.numbers(1), cases.BOOK)
    return difference(
        {k: v[-last:].cpu() for k, v in tensors(whole).items()}, {k: v.cpu() for k, v in tensors(alone).items()}
    )


def _empty_leaf(grad: Tensor, policy: Any) -> Leaf:
    leaf = cases.leaf_of(tuple(grad.shape), policy, device="cuda")
    return leaf._replace(grad=grad)
