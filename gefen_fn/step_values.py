"""The numbers of a fused step: hyperparameters, schedules and corrections, as the pure path would take them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState, Updates
from gefen_fn.gefen import warm_decay
from gefen_fn.inject import InjectHyperparamsState
from gefen_fn.plan import Work
from gefen_fn.program import Part, Path, Program, Stage, at, put
from gefen_fn.scalar import Hyperparameter, bias_correction, is_schedule, per_leaf, root_correction
from gefen_fn.tree import tree_leaves, tree_parts


def value_of(stage: Stage, value: Any, state: OptState) -> Any:
    """An argument of a stage as the pure path would use it in the coming step."""
    if isinstance(value, Hyperparameter):
        assert stage.owner is not None  # marks stand only inside an injection
        return _injected(stage.owner, value.name, at(state, stage.owner.path))
    return value(at(state, stage.path).count) if is_schedule(value) else value


def _injected(owner: Stage, name: str, held: InjectHyperparamsState) -> Any:
    """An injected hyperparameter: what the state holds, or the schedule at the calls so far."""
    given, stored = owner.recipe.kwargs[name], held.hyperparams[name]
    return torch.as_tensor(given(held.count), dtype=stored.dtype, device="cpu") if is_schedule(given) else stored


def advanced(program: Program, state: OptState) -> OptState:
    """The state with call counters one further and scheduled hyperparameters at their value of this step."""
    owners: dict[Path, Stage] = {}
    for stage in program.stages:
        if stage.recipe.args and is_schedule(stage.recipe.args[0]):
            own = at(state, stage.path)
            state = put(state, stage.path, own._replace(count=own.count + 1))
        while stage.owner is not None:
            stage = owners.setdefault(stage.owner.path, stage.owner)
    for owner in owners.values():
        own = at(state, owner.path)
        values = {name: _injected(owner, name, own) for name in own.hyperparams}
        state = put(state, owner.path, own._replace(count=own.count + 1, hyperparams=values))
    return state


def scalars_of(part: Part, works: Sequence[Work], grads: Updates, state: OptState, factor: Tensor | None) -> Tensor:
    """fp32 `[leaves, 10]`, each number rounded once from float64; columns as `gefen_kernels.step.SCALARS`."""
    given, scale = part.core.recipe.kwargs, 1.0 if factor is None else float(factor)
    columns = [_numbers(part.core, given[name], grads, state) for name in ("b1", "b2", "b2_warmup", "eps")]
    for stage in (part.rate, part.decay):
        columns.append(_numbers(stage, 1.0 if stage is None else stage.recipe.args[0], grads, state))
    counts = torch.stack([work.count for work in works]).tolist()
    known: dict[Any, list[float]] = {}
    rows = []
    for work, count in zip(works, counts, strict=True):
        b1, b2, warmup, eps, rate, decay = (column[work.index] for column in columns)
        key = (count, b1, b2, warmup if work.warms else None, eps, rate, decay)
        if key not in known:
            known[key] = [*_count_scalars(*key[:4]), eps, part.sign * rate, decay, scale]
        rows.append(known[key])
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(torch.float32)


def _numbers(stage: Stage | None, value: Any, grads: Updates, state: OptState) -> list[Any]:
    """A hyperparameter as one float per leaf."""
    value = value if stage is None else value_of(stage, value, state)
    if value is None or isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
        return [None if value is None else float(value)] * len(tree_leaves(grads))
    return [float(x) for x in tree_parts(grads, per_leaf(value, grads))]


def _count_scalars(count: int, b1: float, b2: float, warmup: float | None) -> list[float]:
    """What depends on the count alone: both decays with their complements, and both corrections."""
    t = torch.tensor(count + 1, dtype=torch.int32, device="cpu")
    warm = b2 if warmup is None else float(warm_decay(b2, t, warmup))
    return [b1, 1.0 - b1, warm, 1.0 - warm, float(bias_correction(b1, t)), float(root_correction(b2, t))]
