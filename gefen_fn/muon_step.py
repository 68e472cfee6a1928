"""Muon's step in place: momentum, matrices made orthogonal, parameters; shape by shape, so that little is held."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState, Updates
from gefen_fn.first_moment import check_codebook
from gefen_fn.muon_plan import MuonLaunch, MuonWork
from gefen_fn.program import Program, Stage, at
from gefen_fn.quantize import Quantized
from gefen_fn.scalar import multiply
from gefen_fn.spec import scale_of
from gefen_fn.step_values import value_of
from gefen_fn.tree import tree_parts
from gefen_kernels import ops
from gefen_kernels.newton_schulz import orthogonalize_many


def prepared_muon(
    program: Program, launch: MuonLaunch, leaves: Sequence[Any], grads: Updates, state: OptState, factor: Tensor | None
) -> Callable[[], None]:
    """All that can be refused is done here; the result does the step, with the bits of the pure path.

    Args:
        program: with the part.
        launch: what to step.
        leaves: all gradients, in order.
        grads: the same as a tree.
        state: of the whole transform.
        factor: what gradients are multiplied by, 0-dim float64; None for 1.
    """
    works, part = launch.works, launch.works[0].part
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

    def step(n: int, matrices: Iterator[Tensor]) -> None:
        work = works[n]
        direction, scale = _direction(work, [next(matrices) for _ in work.seen.split])
        ops.descend(work.param.detach(), direction, scale, steps[n], decays[n] if launch.decays[n] else None)

    def run() -> None:
        for group in _by_shape(works):
            own = [_gradient(program, leaves[works[n].index], factor) for n in group]
            moved = [_moved(works[n], g, book, momenta[n]) for n, g in zip(group, own, strict=True)]
            parts = [x for n, d in zip(group, moved, strict=True) for x in works[n].seen.parts(d)]
            matrices = iter(orthogonalize_many(parts, **form))
            for n in group:
                step(n, matrices)

    return run


def _by_shape(works: Sequence[MuonWork]) -> list[list[int]]:
    """Numbers of the works whose matrices have the same sides, in one orientation or the other."""
    groups: dict[Any, list[int]] = {}
    for n, work in enumerate(works):
        groups.setdefault(tuple(sorted(map(tuple, map(sorted, work.seen.sizes)))), []).append(n)
    return list(groups.values())


def _gradient(program: Program, g: Tensor, factor: Tensor | None) -> Tensor:
    g = -g if program.negate else g
    return g if factor is None else multiply(factor, g)


def _moved(work: MuonWork, g: Tensor, book: Tensor, momentum: float) -> Tensor:
    """Average the momentum in place; what is made orthogonal."""
    given = work.part.core.recipe.kwargs
    rest = 1.0 if given["convention"] == "sum" else 1.0 - momentum
    if isinstance(work.mu, Quantized):
        lie: dict[str, Any] = {"block": work.layout.block, "start": work.layout.start}
        lie |= {"ties": check_codebook(given["codebook"]), "drive": "ahead" if given["nesterov"] else "m_hat"}
        return ops.moment(g, *work.mu, book, momentum, rest, out=(work.mu.codes, work.mu.absmax), **lie)[0]
    g = g.float()
    work.mu.mul_(momentum).add_(g * rest)
    ahead: Tensor = work.mu * momentum + g * rest if given["nesterov"] else work.mu
    return ahead


def _direction(work: MuonWork, matrices: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The leaf's orthogonal matrices, and their common scale of the learning rate."""
    shape = work.part.shape
    if shape is None:
        return work.seen.join(matrices), 1.0
    scales = [scale_of(shape.recipe.args[0], *size) for size in work.seen.sizes]
    if len(set(scales)) == 1:
        return work.seen.join(matrices), scales[0]
    scaled = [multiply(s, x.to(torch.float32)) for s, x in zip(scales, matrices, strict=True)]
    return work.seen.join(scaled), 1.0
