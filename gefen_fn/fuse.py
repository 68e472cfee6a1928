"""A step in place: what a recognised expression does with gradients, state and parameters.

Fused equals unfused: the back end goes through the operations of the pure path in their order. The pure path steps the
leaves that no back end takes, and where a codebook is learned late.

A step on shards has its rounds (`gefen_fn.exchange`) before anything is written: what bundles ask of other members and
what the pure path asks for the other leaves is put together, so that it takes the same rounds. A bundle says what it
asks in `asked_of`, as a `Later` made of the state before the step; what that comes to is given to `prepared`.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.accumulate import MultiSteps, apply_if_finite
from gefen_fn.base import GradientTransformation, OptState, Params, Updates, started, write_updates
from gefen_fn.bundle import asked_of, prepared
from gefen_fn.calibrate import check_can_learn, is_to_learn, learn_from
from gefen_fn.clip import clip_factor, first_column_axis, norm_by, squares_here
from gefen_fn.combine import chain, without_norm
from gefen_fn.exchange import at_once, finish
from gefen_fn.gefen import ScaleByGefenState
from gefen_fn.muon import ScaleByMuonState
from gefen_fn.muon_plan import MuonBundle, MuonWork
from gefen_fn.plan import Bundle, StepPlan, Work, kernels_of, make_plan
from gefen_fn.program import Part, Program, Stage, at, begins_with_clip, put, recognise
from gefen_fn.rounding import StochasticRoundingState
from gefen_fn.scalar import capturing, check_state, multiply
from gefen_fn.scale import need_params
from gefen_fn.scope import Scope
from gefen_fn.shards import local
from gefen_fn.step_values import changes_of, value_of
from gefen_fn.tree import (
    Tree,
    check_floating,
    form_of,
    tree_leaves,
    tree_map,
    tree_parts,
    tree_structure,
    tree_unflatten,
)
from gefen_kernels import reference

_FIRST = (
    "A step is captured right after one like it that is not: got a first step, other tensors than in the last step, or "
    "a second capture after it. Take one step outside of the capture, with the same tensors, before each capture."
)
_GUARDS: dict[str, Callable[..., GradientTransformation]] = {
    "MultiSteps": MultiSteps,
    "apply_if_finite": apply_if_finite,
}


class Step:
    """`step(grads, state, params, **extra) -> state`: updates parameters and the state's tensors in place.

    Masks and labels that are functions are asked when the tensors of the state or the parameters are new, not at each
    step. A step on tensors of a GPU reads none of them on the host, but for `learned` and for what it learns from, and
    may be captured after one that was not. What it then takes along belongs to the graph alone, and is kept as long as
    this object.

    Attributes:
        program: what was recognised; as text, the stages that are fused.
        wrote: whether the last call came as far as to write, which it does when nothing is refused any more.
    """

    def __init__(self, tx: GradientTransformation, program: Program) -> None:
        self._tx, self.program, self.wrote = tx, program, False
        self._plan: StepPlan | None = None
        self._captured: list[StepPlan] = []

    def __str__(self) -> str:
        """The stages that are fused."""
        return str(self.program)

    @torch.no_grad()
    def __call__(self, grads: Updates, state: OptState, params: Params, **extra: Any) -> OptState:
        """Take one step. Everything that may be refused is refused before anything changes.

        Args:
            grads: like `params`; a `None` leaf is left alone.
            state: of the transform; its tensors are written to.
            params: written to.
            **extra: passed to the pure path; with a clip `global_norm`, if it is known.

        Returns:
            The state, of the same tensors: whoever holds one of them sees the step, as with `torch.optim`.

        Raises:
            StructureError: if gradients, state and params do not fit.
            RuntimeError: if a first step is captured.
        """
        program, given = self.program, tree_leaves(grads)
        plan, leaves = self._planned(grads, given, state, params), [local(g) for g in given]
        unlearned = _unlearned(plan, state)
        moves_codes = _move_codes(unlearned, plan, given)
        if not plan.bundles or plan.share_memory(leaves) or moves_codes:
            return write_state(state, self._pure(grads, state, params, **extra))
        summed = False
        if program.clip is not None and "global_norm" not in extra:
            summed = agree.group_of(given) is None and len(plan.fused) == sum(g is not None for g in given)
            extra["global_norm"] = _norm(plan, leaves) if summed else norm_by(_squares_of, given)
        factor = _clip_factor(program.clip, extra.get("global_norm"), state)
        new = _learned(unlearned, plan, given, state, factor)
        asked = [asked_of(bundle, leaves, grads, new, factor) for bundle in plan.bundles]
        left = [None if i in plan.fused else g for i, g in enumerate(given)]
        is_all = program.whole and all(g is None for g in left)
        if not is_all:
            asked.append(started(self._tx, tree_unflatten(tree_structure(grads), left), new, params, **extra))
        got = finish(at_once(asked))
        pairs = zip(plan.bundles, got, strict=is_all)
        runs = [prepared(program, bundle, leaves, grads, new, factor, own, summed=summed) for bundle, own in pairs]
        changes = changes_of(program, new) if is_all else []
        self.wrote = True
        if not is_all:
            updates, new = got[-1]
            write_updates(params, updates)
        for run in runs:
            run()
        for old, x in changes:
            old.copy_(x)
        return write_state(state, new)

    def _pure(self, grads: Updates, state: OptState, params: Params, **extra: Any) -> OptState:
        updates, state = self._tx.update(grads, state, params, **extra)
        self.wrote = True
        write_updates(params, updates)
        return state

    def _planned(self, grads: Updates, leaves: Sequence[Any], state: OptState, params: Params) -> StepPlan:
        """The plan of the last step, if all that it rests on is the same and where it was."""
        stages = [_stage(part, state) for part in self.program.parts]
        own, forms = tree_parts(grads, params), [form_of(g) for g in leaves]
        kept = [x for stage in stages for x in tree_leaves((stage.count, stage.mu, stage.nu))]
        kept += [x for part in self.program.parts for x in tree_leaves(_drawn(part, state))]
        key, held = [*own, *kept], [local(x) for x in (*own, *kept) if x is not None]
        facts = [*forms, *map(form_of, own), *((x.data_ptr(), x.stride()) for x in held)]
        old, captured = self._plan, capturing()
        if old is None or old.facts != facts or not all(map(operator.is_, old.key, key)):
            if captured:
                raise RuntimeError(_FIRST)
            for g, p in zip(leaves, own, strict=True):
                if g is not None:
                    check_floating(g, p)
            old = make_plan(self.program, grads, state, params, key, facts)
        self._plan = None if captured else old
        self._captured += [old] * captured
        return old


def write_state(state: OptState, new: OptState) -> OptState:
    """Put what is new into the tensors of the state, so that all of it moves together; return the state."""
    if new is state:
        return state
    for old, x in zip(tree_leaves(state), tree_parts(state, new), strict=True):
        if isinstance(old, Tensor) and x is not old:
            old.copy_(x)
    return state


class GuardedStep:
    """A step in place inside a transform that decides whether to step: `MultiSteps` or `apply_if_finite`.

    Attributes:
        inner: the step in place of the guarded transform.
    """

    def __init__(self, name: str, outer: GradientTransformation, inner: "FusedStep") -> None:
        self._name, self._outer, self.inner = name, outer, inner

    def __str__(self) -> str:
        """The guard around what is fused."""
        return f"{self._name}({self.inner})"

    @torch.no_grad()
    def __call__(self, grads: Updates, state: OptState, params: Params, **extra: Any) -> OptState:
        """Take one step, or none; see `Step`."""
        return self._outer.update(grads, state, params, **extra)[1]  # what is to be written the inner step has written


class ChainedStep:
    """A step in place at the end of a chain whose other stages are pure.

    Attributes:
        inner: the step in place of the last stage.
    """

    def __init__(self, front: GradientTransformation, inner: "FusedStep") -> None:
        self._front, self.inner = front, inner

    def __str__(self) -> str:
        """What is fused."""
        return str(self.inner)

    @torch.no_grad()
    def __call__(self, grads: Updates, state: OptState, params: Params, **extra: Any) -> OptState:
        """Take one step; see `Step`."""
        check_state(state, tuple)
        updates, front = self._front.update(grads, state[:-1], params, **extra)
        last = self.inner(updates, state[-1], params, **without_norm(extra))
        return (*write_state(state[:-1], front), last)


FusedStep = Step | GuardedStep | ChainedStep


def fuse(tx: GradientTransformation) -> FusedStep | None:
    """The step in place of a transform, or None if its expression is not recognised.

    Recognised are the expressions of `gefen_fn.program`, `MultiSteps` and `apply_if_finite` around what is recognised,
    and chains that end in it. The step is called as `step(grads, state, params, **extra) -> state`; printed, it says
    which stages are fused.

    Example:
        >>> print(fuse(chain(clip_by_global_norm(1.0), gefen(1e-3))))
        clip_by_global_norm + scale_by_gefen + add_decayed_weights + scale_by_learning_rate
        >>> fuse(chain(clip(1.0), sgd(1e-3))) is None
        True
    """
    recipe, program = getattr(tx.update, "recipe", None), recognise(tx)
    if program is not None:
        return Step(tx, program)
    if recipe is None or not recipe.args or recipe.name not in ("chain", *_GUARDS):
        return None
    *front, last = recipe.args if recipe.name == "chain" else recipe.args[:1]
    inner = fuse(last)
    if inner is None:
        return None
    if recipe.name == "chain":
        return ChainedStep(chain(*front), inner)
    outer = _GUARDS[recipe.name](_in_place(last, inner), *recipe.args[1:], **recipe.kwargs)
    return GuardedStep(recipe.name, outer, inner)


def squares_of(tx: GradientTransformation) -> Callable[[Updates], Tensor | None]:
    """What this member counts of the squares whose root `tx` takes as `global_norm`, 0-dim float64.

    None where `tx` does not begin with a clip of that norm.
    """
    if begins_with_clip(tx):
        return functools.partial(squares_here, _squares_of)
    return lambda grads: None


def _in_place(tx: GradientTransformation, step: FusedStep) -> GradientTransformation:
    """`tx` as a transform that steps in place and leaves no updates."""

    def update(
        updates: Updates, state: OptState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        return tree_map(lambda _: None, updates), step(updates, state, need_params(params, "fuse"), **extra)

    return GradientTransformation(tx.init, update)


def _move_codes(unlearned: list[Part], plan: StepPlan, grads: Sequence[Any]) -> bool:
    """Whether a codebook is about to be learned under codes, here or on another member, that are not zero's."""
    if not unlearned:
        return False
    started = torch.tensor(any(work.started for work in plan.works if work.part in unlearned), device="cpu")
    groups = dict.fromkeys(_learners(part, _shown(part, plan, grads)) for part in unlearned)
    return any([bool(agree.any_member(started, group)) for group in groups])


def _clip_factor(clip: Stage | None, norm: Tensor | None, state: OptState) -> Tensor | None:
    """What all gradients are multiplied by, 0-dim float64; None without a clip."""
    if clip is None or norm is None:
        return None
    return clip_factor(norm, value_of(clip, clip.recipe.args[0], state))


def _norm(plan: StepPlan, leaves: Sequence[Any]) -> Tensor:
    """The norm of all gradients, 0-dim fp32, where all are here and fused."""
    squares = [_squares(bundle, [leaves[work.index] for work in bundle.works]) for bundle in plan.bundles]
    return torch.stack([x.to(squares[0].device) for x in squares]).sum().sqrt().float()


def _squares_of(g: Tensor, start: int) -> Tensor:
    squares: Tensor = kernels_of(g).sum_of_squares(g, start=start)
    return squares


def _squares(bundle: Bundle | MuonBundle, grads: Sequence[Tensor]) -> Tensor:
    """The sum of all squares, 0-dim float64: in one go where the back end can, which its step then goes on from."""
    starts = [first_column_axis(g) for g in grads]
    if isinstance(bundle, Bundle) and bundle.sums:
        return bundle.module.squares(bundle.plan, grads, starts)  # type: ignore[no-any-return]
    each = zip(grads, starts, strict=True)
    return torch.stack([bundle.module.sum_of_squares(g, start=start) for g, start in each]).sum()


def _stage(part: Part, state: OptState) -> Any:
    stage = at(state, part.core.path)
    check_state(stage, ScaleByMuonState if part.is_muon else ScaleByGefenState)
    return stage


def _drawn(part: Part, state: OptState) -> Tree:
    """The counts that parameters are rounded at random with; None without."""
    if part.rounding is None:
        return None
    stage: StochasticRoundingState = at(state, part.rounding.path)
    check_state(stage, StochasticRoundingState)
    return stage.count


def _unlearned(plan: StepPlan, state: OptState) -> list[Part]:
    """The parts whose codebooks are to be learned and were not, and that have leaves to learn from."""
    unlearned = [part for part in plan.coded if is_to_learn(part.core.recipe.kwargs["codebook"], _stage(part, state))]
    if unlearned:
        check_can_learn()
    return unlearned


def _shown(part: Part, plan: StepPlan, grads: Sequence[Any]) -> list[Any]:
    """The gradients with `None` at the leaves of other parts, as the pure path shows them to a part."""
    own = {work.index for work in plan.works if work.part is part}
    return [g if i in own else None for i, g in enumerate(grads)]


def _learners(part: Part, shown: Sequence[Any]) -> Any:
    """The group or scope that learns the codebook of a part."""
    return agree.group_of(shown, Scope.of(part.core.recipe.kwargs["codebook"]))


def _learned(
    unlearned: list[Part], plan: StepPlan, grads: Sequence[Any], state: OptState, factor: Tensor | None
) -> OptState:
    """The state with these parts' codebooks learned."""
    if not unlearned:
        return state
    for part in unlearned:
        shown, stage = _shown(part, plan, grads), _stage(part, state)
        group = _learners(part, shown)
        mine = agree.counted(shown, group)
        counts = torch.zeros(4096, dtype=torch.int64, device="cpu")
        for work in plan.works:
            if work.part is part and not work.layout.dense and mine[work.index]:
                counts += _histogram(work, local(grads[work.index]), factor, fused=work.index in plan.fused)
        book, learned = learn_from(agree.total(counts, group), stage.codebook, stage.learned, group)
        state = put(state, part.core.path, stage._replace(codebook=book, learned=learned))
    return state


def _histogram(work: Work | MuonWork, grad: Tensor, factor: Tensor | None, *, fused: bool) -> Tensor:
    g = grad if factor is None else multiply(factor, grad)
    module = kernels_of(g) if fused else reference
    counts: Tensor = module.histogram(g, block=work.layout.block, start=work.layout.start)
    return counts.cpu()
