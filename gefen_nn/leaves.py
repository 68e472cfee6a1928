"""What a saved tensor must be to take the place of one of the state's."""

from typing import Any

import torch
from torch import Tensor

from gefen_fn.quantize import is_codebook
from gefen_fn.shards import is_sharded, local, piece_of, placements_of
from gefen_nn.errors import CheckpointError

_SCALES = ("absmax", "nu", "row", "col")
_MOMENTS = ("mu", "trace", "ema")


def check_leaf(key: str, own: Tensor, saved: Any) -> None:
    """Refuse a saved tensor that is another kind of tensor than the state's own, or is damaged.

    Of a sharded one this member's part is looked at, so the members have to agree on the outcome.

    Args:
        key: its name, ending in the name of its field.
        own: the state's tensor.
        saved: what is to take its place.

    Raises:
        CheckpointError: naming the key.
    """
    if not isinstance(saved, Tensor):
        raise CheckpointError(f"`{key}` must be a tensor: got {type(saved).__name__}. The file is damaged.")
    if saved.layout != torch.strided or (saved.is_meta and not own.is_meta):
        kind = "on meta" if saved.is_meta else saved.layout
        raise CheckpointError(f"`{key}` must be a dense tensor with data: got one {kind}. The file is damaged.")
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise CheckpointError(
            f"`{key}` must be {own.dtype} {tuple(own.shape)}: got {saved.dtype} {tuple(saved.shape)}. "
            "Load it without casting, into an optimizer of the same structure."
        )
    if is_sharded(saved) and _place(saved) != _place(own):
        raise CheckpointError(
            f"`{key}` must lie as the target's, {_place(own)}: got {_place(saved)}. Save and load it by "
            "`gefen_nn.save` and `load`, or by torch.distributed.checkpoint, which move it between meshes."
        )
    rule = None if saved.is_meta else _broken_rule(key.rsplit(".", 1)[-1], local(saved), own)
    if rule is not None:
        came = _summary(local(saved))
        raise CheckpointError(f"`{key}` must {rule}: got {came}. The file is damaged; load an older one.")


def _place(x: Tensor) -> str:
    """Which part of the tensor lies here, and where the others are."""
    if not is_sharded(x):
        return "whole"
    mesh = x.device_mesh  # type: ignore[attr-defined]  # a DTensor
    part = tuple(local(x).shape)
    return f"{part} at {piece_of(x).offset}, placed {placements_of(x)} on {mesh.device_type} {mesh.mesh.tolist()}"


def _broken_rule(field: str, x: Tensor, own: Tensor) -> str | None:
    if field == "codebook" and not is_codebook(x):
        return "be sorted, finite and end at -1 and 1"
    if field == "codebook" and _is_symmetric(own) and not _is_symmetric(x):
        return "be symmetric, with 0 twice in the middle"
    if field in (*_SCALES, *_MOMENTS) and not bool(x.isfinite().all()):
        return "be finite"
    if field in _SCALES and bool((x < 0).any()):
        return "be >= 0"
    counts = x.dtype in (torch.int32, torch.int64) and x.dim() == 0
    return "count from 0 upwards" if counts and int(x) < 0 else None


def _is_symmetric(x: Tensor) -> bool:
    return torch.equal(x, -x.flip(0))


def _summary(x: Tensor) -> str:
    return f"values from {float(x.min())} to {float(x.max())}" if x.numel() else "an empty tensor"
