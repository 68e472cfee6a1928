"""Which leaves a back end steps, and what it keeps of them from step to step."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gefen_fn.base import OptState, Params, Updates
from gefen_fn.blocks import LeafLayout, layouts
from gefen_fn.combine import choices_of
from gefen_fn.gefen import ScaleByGefenState, check_moment
from gefen_fn.program import Part, Program, at
from gefen_fn.quantize import Quantized
from gefen_fn.second_moment import Block, Factored, SecondMoment, policy_for
from gefen_fn.tree import tree_leaves, tree_parts
from gefen_kernels import ops, reference
from gefen_kernels.step import Leaf


@dataclass(frozen=True)
class Work:
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
class Plan:
    """What stays from step to step while leaves keep their tensors.

    Attributes:
        key: the tensors and dtypes that it rests on.
        owned: the leaves of all parts that have a gradient.
        taken: by index, those that a back end steps.
        laid: for each part and device, the taken leaves and the back end's own plan of them.
    """

    key: list[Any]
    owned: list[Work]
    taken: dict[int, Work]
    laid: list[tuple[list[Work], Any]]


def make_plan(program: Program, grads: Updates, state: OptState, params: Params, key: list[Any]) -> Plan:
    leaves = tree_leaves(grads)
    owned = _owned(program, grads, state, params)
    taken = {work.index: work for work in owned if _takes(work, leaves[work.index])}
    if program.clip is not None and len(taken) < sum(g is not None for g in leaves):
        taken = {}  # the norm is over all leaves, so all go one way
    laid = []
    for part in program.parts:
        decays, of_part = _decays(part, grads, params), [work for work in taken.values() if work.part is part]
        for device in dict.fromkeys(work.param.device for work in of_part):
            works = [work for work in of_part if work.param.device == device]
            own = [work.leaf(leaves[work.index], decays[work.index]) for work in works]
            laid.append((works, module_of(works[0].param).plan_step(own)))
    return Plan(key, owned, taken, laid)


def _owned(program: Program, grads: Updates, state: OptState, params: Params) -> list[Work]:
    """The leaves of all parts that have a gradient."""
    own = tree_parts(grads, params)
    labels = [None] * len(own) if program.labels is None else choices_of(program.labels, grads, params)
    out = []
    for part in program.parts:
        stage: ScaleByGefenState = at(state, part.core.path)
        trees = (stage.count, stage.mu, stage.nu, layouts(part.core.recipe.kwargs["block"], grads))
        rows = zip(tree_leaves(grads), own, labels, *(tree_parts(grads, tree) for tree in trees), strict=True)
        for i, (g, p, label, count, mu, nu, layout) in enumerate(rows):
            if g is not None and label == part.label:
                check_moment(g, mu, layout)
                out.append(Work(i, part, p, count, mu, nu, layout))
    return out


def _takes(work: Work, grad: Tensor) -> bool:
    """Whether a back end steps this leaf; blocks over a flattened leaf with tiles of its matrix are the pure path's."""
    if isinstance(work.policy, Factored) and work.layout.unflattened is not work.layout:
        return False
    module = ops.back_end(work.param.device)
    return module is not None and bool(module.supports(work.leaf(grad, decays=True)))


def _decays(part: Part, grads: Updates, params: Params) -> list[bool]:
    if part.decay is None or part.mask is None:
        return [part.decay is not None] * len(tree_leaves(grads))
    return choices_of(part.mask, grads, params)


def module_of(x: Tensor) -> Any:
    """The back end of a tensor's device, or the reference."""
    return ops.back_end(x.device) or reference
