"""Symmetric products on the card against float64, orthogonalization by them, and what they save."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gefen_fn import NS_COEFFS, orthogonalize
from gefen_kernels import newton_schulz, triton_gram
from gefen_kernels.products import TILES
from tests import test_triton_gram as cases
from tests.device.checks import DTYPES, Checks, kernels

_TRIPLES = NS_COEFFS["standard"]
_PLAIN = (1,) * len(_TRIPLES)
_SIZES = [(2, 63, 60), (3, 1000, 130), (1, 4096, 1024), (1, 257, 70_000)]
_MATRICES = [(1024, 1024), (4096, 1024), (1024, 2816), (2048, 8192), (130, 70), (8, 512, 2048)]
_WORST = {"bf16": 0.02, "fp16": 0.01, "fp32": 1e-4}  # of a random matrix, in the form that is chosen


def products(checks: Checks) -> None:
    """`X X^T` and a polynomial of it: near float64, and symmetric to the bit."""
    module = kernels(checks, cases.run, triton_gram)
    for name, dtype in DTYPES.items():
        for shape in [(2, 63, 60)] if checks.dry else _SIZES:
            x = (cases.drawn(*shape) / shape[-1] ** 0.5).to(dtype).to(checks.device)
            r = cases.symmetric(*shape[:2], dtype).to(checks.device)
            exact = x.double() @ x.double().mT, 0.5 * r.double() - 0.25 * r.double() @ r.double()
            checks.make(f"X X^T {shape} {name}", _near(module.symmetric_product, (x, x), {}, exact[0]))
            factors = {"beta": 0.5, "alpha": -0.25}
            checks.make(
                f"0.5 R - 0.25 R^2 {shape} {name}", _near(module.symmetric_product, (r, r, r), factors, exact[1])
            )


def orthogonal(checks: Checks) -> None:
    """Random matrices against the same iterations in float64."""
    for name, dtype in DTYPES.items():
        for shape in _MATRICES:
            x = cases.drawn(*shape).to(checks.device)
            checks.make(f"orthogonalize {shape} {name}", _follows(x, dtype, _WORST[name]))


def times(checks: Checks) -> None:
    """Milliseconds of one product and of the whole, the kernel's and torch's in turn."""
    for shape in ((1, 1024, 1024), (1, 4096, 4096), (8, 1024, 4096)):
        for name, dtype in DTYPES.items():
            x = torch.randn(shape, device=checks.device).to(dtype)
            arms = {"torch": lambda x=x: torch.bmm(x, x.mT), "kernel": lambda x=x: triton_gram.symmetric_product(x, x)}
            checks.make(f"X X^T {shape} {name}", lambda arms=arms: _in_turn(arms))
    for rows, cols in ((1024, 1024), (4096, 4096), (2048, 8192)):
        x = torch.randn(1, rows, cols, device=checks.device)
        plain = lambda x=x: newton_schulz.iterate(newton_schulz.normalized(x, 1e-7, torch.bfloat16), _TRIPLES, _PLAIN)  # noqa: E731
        checks.make(
            f"orthogonalize ({rows}, {cols})",
            lambda x=x, plain=plain: _in_turn({"plain form": plain, "chosen": lambda: orthogonalize(x)}),
        )


def _near(multiply: Callable[..., Tensor], args: tuple[Tensor, ...], factors: dict[str, Any], exact: Tensor) -> Any:
    def check() -> dict[str, Any]:
        got = multiply(*args, **factors)
        worst = float((got.double() - exact).abs().max() / exact.abs().max())
        symmetric = torch.equal(got, got.mT)
        return {"passed": symmetric and worst < cases.ERRORS[got.dtype], "relative": worst, "tile": TILES[got.dtype]}

    return check


def _follows(x: Tensor, dtype: torch.dtype, bound: float) -> Callable[[], dict[str, Any]]:
    def check() -> dict[str, Any]:
        tall = x.shape[-2] > x.shape[-1]
        wide = (x.mT if tall else x).reshape(-1, *sorted(x.shape[-2:]))
        exact = newton_schulz.iterate(newton_schulz.normalized(wide, 1e-7, dtype).double(), _TRIPLES, _PLAIN)
        got = orthogonalize(x, dtype=dtype).double()
        worst = float(((got.mT if tall else got).reshape(exact.shape) - exact).norm() / exact.norm())
        return {"passed": worst < bound, "relative": worst, "bound": bound}

    return check


def _in_turn(arms: dict[str, Callable[[], Tensor]], rounds: int = 20) -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(rounds + 3):
        for name, arm in arms.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            arm()
            end.record()
            torch.cuda.synchronize()
            if round_number >= 3:
                taken[name].append(begin.elapsed_time(end))
    first, second = (statistics.median(values) for values in taken.values())
    return {**{f"{name} ms": statistics.median(values) for name, values in taken.items()}, "ratio": second / first}
