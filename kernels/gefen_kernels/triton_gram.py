"""Symmetric products on a GPU: the tiles of one triangle are computed, and mirrored as they are stored.

One program makes one output tile, adding over the depth in fixed order in fp32; nothing is split and nothing tuned, so
the bits of a matrix depend on its entries alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gefen_kernels.products import TILES
from gefen_kernels.triton_base import jit, launch, widen


@jit
def _symmetric_kernel(
    a: tl.tensor, b: tl.tensor, added: tl.tensor, out: tl.tensor,
    rows: tl.tensor, depth: tl.tensor, beta: tl.tensor, alpha: tl.tensor,
    TILE: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr
) -> None:  # fmt: skip
    side = (rows + TILE - 1) // TILE
    tiles = side * (side + 1) // 2
    first = (tl.program_id(0) // tiles).to(tl.int64) * rows  # row of the whole batch that the matrix begins with
    # The triangle folded to a rectangle: its last row before its first, its last but one before its second, ...
    width = side + 1 - side % 2
    fold, place = tl.program_id(0) % tiles // width, tl.program_id(0) % tiles % width
    last = side - fold
    top = tl.where(place < last, last - 1, fold - side % 2) * TILE
    edge = tl.where(place < last, place, place - last) * TILE
    near, along = tl.arange(0, TILE), tl.arange(0, DEPTH)
    row, column = top + near, edge + near
    left = a + (first + row)[:, None] * depth + along[None, :]  # [TILE, DEPTH]
    right = b + (first + column)[None, :] * depth + along[:, None]  # [DEPTH, TILE]
    total = tl.full([TILE, TILE], 0.0, tl.float32)
    for start in range(0, depth, DEPTH):
        x = tl.load(left + start, mask=(row < rows)[:, None], other=0.0)
        y = tl.load(right + start, mask=(column < rows)[None, :], other=0.0)
        if WIDEN:
            x, y = widen(x), widen(y)
        total = tl.dot(x, y, total, input_precision="ieee")
    total = total * alpha
    # A tile begins anywhere, but ends within 2^31 entries of its beginning: TILE rows of less than 2^24.
    here, there = (first + top) * rows + edge, (first + edge) * rows + top
    mask = (row < rows)[:, None] & (column < rows)[None, :] & (row[:, None] >= column[None, :])
    if added is not None:
        total += widen(tl.load(added + here + (near[:, None] * rows + near[None, :]), mask=mask, other=0.0)) * beta
    value = total.to(out.dtype.element_ty)
    tl.store(out + here + (near[:, None] * rows + near[None, :]), value, mask=mask)
    tl.store(out + there + (near[None, :] * rows + near[:, None]), value, mask=mask)


def symmetric_product(
    a: Tensor, b: Tensor, added: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """`products.symmetric_product`, one triangle computed whatever it costs.

    Args:
        a: `[N, R, K]` of fp32, bf16 or fp16.
        b: likewise.
        added: `[N, R, R]` of the same dtype; None adds nothing.
        beta: factor of `added`.
        alpha: factor of the product.

    Returns:
        `[N, R, R]` of the same dtype: the lower triangle of `alpha a b^T + beta added`, and its mirror image.
    """
    count, rows, _ = a.shape
    out = a.new_empty(count, rows, rows)
    tile, step = TILES[a.dtype], 32 if a.dtype == torch.float32 else 64
    side = triton.cdiv(rows, tile)
    left, right = _padded(a, step), _padded(b, step)
    args = (left, right, None if added is None else added.contiguous(), out, rows, left.shape[-1], beta, alpha)
    # Triton's interpreter multiplies the bits of bf16 as if they were integers.
    interpreted = not isinstance(widen, triton.JITFunction)
    constants = {"TILE": tile, "DEPTH": step, "WIDEN": interpreted}
    launch(_symmetric_kernel, count * side * (side + 1) // 2, *args, warps=8, **constants)
    return out


def _padded(x: Tensor, step: int) -> Tensor:
    """Contiguous, with zeros up to a whole number of steps along the last axis: rows begin aligned, none is ragged."""
    missing = -x.shape[-1] % step
    return torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()
