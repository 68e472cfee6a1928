"""The first moment that Gefen and Muon keep as codes: its codebook, its first value, and what does not fit it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.base import Params, Updates
from gefen_fn.blocks import Blocks, LeafLayout, check_block, lengths_in
from gefen_fn.calibrate import check_can_learn, check_learned, is_to_learn, learn_from
from gefen_fn.quantize import Quantized, histogram_of, quantized_zeros, requantize, tie_rule
from gefen_fn.scalar import check_choice
from gefen_fn.scope import Scope
from gefen_fn.shards import local, zeros_placed
from gefen_fn.tree import StructureError, tree_leaves, tree_map
from gefen_kernels import reference
from gefen_kernels.codebook import default_codebook


def check_codebook(codebook: str | Tensor | Scope) -> reference.Ties:
    """Refuse what cannot be a codebook; return its tie rule."""
    if isinstance(codebook, str):
        check_choice("codebook", codebook, ("learned", "fixed"))
    if isinstance(codebook, (str, Scope)):
        return "zero"
    return tie_rule(codebook)


def check_blocks(block: Blocks) -> None:
    """Raise `ValueError` for a block length that is wrong whatever the leaves; a tree of them is checked by `init`."""
    length = lengths_in(block)
    if isinstance(length, (int, float)):
        check_block(length)


def first_codebook(codebook: str | Tensor | Scope, params: Params) -> Tensor:
    """A fresh copy of the codebook that a state starts with, where the parameters are; real for meta parameters.

    Raises:
        StructureError: if the members of a scope do not hold every entry of a leaf.
    """
    agree.make_groups(tree_leaves(params))  # all members of them learn together
    if isinstance(codebook, Scope):
        agree.group_of(tree_leaves(params), codebook)
    book = codebook.detach().clone() if isinstance(codebook, Tensor) else default_codebook()
    devices = [p.device for p in tree_leaves(params) if p is not None and p.device.type != "meta"]
    return book.to(devices[0] if devices else torch.device("cpu"))


def with_codebook(
    codebook: str | Tensor | Scope, updates: Updates, state: Any, layout: Sequence[LeafLayout | None]
) -> Any:
    """The state with its codebook learned, if it is to be and was not; codes move with it, as a load brings some.

    Zero gradients and overflows leave it as it is.

    Args:
        codebook: the transform's argument.
        updates: the gradients of this update.
        state: with fields `codebook`, `learned` and `mu`.
        layout: how the blocks of each leaf lie.

    Raises:
        RuntimeError: if the codebook is still to be learned where the host cannot read, also when a compiled step runs.
    """
    if torch.compiler.is_compiling():
        check_learned(codebook, state)
    if all(at is not None and at.dense for at in layout) or not is_to_learn(codebook, state):
        return state
    check_can_learn()
    leaves = tree_leaves(updates)
    group = agree.group_of(leaves, Scope.of(codebook))
    book, learned = learn_from(histogram_of(leaves, layout, group), state.codebook, state.learned, group)
    if book is state.codebook:
        return state
    moved = requantize(state.mu, state.codebook, book)
    mu = tree_map(lambda old, new: old if torch.equal(local(old), local(new)) else new, state.mu, moved)
    return state._replace(codebook=book, learned=learned, mu=mu)


def zero_moment(p: Tensor, layout: LeafLayout) -> Any:
    """A first moment of zeros: fp32 for a dense leaf, else a `Quantized`."""
    if layout.dense:
        return zeros_placed(p, layout.piece.whole)
    return quantized_zeros(p, layout)


def check_moment(g: Tensor, mu: Any, layout: LeafLayout) -> None:
    """Raise `StructureError` unless `mu` is the first moment of a leaf of `g`'s shape with this layout."""
    stored = mu.codes if isinstance(mu, Quantized) else mu
    shape = getattr(stored, "shape", None)
    fits = isinstance(mu, Quantized) != layout.dense and shape == g.shape
    if fits and isinstance(mu, Quantized):
        fits = tuple(mu.absmax.shape) == reference.scale_shape(layout.shape, layout.block, layout.start)
    if not fits:
        kind = "a dense" if layout.dense else "a quantized"
        raise StructureError(
            f"State must fit its gradient: got {type(mu).__name__} {shape} for {kind} leaf {tuple(g.shape)}. "
            "Use the state that `init` made for these params."
        )
