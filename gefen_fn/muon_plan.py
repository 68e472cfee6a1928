"""Which leaves of Muon's part are stepped in place."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import Params, Updates
from gefen_fn.blocks import LeafLayout
from gefen_fn.first_moment import check_moment
from gefen_fn.muon import ScaleByMuonState, block_lengths, momentum_layout
from gefen_fn.program import Part
from gefen_fn.quantize import Quantized
from gefen_fn.shards import local
from gefen_fn.spec import Matrices, matrices
from gefen_fn.tree import tree_leaves, tree_parts
from gefen_kernels import ops

_KNOWN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MuonWork:
    """A leaf of Muon's part: its place in the tree, its tensors, and how its matrices and its momentum's blocks lie."""

    index: int
    part: Part
    param: Tensor
    mu: Any
    seen: Matrices
    layout: LeafLayout

    @property
    def started(self) -> bool:
        """Whether there is a momentum that codes stand for."""
        return isinstance(self.mu, Quantized) and bool(self.mu.absmax.any())

    def takes(self, grad: Tensor) -> bool:
        """Whether it is stepped in place: whole leaves, plain CPU tensors of known dtypes."""
        kept = self.mu if isinstance(self.mu, Quantized) else (self.mu,)
        plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in (grad, self.param, *kept))
        known = self.param.dtype in _KNOWN and grad.dtype in _KNOWN
        laid = all(x.is_contiguous() for x in (self.param, *kept))
        here = self.param.device.type == grad.device.type == "cpu" and ops.back_end(grad.device) is not None
        return plain and known and laid and here and not self.layout.piece.axes


class MuonBundle(NamedTuple):
    """Leaves of one part that are stepped together.

    Attributes:
        works: the leaves.
        module: the back end.
        decays: whether each of them decays.
    """

    works: list[MuonWork]
    module: Any
    decays: list[bool]


def muon_works(part: Part, state: ScaleByMuonState, updates: Updates, params: Params) -> list[MuonWork]:
    """The leaves of a part that have a gradient.

    Args:
        part: with `scale_by_muon`.
        state: of its core.
        updates: the gradients, `None` at the leaves of other parts.
        params: likewise.
    """
    given = part.core.recipe.kwargs
    columns = tree_parts(updates, params), tree_parts(updates, state.mu), matrices(given["spec"], updates, params)
    rows = zip(tree_leaves(updates), *columns, block_lengths(given["block"], updates), strict=True)
    out = []
    for i, (g, p, mu, seen, length) in enumerate(rows):
        if g is not None and seen is not None:
            layout = momentum_layout(g, seen, length, given)
            check_moment(local(g), local(mu), layout)
            out.append(MuonWork(i, part, local(p), local(mu), seen, layout))
    return out
