"""One step of a quantized moment, as a pure operation: decode, average, encode."""

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
) -> tuple[Tensor, Tensor, Tensor]:
    """The moment `m = decay m + rest g` of a leaf whose moment is kept as codes.

    Args:
        g: gradient of the leaf's shape, of any floating dtype.
        codes: uint8 of the leaf's shape; not written to.
        absmax: fp32 of `reference.scale_shape(g.shape, block, start)`; not written to.
        codebook: `[256]` fp32 levels.
        decay: weight of the old moment; fp32 where it is a tensor.
        rest: weight of the gradient, likewise.
        block: entries per block.
        start: first of the axes that are merged into columns.
        ties: as in `reference.nearest`.
        drive: what is returned: "m" before it is stored, "m_hat" as it is stored, or "ahead", `decay m_hat + rest g`.

    Returns:
        `(d, codes, absmax)`: fp32 of the leaf's shape, and the new moment.
    """
    g = g.to(torch.float32)
    m = reference.decode(codes, absmax, codebook, block=block, start=start) * decay + g * rest
    codes, absmax = reference.encode(m, codebook, block=block, start=start, ties=ties)
    if drive == "m":
        return m, codes, absmax
    stored = reference.decode(codes, absmax, codebook, block=block, start=start)
    return (stored if drive == "m_hat" else stored * decay + g * rest), codes, absmax
