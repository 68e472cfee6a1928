"""Muon: momentum whose matrices are made orthogonal (Jordan 2024), kept in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import EmptyState, GradientTransformation, Params, Recipe, Updates, Waits, made_in_rounds
from gefen_fn.blocks import DEFAULT_BLOCK, Blocks, FlatBlocks, LeafLayout, lengths_in
from gefen_fn.exchange import Later, at_once, begun, then
from gefen_fn.first_moment import (
    check_blocks,
    check_codebook,
    check_moment,
    first_codebook,
    with_codebook,
    zero_moment,
)
from gefen_fn.inject import takes_schedules
from gefen_fn.muon_shards import Done, Job, is_cut, talks
from gefen_fn.quantize import Quantized
from gefen_fn.scalar import (
    Scalar,
    bias_correction,
    check_choice,
    check_decay,
    check_nonnegative,
    check_state,
    exact,
    moving_average,
    rounded,
)
from gefen_fn.scale import counts
from gefen_fn.scope import Scope
from gefen_fn.shards import Piece, like_piece, local, piece_of, placed, zeros_placed
from gefen_fn.spec import Matrices, Spec, matrices
from gefen_fn.tree import (
    StructureError,
    Tree,
    check_leaves,
    leaf_choices,
    map_update,
    tree_leaves,
    tree_parts,
    tree_structure,
    tree_unflatten,
)
from gefen_kernels import ops, reference
from gefen_kernels.moment import Drive
from gefen_kernels.newton_schulz import orthogonalize_many
from gefen_kernels.ns_coefficients import ns_coefficients

_ROW_DECAY = 0.95
_ROW_EPS = 1e-8
_ROOT_MEAN_SQUARE = 0.2
_TINY = torch.finfo(torch.float32).tiny
_CHUNK = 1 << 20  # entries whose squares are held at one time


class ScaleByMuonState(NamedTuple):
    """State of `scale_by_muon`.

    Attributes:
        count: int32 per leaf, updates of that leaf, if a formula counts them; else `EmptyState()`.
        codebook: fp32 `[256]`, the levels of every quantized leaf.
        learned: bool scalar, whether the codebook was learned from gradients; it is frozen then.
        mu: per leaf a `Quantized`, or fp32 for a dense leaf.
        nu: NorMuon's average for each row, fp32 of the leaf's shape with column axes of length 1; else `EmptyState()`.
    """

    count: Tree
    codebook: Tensor
    learned: Tensor
    mu: Tree
    nu: Tree


class _Rule(NamedTuple):
    """The arguments of `scale_by_muon`, with the tie rule of its codebook."""

    momentum: Scalar | Tree
    nesterov: bool
    quantize: bool
    coeffs: str | Sequence[Sequence[float]]
    eps: Any
    normuon: bool | str
    spec: Spec
    block: Blocks
    codebook: str | Tensor | Scope
    convention: str
    sharded: str
    ties: reference.Ties

    @property
    def counts(self) -> bool:
        """Whether a formula corrects a bias."""
        return self.convention == "nadam" or self.normuon == "norm_kept"


@takes_schedules
def scale_by_muon(
    momentum: Scalar | Tree = 0.95,
    nesterov: bool = True,
    *,
    quantize: bool = True,
    coeffs: str | Sequence[Sequence[float]] = "standard",
    eps: float = 1e-7,
    normuon: bool | str = False,
    spec: Spec = None,
    block: Blocks = DEFAULT_BLOCK,
    codebook: str | Tensor | Scope = "learned",
    convention: str = "ema",
    sharded: str = "auto",
) -> GradientTransformation:
    """Muon's direction: about `U V^T` of the momentum's matrices `U S V^T` (Jordan 2024), by Newton-Schulz iterations.

    `m = momentum m + (1 - momentum) g` is stored, as 8-bit codes of `codebook` times each block's largest magnitude;
    the matrix that is made orthogonal is `momentum m + (1 - momentum) g` of the stored m, or without Nesterov m itself.
    A leaf is a matrix of its first axis by all others, experts `[E, M, N]` with M, N >= 32 are E of them, and `spec`
    says otherwise. Leaves with fewer than 4,096 entries keep an fp32 momentum. Updates are fp32. A leaf whose gradient
    is `None` is untouched. `momentum` may be a 0-dim tensor, a tree of them per leaf, or a schedule.

    Args:
        momentum: decay of the momentum, in [0, 1).
        nesterov: look one step ahead.
        quantize: False keeps the whole momentum in fp32.
        coeffs: of the iterations: a name in `NS_COEFFS`, or a list of triples.
        eps: least Frobenius norm that a matrix is divided by.
        normuon: `"norm_kept"` or `"paper"`: divide each row by the root of its running mean square (NorMuon, arXiv
            2510.05491), then give the matrix the norm it had, or a root mean square of 0.2.
        spec: which axes are the matrix, and how its rows are split: a `MatrixAxes`, a tree of those and `None`, or a
            function of params.
        block: entries per block of the codes: an int, a tree of ints, or `FlatBlocks`.
        codebook: `"learned"`: from the first gradients with a non-zero quantized entry, which reads the host;
            `"fixed"`: the default codebook; an fp32 tensor `[256]`; or a `Scope` that learns one together.
        convention: of the momentum: `"ema"` as above and in torch.optim.Muon, `"sum"`: `m = momentum m + g`, or
            `"nadam"`: the average with its bias corrected, looking ahead as NAdam (Dozat 2016).
        sharded: what becomes of matrices cut by shards: `"exact"`: every member makes each of them orthogonal;
            `"distributed"`: one member does, for all; `"blockwise"`: each member its own part, which is another
            algorithm; `"auto"`: `"distributed"`.

    Raises:
        ValueError: if an argument is out of range; from `init`, naming it, if a leaf without a spec is no matrix.
        RuntimeError: from `update`, if the codebook is still to be learned where the host cannot read.
        StructureError: from `update`, if updates and state do not fit.

    Example:
        >>> tx, grads = scale_by_muon(), {"w": torch.randn(64, 128)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> singular = torch.linalg.svdvals(updates["w"])
        >>> bool(singular.min() > 0.5), bool(singular.max() < 1.3)
        (True, True)
    """
    check_decay("momentum", momentum)
    check_nonnegative("eps", eps)
    if isinstance(eps, (dict, list, tuple)):
        raise ValueError(f"`eps` is one for all matrices: got a {type(eps).__name__}. Give a number.")
    check_blocks(block)
    check_choice("normuon", normuon, (False, "norm_kept", "paper"))
    check_choice("convention", convention, ("ema", "sum", "nadam"))
    check_choice("sharded", sharded, ("auto", "distributed", "exact", "blockwise"))
    ns_coefficients(coeffs)
    ties = check_codebook(codebook)
    rule = _Rule(momentum, nesterov, quantize, coeffs, eps, normuon, spec, block, codebook, convention, sharded, ties)

    def init(params: Params) -> ScaleByMuonState:
        return _init(rule, params)

    def start(updates: Updates, state: ScaleByMuonState, params: Params | None = None, **extra: Any) -> Waits:
        return _start(rule, updates, state, params)

    given = {k: v for k, v in zip(rule._fields, rule, strict=True) if k != "ties"}
    return made_in_rounds(Recipe("scale_by_muon", (), given), init, start)


def _init(rule: _Rule, params: Params) -> ScaleByMuonState:
    check_leaves(params)
    leaves, structure = tree_leaves(params), tree_structure(params)
    rows = list(zip(leaves, matrices(rule.spec, params), block_lengths(rule.block, params), strict=True))
    mu = [seen and zero_moment(p, momentum_layout(p, seen, length, rule._asdict())) for p, seen, length in rows]
    nu = [seen and zeros_placed(p, seen.row_values.shape) for p, seen, _ in rows]
    return ScaleByMuonState(
        counts(params) if rule.counts else EmptyState(),
        first_codebook(rule.codebook, params),
        torch.zeros((), dtype=torch.bool, device="cpu"),
        tree_unflatten(structure, mu),
        tree_unflatten(structure, nu) if rule.normuon else EmptyState(),
    )


def _start(rule: _Rule, updates: Updates, state: ScaleByMuonState, params: Params | None) -> Waits:
    check_state(state, ScaleByMuonState)
    check_leaves(updates)
    seen, given = matrices(rule.spec, updates, params), rule._asdict()
    rows = zip(tree_leaves(updates), seen, block_lengths(rule.block, updates), strict=True)
    layout = [None if own is None else momentum_layout(g, own, length, given) for g, own, length in rows]
    if rule.quantize:
        state = with_codebook(rule.codebook, updates, state, layout)

    def leaf(g: Tensor, mu: Any, *rest: Any) -> tuple[Any, ...]:
        *count, momentum, layout = rest
        t = [n + 1 for n in count]
        return *_momentum(rule, state.codebook, g, mu, t, momentum, layout), *t

    kept = (state.mu, state.count) if rule.counts else (state.mu,)
    each = (_per_leaf(rule.momentum, updates), layout)
    moved, (mu, *count) = map_update(leaf, updates, kept, each=each)
    state = state._replace(mu=mu, count=count[0] if count else state.count)
    return _directions(rule, moved, state, seen)


def block_lengths(block: Blocks, tree: Tree) -> list[Any]:
    """The block length of each leaf, from the argument of `scale_by_muon`."""
    return _per_leaf(lengths_in(block), tree)


def _per_leaf(value: Any, tree: Tree) -> list[Any]:
    if isinstance(value, (int, float, Tensor)):
        return [value] * len(tree_leaves(tree))
    return leaf_choices(value, tree)


def momentum_layout(x: Tensor, seen: Matrices, length: int, given: Mapping[str, Any]) -> LeafLayout:
    """Where the blocks of a leaf's momentum lie; of an fp32 momentum there are none.

    Args:
        x: the leaf.
        seen: its matrices.
        length: of a block.
        given: the arguments of `scale_by_muon`.

    Raises:
        StructureError: if a shard cuts a block, or by `sharded="blockwise"` a part of a split.
    """
    piece = piece_of(x)
    if given["sharded"] == "blockwise" and len(seen.split) > 1 and is_cut(seen, piece):
        raise StructureError(
            f"Parts of a split must be whole where matrices are made orthogonal by shards: got split={seen.split} for "
            f'shape {piece.whole} cut along axes {sorted(piece.axes)}. Use sharded="distributed".'
        )
    if not given["quantize"]:
        return LeafLayout(piece, 1, length, dense=True)
    return seen.layout(length, piece, flat=isinstance(given["block"], FlatBlocks))


def _momentum(
    rule: _Rule, codebook: Tensor, g: Tensor, mu: Any, t: list[Tensor], momentum: Scalar, layout: LeafLayout
) -> tuple[Tensor, Any]:
    """What is made orthogonal, and the momentum that is stored; `t` holds the leaf's count if a formula needs it."""
    check_moment(g, mu, layout)
    decay = rounded(momentum)
    rest = 1.0 if rule.convention == "sum" else rounded(1.0 - exact(momentum))
    ahead = rule.nesterov and rule.convention != "nadam"
    if layout.dense:
        g = g.float()
        mu = mu * decay + g * rest
        d = mu * decay + g * rest if ahead else mu
    else:
        book = codebook.to(g.device)
        drive: Drive = "ahead" if ahead else "m_hat"
        lie: dict[str, Any] = {"block": layout.block, "start": layout.start}
        d, *stored = ops.moment(g, mu.codes, mu.absmax, book, decay, rest, ties=rule.ties, drive=drive, **lie)
        mu = Quantized(*stored)
    return (_corrected(rule, d, g.float(), momentum, t[0]) if rule.convention == "nadam" else d), mu


def _corrected(rule: _Rule, m: Tensor, g: Tensor, momentum: Scalar, t: Tensor) -> Tensor:
    """NAdam's first moment (Dozat 2016): both terms with their bias corrected, m for the step to come."""
    if not rule.nesterov:
        return m / bias_correction(momentum, t)
    return moving_average(momentum, m / bias_correction(momentum, t + 1), g / bias_correction(momentum, t))


def _directions(rule: _Rule, moved: Tree, state: ScaleByMuonState, seen: Sequence[Matrices | None]) -> Waits:
    """Orthogonal matrices in the place of the moved ones, their rows normalised if asked for."""
    leaves = tree_leaves(moved)
    nu = tree_parts(moved, state.nu) if rule.normuon else [None] * len(leaves)
    t = tree_parts(moved, state.count) if rule.normuon and rule.counts else [None] * len(leaves)
    rows = zip(leaves, seen, nu, t, strict=True)
    jobs = [None if own is None else Job(local(u), own, local(rows), n) for u, own, rows, n in rows]
    pieces = [
        [] if u is None else [piece_of(x) for x in (u, own) if x is not None] for u, own in zip(leaves, nu, strict=True)
    ]

    def placed_back(done: Sequence[Done | None]) -> tuple[Updates, ScaleByMuonState]:
        out = [None if own is None else like_piece(own.x, u) for own, u in zip(done, leaves, strict=True)]
        if not rule.normuon:
            return tree_unflatten(tree_structure(moved), out), state
        new = [old if own is None else placed(own.nu, old) for own, old in zip(done, nu, strict=True)]
        kept = state._replace(nu=tree_unflatten(tree_structure(moved), new))
        return tree_unflatten(tree_structure(moved), out), kept

    return then(_done(rule, jobs, pieces), placed_back)


def _done(
    rule: _Rule, jobs: Sequence[Job | None], pieces: Sequence[Sequence[Piece]]
) -> list[Done | None] | Later[list[Done | None]]:
    """What becomes of each job: of matrices that are cut at their owners, of the others here."""

    def with_others(held: Sequence[dict[int, Done]]) -> list[Done | None]:
        done = {n: x for own in held for n, x in own.items()}
        left = {n: _here(job) for n, job in enumerate(jobs) if job is not None and n not in done}
        done.update(zip(left, _worked(rule, list(left.values())), strict=True))
        return [done.get(n) for n in range(len(jobs))]

    if rule.sharded == "blockwise" or not any(own and own[0].axes for own in pieces):
        return with_others([])
    own_talks = talks(jobs, pieces, rule.sharded, torch.bfloat16, partial(_worked, rule))
    return then(at_once([begun(talk) for talk in own_talks]), with_others)


def _here(job: Job) -> Job:
    """A job as far as it is held here."""
    return job._replace(seen=replace(job.seen, shape=tuple(job.x.shape)))


def _worked(rule: _Rule, jobs: Sequence[Job]) -> list[Done]:
    """Whole jobs, their matrices of one shape together."""
    parts = [job.seen.parts(job.x) for job in jobs]
    matrices = iter(_orthogonal(rule, [x for own in parts for x in own]))
    found = [[next(matrices) for _ in own] for own in parts]
    return [_finished(job, own) for job, own in zip(jobs, found, strict=True)]


def _finished(job: Job, found: Sequence[Tensor]) -> Done:
    if job.nu is None:
        return Done(job.seen.join([_wide(x) for x in found]), None)
    return Done(*_normalised(found, job.nu, job.seen, job.t))


def _orthogonal(rule: _Rule, xs: Sequence[Tensor]) -> list[Tensor]:
    return orthogonalize_many(xs, coeffs=rule.coeffs, eps=rule.eps)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32, memory_format=torch.contiguous_format)


def _normalised(found: Sequence[Tensor], nu: Tensor, seen: Matrices, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """NorMuon (arXiv 2510.05491) of a leaf's orthogonal matrices; without a count in the form of the paper."""
    kept = seen.row_values
    pairs = [_rows(_wide(x), own, count) for x, own in zip(found, kept.parts(nu), strict=True)]
    return seen.join([x for x, _ in pairs]), kept.join([own for _, own in pairs])


def _rows(x: Tensor, nu: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of `[.., R, C]` divided by their running root mean square `[.., R, 1]`, and the matrix rescaled.

    Its norms before and after follow from the rows' mean squares.
    """
    square = _mean_squares(x)
    nu = moving_average(_ROW_DECAY, nu, square)
    root = reference.root(nu if count is None else nu / bias_correction(_ROW_DECAY, count)) + _ROW_EPS
    after = reference.tree_sum(square / root / root, -2).unsqueeze(-2).clamp(min=_TINY)
    if count is None:
        norm = reference.root(_ROOT_MEAN_SQUARE**2 * x.shape[-2] / after)
    else:
        norm = reference.root(reference.tree_sum(square, -2).unsqueeze(-2) / after)
    return x * (norm / root), nu


def _mean_squares(x: Tensor) -> Tensor:
    """Mean of the squares of each row, `[.., R, C]` -> `[.., R, 1]`."""
    rows = x.flatten(0, -2)
    chunks = torch.split(rows, max(1, _CHUNK // max(1, x.shape[-1])))
    sums = torch.cat([reference.tree_sum(chunk * chunk, -1) for chunk in chunks])
    return sums.reshape(*x.shape[:-1], 1) / x.new_full((), float(x.shape[-1]))
