"""The statistics of a search for block lengths as a Triton kernel, equal to `block_search`'s to the bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gefen_kernels.reference import block_count, tree_sum
from gefen_kernels.triton_base import jit, launch
from gefen_kernels.triton_codec import tree_sum_last

_PIECE = 2048  # entries of a program, and of what a longer block is cut into


@jit
def _sum_kernel(
    x: tl.tensor, means: tl.tensor, out: tl.tensor, total: tl.tensor, block: tl.tensor, pieces: tl.tensor,
    COUNT: tl.constexpr, WIDTH: tl.constexpr
) -> None:  # fmt: skip
    """The sums of `COUNT` pieces of `WIDTH` entries, of squares about their block's mean where there are means."""
    piece = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    owner, left = piece // pieces, piece % pieces * WIDTH
    column = left[:, None] + tl.arange(0, WIDTH)[None, :]
    mask = (piece[:, None] < total) & (column < block)
    entries = tl.load(x + owner[:, None] * block + column, mask=mask, other=0.0).to(tl.float64)
    if means is not None:
        entries = tl.where(mask, entries - tl.load(means + owner, mask=piece < total, other=0.0)[:, None], 0.0)
        entries = entries * entries
    tl.store(out + piece, tree_sum_last(entries), mask=piece < total)


def block_means(x: Tensor, block: int) -> Tensor:
    """`block_search.block_means`."""
    return _mean(x.contiguous(), block, None)


def block_variances(x: Tensor, block: int) -> Tensor:
    """`block_search.block_variances`."""
    x = x.contiguous()
    return _mean(x, block, _mean(x, block, None))


def _mean(x: Tensor, block: int, means: Tensor | None) -> Tensor:
    """Means of blocks, or of the squares about these means."""
    width = min(_PIECE, triton.next_power_of_2(block))
    pieces, blocks = block_count(block, width), x.numel() // block
    out, count = x.new_empty(blocks, pieces, dtype=torch.float64), _PIECE // width
    programs = block_count(blocks * pieces, count)
    launch(_sum_kernel, programs, x, means, out, blocks * pieces, block, pieces, COUNT=count, WIDTH=width)
    return tree_sum(out, 1) / torch.tensor(block, dtype=torch.float64, device=x.device)
