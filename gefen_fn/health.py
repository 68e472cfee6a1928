"""What quantized moments look like while they train: tensors beside the state, of which the host reads none."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import OptState, Updates
from gefen_fn.quantize import has_codebook
from gefen_fn.shards import local
from gefen_fn.tree import check_tensors, readable, tree_leaves, tree_map, tree_paths


class LeafHealth(NamedTuple):
    """One leaf; every value is a 0-dim tensor on the leaf's device, None where there is nothing to look at.

    Attributes:
        update_rms: root of the mean square of its update.
        at_ends: share of codes that stand for -1 or 1: at least one in each block that is not zero.
        at_zero: share of codes that stand for 0.
        least_scale: the least scale of a block above zero; infinite if there is none.
        largest_scale: the largest scale of a block.
        empty_blocks: share of blocks whose scale is zero.
    """

    update_rms: Tensor | None = None
    at_ends: Tensor | None = None
    at_zero: Tensor | None = None
    least_scale: Tensor | None = None
    largest_scale: Tensor | None = None
    empty_blocks: Tensor | None = None


def health(state: OptState, updates: Updates | None = None) -> dict[str, LeafHealth]:
    """Look at every leaf's codes and scales, and at its update, without a look by the host.

    Of a sharded leaf the part that is held here counts, and nothing is sent. To log the values read them together, as
    in `torch.stack(values).tolist()`: each read by itself waits for the device.

    Args:
        state: of any transform, such as `optimizer.state_tree()`; stages that keep no codes are passed over.
        updates: what a step adds to the parameters, or the difference it made; a tree of the parameters' structure.

    Returns:
        By the leaf's path; the leaves that have codes, and those of `updates`.

    Raises:
        StructureError: for a module or an optimizer in the place of a tree.

    Example:
        >>> tx, params = gefen(1e-3), {"w": torch.randn(64, 64)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> found = health(state, updates)["w"]
        >>> float(found.empty_blocks), bool(found.at_ends >= 1 / 64)
        (0.0, True)
    """
    check_tensors(state, int, float)
    check_tensors(updates)
    found = dict(_moments(state))
    paths = () if updates is None else zip(tree_paths(updates), tree_leaves(updates), strict=True)
    for path, u in paths:
        if u is not None:
            name = readable(path)
            found[name] = found.get(name, LeafHealth())._replace(update_rms=_rms(local(u)))
    return found


def _moments(state: OptState) -> Iterator[tuple[str, LeafHealth]]:
    """The leaves with codes, stage by stage."""
    stages: list[Any] = []
    tree_map(stages.append, state, is_leaf=has_codebook)
    for stage in filter(has_codebook, stages):
        kept = dict(zip(tree_paths(stage.mu), tree_leaves(stage.mu), strict=True))
        for path, codes in kept.items():
            if codes is not None and codes.dtype == torch.uint8:
                leaf = path.removesuffix("codes")
                yield readable(leaf.removesuffix(".")), _of_moment(codes, kept[f"{leaf}absmax"], stage.codebook)


def _of_moment(codes: Tensor, absmax: Tensor, codebook: Tensor) -> LeafHealth:
    held = local(codes)
    return LeafHealth(None, *code_shares(held, codebook.to(held.device)), *scale_range(local(absmax)))


def code_shares(codes: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """The shares of codes at either end of a codebook and at its zeros, 0-dim fp32; NaN where there are no codes.

    Args:
        codes: uint8 of any shape.
        codebook: ascending levels `[K]`, on the device of the codes.
    """
    zero = codebook.new_zeros(())
    first, after = torch.searchsorted(codebook, zero), torch.searchsorted(codebook, zero, right=True)
    at_ends = (codes == 0) | (codes == len(codebook) - 1)
    return _share(at_ends), _share((codes >= first) & (codes < after))


def scale_range(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The least scale above zero, the largest, and the share of those that are zero; 0-dim fp32, NaN without scales."""
    if not absmax.numel():
        return (absmax.new_full((), math.nan),) * 3
    return torch.where(absmax > 0, absmax, math.inf).amin(), absmax.amax(), _share(absmax == 0)


def _share(mask: Tensor) -> Tensor:
    return mask.sum() / mask.numel()


def _rms(u: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(u, dtype=torch.float32)
    return norm / math.sqrt(u.numel()) if u.numel() else norm.new_full((), math.nan)
