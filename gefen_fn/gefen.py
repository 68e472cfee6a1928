"""Gefen: Adam with an 8-bit first moment and a compact second one (Benedek, Koren, Fried, arXiv 2606.13894)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, Params, Recipe, Updates, Waits, made_in_rounds
from gefen_fn.blocks import DEFAULT_BLOCK, Blocks, LeafLayout, layout_list, layouts
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
from gefen_fn.quantize import Quantized
from gefen_fn.rounding import leaf_seeds, part_of
from gefen_fn.scalar import (
    Scalar,
    bias_correction,
    check_choice,
    check_decay,
    check_nonnegative,
    check_number,
    check_state,
    exact,
    moving_average,
    new_count,
    root_correction,
    rounded,
    smaller,
)
from gefen_fn.scope import Scope
from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT, SecondMoment, check_policy, policy_for
from gefen_fn.shards import local
from gefen_fn.tree import (
    Tree,
    broadcast,
    check_leaves,
    map_update,
    tree_leaves,
    tree_map,
    tree_parts,
)
from gefen_kernels import ops, reference


class ScaleByGefenState(NamedTuple):
    """State of `scale_by_gefen`.

    Attributes:
        count: int32 per leaf, updates of that leaf.
        codebook: fp32 `[256]`, the levels of every quantized leaf.
        learned: bool scalar, whether the codebook was learned from gradients; it is frozen then.
        mu: per leaf a `Quantized`, or fp32 for a dense leaf.
        nu: per leaf what its policy keeps.
    """

    count: Tree
    codebook: Tensor
    learned: Tensor
    mu: Tree
    nu: Tree


class _Rule(NamedTuple):
    """The arguments of `scale_by_gefen`, with the tie rule of its codebook; `codebook` is a tensor if one was given."""

    b1: Scalar | Tree
    b2: Scalar | Tree
    eps: Scalar | Tree
    second_moment: SecondMoment
    b2_warmup: Scalar | Tree | None
    block: Blocks
    codebook: str | Tensor | Scope
    drive: str
    rounding: str
    ties: reference.Ties


@takes_schedules
def scale_by_gefen(
    b1: Scalar | Tree = 0.9,
    b2: Scalar | Tree = 0.999,
    eps: Scalar | Tree = 1e-8,
    *,
    second_moment: SecondMoment = DEFAULT_SECOND_MOMENT,
    b2_warmup: Scalar | Tree | None = 0.9,
    block: Blocks = DEFAULT_BLOCK,
    codebook: str | Tensor | Scope = "learned",
    drive: str = "m",
    rounding: str = "nearest",
) -> GradientTransformation:
    """Gefen's direction: `(d / (1 - b1^t)) / (sqrt(nu_hat / c2) + eps)`.

    `m = b1 mu + (1 - b1) g` is stored as 8-bit codes of `codebook` times each block's largest magnitude. Leaves with
    fewer than 4,096 entries, fewer than 2 axes or one entry after the first axis are dense: plain Adam in fp32. Updates
    are fp32 and odd in the gradient, to the bit. Counts are per leaf; a leaf whose gradient is `None` is untouched.
    `b1`, `b2`, `eps` and `b2_warmup` may be 0-dim tensors, trees of them per leaf, or schedules of the calls so far.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added after the root.
        second_moment: `Dense()`, `Block()` or `Factored(tile)`; `Block` where `Factored` does not fit.
        b2_warmup: exponent q of `min(b2, 1 - t^-q)` for `Block` and `Factored`, with `c2 = 1`; None for constant b2 and
            `c2 = 1 - b2^t`, the published form.
        block: entries per block: an int, a tree of ints, or `FlatBlocks`.
        codebook: `"learned"`: from the first gradients with a non-zero quantized entry, which reads the host;
            `"fixed"`: the default codebook; an fp32 tensor `[256]`; or a `Scope` that learns one together.
        drive: `"m"`: d is the moment before it is stored; `"m_hat"`: what is stored, the published form.
        rounding: `"nearest"`, or `"stochastic"` by distance, drawn from (leaf path, count, index).

    Raises:
        ValueError: if an argument is out of range.
        RuntimeError: from `update`, if the codebook is still to be learned where the host cannot read.
        StructureError: from `update`, if updates and state do not fit.

    Example:
        >>> state = scale_by_gefen().init({"w": torch.ones(64, 512), "b": torch.ones(64)})
        >>> state.mu["w"].codes.dtype, state.mu["w"].absmax.shape
        (torch.uint8, torch.Size([64, 2]))
        >>> state.mu["b"].dtype  # a small leaf stays dense
        torch.float32
    """
    _check_arguments(b1, b2, eps, b2_warmup, block)
    check_policy(second_moment)
    check_choice("drive", drive, ("m", "m_hat"))
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    ties = check_codebook(codebook)
    rule = _Rule(b1, b2, eps, second_moment, b2_warmup, block, codebook, drive, rounding, ties)

    def init(params: Params) -> ScaleByGefenState:
        return _init(rule, params)

    def start(updates: Updates, state: ScaleByGefenState, params: Params | None = None, **extra: Any) -> Waits:
        return _start(rule, updates, state)

    given = {k: v for k, v in zip(rule._fields, rule, strict=True) if k != "ties"}
    return made_in_rounds(Recipe("scale_by_gefen", (), given), init, start)


def _init(rule: _Rule, params: Params) -> ScaleByGefenState:
    check_leaves(params)
    layout = layouts(rule.block, params)
    return ScaleByGefenState(
        tree_map(lambda _: new_count(), params),
        first_codebook(rule.codebook, params),
        torch.zeros((), dtype=torch.bool, device="cpu"),
        tree_map(zero_moment, params, layout),
        tree_map(lambda p, at: policy_for(rule.second_moment, at).init(p, at), params, layout),
    )


def _start(rule: _Rule, updates: Updates, state: ScaleByGefenState) -> Waits:
    check_state(state, ScaleByGefenState)
    layout = layout_list(rule.block, updates)
    learned = with_codebook(rule.codebook, updates, state, layout)
    return then(_gathered(rule, updates, learned, layout), lambda own: _update(rule, updates, learned, layout, own))


def _update(
    rule: _Rule,
    updates: Updates,
    state: ScaleByGefenState,
    layout: Sequence[LeafLayout | None],
    gathered: Sequence[tuple[Any, ...]],
) -> tuple[Updates, ScaleByGefenState]:
    settings = {"b1": rule.b1, "b2": rule.b2, "eps": rule.eps, "warmup": rule.b2_warmup}
    shared: dict[str, Any] = {k: v for k, v in settings.items() if v is None or isinstance(v, (int, float, Tensor))}
    per_leaf = {k: v for k, v in settings.items() if k not in shared}

    seeds = leaf_seeds(updates, 'rounding="stochastic"') if rule.rounding == "stochastic" else [0] * len(layout)
    each: dict[str, Sequence[Any]] = {"seed": seeds, "layout": layout, "gathered": gathered}

    def leaf(g: Tensor, count: Tensor, mu: Any, nu: Any, *own: Any) -> tuple[Tensor, Tensor, Any, Any]:
        named = dict(zip([*per_leaf, *each], own, strict=True))
        return _update_leaf(rule, state.codebook, g, count, mu, nu, **shared, **named)

    trees = (state.count, state.mu, state.nu)
    out, (count, mu, nu) = map_update(leaf, updates, trees, *per_leaf.values(), each=tuple(each.values()))
    return out, ScaleByGefenState(count, state.codebook, state.learned, mu, nu)


def _update_leaf(
    rule: _Rule,
    codebook: Tensor,
    g: Tensor,
    count: Tensor,
    mu: Any,
    nu: Any,
    *,
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    warmup: Scalar | None,
    seed: int,
    layout: LeafLayout,
    gathered: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Any, Any]:
    check_moment(g, mu, layout)
    g, t = g.float(), count + 1
    policy = policy_for(rule.second_moment, layout)
    d, mu = _dense_moment(g, mu, b1) if layout.dense else _moment(rule, codebook, g, mu, t, layout, seed, b1)
    root, nu = policy.update(g, nu, _decay_of(policy, b2, t, warmup), layout, *gathered)
    if warmup is None or not policy.warms:
        root = root / root_correction(b2, t)
    return d / bias_correction(b1, t) / (root + rounded(eps)), t, mu, nu


def _decay_of(policy: SecondMoment, b2: Scalar, t: Tensor, warmup: Scalar | None) -> Scalar:
    """The second moment's decay in update `t`."""
    return b2 if warmup is None or not policy.warms else warm_decay(b2, t, warmup)


def _gathered(
    rule: _Rule, updates: Updates, state: ScaleByGefenState, layout: Sequence[LeafLayout | None]
) -> list[tuple[Any, ...]] | Later[list[tuple[Any, ...]]]:
    """What each leaf's second moment needs of its other shards, as further arguments of its policy's `update`."""
    if not any(at is not None and at.piece.axes for at in layout):
        return [()] * len(layout)
    count, nu = (tree_parts(updates, tree) for tree in (state.count, state.nu))
    b2 = tree_parts(updates, broadcast(rule.b2, updates))
    warmup = [None] * len(b2) if rule.b2_warmup is None else tree_parts(updates, broadcast(rule.b2_warmup, updates))
    rows = zip(tree_leaves(updates), layout, count, nu, b2, warmup, strict=True)
    return at_once([_gathered_leaf(rule, place, *row) for place, row in enumerate(rows)])


def _gathered_leaf(
    rule: _Rule,
    place: int,
    g: Tensor | None,
    layout: LeafLayout | None,
    count: Tensor,
    nu: Any,
    b2: Scalar,
    warmup: Scalar | None,
) -> tuple[Any, ...] | Later[tuple[Any, ...]]:
    if g is None or layout is None or not layout.piece.axes:
        return ()
    policy = policy_for(rule.second_moment, layout)
    talk = policy.share(local(g), local(nu), _decay_of(policy, b2, count + 1, warmup), layout)
    return () if talk is None else then(begun(talk, (place,)), lambda shared: (shared,))


def _dense_moment(g: Tensor, mu: Tensor, b1: Scalar) -> tuple[Tensor, Tensor]:
    m = moving_average(b1, mu, g)
    return m, m


def _moment(
    rule: _Rule, codebook: Tensor, g: Tensor, mu: Quantized, t: Tensor, layout: LeafLayout, seed: int, b1: Scalar
) -> tuple[Tensor, Quantized]:
    """The moment that drives the update, and the one that is stored: `b1 mu + (1 - b1) g`, and its codes."""
    book = codebook.to(g.device)
    lie: dict[str, Any] = {"block": layout.block, "start": layout.start}
    if rule.rounding == "nearest":
        decay, rest = rounded(b1), rounded(1.0 - exact(b1))
        d, *new = ops.moment(g, *mu, book, decay, rest, ties=rule.ties, drive=rule.drive, **lie)  # type: ignore[arg-type]
        return d, Quantized(*new)
    m = moving_average(b1, reference.decode(*mu, book, **lie), g)
    noise = reference.as_uniform(ops.random_words(seed, t, g.shape, g.device, part_of(layout.piece)))
    book = book.clone(memory_format=torch.contiguous_format)  # vmap of `init` expands it
    stored = Quantized(*reference.encode(m, book, ties=rule.ties, noise=noise, **lie))
    return (m if rule.drive == "m" else reference.decode(*stored, book, **lie)), stored


def warm_decay(b2: Scalar, t: Scalar, warmup: Scalar) -> Scalar:
    """`min(b2, 1 - t^-q)` in float64: 0 at t = 1, so the weights of the average sum to one at every t."""
    return smaller(1.0 - exact(t) ** -exact(warmup), exact(b2))


def _check_arguments(b1: Any, b2: Any, eps: Any, b2_warmup: Any, block: Blocks) -> None:
    check_decay("b1", b1)
    check_decay("b2", b2)
    check_nonnegative("eps", eps)
    if b2_warmup is not None:
        fix = "Use 0.9, or None for a constant b2."
        check_number(b2_warmup, lambda q: 0 < q < math.inf, "0 < b2_warmup < inf", fix)
    check_blocks(block)
