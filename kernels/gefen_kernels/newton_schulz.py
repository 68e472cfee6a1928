"""Orthogonalization of matrices by Newton-Schulz iterations, in low precision: the heart of Muon.

A matrix `X = U S V^T` divided by its Frobenius norm has singular values in (0, 1]. An odd polynomial of it,
`a X + b (X X^T) X + c (X X^T)^2 X`, keeps U and V and maps each singular value s to `a s + b s^3 + c s^5`; a few of
them in turn send all but the smallest near 1, so that X becomes about `U V^T` (Jordan 2024).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gefen_kernels.ns_coefficients import Triple, ns_coefficients

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def orthogonalize(
    x: Tensor,
    *,
    coeffs: str | Sequence[Sequence[float]] = "standard",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """About `U V^T` of each matrix `U S V^T`.

    Args:
        x: `[..., R, C]` of any floating dtype; leading axes are a batch. Never written to.
        coeffs: a name in `NS_COEFFS`, or one triple `(a, b, c)` per iteration.
        eps: least Frobenius norm that is divided by; a matrix of zeros stays one.
        dtype: what the products are computed in: bf16, fp16 or fp32. They are added in fp32.

    Returns:
        `[..., R, C]` of `dtype`, as the last product leaves it: casting it up is exact. Whatever x holds that is not
        finite makes its whole matrix NaN.

    Raises:
        ValueError: if x has fewer than two axes, or `coeffs` or `dtype` is none of those named.
        TypeError: if x is not of a floating dtype, or `coeffs` neither a name nor triples.
    """
    triples = ns_coefficients(coeffs)
    _check(x, dtype)
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    batch = normalized(wide, eps, dtype).reshape(math.prod(wide.shape[:-2]), *wide.shape[-2:])
    out = iterate(batch, triples).reshape(wide.shape)
    return out.mT if tall else out


def frobenius_norm(x: Tensor) -> Tensor:
    """`[..., R, C]` -> fp32 `[..., 1, 1]`; added in float64 and rounded once, so that no order of adding shows."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    return norm.to(torch.float32)


def normalized(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`x / max(norm, eps)` of each matrix `[..., R, C]`, divided in fp32 and rounded once to `dtype`, contiguous.

    The norm is that of x as rounded to `dtype`, except for fp16, in which x itself may not be representable.
    """
    cast = x.to(torch.float32 if dtype == torch.float16 else dtype)
    return (cast.to(torch.float32) / frobenius_norm(cast).clamp(min=eps)).to(dtype).contiguous()


def iterate(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """Apply the polynomials in turn to a batch `[N, R, C]`, R <= C, of matrices with singular values up to 1."""
    for a, b, c in triples:
        gram = torch.bmm(x, x.mT)  # [N, R, R]
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a)
    return x


def _check(x: Tensor, dtype: torch.dtype) -> None:
    if x.dim() < 2:
        raise ValueError(
            f"A matrix has at least two axes: got shape {tuple(x.shape)}. Reshape it, or keep this leaf out of Muon."
        )
    if not x.is_floating_point():
        raise TypeError(f"A matrix must be of a floating dtype: got {x.dtype}. Cast it first.")
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be bf16, fp16 or fp32: got {dtype}. Use torch.bfloat16, the default.")
