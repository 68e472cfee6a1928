"""One launch of a step in place: what it asks of other members, and what it does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState, Updates
from gefen_fn.cut_step import asked_means
from gefen_fn.exchange import then
from gefen_fn.muon_plan import MuonLaunch
from gefen_fn.muon_step import prepared_muon
from gefen_fn.plan import Launch
from gefen_fn.program import Program, at
from gefen_fn.step_values import draws_of, scalars_of


def asked_of(
    launch: Launch | MuonLaunch, leaves: Sequence[Any], grads: Updates, state: OptState, factor: Tensor | None
) -> Any:
    """What a launch needs before it is prepared: its scalars, and for cut tiles a `Later` with their column means."""
    if isinstance(launch, MuonLaunch):
        return None
    scalars, own = scalars_of(launch, grads, state, factor), [leaves[work.index] for work in launch.works]
    if launch.cuts is None:
        return scalars, []
    places = [work.index for work in launch.works]
    means = asked_means(launch.module, launch.cuts, places, own, scalars, factor)
    return then(means, lambda edges: (scalars, edges))


def prepared(
    program: Program,
    launch: Launch | MuonLaunch,
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
        program: with the launch's part.
        launch: what to step.
        leaves: what is held here of all gradients.
        grads: the gradients as a tree.
        state: before the step.
        factor: what gradients are multiplied by, 0-dim float64; None for 1.
        got: what came of `asked_of`.
        summed: whether the back end has just added the squares of these gradients, where it does so in one go.
    """
    if isinstance(launch, MuonLaunch):
        return prepared_muon(program, launch, leaves, grads, state, factor)
    (table, edges), works, part = got, launch.works, launch.works[0].part
    book = at(state, part.core.path).codebook.to(works[0].param.device)
    own, scalars = launch.gradients(leaves), launch.spread(table)
    options = {"drive": part.core.recipe.kwargs["drive"], "ties": launch.ties, "negate": program.negate}
    options["scaled"] = factor is not None
    if launch.sums and summed:
        options["summed"] = True
    if launch.draws:
        options["counts"] = launch.spread(draws_of(launch))
    counts = [work.count for work in works] + [work.drawn for work in works if work.drawn is not None]

    def run() -> None:
        if launch.cuts is not None:
            launch.cuts.put(edges)
        launch.module.run_step(launch.plan, own, scalars, book, **options)
        torch._foreach_add_(counts, 1)
        torch.autograd.graph.increment_version([work.param for work in works])

    return run
