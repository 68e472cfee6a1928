"""A step in place: what a recognised expression does with gradients, state and parameters.

Fused equals unfused: the back end goes through the operations of the pure path in their order, and the pure path itself
advances counters and schedules, and steps the leaves that no back end takes.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, OptState, Params, Updates, add_rounded
from gefen_fn.blocks import LeafLayout, layouts, start_axis
from gefen_fn.calibrate import learn_from
from gefen_fn.clip import clip_factor
from gefen_fn.combine import choices_of
from gefen_fn.gefen import ScaleByGefenState, check_moment, warm_decay
from gefen_fn.inject import InjectHyperparamsState
from gefen_fn.program import Part, Path, Program, Stage, recognise
from gefen_fn.quantize import Quantized, requantize, tie_rule
from gefen_fn.scalar import Hyperparameter, bias_correction, is_schedule, multiply, per_leaf
from gefen_fn.second_moment import Block, Factored, SecondMoment, policy_for
from gefen_fn.tree import check_floating, tree_leaves, tree_parts, tree_structure, tree_unflatten
from gefen_kernels import ops, reference
from gefen_kernels.step import Leaf


@dataclass(frozen=True)
class _Work:
    """A leaf of a part: its place in the tree, its tensors, and how they lie."""

    index: int
    part: Part
    param: Tensor
    count: Tensor
    mu: Any
    nu: Any
    layout: LeafLayout

    @property
    def policy(self) -> SecondMoment:
        """The second moment that this leaf really has."""
        return policy_for(self.part.core.recipe.kwargs["second_moment"], self.layout)

    @property
    def warms(self) -> bool:
        """Whether the second moment's decay is warmed, which leaves nothing to correct."""
        return self.part.core.recipe.kwargs["b2_warmup"] is not None and self.policy.warms

    def leaf(self, grad: Tensor, decays: bool) -> Leaf:
        """The leaf as a back end takes it."""
        policy, quantized = self.policy, isinstance(self.mu, Quantized)
        kind = "factored" if isinstance(policy, Factored) else "block" if isinstance(policy, Block) else "dense"
        return Leaf(
            grad=grad,
            param=self.param.detach(),
            mu=self.mu.codes if quantized else self.mu,
            absmax=self.mu.absmax if quantized else None,
            nu=tuple(self.nu) if isinstance(policy, Factored) else (self.nu,),
            policy=kind,  # type: ignore[arg-type]  # one of the three words
            start=self.layout.start,
            block=self.layout.block,
            tile=policy.sides if isinstance(policy, Factored) else (None, None),
            decays=decays,
            corrects=not self.warms,
        )


@dataclass(frozen=True)
class _Plan:
    """What stays from step to step while leaves keep their tensors.

    Attributes:
        key: the tensors and dtypes that it rests on.
        owned: the leaves of all parts that have a gradient.
        taken: by index, those that a back end steps.
        laid: for each part, its taken leaves and the back end's own plan of them.
    """

    key: list[Any]
    owned: list[_Work]
    taken: dict[int, _Work]
    laid: list[tuple[list[_Work], Any]]


class Step:
    """`step(grads, state, params, **extra) -> state`: updates parameters and the state's tensors in place.

    Masks and labels that are functions are asked when the tensors of the state or the parameters are new, not at each
    step.

    Attributes:
        program: what was recognised; as text, the stages that are fused.
    """

    def __init__(self, tx: GradientTransformation, program: Program) -> None:
        self._tx, self.program = tx, program
        self._plan: _Plan | None = None

    @torch.no_grad()
    def __call__(self, grads: Updates, state: OptState, params: Params, **extra: Any) -> OptState:
        """Take one step. Everything that may be refused is refused before anything changes.

        Args:
            grads: like `params`; a `None` leaf is left alone.
            state: of the transform; its tensors are written to.
            params: written to.
            **extra: passed to the pure path.

        Returns:
            The new state, mostly of the same tensors.

        Raises:
            StructureError: if gradients, state and params do not fit.
        """
        program, leaves = self.program, tree_leaves(grads)
        for g, p in zip(leaves, tree_parts(grads, params), strict=True):
            if g is not None:
                check_floating(g, p)
        plan = self._planned(grads, state, params)
        factor = _clip_factor(program.clip, leaves, state) if plan.taken else None
        if plan.taken:
            state = _learned(program, plan.owned, leaves, state, factor)
        runs = [_prepared(program, *laid, leaves, grads, state, factor) for laid in plan.laid]
        left = [None if i in plan.taken else g for i, g in enumerate(leaves)]
        if program.whole and all(g is None for g in left):
            state = _advanced(program, state)
        else:
            updates, state = self._tx.update(tree_unflatten(tree_structure(grads), left), state, params, **extra)
            _write(updates, params)
        for run in runs:
            run()
        return state

    def _planned(self, grads: Updates, state: OptState, params: Params) -> _Plan:
        """The plan of the last step, if all that it rests on is the same."""
        stages = [_at(state, part.core.path) for part in self.program.parts]
        kept = [tree_leaves((stage.count, stage.mu, stage.nu)) for stage in stages]
        dtypes = [None if g is None else g.dtype for g in tree_leaves(grads)]
        key = [*dtypes, *tree_parts(grads, params), *(x for leaves in kept for x in leaves)]
        old = self._plan
        if old is None or len(old.key) != len(key) or not all(map(operator.is_, old.key, key)):
            old = self._plan = _plan(self.program, grads, state, params, key)
        return old


def fuse(tx: GradientTransformation) -> Step | None:
    """The step in place of a transform, or None if its expression is not recognised (see `gefen_fn.program`)."""
    program = recognise(tx)
    return None if program is None else Step(tx, program)


def _plan(program: Program, grads: Updates, state: OptState, params: Params, key: list[Any]) -> _Plan:
    leaves = tree_leaves(grads)
    owned = _owned(program, grads, state, params)
    taken = {work.index: work for work in owned if _takes(work, leaves[work.index])}
    if program.clip is not None and len(taken) < sum(g is not None for g in leaves):
        taken = {}  # the norm is over all leaves, so all go one way
    laid = []
    for part in program.parts:
        works, decays = [work for work in taken.values() if work.part is part], _decays(part, grads, params)
        if works:
            own = [work.leaf(leaves[work.index], decays[work.index]) for work in works]
            laid.append((works, _module(works[0].param).plan_step(own)))
    return _Plan(key, owned, taken, laid)


def _owned(program: Program, grads: Updates, state: OptState, params: Params) -> list[_Work]:
    """The leaves of all parts that have a gradient."""
    own = tree_parts(grads, params)
    labels = [None] * len(own) if program.labels is None else choices_of(program.labels, grads, params)
    out = []
    for part in program.parts:
        stage: ScaleByGefenState = _at(state, part.core.path)
        trees = (stage.count, stage.mu, stage.nu, layouts(part.core.recipe.kwargs["block"], grads))
        rows = zip(tree_leaves(grads), own, labels, *(tree_parts(grads, tree) for tree in trees), strict=True)
        for i, (g, p, label, count, mu, nu, layout) in enumerate(rows):
            if g is not None and label == part.label:
                check_moment(g, mu, layout)
                out.append(_Work(i, part, p, count, mu, nu, layout))
    return out


def _takes(work: _Work, grad: Tensor) -> bool:
    """Whether a back end steps this leaf; blocks over a flattened leaf with tiles of its matrix are the pure path's."""
    if isinstance(work.policy, Factored) and work.layout.unflattened is not work.layout:
        return False
    module = ops.back_end(work.param.device)
    return module is not None and bool(module.supports(work.leaf(grad, decays=True)))


def _at(state: OptState, path: Path) -> Any:
    for key in path:
        state = getattr(state, key) if hasattr(state, "_fields") else state[key]
    return state


def _put(state: OptState, path: Path, value: Any) -> OptState:
    """The state with `value` at a path."""
    if not path:
        return value
    key, inner = path[0], _put(_at(state, path[:1]), path[1:], value)
    if hasattr(state, "_fields"):
        return state._replace(**{key: inner})
    if isinstance(state, dict):
        return {**state, key: inner}
    return (*state[:key], inner, *state[key + 1 :])


def _value(stage: Stage, value: Any, state: OptState) -> Any:
    """An argument of a stage as the pure path would use it in the coming step."""
    if isinstance(value, Hyperparameter):
        assert stage.owner is not None  # marks stand only inside an injection
        return _injected(stage.owner, value.name, _at(state, stage.owner.path))
    return value(_at(state, stage.path).count) if is_schedule(value) else value


def _injected(owner: Stage, name: str, held: InjectHyperparamsState) -> Any:
    """An injected hyperparameter: what the state holds, or the schedule at the calls so far."""
    given, stored = owner.recipe.kwargs[name], held.hyperparams[name]
    return torch.as_tensor(given(held.count)).to(stored.dtype) if is_schedule(given) else stored


def _clip_factor(clip: Stage | None, leaves: Sequence[Tensor | None], state: OptState) -> Tensor | None:
    """What all gradients are multiplied by, 0-dim float64; None without a clip."""
    if clip is None:
        return None
    squares = [_module(g).sum_of_squares(g, start=min(start_axis(g.shape), g.ndim)) for g in leaves if g is not None]
    norm = sum(squares, torch.zeros((), dtype=torch.float64)).sqrt().float()
    return clip_factor(norm, _value(clip, clip.recipe.args[0], state))


def _module(x: Tensor) -> Any:
    """The back end of a tensor's device, or the reference."""
    return ops.back_end(x.device) or reference


def _learned(
    program: Program, owned: Sequence[_Work], leaves: Sequence[Any], state: OptState, factor: Tensor | None
) -> OptState:
    """The state with its codebooks learned, where they are to be and were not."""
    for part in program.parts:
        stage: ScaleByGefenState = _at(state, part.core.path)
        rule = part.core.recipe.kwargs["codebook"]
        if isinstance(rule, Tensor) or rule != "learned" or bool(stage.learned):
            continue
        quantized = [work for work in owned if work.part is part and not work.layout.dense]
        counts = torch.zeros(4096, dtype=torch.int64)
        for work in quantized:
            counts += _histogram(work, leaves[work.index], factor)
        book, learned = learn_from(counts, stage.codebook, stage.learned)
        for work in quantized if book is not stage.codebook else ():
            if bool(work.count):  # before the first step all codes are zero's
                work.mu.codes.copy_(requantize(work.mu, stage.codebook, book).codes)
        state = _put(state, part.core.path, stage._replace(codebook=book, learned=learned))
    return state


def _histogram(work: _Work, grad: Tensor, factor: Tensor | None) -> Tensor:
    g = grad if factor is None else multiply(factor, grad)
    counts: Tensor = _module(g).histogram(g, block=work.layout.block, start=work.layout.start)
    return counts.cpu()


def _advanced(program: Program, state: OptState) -> OptState:
    """The state with call counters one further and scheduled hyperparameters at their value of this step."""
    owners: dict[Path, Stage] = {}
    for stage in program.stages:
        if stage.recipe.args and is_schedule(stage.recipe.args[0]):
            own = _at(state, stage.path)
            state = _put(state, stage.path, own._replace(count=own.count + 1))
        while stage.owner is not None:
            stage = owners.setdefault(stage.owner.path, stage.owner)
    for owner in owners.values():
        own = _at(state, owner.path)
        values = {name: _injected(owner, name, own) for name in own.hyperparams}
        state = _put(state, owner.path, own._replace(count=own.count + 1, hyperparams=values))
    return state


def _prepared(
    program: Program,
    works: list[_Work],
    laid: Any,
    leaves: Sequence[Any],
    grads: Updates,
    state: OptState,
    factor: Tensor | None,
) -> Callable[[], None]:
    """All that can be refused is done here; the result does the step."""
    part = works[0].part
    book = _at(state, part.core.path).codebook
    scalars = _scalars(part, works, grads, state, factor)
    own, module = [leaves[work.index] for work in works], _module(works[0].param)
    drive, ties = part.core.recipe.kwargs["drive"], tie_rule(book)

    def run() -> None:
        scaled = factor is not None
        module.run_step(laid, own, scalars, book, drive=drive, ties=ties, negate=program.negate, scaled=scaled)
        torch._foreach_add_([work.count for work in works], 1)
        torch.autograd.graph.increment_version([work.param for work in works])

    return run


def _decays(part: Part, grads: Updates, params: Params) -> list[bool]:
    if part.decay is None or part.mask is None:
        return [part.decay is not None] * len(tree_leaves(grads))
    return choices_of(part.mask, grads, params)


def _scalars(part: Part, works: Sequence[_Work], grads: Updates, state: OptState, factor: Tensor | None) -> Tensor:
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
            known[key] = [*_decayed(*key[:4]), eps, part.sign * rate, decay, scale]
        rows.append(known[key])
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32)


def _numbers(stage: Stage | None, value: Any, grads: Updates, state: OptState) -> list[Any]:
    """A hyperparameter as one float per leaf."""
    value = value if stage is None else _value(stage, value, state)
    if value is None or isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
        return [None if value is None else float(value)] * len(tree_leaves(grads))
    return [float(x) for x in tree_parts(grads, per_leaf(value, grads))]


def _decayed(count: int, b1: float, b2: float, warmup: float | None) -> list[float]:
    """What depends on the count alone: both decays with their complements, and both corrections."""
    t = torch.tensor(count + 1, dtype=torch.int32)
    warm = b2 if warmup is None else float(warm_decay(b2, t, warmup))
    root = float(reference.root(bias_correction(b2, t)))
    return [b1, 1.0 - b1, warm, 1.0 - warm, float(bias_correction(b1, t)), root]


def _write(updates: Updates, params: Params) -> None:
    """Apply the updates of the pure path in place."""
    for u, p in zip(tree_leaves(updates), tree_parts(updates, params), strict=True):
        if u is not None and p is not None:
            p.copy_(add_rounded(p, u))
