"""Rounding at random, from (leaf path, count, index) alone: replicas agree, and splitting the tree changes nothing."""

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, OptState, Params, Recipe, Updates, made
from gefen_fn.scalar import check_state
from gefen_fn.scale import counts, need_params
from gefen_fn.shards import Piece, piece_of
from gefen_fn.tree import Tree, check_floating, check_leaves, map_update, tree_leaves, tree_paths
from gefen_kernels import ops, reference
from gefen_kernels.step import PARAM_STREAM


class StochasticRoundingState(NamedTuple):
    """`count`: int32 per leaf, updates of that leaf."""

    count: Tree


def stochastic_rounding() -> GradientTransformation:
    """Round bf16 parameters up or down at random, by distance; the last stage of a chain.

    A bf16 parameter keeps 8 bits, so that a step below some 0.2 % of it is lost by rounding to nearest; rounded at
    random it arrives on average (Gupta et al., arXiv 1502.02551). For a bf16 leaf the update `u` becomes
    `round(p + u) - p`, which `apply_updates` brings to that bf16 number; other leaves pass unchanged. The noise is
    drawn by Philox from the leaf's path, its count of updates and the entry's index. An entry whose update is 0 stays.

    Raises:
        ValueError: from `update`, if it is called without params.
        RuntimeError: from `update`, if it is traced by torch.compile.

    Example:
        >>> p, g = torch.ones(1000).bfloat16(), torch.ones(1000).bfloat16()
        >>> plain, tx = sgd(1e-3), chain(sgd(1e-3), stochastic_rounding())
        >>> lost = apply_updates(p, plain.update(g, plain.init(p), p)[0])
        >>> kept = apply_updates(p, tx.update(g, tx.init(p), p)[0])
        >>> float(lost.float().mean()), round(float(kept.float().mean()), 3)
        (1.0, 0.999)
    """

    def init(params: Params) -> StochasticRoundingState:
        check_leaves(params)
        return StochasticRoundingState(counts(params))

    def update(
        updates: Updates, state: StochasticRoundingState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        check_state(state, StochasticRoundingState)
        params = need_params(params, "stochastic_rounding")
        seeds = leaf_seeds(updates, "stochastic_rounding()")
        pieces = [None if u is None else piece_of(u) for u in tree_leaves(updates)]
        out, (count,) = map_update(_round_leaf, updates, state, params, each=(seeds, pieces))
        return out, StochasticRoundingState(count)

    return made(Recipe("stochastic_rounding"), init, update)


def _round_leaf(u: Tensor, count: Tensor, p: Tensor, seed: int, piece: Piece) -> tuple[Tensor, Tensor]:
    check_floating(p, u)
    t, start = count + 1, p.float()
    if p.dtype != torch.bfloat16:
        return u, t
    words = ops.random_words(seed + PARAM_STREAM, t, p.shape, p.device, part_of(piece))
    return reference.round_to_bf16(start + u.float(), words) - start, t


def part_of(piece: Piece) -> reference.Part:
    """Where a piece lies in its leaf, for what is drawn by index; None for a whole leaf."""
    return (piece.whole, piece.offset) if piece.axes else None


def leaf_seeds(tree: Tree, what: str) -> list[int]:
    """A seed for each leaf, from its path, so that leaves draw differently.

    Args:
        tree: the tree whose paths count.
        what: the expression that draws, for the error.

    Raises:
        RuntimeError: under torch.compile.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{what} must see the paths of the leaves: got a trace by torch.compile, which reads none. "
            "Round to nearest, or leave this step uncompiled."
        )
    return [zlib.crc32(path.encode()) for path in tree_paths(tree)]
