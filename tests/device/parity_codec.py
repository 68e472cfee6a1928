"""Every operation of the Triton codec on the card against the reference on the CPU, and against float64."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gefen_kernels import block_search, reference, triton_codec, triton_step
from tests import test_triton_codec as cases
from tests.device.checks import DTYPES, Checks, OnDevice, difference, kernels, there

_EPSILON = 2.0**-24
_TINY_LAYOUTS = [((4, 300), 256, 1), ((3, 130), 48, 1), ((0, 300), 256, 1)]


def _module(checks: Checks) -> Any:
    return kernels(checks, cases.run, triton_codec)


def _card(checks: Checks) -> OnDevice:
    return OnDevice(_module(checks), checks.device)


def layouts(checks: Checks, dtype: str) -> None:
    """Every operation in every layout."""
    card = _card(checks)
    for shape, block, start in _TINY_LAYOUTS if checks.dry else cases.LAYOUTS:
        x = cases.drawn(shape).to(DTYPES[dtype])
        for name, op in cases.OPS.items():
            sizes = {"block": block, "start": start}
            checks.make(f"{name} {shape} block {block} start {start} {dtype}", _same(op, card, x, sizes))


def _same(op: Callable[..., Any], card: OnDevice, x: Tensor, sizes: dict[str, int]) -> Callable[[], dict[str, Any]]:
    return lambda: difference(op(card, x, **sizes), op(reference, x, **sizes))


def edges(checks: Checks) -> None:
    """What is not finite or hardly normal, every edge of every codebook, and leaves with strides."""
    card = _card(checks)
    for dtype in (*cases.DTYPES, torch.float64):
        x = cases.awkward(dtype)
        for name, op in cases.OPS.items():
            checks.make(f"{name} of awkward entries {dtype}", _same(op, card, x, {"block": 256}))
    for name, book in cases.BOOKS.items():
        _book_edges(checks, card, name, book)
    for name in ("block_means", "block_variances"):
        for block in (1, 7, 100, 15_000):
            checks.make(
                f"{name} of {block}", lambda n=name, b=block: _searched(n, cases.drawn((30, 21_000)).square(), b)
            )
    for view_name, view in cases.VIEWS.items():
        for name in set(cases.OPS) - {"decode"}:
            x = view(cases.drawn((20, 300)))
            checks.make(f"{name} of a leaf {view_name}", _same(cases.OPS[name], card, x, {"block": 64}))


def _searched(name: str, x: Tensor, block: int) -> dict[str, Any]:
    return difference(
        getattr(OnDevice(triton_step, torch.device("cuda")), name)(x, block), getattr(block_search, name)(x, block)
    )


def _book_edges(checks: Checks, card: OnDevice, name: str, book: Tensor) -> None:
    x = cases.probes(book)
    row = torch.cat([x.nan_to_num().clamp(-1, 1), torch.tensor([1.0])]).reshape(1, -1)
    noise = cases.noise_of(row.shape)
    codes = torch.randint(0, len(book), (3, 70), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    for ties in ("zero", "published"):
        checks.make(
            f"nearest, book {name}, ties {ties}",
            lambda ties=ties: difference(card.nearest(x, book, ties=ties), reference.nearest(x, book, ties=ties)),
        )
    checks.make(
        f"encode stochastically, book {name}",
        lambda: difference(*(m.encode(row, book, block=row.shape[1], noise=noise) for m in (card, reference))),
    )
    for other, new in cases.BOOKS.items():
        checks.make(
            f"requantize, book {name} to {other}",
            lambda new=new: difference(*(m.requantize(codes, book, new) for m in (card, reference))),
        )


def against_float64(checks: Checks) -> None:
    """Values against float64, each error in units of what one rounding may do, with its bound."""
    card = _card(checks)
    shapes = _TINY_LAYOUTS[:2] if checks.dry else [*cases.LAYOUTS[:9], ((1024, 4096), 256, 1)]
    for dtype in ("fp32",) if checks.dry else DTYPES:
        for shape, block, start in shapes:
            x = cases.drawn(shape).to(DTYPES[dtype])
            for name, check in _EXACT.items():
                checks.make(
                    f"{name} {shape} block {block} {dtype} against float64", _bounded(check, card, x, block, start)
                )


def _bounded(check: Any, card: OnDevice, x: Tensor, block: int, start: int) -> Callable[[], dict[str, Any]]:
    def measured() -> dict[str, Any]:
        error, bound = check(card, x, block, start)
        worst = float(error.max()) if error.numel() else 0.0
        return {"passed": worst <= bound, "roundings": worst, "bound": bound}

    return measured


def _parts(x: Tensor, block: int, start: int) -> Iterator[Tensor]:
    """The blocks of a leaf in float64, in the order of their scales."""
    for row in x.double().reshape(math.prod(x.shape[:start]), -1):
        yield from row.split(block)


def _mean(card: OnDevice, x: Tensor, block: int, start: int) -> tuple[Tensor, float]:
    got = card.block_mean_square(x, block=block, start=start).double().reshape(-1)
    exact = torch.stack([part.square().mean() for part in _parts(x, block, start)])
    return (got / exact - 1).abs() / _EPSILON, math.log2(block) + 3


def _sum(card: OnDevice, x: Tensor, block: int, start: int) -> tuple[Tensor, float]:
    got, exact = card.sum_of_squares(x, block=block, start=start), x.double().square().sum()
    return (got / exact - 1).abs() / _EPSILON, math.log2(block) + 2


def _decode(card: OnDevice, x: Tensor, block: int, start: int) -> tuple[Tensor, float]:
    codes, absmax = reference.encode(x, cases.BOOK, block=block, start=start)
    got = card.decode(codes, absmax, cases.BOOK, block=block, start=start).double()
    exact = cases.BOOK.double()[codes.long()] * _wide(absmax, x, block, start)
    return (got - exact).abs() / exact.abs().clamp(min=1e-300) / _EPSILON, 1.0


def _encode(card: OnDevice, x: Tensor, block: int, start: int) -> tuple[Tensor, float]:
    """How much farther than the nearest level the chosen one is, a rounding being one of the absmax."""
    codes, absmax = card.encode(x, cases.BOOK, block=block, start=start)
    return beyond_nearest(x.double(), codes, _wide(absmax, x, block, start)), 2.0


def beyond_nearest(x: Tensor, codes: Tensor, absmax: Tensor) -> Tensor:
    """By how many roundings of the absmax the level of each code is farther from float64 x than the nearest."""
    book, ratio = cases.BOOK.double(), x / absmax.clamp(min=1e-300)
    nearest = torch.bucketize(ratio, (book[1:] + book[:-1]) / 2)
    return ((ratio - book[codes.long()]).abs() - (ratio - book[nearest]).abs()) / _EPSILON


def _wide(absmax: Tensor, x: Tensor, block: int, start: int) -> Tensor:
    return there(reference.expand_blocks(absmax, x.shape, block=block, start=start), x.device).double()


_EXACT = {"block_mean_square": _mean, "sum_of_squares": _sum, "decode": _decode, "encode": _encode}
