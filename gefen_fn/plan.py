"""Which leaves a back end steps, and what it keeps of them from step to step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import OptState, Params, Updates
from gefen_fn.blocks import LeafLayout, layouts
from gefen_fn.combine import bools, choices_of
from gefen_fn.cut_step import CutLeaves, Cuts, first_entry, is_one_run, lay_out
from gefen_fn.first_moment import check_moment
from gefen_fn.muon_plan import MuonBundle, MuonWork, muon_works
from gefen_fn.program import Part, Program, at
from gefen_fn.quantize import Quantized, tie_rule
from gefen_fn.rounding import leaf_seeds
from gefen_fn.second_moment import Block, Factored, SecondMoment, policy_for
from gefen_fn.shards import local
from gefen_fn.tiles import Tiles
from gefen_fn.tree import tree_leaves, tree_parts, tree_structure, tree_unflatten
from gefen_kernels import ops, reference
from gefen_kernels.step import Leaf


@dataclass(frozen=True)
class Work:
    """A leaf of a part: its place in the tree, its tensors as they are held here, and how they lie.

    `drawn` is its count in `stochastic_rounding`, None without; `seed` that of what is rounded at random.
    """

    index: int
    part: Part
    param: Tensor
    count: Tensor
    mu: Any
    nu: Any
    layout: LeafLayout
    drawn: Tensor | None
    seed: int

    @property
    def policy(self) -> SecondMoment:
        """The second moment that this leaf really has."""
        return policy_for(self.part.core.recipe.kwargs["second_moment"], self.layout)

    @property
    def warms(self) -> bool:
        """Whether the second moment's decay is warmed, which leaves nothing to correct."""
        return self.part.core.recipe.kwargs["b2_warmup"] is not None and self.policy.warms

    @property
    def started(self) -> bool:
        """Whether there is a moment that codes stand for."""
        return bool(self.count)

    def takes(self, grad: Tensor) -> bool:
        """Whether a back end steps it.

        Blocks over a flattened leaf with tiles of its matrix are the pure path's. So are shards that are rounded at
        random, unless what they draw, by the place in the whole leaf, is one run for each leaf of the back end; and
        parameters with cut tiles that are not contiguous.
        """
        module, cut, leaf = ops.back_end(self.param.device), self.tiles is not None, self.leaf(grad, decays=True)
        if isinstance(self.policy, Factored) and self.layout.unflattened is not self.layout:
            return False
        random, piece = leaf.random_codes or leaf.random_param, self.layout.piece
        if random and not is_one_run(piece, self.layout.start, cut=cut):
            return False
        return module is not None and bool(module.supports(leaf)) and (not cut or self.param.is_contiguous())

    @property
    def tiles(self) -> Tiles | None:
        """Its tiles, if one of them is cut by a shard edge, here or on other members."""
        tiles = self.policy.tiles(self.layout) if isinstance(self.policy, Factored) else None
        return tiles if tiles is not None and tiles.peers is not None else None

    def leaf(self, grad: Tensor, decays: bool) -> Leaf:
        """The leaf as a back end takes it."""
        policy, quantized, piece = self.policy, isinstance(self.mu, Quantized), self.layout.piece
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
            seed=self.seed,
            first=first_entry(piece, self.layout.start) if piece.axes and self.param.numel() else 0,
            random_codes=quantized and self.part.core.recipe.kwargs["rounding"] == "stochastic",
            random_param=self.drawn is not None and self.param.dtype == torch.bfloat16,
        )


class Bundle(NamedTuple):
    """Leaves of one part on one device, which a back end steps in one call.

    Attributes:
        works: the leaves.
        module: the back end.
        plan: its own plan of them.
        ties: of the codebook, see `reference.nearest`.
        warms: bool `[leaves]`, `Work.warms` of each, where the counts are.
        draws: whether something is rounded at random.
        cuts: the leaves with tiles that shard edges cut; None without.
    """

    works: list[Work]
    module: Any
    plan: Any
    ties: reference.Ties
    warms: Tensor
    draws: bool
    cuts: Cuts | None

    @classmethod
    def of(cls, works: list[Work], given: Sequence[Leaf], ties: reference.Ties) -> "Bundle":
        """The bundle of these works, which are `given` to the back end of their device."""
        module: Any = ops.back_end(works[0].param.device)
        leaves, cuts = lay_out(module, given, _cut_leaves(works), [work.layout.piece for work in works])
        warms = torch.tensor([work.warms for work in works], device=works[0].count.device)
        draws = any(leaf.random_codes or leaf.random_param for leaf in given)
        return cls(works, module, module.plan_step(leaves), ties, warms, draws, cuts)

    def gradients(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The gradients as the back end takes them, out of those of the whole tree."""
        if self.cuts is None:
            return [leaves[work.index] for work in self.works]
        works = [self.works[n] for n in self.cuts.owner.tolist()]
        pairs = [(leaves[work.index], work.layout.start) for work in works]
        return [g if own is None else own.of(g, at) for own, (g, at) in zip(self.cuts.rows, pairs, strict=True)]

    def spread(self, table: Tensor) -> Tensor:
        """`[works, ..]` -> the same with a row for each leaf of the back end."""
        return table if self.cuts is None else table[self.cuts.owner.to(table.device)]

    @property
    def sums(self) -> bool:
        """Whether the back end adds the squares of all leaves in one go."""
        return hasattr(self.module, "squares")


@dataclass(frozen=True)
class StepPlan:
    """What stays from step to step while leaves keep their tensors.

    Attributes:
        key: the tensors that it rests on.
        facts: where they lie in memory, and how; compared with the key at each step.
        works: the leaves of all parts that have a gradient.
        coded: the parts of which one such leaf has codes.
        bundles: how a back end steps some of them.
        fused: the places of those in the tree.
        written: the memory of their parameters.
    """

    key: list[Any]
    facts: list[Any]
    works: list[Work | MuonWork]
    coded: list[Part]
    bundles: list[Bundle | MuonBundle]
    fused: frozenset[int]
    written: frozenset[int]

    def share_memory(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether a gradient lies in the memory of a parameter that a back end writes."""
        return any(g is not None and _memory(g) in self.written and g.numel() for g in grads)


def make_plan(
    program: Program, grads: Updates, state: OptState, params: Params, key: list[Any], facts: list[Any]
) -> StepPlan:
    """Find the leaves of a program's parts, and lay out those that a back end takes.

    Raises:
        StructureError: if the state does not fit the leaves.
    """
    leaves = [local(g) for g in tree_leaves(grads)]
    works = _works(program, grads, state, params)
    taken = [work for work in works if work.takes(leaves[work.index])]
    if _overlap([work.param for work in taken]):
        taken = []  # tied memory: what one leaf writes another would read
    bundles: list[Bundle | MuonBundle] = []
    for part in program.parts:
        decays = _decays(program, part, grads, params)
        matrices = [work for work in taken if isinstance(work, MuonWork) and work.part is part]
        if matrices:
            cpu: Any = ops.back_end(matrices[0].param.device)
            bundles.append(MuonBundle(matrices, cpu, [decays[work.index] for work in matrices]))
        own = [work for work in taken if isinstance(work, Work) and work.part is part]
        for device in dict.fromkeys(work.param.device for work in own):
            there = [work for work in own if work.param.device == device]
            given = [work.leaf(leaves[work.index], decays[work.index]) for work in there]
            bundles.append(Bundle.of(there, given, _ties(part)))
    written = frozenset(_memory(work.param) for work in taken) - {0}  # where empty and meta tensors lie
    coded = [part for part in program.parts if any(w.part is part and not w.layout.dense for w in works)]
    return StepPlan(key, facts, works, coded, bundles, frozenset(work.index for work in taken), written)


def _works(program: Program, grads: Updates, state: OptState, params: Params) -> list[Work | MuonWork]:
    """The leaves of all parts that have a gradient."""
    own = tree_parts(grads, params)
    labels = _labels(program, grads, params)
    out: list[Work | MuonWork] = []
    for part in program.parts:
        stage: Any = at(state, part.core.path)
        if part.is_muon:
            shown = [label == part.label for label in labels]
            out += muon_works(part, stage, _only(grads, grads, shown), _only(grads, params, shown))
            continue
        trees = (stage.count, stage.mu, stage.nu, layouts(part.core.recipe.kwargs["block"], grads))
        drawn = [None] * len(own) if part.rounding is None else tree_parts(grads, at(state, part.rounding.path).count)
        columns = (own, labels, leaf_seeds(grads, str(program)), drawn, *(tree_parts(grads, tree) for tree in trees))
        rows = zip(tree_leaves(grads), *columns, strict=True)
        for i, (g, p, label, seed, draws, count, mu, nu, layout) in enumerate(rows):
            if g is not None and label == part.label:
                work = Work(i, part, local(p), count, local(mu), local(nu), layout, draws, seed)
                check_moment(local(g), work.mu, layout)
                work.policy.check(work.nu, layout)
                out.append(work)
    return out


def _cut_leaves(works: Sequence[Work]) -> list[CutLeaves]:
    """The leaves with tiles that shard edges cut, by layout; the tiles of one policy follow from it."""
    tiles = {n: work.tiles for n, work in enumerate(works)}
    alike: dict[LeafLayout, list[int]] = {}
    for n, own in tiles.items():
        if own is not None:
            alike.setdefault(works[n].layout, []).append(n)
    groups = [(layout, numbers, tiles[numbers[0]]) for layout, numbers in alike.items()]
    return [
        CutLeaves.of(numbers, layout, own, [works[n].nu.col for n in numbers])
        for layout, numbers, own in groups
        if own is not None
    ]


def _only(grads: Updates, tree: Any, shown: Sequence[bool]) -> Any:
    """`tree`, which is like `grads`, with `None` at the leaves that are not shown."""
    leaves = [x if keep else None for x, keep in zip(tree_parts(grads, tree), shown, strict=True)]
    return tree_unflatten(tree_structure(grads), leaves)


def _labels(program: Program, grads: Updates, params: Params) -> list[Any]:
    """Whose each leaf is; None without a partition or masks."""
    leaves = tree_leaves(grads)
    return [None] * len(leaves) if program.labels is None else choices_of(program.labels, grads, params)


def _decays(program: Program, part: Part, grads: Updates, params: Params) -> list[bool]:
    """Whether each leaf decays; the mask is asked about the leaves of its part, as the pure path asks it."""
    if part.decay is None or part.mask is None:
        return [part.decay is not None] * len(tree_leaves(grads))
    shown = [label == part.label for label in _labels(program, grads, params)]
    return bools(choices_of(part.mask, _only(grads, grads, shown), _only(grads, params, shown)))


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether two tensors, or two entries of one, share memory."""
    real = [x for x in tensors if x.numel() and not x.is_meta]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.element_size() * _reach(x)) for x in real)
    expanded = any(stride == 0 and size > 1 for x in tensors for size, stride in zip(x.shape, x.stride(), strict=True))
    return expanded or any(a[1] > b[0] for a, b in pairwise(spans))


def _reach(x: Tensor) -> int:
    """Entries from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _ties(part: Part) -> reference.Ties:
    book = part.core.recipe.kwargs["codebook"]
    return tie_rule(book) if isinstance(book, Tensor) else "zero"


def kernels_of(x: Tensor) -> Any:
    """The back end of a tensor's device, or the reference."""
    return ops.back_end(x.device) or reference
