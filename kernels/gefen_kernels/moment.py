"""Parts of a step that some transforms take one by one: a quantized moment's average, and a parameter's move."""

from typing import Literal

import torch
from torch import Tensor

from gefen_kernels import reference

Drive = Literal["m", "m_hat", "ahead"]


def moment(
    g: Tensor,
    codes: Tensor,
    absmax: Tensor,
    codebook: Tensor,
    decay: float | Tensor,
    rest: float | Tensor,
    *,
    block: int,
    start: int = 1,
    ties: reference.Ties = "zero",
    drive: Drive = "m",
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The moment `m = decay m + rest g` of a leaf whose moment is kept as codes.

    Args:
        g: gradient of the leaf's shape, of any floating dtype.
        codes: uint8 of the leaf's shape.
        absmax: fp32 of `reference.scale_shape(g.shape, block, start)`.
        codebook: `[256]` fp32 levels.
        decay: weight of the old moment; fp32 where it is a tensor.
        rest: weight of the gradient, likewise.
        block: entries per block.
        start: first of the axes that are merged into columns.
        ties: as in `reference.nearest`.
        drive: what is returned: "m" before it is stored, "m_hat" as it is stored, or "ahead", `decay m_hat + rest g`.
        out: where `(d, codes, absmax)` are written, contiguous; codes and scales may be those given. None: new tensors.

    Returns:
        `(d, codes, absmax)`: fp32 of the leaf's shape, and the new moment.
    """
    g = g.to(torch.float32)
    m = reference.decode(codes, absmax, codebook, block=block, start=start) * decay + g * rest
    new, scales = reference.encode(m, codebook, block=block, start=start, ties=ties)
    if drive != "m":
        stored = reference.decode(new, scales, codebook, block=block, start=start)
        m = stored if drive == "m_hat" else stored * decay + g * rest
    if out is None:
        return m, new, scales
    return out[0].copy_(m), out[1].copy_(new), out[2].copy_(scales)


def descend(param: Tensor, direction: Tensor, scale: float, step: float, decay: float | None) -> None:
    """`param + step (scale direction + decay param)` in place, in fp32 and rounded once to the parameter's dtype.

    Args:
        param: of any floating dtype.
        direction: of its shape, of any floating dtype.
        scale: of the direction; numbers are rounded to fp32.
        step: the learning rate with its sign.
        decay: of the weights; None adds nothing.
    """
    p, u = param.to(torch.float32), direction.to(torch.float32) * scale
    param.copy_(p + (u if decay is None else u + p * decay) * step)
