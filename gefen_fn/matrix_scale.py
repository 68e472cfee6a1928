"""Muon's scale of the learning rate, matrix by matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import EmptyState, GradientTransformation, Params, Recipe, Updates, made
from gefen_fn.scalar import check_state, multiply
from gefen_fn.shards import Piece, piece_of
from gefen_fn.spec import Matrices, Spec, check_rule, matrices, scale_of
from gefen_fn.tree import check_leaves, map_update, tree_leaves


def scale_by_matrix_shape(rule: str | None = "original", spec: Spec = None) -> GradientTransformation:
    """Multiply each matrix by Muon's scale of the learning rate, see `adjust_scale`.

    Args:
        rule: `"original"` or None, `"match_rms_adamw"`, or `"none"`.
        spec: as of `scale_by_muon`; each part of a split has its own scale.

    Raises:
        ValueError: if the rule is unknown; naming it, if a leaf without a spec is no matrix.

    Example:
        >>> tx, x = scale_by_matrix_shape("original"), torch.ones(256, 64)
        >>> tx.update(x, tx.init(x))[0][0, 0]  # sqrt(256 / 64)
        tensor(2.)
    """
    check_rule(rule)

    def init(params: Params) -> EmptyState:
        matrices(spec, params)
        return EmptyState()

    def leaf(u: Tensor, seen: Matrices, piece: Piece) -> tuple[Tensor]:
        scales = [scale_of(rule, *size) for size in seen.sizes]
        if len(set(scales)) == 1:
            return (u if scales[0] == 1.0 else multiply(scales[0], u),)
        return ((u.float() * _by_row(scales, seen, piece, u.device)).to(u.dtype),)

    def update(
        updates: Updates, state: EmptyState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        check_state(state, EmptyState)
        check_leaves(updates)
        pieces = [None if u is None else piece_of(u) for u in tree_leaves(updates)]
        return map_update(leaf, updates, (), each=(matrices(spec, updates, params), pieces))[0], state

    return made(Recipe("scale_by_matrix_shape", (rule,), {"spec": spec}), init, update)


def _by_row(scales: Sequence[float], seen: Matrices, piece: Piece, device: torch.device) -> Tensor:
    """Each row's scale, fp32 of the shape of the part held here with column axes of length 1."""
    rows = seen.row_values
    lead = [rows.shape[n] for n in rows.batch]
    parts = [torch.full((*lead, count, 1), s, device=device) for s, count in zip(scales, seen.split, strict=True)]
    whole = rows.join(parts)
    for axis in (*rows.batch, *rows.rows):
        whole = whole.narrow(axis, piece.offset[axis], piece.shape[axis])
    return whole
