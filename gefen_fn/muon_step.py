"""Muon's step in place: momentum, orthogonal matrices, parameters; a few leaves at a time, so that little is held."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState, Updates
from gefen_fn.first_moment import check_codebook
from gefen_fn.muon_plan import MuonBundle, MuonWork
from gefen_fn.program import Program, Stage, at
from gefen_fn.quantize import Quantized
from gefen_fn.scalar import multiply
from gefen_fn.spec import Matrices, scale_of
from gefen_fn.step_values import value_of
from gefen_fn.tree import tree_parts
from gefen_kernels import ops
from gefen_kernels.newton_schulz import orthogonalize_many

_STACK = 1 << 18  # entries of the leaves that are stacked: more memory would be returned to the system each time


def prepared_muon(
    program: Program, bundle: MuonBundle, leaves: Sequence[Any], grads: Updates, state: OptState, factor: Tensor | None
) -> Callable[[], None]:
    """All that can be refused is done here; the result does the step, with the bits of the pure path.

    Args:
        program: with the part.
        bundle: what to step.
        leaves: all gradients, in order.
        grads: the same as a tree.
        state: of the whole transform.
        factor: what gradients are multiplied by, 0-dim float64; None for 1.
    """
    works, part = bundle.works, bundle.works[0].part
    given, decay = part.core.recipe.kwargs, part.decay

    def numbers(stage: Stage | None, value: Any) -> list[float]:
        value = value if stage is None else value_of(stage, value, state)
        if isinstance(value, (int, float, Tensor)):
            return [float(value)] * len(works)
        parts = tree_parts(grads, value)
        return [float(parts[work.index]) for work in works]

    momenta = numbers(part.core, given["momentum"])
    steps = [part.sign * x for x in numbers(part.rate, 1.0 if part.rate is None else part.rate.recipe.args[0])]
    decays = numbers(decay, 0.0 if decay is None else decay.recipe.args[0])
    form = {"coeffs": given["coeffs"], "eps": numbers(part.core, given["eps"])[0]}
    book = at(state, part.core.path).codebook

    def run() -> None:
        for group in _alike(works):
            first = works[group[0]]
            stack = torch.empty(len(group), *first.seen.shape, dtype=torch.float32, device="cpu")
            for n, d in zip(group, stack, strict=True):
                _average(works[n], _gradient(program, leaves[works[n].index], factor), book, momenta[n], d)
            directions, scale = _directions(first, stack, form)
            for n, direction in zip(group, directions, strict=True):
                own = decays[n] if bundle.decays[n] else None
                ops.descend(works[n].param.detach(), direction, scale, steps[n], own)

    return run


def _alike(works: Sequence[MuonWork]) -> Iterator[list[int]]:
    """Numbers of works with the same matrices, in groups of at most `_STACK` entries or one leaf."""
    groups: dict[Matrices, list[int]] = {}
    for n, work in enumerate(works):
        groups.setdefault(work.seen, []).append(n)
    for seen, group in groups.items():
        most = max(1, _STACK // max(1, math.prod(seen.shape)))
        yield from (group[k : k + most] for k in range(0, len(group), most))


def _gradient(program: Program, g: Tensor, factor: Tensor | None) -> Tensor:
    g = -g if program.negate else g
    return g if factor is None else multiply(factor, g)


def _average(work: MuonWork, g: Tensor, book: Tensor, momentum: float, d: Tensor) -> None:
    """Average the momentum in place, and write what is made orthogonal to `d`."""
    given = work.part.core.recipe.kwargs
    rest = 1.0 if given["convention"] == "sum" else 1.0 - momentum
    if isinstance(work.mu, Quantized):
        lie: dict[str, Any] = {"block": work.layout.block, "start": work.layout.start}
        lie |= {"ties": check_codebook(given["codebook"]), "drive": "ahead" if given["nesterov"] else "m_hat"}
        ops.moment(g, *work.mu, book, momentum, rest, out=(d, *work.mu), **lie)
        return
    g = g.float()
    work.mu.mul_(momentum).add_(g * rest)
    if given["nesterov"]:
        torch.mul(work.mu, momentum, out=d).add_(g * rest)
    else:
        d.copy_(work.mu)


def _directions(work: MuonWork, stack: Tensor, form: dict[str, Any]) -> tuple[Tensor, float]:
    """Orthogonal matrices of leaves like this one, and their common scale of the learning rate."""
    seen, shape = work.seen.many(len(stack)), work.part.shape
    matrices = orthogonalize_many(seen.parts(stack), **form)
    scales = [1.0 if shape is None else scale_of(shape.recipe.args[0], *size) for size in seen.sizes]
    if len(set(scales)) == 1:
        return seen.join(matrices), scales[0]
    return seen.join([multiply(s, x.to(torch.float32)) for s, x in zip(scales, matrices, strict=True)]), 1.0
