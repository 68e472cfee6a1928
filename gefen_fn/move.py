"""State on another device: all of it is copied before any of it counts, so that a failure changes nothing."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState
from gefen_fn.shards import like_piece, local
from gefen_fn.tree import check_tensors, tree_leaves, tree_map


def move_state(state: OptState, device: str | torch.device) -> OptState:
    """The state with its tensors on a device; of DTensors the parts held here, placed as they were.

    Tensors without axes, such as counts, stay: they are read on the host. Moved tensors are contiguous and own their
    memory; those that are there already are the same. Nothing is sent.

    Args:
        state: of any transform; it is not changed.
        device: to the CPU from a GPU goes into pinned memory, from where copies need not be waited for.

    Raises:
        StructureError: for a module or an optimizer in the place of a state.

    Example:
        >>> state = scale_by_adam().init(torch.zeros(3))
        >>> there = move_state(state, "meta")
        >>> there.mu.device.type, there.count.device.type
        ('meta', 'cpu')
    """
    check_tensors(state, int, float)
    moved = tree_map(lambda x: begin_move(x, device) if isinstance(x, Tensor) and x.ndim else x, state)
    finish_moves([*tree_leaves(state), *tree_leaves(moved)])
    return moved


def begin_move(x: Tensor, device: str | torch.device) -> Tensor:
    """A copy on a device, which may be read there in stream order, and on the host after `finish_moves`.

    A tensor that is there, or on meta, is returned itself.
    """
    part = local(x).detach()
    there = torch.empty(0, device=device).device  # with an index
    if part.device == there or part.is_meta:
        return x
    pinned = there.type == "cpu" and part.is_cuda
    copy = torch.empty(part.shape, dtype=part.dtype, device=there, pin_memory=pinned)
    return like_piece(copy.copy_(part, non_blocking=True), x)


def finish_moves(tensors: Iterable[Any]) -> None:
    """Wait until copies from and to these tensors are done; an error among them is raised here."""
    for device in {local(x).device for x in tensors if isinstance(x, Tensor)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
