"""A step in place: what a recognised expression does with gradients, state and parameters.

Fused equals unfused: the back end goes through the operations of the pure path in their order, and the pure path itself
advances counters and schedules, and steps the leaves that no back end takes.
"""

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
from gefen_fn.program import Part, Path, Program, Stage, recognise
from gefen_fn.quantize import Quantized, requantize, tie_rule
from gefen_fn.scalar import Hyperparameter, bias_correction, multiply, per_leaf
from gefen_fn.second_moment import Block, Factored, policy_for
from gefen_fn.tree import check_floating, tree_leaves, tree_parts, tree_structure, tree_unflatten
from gefen_kernels import ops, reference
from gefen_kernels.step import Leaf


@dataclass(frozen=True)
class _Work:
    """A leaf of a part: its place in the tree, its tensors, and how they lie."""

    index: int
    part: Part
    grad: Tensor
    param: Tensor
    count: Tensor
    mu: Any
    nu: Any
    layout: LeafLayout

    @property
    def warms(self) -> bool:
        """Whether the second moment's decay is warmed, which leaves nothing to correct."""
        given = self.part.core.recipe.kwargs
        return given["b2_warmup"] is not None and policy_for(given["second_moment"], self.layout).warms

    def leaf(self, decays: bool) -> Leaf:
        """The leaf as a back end takes it."""
        policy = policy_for(self.part.core.recipe.kwargs["second_moment"], self.layout)
        kind = "factored" if isinstance(policy, Factored) else "block" if isinstance(policy, Block) else "dense"
        quantized = isinstance(self.mu, Quantized)
        return Leaf(
            grad=self.grad,
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


class Step:
    """`step(grads, state, params, **extra) -> state`: updates parameters and the state's tensors in place.

    Attributes:
        program: what was recognised; as text, the stages that are fused.
    """

    def __init__(self, tx: GradientTransformation, program: Program) -> None:
        self._tx, self.program = tx, program

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
        owned = _owned(program, grads, state, params)
        taken = {work.index: work for work in owned if _takes(work)}
        if program.clip is not None and len(taken) < sum(g is not None for g in leaves):
            taken = {}  # the norm is over all leaves, so all go one way
        factor = _clip_factor(program.clip, leaves, state) if taken else None
        if taken:
            state = _learned(program, owned, state, factor)
        runs = [_prepared(part, list(taken.values()), grads, state, params, factor) for part in program.parts]
        rest = tree_unflatten(tree_structure(grads), [None if i in taken else g for i, g in enumerate(leaves)])
        updates, advanced = self._tx.update(rest, state, params, **extra)
        for run in runs:
            run(program.negate)
        _write(updates, params)
        return advanced


def fuse(tx: GradientTransformation) -> Step | None:
    """The step in place of a transform, or None if its expression is not recognised (see `gefen_fn.program`)."""
    program = recognise(tx)
    return None if program is None else Step(tx, program)


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
                check_floating(g, p)
                check_moment(g, mu, layout)
                out.append(_Work(i, part, g, p, count, mu, nu, layout))
    return out


def _takes(work: _Work) -> bool:
    """Whether a back end steps this leaf; blocks over a flattened leaf with tiles of its matrix are the pure path's."""
    policy = policy_for(work.part.core.recipe.kwargs["second_moment"], work.layout)
    if isinstance(policy, Factored) and work.layout.unflattened is not work.layout:
        return False
    module = ops.back_end(work.param.device)
    return module is not None and bool(module.supports(work.leaf(decays=True)))


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
        owner = stage.owner
        assert owner is not None  # marks stand only inside an injection
        held, given = _at(state, owner.path), owner.recipe.kwargs[value.name]
        stored = held.hyperparams[value.name]
        return torch.as_tensor(given(held.count)).to(stored.dtype) if callable(given) else stored
    return value(_at(state, stage.path).count) if callable(value) else value


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


def _learned(program: Program, owned: Sequence[_Work], state: OptState, factor: Tensor | None) -> OptState:
    """The state with its codebooks learned, where they are to be and were not."""
    for part in program.parts:
        stage: ScaleByGefenState = _at(state, part.core.path)
        if isinstance(part.core.recipe.kwargs["codebook"], Tensor) or part.core.recipe.kwargs["codebook"] != "learned":
            continue
        if bool(stage.learned):
            continue
        counts = torch.zeros(4096, dtype=torch.int64)
        for work in owned:
            if work.part is part and not work.layout.dense:
                counts += _histogram(work, factor)
        book, learned = learn_from(counts, stage.codebook, stage.learned)
        for work in owned:
            if book is not stage.codebook and work.part is part and not work.layout.dense and bool(work.count):
                work.mu.codes.copy_(requantize(work.mu, stage.codebook, book).codes)
        state = _put(state, part.core.path, stage._replace(codebook=book, learned=learned))
    return state


def _histogram(work: _Work, factor: Tensor | None) -> Tensor:
    g = work.grad if factor is None else multiply(factor, work.grad)
    counts: Tensor = _module(g).histogram(g, block=work.layout.block, start=work.layout.start)
    return counts.cpu()


def _prepared(
    part: Part, taken: list[_Work], grads: Updates, state: OptState, params: Params, factor: Tensor | None
) -> Callable[[bool], None]:
    """All that can be refused is done here; the result does the step."""
    works = [work for work in taken if work.part is part]
    stage: ScaleByGefenState = _at(state, part.core.path)
    decays = _decays(part, grads, params)
    leaves = [work.leaf(decays[work.index]) for work in works]
    scalars = _scalars(part, works, grads, state, factor)
    drive = part.core.recipe.kwargs["drive"]

    def run(negate: bool) -> None:
        if not works:
            return
        book = stage.codebook
        options = {"drive": drive, "ties": tie_rule(book), "negate": negate, "scaled": factor is not None}
        _module(works[0].param).gefen_step(leaves, scalars, book, **options)
        torch._foreach_add_([work.count for work in works], 1)
        torch.autograd.graph.increment_version([work.param for work in works])

    return run


def _decays(part: Part, grads: Updates, params: Params) -> list[bool]:
    if part.decay is None or part.mask is None:
        return [part.decay is not None] * len(tree_leaves(grads))
    return choices_of(part.mask, grads, params)


def _scalars(part: Part, works: Sequence[_Work], grads: Updates, state: OptState, factor: Tensor | None) -> Tensor:
    """fp32 `[leaves, 10]`, each number rounded once from float64; columns as `gefen_kernels.step.SCALARS`."""
    given = part.core.recipe.kwargs
    numbers = {name: _numbers(part.core, given[name], grads, state) for name in ("b1", "b2", "eps", "b2_warmup")}
    decay = _numbers(part.decay, part.decay.recipe.args[0], grads, state) if part.decay else None
    rate = _numbers(part.rate, part.rate.recipe.args[0], grads, state) if part.rate else None
    scale, rows, known = 1.0 if factor is None else float(factor), [], {}
    for work in works:
        b1, b2, eps, warmup = (numbers[name][work.index] for name in ("b1", "b2", "eps", "b2_warmup"))
        key = (int(work.count), b1, b2, warmup if work.warms else None)
        if key not in known:
            known[key] = _decayed(*key)
        step = part.sign * (1.0 if rate is None else rate[work.index])
        rows.append([*known[key], eps, step, 0.0 if decay is None else decay[work.index], scale])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 10).to(torch.float32)


def _numbers(stage: Stage, value: Any, grads: Updates, state: OptState) -> list[Any]:
    """A hyperparameter as one float per leaf."""
    value = _value(stage, value, state)
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
