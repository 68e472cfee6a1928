"""Orthogonalization of matrices by Newton-Schulz iterations, in low precision: the heart of Muon.

A matrix `X = U S V^T` divided by its Frobenius norm has singular values in (0, 1]. An odd polynomial of it,
`a X + b (X X^T) X + c (X X^T)^2 X`, keeps U and V and maps each singular value s to `a s + b s^3 + c s^5`; a few of
them in turn send all but the smallest near 1, so that X becomes about `U V^T` (Jordan 2024).

The Gram form: an iteration is `X' = P X` with the polynomial `P = a + b R + c R^2` of the small symmetric `R = X X^T`,
and `R' = P R P`. Several iterations, a segment, reach X as one product of their P; all these matrices commute and are
symmetric. A segment of one iteration is the plain form; a longer one saves products with X and adds small ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gefen_kernels.ns_coefficients import Triple, ns_coefficients
from gefen_kernels.ops import loops
from gefen_kernels.products import gram, product, symmetric_flops, tile_side

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_LOSS = 1 / 64  # what a segment may make of the rounding of its first R


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
        dtype: what the products are computed in, added up in fp32: bf16, fp16 or fp32. (Where bf16 on a GPU takes the
            Gram form it computes in fp16, whose error is smaller.)

    Returns:
        `[..., R, C]` of `dtype`, contiguous, as the last product leaves it: to cast it up is exact. Whatever x holds
        that is not finite makes its whole matrix NaN.

    Raises:
        ValueError: if x has fewer than two axes, or `coeffs` or `dtype` is none of those named.
        TypeError: if x is no tensor of a floating dtype, `coeffs` neither a name nor triples, or `eps` a string.

    Example:
        >>> x = torch.randn(8, 64, 32)  # eight matrices
        >>> y = orthogonalize(x, coeffs="standard")
        >>> y.shape, y.dtype
        (torch.Size([8, 64, 32]), torch.bfloat16)
        >>> bool(torch.linalg.svdvals(y.float()).sub(1).abs().max() < 0.4)
        True
    """
    if isinstance(eps, str):
        raise TypeError(f"`eps` must be a number: got a string, {eps!r}. Write a float.")
    return orthogonalize_many([x], coeffs=coeffs, eps=eps, dtype=dtype)[0]


def orthogonalize_many(
    matrices: Sequence[Tensor],
    *,
    coeffs: str | Sequence[Sequence[float]] = "standard",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    budget: int | None = None,
) -> list[Tensor]:
    """`orthogonalize` of each, those of one shape or its transpose stacked into common products.

    A matrix has the bits it has alone wherever torch's batched products have: on a CPU in bf16 they have.

    Args:
        matrices: each `[..., R, C]`, as for `orthogonalize`.
        coeffs: as for `orthogonalize`.
        eps: as for `orthogonalize`.
        dtype: as for `orthogonalize`.
        budget: bytes that a stack may take with its products; a matrix that needs more goes alone. None is 8 MiB on a
            CPU, whose caches hold that, and 256 MiB elsewhere.

    Returns:
        The results in the order of the matrices, contiguous; they may share memory with each other.

    Raises:
        ValueError: as `orthogonalize`.
        TypeError: as `orthogonalize`.
    """
    triples = ns_coefficients(coeffs)
    batches = [_wide(x, dtype) for x in matrices]
    groups: dict[tuple[int, int, torch.device], list[int]] = {}
    for index, batch in enumerate(batches):
        groups.setdefault((batch.shape[1], batch.shape[2], batch.device), []).append(index)
    results = list(batches)
    for (rows, cols, device), members in groups.items():
        cut, working = plan(rows, cols, triples, dtype=dtype, device=device)
        limit = (8 if device.type == "cpu" else 256) << 20 if budget is None else budget
        most = max(1, limit // max(1, working_bytes(rows, cols, working)))

        def run(parts: list[Tensor], cut: tuple[int, ...] = cut, working: torch.dtype = working) -> Tensor:
            scaled = [normalized(part, eps, working) for part in parts]
            return iterate(torch.cat(scaled) if len(scaled) > 1 else scaled[0], triples, cut)

        for index, result in zip(members, _in_stacks([batches[index] for index in members], most, run), strict=True):
            results[index] = result
    return [_restored(result.to(dtype), x.shape) for result, x in zip(results, matrices, strict=True)]


def frobenius_norm(x: Tensor) -> Tensor:
    """`[..., R, C]` -> fp32 `[..., 1, 1]`; added in float64 and rounded once, so that no order of adding shows."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    return norm.to(torch.float32)


def normalized(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`x / max(norm, eps)` of each matrix `[N, R, C]`, divided in fp32 and rounded once to `dtype`, contiguous.

    The norm is that of x as rounded to `dtype`, except for fp16, in which x itself may not be representable.
    """
    module = loops("normalize", x) if dtype == torch.bfloat16 else None
    if module is None:
        cast = x.to(torch.float32 if dtype == torch.float16 else dtype)
        scaled = (cast / frobenius_norm(cast).clamp(min=eps)).to(dtype)
    else:
        scaled = module.normalized(x, float(eps))
    return scaled if scaled.is_contiguous() else _transposed(scaled.mT)


def iterate(x: Tensor, triples: Sequence[Triple], cut: Sequence[int]) -> Tensor:
    """Apply the polynomials in turn to a batch of matrices with singular values up to 1.

    Args:
        x: `[N, R, C]`, R <= C.
        triples: the polynomials.
        cut: lengths of the segments they are applied in, as from `plan`.
    """
    tile, start = tile_side(x.device, x.dtype), 0
    for length in cut:
        x = _segment(x, triples[start : start + length], tile)
        start += length
    return x


def plan(
    rows: int, cols: int, triples: Sequence[Triple], *, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], torch.dtype]:
    """How to iterate on `[rows, cols]` matrices, rows <= cols, with the fewest flops.

    Returns:
        Lengths of the segments, and the dtype to compute in: `dtype`, or fp16 for the Gram form of bf16 on a GPU. In
        bf16 itself a segment of two would take the error of a random matrix from 1 % to 6 %.
    """
    if dtype == torch.bfloat16 and device.type == "cuda":
        cut = segments(rows, cols, triples, dtype=torch.float16, tile=tile_side(device, torch.float16))
        return cut, torch.float16 if max(cut) > 1 else dtype
    return segments(rows, cols, triples, dtype=dtype, tile=tile_side(device, dtype)), dtype


def segments(
    rows: int, cols: int, triples: Sequence[Triple], *, dtype: torch.dtype, tile: int | None
) -> tuple[int, ...]:
    """The cut of the iterations into segments that costs the fewest flops, among those `dtype` can bear.

    A polynomial multiplies the smallest eigenvalues of R by a^2, and with them what rounding has left there: the
    rounding unit times all a^2 but the last of a segment may reach 1/64. Of equal costs the shorter segments win.
    """
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for end in range(1, len(triples) + 1):
        cost, cut = best[-1]
        least, chosen = cost + flops(rows, cols, (1,), tile=tile), (*cut, 1)
        loss = _rounding_unit(dtype)
        for start in range(end - 2, -1, -1):
            loss *= triples[start][0] ** 2
            if loss > _LARGEST_LOSS:
                break
            cost, cut = best[start]
            cost += flops(rows, cols, (end - start,), tile=tile)
            if cost < least:
                least, chosen = cost, (*cut, end - start)
        best.append((least, chosen))
    return best[-1][1]


def flops(rows: int, cols: int, cut: Sequence[int], *, tile: int | None = None) -> int:
    """Flops of the products that a cut into segments takes for one `[rows, cols]` matrix, rows <= cols.

    Each segment takes `X X^T`, one product with X at its end, and `4 length - 3` products of `[rows, rows]` matrices:
    `R^2` each time, and between two iterations one for the product of the P and two for `P R P`.

    Args:
        rows: the shorter side.
        cols: the longer side.
        cut: lengths of the segments; `(1,) * 5` is the plain form of five iterations.
        tile: side of the output tiles of the kernel that computes one triangle of symmetric products; None: no kernel.
    """
    small = symmetric_flops(rows, rows, tile)
    around = symmetric_flops(rows, cols, tile) + 2 * rows * rows * cols
    return sum(around + (4 * length - 3) * small for length in cut)


def working_bytes(rows: int, cols: int, dtype: torch.dtype) -> int:
    """Bytes that one matrix of a stack takes, at most: three of its size, one in float64 for its norm, six R."""
    size = torch.finfo(dtype).bits // 8
    return rows * cols * (3 * size + 8) + 6 * rows * rows * size


def _segment(x: Tensor, triples: Sequence[Triple], tile: int | None) -> Tensor:
    """`P_n ... P_1 X`. The product of the P is held as `q + M` with a number q, which no rounding touches."""
    r = gram(x, tile=tile)  # [N, R, R]
    q, total = 1.0, None
    for index, (a, b, c) in enumerate(triples):
        inner = product(r, r, r, beta=b, alpha=c, tile=tile)  # P - a
        if total is None:
            q, total = a, inner
        else:
            q, total = a * q, product(inner, total, torch.add(a * total, inner, alpha=q), tile=tile)
        if index < len(triples) - 1:
            half = product(inner, r, r, beta=a, tile=tile)  # P R
            r = product(inner, half, half, beta=a, tile=tile)  # P R P
    return x if total is None else product(total, x, x, beta=q)


def _rounding_unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding, taken for that of bf16 where torch shortens the factors of fp32."""
    return torch.finfo(torch.bfloat16 if dtype == torch.float32 and _shortens_fp32() else dtype).eps / 2


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch does not type it
def _shortens_fp32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices as `[N, R, C]`, R <= C."""
    if not isinstance(x, Tensor):
        raise TypeError(f"A matrix must be a tensor: got {type(x).__name__}. Pass a module's `weight`.")
    if x.dim() < 2:
        raise ValueError(
            f"A matrix has at least two axes: got shape {tuple(x.shape)}. Reshape it, or keep this leaf out of Muon."
        )
    if not x.is_floating_point():
        raise TypeError(f"A matrix must be of a floating dtype: got {x.dtype}. Cast it first.")
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be bf16, fp16 or fp32: got {dtype}. Use torch.bfloat16, the default.")
    batch = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return batch.mT if x.shape[-2] > x.shape[-1] else batch


def _restored(wide: Tensor, shape: Sequence[int]) -> Tensor:
    """`_wide` undone; contiguous."""
    batch = _transposed(wide) if shape[-2] > shape[-1] else wide
    return batch.reshape(tuple(shape))


def _transposed(x: Tensor) -> Tensor:
    """`[N, R, C]` -> `[N, C, R]`, contiguous. Of one matrix alone torch makes block-wise copies, four times as fast."""
    return x[0].mT.contiguous()[None] if x.shape[0] == 1 else x.mT.contiguous()


def _in_stacks(batches: list[Tensor], most: int, run: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """`run` of each batch, given to it in lists of parts that hold at most `most` matrices in all."""
    done: list[list[Tensor]] = [[] for _ in batches]
    for stack in _stacks([len(batch) for batch in batches], most):
        result = run([batches[index][start:stop] for index, start, stop in stack])
        parts = torch.split(result, [stop - start for _, start, stop in stack])
        for (index, _, _), part in zip(stack, parts, strict=True):
            done[index].append(part)
    return [
        parts[0] if len(parts) == 1 else torch.cat(parts or [batch]) for parts, batch in zip(done, batches, strict=True)
    ]


def _stacks(sizes: list[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Parts `(index, start, stop)` of batches of these sizes, in lists that hold `most` matrices but for the last."""
    stack: list[tuple[int, int, int]] = []
    room = most
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(start + room, size)
            stack.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield stack
                stack, room = [], most
    if stack:
        yield stack
