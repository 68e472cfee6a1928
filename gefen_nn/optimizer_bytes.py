"""Bytes of state of anybody's optimizer."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages on `optimizer.state`, whatever kinds of tensors it keeps.

    Args:
        optimizer: Anybody's; parameters and gradients that it keeps by reference are not state.

    Returns:
        Their sum.
    """
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    own = {x.untyped_storage().data_ptr() for p in owned for x in (p, p.grad) if x is not None}
    storages = (x.untyped_storage() for x in _tensors(list(optimizer.state.values())))
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for address, size in sizes.items() if address not in own)


def _tensors(x: Any) -> Iterator[Tensor]:
    """The plain tensors in nested containers and in tensors made of tensors."""
    if isinstance(x, Tensor):
        parts = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else []
        yield from (t for part in parts for t in _tensors(getattr(x, part))) if parts else [x]
    elif isinstance(x, (Mapping, list, tuple)):
        for value in x.values() if isinstance(x, Mapping) else x:
            yield from _tensors(value)
