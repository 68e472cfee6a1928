"""The fused step on the card against the pure path on the CPU, against the pure path there, and against float64."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn import GradientTransformation, apply_updates, chain, flatten_state, fuse, gefen, stochastic_rounding
from gefen_fn.second_moment import Block, Dense, Factored
from gefen_kernels import reference, triton_step
from gefen_kernels.step import SCALARS, Leaf
from tests import test_triton_step as cases
from tests.device.checks import DTYPES, Checks, difference, kernels, nearness, stepping
from tests.device.parity_codec import beyond_nearest
from tests.test_second_moment import spans

Shapes = Sequence[tuple[int, ...]]
_EPSILON = 2.0**-24
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# The interpreter rounds nothing to bf16 as a card does, so dry runs write fp32.
_TINY_ROWS: dict[str, Any] = {
    "small tiles": (Factored((32, 64)), 64, [(40, 128), (5,)]),
    "odd blocks": (Block(), 100, [(16, 300)]),
}


def rows(checks: Checks, grad: str, param: str) -> None:
    """Every policy, tile and block."""
    for name, (policy, block, shapes) in (_TINY_ROWS if checks.dry else cases.ROWS).items():
        tx = gefen(1e-2, weight_decay=0.1, second_moment=policy, block=block, codebook="fixed")
        three_ways(checks, f"{name} {grad} {param}", tx, shapes, (DTYPES[grad], DTYPES[param]))


def mixed(checks: Checks) -> None:
    """Gradients and parameters of different dtypes, blocks over a flattened leaf, leaves with strides."""
    tx = gefen(1e-2, weight_decay=0.1, second_moment=Factored((32, 64)), block=64, codebook="fixed")
    for grad, param in (("fp16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("bf16", "fp32"), ("fp16", "fp16")):
        three_ways(checks, f"{grad} {param}", tx, [(40, 128), (16, 300), (5, 7)], (DTYPES[grad], DTYPES[param]))
    flat = gefen(1e-2, second_moment=Block(), block=cases.FlatBlocks(100), codebook="fixed")
    three_ways(checks, "flat blocks", flat, [(70, 150), (65_600,)])
    views = {"transposed": lambda x: x.T.contiguous().T, "every second": lambda x: torch.stack([x, x], -1)[..., 0]}
    for name, view in views.items():
        three_ways(checks, name, gefen(1e-2, **cases.TILES), [(40, 128), (16, 300)], view=view)
    for policy in (Factored((32, 64)), Factored(), Block(), Dense()):
        odd = gefen(1e-2, second_moment=policy, block=64, codebook="fixed")
        three_ways(checks, f"not finite, {policy}", odd, [(70, 150), (70, 150)], change=_spoilt)


def _spoilt(g: Tensor) -> Tensor:
    g[0, 3], g[1, 5], g[40, 64] = float("nan"), float("inf"), -float("inf")
    g[2], g[3], g[4], g[5, 1:] = 0, g[3] * 1e-30, g[4] * 1e-38, 0
    return g


def expressions(checks: Checks) -> None:
    """Every kind of expression that is fused."""
    for name, make in cases.EXPRESSIONS.items():
        for policy in (cases.TILES, cases.TILES | {"second_moment": Factored()}):
            dtypes, tile = (torch.bfloat16, torch.float32), policy["second_moment"]
            three_ways(checks, f"{name} {tile}", make(policy), cases.SHAPES, dtypes, steps=3)


def drawn(checks: Checks) -> None:
    """Codes and bf16 parameters rounded at random, where 16 bytes are read at once and where not."""
    dtypes, shapes = (torch.bfloat16, torch.bfloat16), [(300, 512), (70, 301), (2, 64, 150), (700,)]
    for policy in (Factored((128, 256)), Factored(), Block(), Dense()):
        for codes in ("nearest", "stochastic"):
            rule = gefen(1e-2, second_moment=policy, codebook="fixed", rounding=codes)
            three_ways(checks, f"{policy}, {codes} codes", chain(rule, stochastic_rounding()), shapes, dtypes)


def clipped(checks: Checks) -> None:
    """Steps after a clip: whole sides are averaged from the norm's pass, so their bits are those of the card alone."""
    for policy in (Factored((32, 64)), Block(), Dense()):
        three_ways(checks, f"{policy}", cases.clipped(policy), cases.SHAPES, (torch.bfloat16, torch.float32))
    for policy in (Factored(), Factored((64, None))):
        for name, limit, change in (("half", 20.0, None), ("nothing", 1e6, None), ("overflow", 0.5, _huge)):
            own = (checks, f"{policy} {name}", cases.clipped(policy, limit), cases.SHAPES)
            three_ways(*own, (torch.bfloat16, torch.float32), change=change, exact=name != "half")


def _huge(g: Tensor) -> Tensor:
    return g * 1e18


def three_ways(
    checks: Checks,
    name: str,
    tx: GradientTransformation,
    shapes: Shapes,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    exact: bool = True,
    **options: Any,
) -> None:
    """Fused there against pure on the CPU, to the bit if `exact`; against pure there, nearly; twice, to the bit."""
    made: dict[str, dict[str, Tensor]] = {}
    bound = max(_BOUNDS[dtypes[1]], 0.0 if exact else _BOUNDS[dtypes[0]])

    def known(which: str, device: torch.device, fused: bool) -> dict[str, Tensor]:
        if which not in made:
            made[which] = trajectory(checks, tx, shapes, dtypes, device, fused=fused, **options)
        return made[which]

    cpu = torch.device("cpu")
    start = {f"param {i}": _param(i, shape, dtypes[1]) for i, shape in enumerate(shapes)}
    if exact:
        checks.make(
            f"{name}: fused has the CPU's bits",
            lambda: difference(known("fused", checks.device, True), known("pure", cpu, False)),
        )
    if checks.dry:
        return
    checks.make(
        f"{name}: fused repeats its bits",
        lambda: difference(known("again", checks.device, True), known("fused", checks.device, True)),
    )
    if options.get("change") is None:  # beside a NaN there is no distance
        checks.make(
            f"{name}: fused is near pure on the card",
            lambda: nearness(known("fused", checks.device, True), known("there", checks.device, False), start, bound),
        )


def _param(i: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return cases.noise(shape, 1000 + i, dtype)


def trajectory(
    checks: Checks,
    tx: GradientTransformation,
    shapes: Shapes,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    *,
    fused: bool,
    steps: int = 2,
    change: Callable[[Tensor], Tensor] | None = None,
    view: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, Tensor]:
    """Parameters and state after some steps, on the CPU.

    Raises:
        AssertionError: if a fused step left a leaf to the pure path.
    """
    step, taken = fuse(tx) if fused else None, list[int]()
    params = {str(i): view(_param(i, s, dtypes[1]).to(device)) for i, s in enumerate(shapes)}
    state = tx.init(params)
    with stepping(kernels(checks, cases.run, triton_step), taken):
        for t in range(steps):
            drawn = {str(i): cases.noise(s, 10 * t + i, dtypes[0]) for i, s in enumerate(shapes)}
            grads = {k: view((g if change is None else change(g)).to(device)) for k, g in drawn.items()}
            if step is None:
                updates, state = tx.update(grads, state, params)
                params = apply_updates(params, updates)
            else:
                state = step(grads, state, params)
    assert step is None or sum(taken) == steps * len(shapes), f"kernels took {sum(taken)} leaves of {steps} steps"
    return {
        **{f"param {k}": p.cpu() for k, p in params.items()},
        **{k: x.cpu() for k, x in flatten_state(state).items()},
    }


# ---- float64


def against_float64(checks: Checks) -> None:
    """Three steps of one leaf with arbitrary codes before the first; see `Exact`."""
    table: dict[str, tuple[Any, int, tuple[int, ...]]] = {
        "tiles": (Factored((128, 256)), 256, (300, 520)),
        "tiles of strips": (Factored((128, 256)), 100, (300, 520)),
        "one tile": (Factored(), 256, (300, 520)),
        "matrices": (Factored((32, 64)), 64, (3, 70, 150)),
        "blocks": (Block(), 256, (64, 700)),
        "odd blocks": (Block(), 100, (64, 300)),
        "dense nu": (Dense(), 256, (64, 700)),
        "large tiles": (Factored((128, 256)), 256, (2048, 4096)),
    }
    if checks.dry:
        table = {"tiles": (Factored((32, 64)), 64, (40, 150)), "blocks": (Block(), 100, (16, 300))}
    for name, (policy, block, shape) in table.items():
        for dtypes in [("fp32", "fp32")] if checks.dry else [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")]:
            kinds = (DTYPES[dtypes[0]], DTYPES[dtypes[1]])
            exact = functools.cache(functools.partial(Exact, checks, policy, block, shape, kinds))
            for t in range(3):
                checks.make(
                    f"{name} {shape} {' '.join(dtypes)} step {t + 1} against float64", lambda t=t, e=exact: e().step(t)
                )


class Exact:
    """A leaf on the card and the second moment it should have, in float64.

    A step's parameter is compared with the float64 one computed from what the card held before: besides half an ulp of
    its dtype it may be off by some fp32 roundings of the terms. Its codes must be those of the nearest level of the
    float64 moment, but for some roundings.
    """

    def __init__(
        self,
        checks: Checks,
        policy: Any,
        block: int,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.run, self.device = kernels(checks, cases.run, triton_step), checks.device
        leaf = cases.leaf_of(shape, policy, block, dtypes)
        assert leaf.absmax is not None
        codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(5)).to(torch.uint8)
        scale = cases.noise(leaf.absmax.shape, 6).abs() * 0.1
        leaf = leaf._replace(param=cases.noise(shape, 7, dtypes[1]), mu=codes, absmax=scale)
        moved = {k: v.to(self.device) for k, v in leaf._asdict().items() if isinstance(v, Tensor)}
        self.leaf = leaf._replace(**moved, nu=tuple(x.to(self.device) for x in leaf.nu))
        self.squares = torch.zeros(shape, dtype=torch.float64)
        self.scalars, self.dtype = cases.numbers(1), dtypes[0]

    def step(self, t: int) -> Mapping[str, Any]:
        """One step."""
        leaf = self.leaf._replace(grad=cases.noise(self.leaf.param.shape, 20 + t, self.dtype).to(self.device))
        n = dict(zip(SCALARS, self.scalars[0].double().tolist(), strict=True))
        before, g = leaf.param.double().cpu(), leaf.grad.double().cpu()
        old = cases.BOOK.double()[leaf.mu.long().cpu()] * _wide(leaf)
        self.squares = n["b2"] * self.squares + n["one_minus_b2"] * g * g
        divisor = n["correction1"] * (root_of(self.squares, leaf) + n["eps"])
        m = n["b1"] * old + n["one_minus_b1"] * g
        exact = before + n["step"] * (m / divisor + n["weight_decay"] * before)
        terms = (n["b1"] * old.abs() + n["one_minus_b1"] * g.abs()) / divisor
        self.run.gefen_step([leaf], self.scalars, cases.BOOK)
        return self._judged(exact, before.abs() + abs(n["step"]) * terms, m)

    def _judged(self, exact: Tensor, terms: Tensor, m: Tensor) -> dict[str, Any]:
        got = self.leaf.param.cpu()
        own = torch.finfo(got.dtype)
        ulp = torch.exp2(exact.abs().clamp(min=own.smallest_normal).log2().floor()) * own.eps
        error = (got.double() - exact).abs()
        roundings = float(((error - ulp / 2) / terms / _EPSILON).max().clamp(min=0))
        codes = float(beyond_nearest(m, self.leaf.mu.cpu(), _wide(self.leaf)).max())
        passed = roundings <= 24 and codes <= 16
        return {"passed": passed, "ulp": float((error / ulp).max()), "roundings": roundings, "code roundings": codes}


def _wide(leaf: Leaf) -> Tensor:
    assert leaf.absmax is not None
    scales = leaf.absmax.cpu()
    return reference.expand_blocks(scales, leaf.param.shape, block=leaf.block, start=leaf.start).double()


def root_of(squares: Tensor, leaf: Leaf) -> Tensor:
    """`sqrt(nu_hat)` in float64, out of the average of `g^2` of every entry."""
    rows, columns = squares.shape[leaf.start - 1], math.prod(squares.shape[leaf.start :])
    matrices = squares.reshape(-1, rows, columns)
    out = matrices.clone()
    if leaf.policy == "block":
        for part in out.split(leaf.block, -1):
            part.copy_(part.mean(-1, keepdim=True).expand_as(part))
    elif leaf.policy == "factored":
        for a, b in spans(rows, leaf.tile[0], True):
            for c, d in spans(columns, leaf.tile[1], False):
                part = matrices[:, a:b, c:d]
                scale = part.mean((1, 2), keepdim=True)
                out[:, a:b, c:d] = part.mean(2, keepdim=True) * part.mean(1, keepdim=True) / scale
    return out.sqrt().reshape(squares.shape)
