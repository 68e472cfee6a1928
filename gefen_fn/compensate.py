"""bf16 parameters without fp32 copies: the bits that rounding drops are kept beside them, for the next step."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, OptState, Params, Recipe, Updates, add_rounded, made
from gefen_fn.scalar import check_choice, check_state
from gefen_fn.scale import need_params
from gefen_fn.shards import zeros_placed
from gefen_fn.tree import Tree, check_floating, check_leaves, map_update, tree_map

_DTYPES = {8: torch.int8, 16: torch.int16}
_EXPONENT = 0x7F80


class CompensatedState(NamedTuple):
    """`low`: int8 or int16 per bf16 leaf, the bits of the weight below the parameter's; None for other leaves."""

    low: Tree


def compensated(bits: int = 8) -> GradientTransformation:
    """Keep what rounding to bf16 drops, and add it in the next step; the last stage of a chain.

    After Kahan's summation (1965), on the bits of fp32 numbers: a bf16 number is the upper half of one, so that with
    8 bits more it is a weight of 24 bits, and with 16 bits the fp32 weight itself. For a bf16 leaf with weight `w` the
    update `u` becomes `p' - p`, where `p'` is the bf16 number nearest to `w + u`; what `w + u` is beside `p'` is kept.
    A step below 2^-17 of its weight is lost with 8 bits and one below 2^-25 with 16, as one below 2^-9 is without.
    Other leaves pass unchanged. Nothing is kept beside zeros, subnormal numbers and what is not finite.

    Args:
        bits: kept per entry, 8 or 16.

    Raises:
        ValueError: for another `bits`; from `update`, if it is called without params.

    Example:
        >>> p, g = torch.ones(1).bfloat16(), torch.ones(1).bfloat16()
        >>> tx = chain(sgd(1e-3), compensated())
        >>> state = tx.init(p)
        >>> for _ in range(100):  # rounded to nearest, p would stay 1
        ...     updates, state = tx.update(g, state, p)
        ...     p = apply_updates(p, updates)
        >>> round(float(p), 2)
        0.9
    """
    check_choice("bits", bits, tuple(_DTYPES))

    def init(params: Params) -> CompensatedState:
        check_leaves(params)
        return CompensatedState(tree_map(lambda p: _zeros(p, _DTYPES[bits]), params))

    def update(
        updates: Updates, state: CompensatedState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        check_state(state, CompensatedState)
        params = need_params(params, "compensated")
        out, (low,) = map_update(_step, updates, state, params)
        return out, CompensatedState(low)

    return made(Recipe("compensated", (bits,)), init, update)


def weight_of(p: Tensor, low: Tensor) -> Tensor:
    """The weight in fp32 of a bf16 parameter and the bits below it, of one shape."""
    bits = (p.contiguous().view(torch.int16).to(torch.int32) << 16) + (low.to(torch.int32) << _shift(low.dtype))
    return torch.where(_is_normal(p), bits.view(torch.float32), p.float())


def split(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bf16 number nearest to `w`, and the bits below it that `weight_of` adds; halves go away from zero.

    Args:
        w: fp32 of any shape.
        dtype: of the bits: with int8 `w` is rounded to 24 bits first, half to even.
    """
    bits, shift = w.contiguous().view(torch.int32), _shift(dtype)
    if shift:
        bits = (bits + 0x7F + ((bits >> 8) & 1)) & -0x100
    high = (bits + 0x8000) & -0x10000  # magnitudes below the sign bit: as numbers they are in the order of the floats
    p = torch.where(w.isfinite(), (high >> 16).to(torch.int16).view(torch.bfloat16), w.to(torch.bfloat16))
    return p, torch.where(_is_normal(p), (bits - high) >> shift, 0).to(dtype)


def _step(u: Tensor, low: Any, p: Tensor) -> tuple[Tensor, Any]:
    check_floating(p, u)
    if not isinstance(low, Tensor):  # another dtype has none: `None`, or what a mask puts there
        return u, low
    new, rest = split(weight_of(p, low) + u.float(), low.dtype)
    change = new.float() - p.float()
    arrives = add_rounded(p, change) == new  # not where 16 binades and more lie between the two
    return change, torch.where(arrives, rest, 0)


def _zeros(p: Tensor, dtype: torch.dtype) -> Tensor | None:
    return zeros_placed(p, p.shape, dtype) if p.dtype == torch.bfloat16 else None


def _shift(dtype: torch.dtype) -> int:
    return 16 - 8 * dtype.itemsize


def _is_normal(p: Tensor) -> Tensor:
    exponent = p.contiguous().view(torch.int16) & _EXPONENT
    return (exponent != 0) & (exponent != _EXPONENT)
