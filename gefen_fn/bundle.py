"""One bundle of a step in place: what it asks of other members, and what it does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState, Updates
from gefen_fn.cut_step import asked_means
from gefen_fn.exchange import then
from gefen_fn.muon_plan import MuonBundle
from gefen_fn.muon_step import prepared_muon
from gefen_fn.plan import Bundle
from gefen_fn.program import Program, at
from gefen_fn.step_values import draws_of, scalars_of


def asked_of(
    bundle: Bundle | MuonBundle, leaves: Sequence[Any], grads: Updates, state: OptState, factor: Tensor | None
) -> Any:
    """What a bundle needs before it is prepared: its scalars, and for cut tiles a `Later` with their column means."""
    if isinstance(bundle, MuonBundle):
        return None
    scalars, own = scalars_of(bundle, grads, state, factor), [leaves[work.index] for work in bundle.works]
    if bundle.cuts is None:
        return scalars, []
    places = [work.index for work in bundle.works]
    means = asked_means(bundle.module, bundle.cuts, places, own, scalars, factor)
    return then(means, lambda edges: (scalars, edges))


def prepared(
    program: Program,
    bundle: Bundle | MuonBundle,
    leaves: Sequence[Any],
    grads: Updates,
    state: OptState,
    factor: Tensor | None,
    got: Any,
    *,
    summed: bool,
) -> Callable[[], None]:
    """All that can be refused is done here; the result does the step.

    Args:
        program: with the bundle's part.
        bundle: what to step.
        leaves: what is held here of all gradients.
        grads: the gradients as a tree.
        state: before the step.
        factor: what gradients are multiplied by, 0-dim float64; None for 1.
        got: what came of `asked_of`.
        summed: whether the back end has just added the squares of these gradients, where it does so in one go.
    """
    if isinstance(bundle, MuonBundle):
        return prepared_muon(program, bundle, leaves, grads, state, factor)
    (table, edges), works, part = got, bundle.works, bundle.works[0].part
    book = at(state, part.core.path).codebook.to(works[0].param.device)
    own, scalars = bundle.gradients(leaves), bundle.spread(table)
    options = {"drive": part.core.recipe.kwargs["drive"], "ties": bundle.ties, "negate": program.negate}
    options["scaled"] = factor is not None
    if bundle.sums and summed:
        options["summed"] = True
    if bundle.draws:
        options["counts"] = bundle.spread(draws_of(bundle))
    counts = [work.count for work in works] + [work.drawn for work in works if work.drawn is not None]

    def run() -> None:
        if bundle.cuts is not None:
            bundle.cuts.put(edges)
        bundle.module.run_step(bundle.plan, own, scalars, book, **options)
        torch._foreach_add_(counts, 1)
        torch.autograd.graph.increment_version([work.param for work in works])

    return run
