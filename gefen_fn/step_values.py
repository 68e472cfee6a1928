"""The numbers of a fused step: hyperparameters, schedules and corrections, as the pure path would take them.

Everything is computed where the counts are, and nothing is read on a GPU, so that a captured step has live values.
"""

from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState, Updates
from gefen_fn.gefen import warm_decay
from gefen_fn.inject import InjectHyperparamsState
from gefen_fn.plan import Bundle
from gefen_fn.program import Path, Program, Stage, at
from gefen_fn.scalar import (
    Hyperparameter,
    Scalar,
    bias_correction,
    capturing,
    is_schedule,
    root_correction,
    scalar_on,
)
from gefen_fn.tree import tree_parts


def value_of(stage: Stage, value: Any, state: OptState) -> Any:
    """An argument of a stage as the pure path would use it in the coming step."""
    if isinstance(value, Hyperparameter):
        assert stage.owner is not None  # marks stand only inside an injection
        return _injected(stage.owner, value.name, at(state, stage.owner.path))
    return value(at(state, stage.path).count) if is_schedule(value) else value


def _injected(owner: Stage, name: str, held: InjectHyperparamsState) -> Any:
    """An injected hyperparameter: what the state holds, or the schedule at the calls so far."""
    given, stored = owner.recipe.kwargs[name], held.hyperparams[name]
    if not is_schedule(given):
        return stored
    x = given(held.count)
    return x.to(stored.dtype) if isinstance(x, Tensor) else torch.tensor(x, dtype=stored.dtype, device="cpu")


def changes_of(program: Program, state: OptState) -> list[tuple[Tensor, Tensor]]:
    """What a step that is fused whole changes besides its leaves, with the values after it.

    Those are the call counters, and scheduled hyperparameters, which are kept at their value of the step.
    """
    changes: list[tuple[Tensor, Tensor]] = []
    owners: dict[Path, Stage] = {}
    for stage in program.stages:
        if stage.recipe.args and is_schedule(stage.recipe.args[0]):
            count = at(state, stage.path).count
            changes.append((count, count + 1))
        while stage.owner is not None:
            stage = owners.setdefault(stage.owner.path, stage.owner)
    for owner in owners.values():
        held = at(state, owner.path)
        scheduled = [name for name in held.hyperparams if is_schedule(owner.recipe.kwargs[name])]
        changes += [(held.hyperparams[name], _injected(owner, name, held)) for name in scheduled]
        changes.append((held.count, held.count + 1))
    return changes


def scalars_of(bundle: Bundle, grads: Updates, state: OptState, factor: Tensor | None) -> Tensor:
    """fp32 `[leaves, 10]`, each number rounded once from float64; columns as `gefen_kernels.step.SCALARS`.

    Args:
        bundle: whose leaves.
        grads: all gradients.
        state: of the whole transform.
        factor: what gradients are multiplied by, 0-dim float64; None for 1.
    """
    works, part = bundle.works, bundle.works[0].part
    given, counts = part.core.recipe.kwargs, torch.stack([work.count for work in works])
    device = counts.device
    reads = device.type == "cpu" and not capturing()  # Python computes with a few numbers sooner than torch does

    def number(stage: Stage | None, value: Any) -> Any:
        value = value if stage is None else value_of(stage, value, state)
        if value is None or isinstance(value, (int, float)):
            return value
        if isinstance(value, Tensor):
            return float(value) if reads else scalar_on(value, device)
        parts = tree_parts(grads, value)
        return torch.stack([scalar_on(parts[work.index], device) for work in works])

    t = _common(counts + 1) if reads else (counts + 1).to(torch.float64)
    b1, b2, warmup, eps = (number(part.core, given[name]) for name in ("b1", "b2", "b2_warmup", "eps"))
    rate, decay = (number(stage, 1.0 if stage is None else stage.recipe.args[0]) for stage in (part.rate, part.decay))
    warm = b2
    if warmup is not None:
        rising = warm_decay(b2, t, warmup)
        warm = torch.where(bundle.warms, rising if isinstance(rising, Tensor) else scalar_on(rising, device), b2)
    corrections = bias_correction(b1, t), root_correction(b2, t)
    scale = 1.0 if factor is None else factor
    table = torch.empty(len(works), 10, dtype=torch.float32, device=device)
    numbers = (b1, 1.0 - b1, warm, 1.0 - warm, *corrections, eps, part.sign * rate, decay, scale)
    for column, x in zip(table.unbind(1), numbers, strict=True):
        if isinstance(x, Tensor):
            column.copy_(x)
        else:
            column.fill_(x)
    return table


def _common(counts: Tensor) -> Scalar:
    """One number if it is the same for all; else float64 `[leaves]`."""
    read = counts.tolist()
    return float(read[0]) if len(set(read)) == 1 else counts.to(torch.float64)


def draws_of(bundle: Bundle) -> Tensor:
    """The counts that codes and parameters of the coming update are rounded at random with: integers `[leaves, 2]`."""
    pairs = [(work.count, work.count if work.drawn is None else work.drawn) for work in bundle.works]
    return torch.stack([x for pair in pairs for x in pair]).reshape(-1, 2) + 1
