"""Adam and Lion: moments stored whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, Params, Recipe, Updates, made
from gefen_fn.inject import takes_schedules
from gefen_fn.scalar import (
    Scalar,
    bias_correction,
    check_decay,
    check_dtype,
    check_nonnegative,
    check_state,
    moving_average,
    per_leaf,
    rounded,
)
from gefen_fn.scale import counts, moments
from gefen_fn.tree import Tree, check_floating, map_update
from gefen_kernels import reference


class ScaleByAdamState(NamedTuple):
    """`count`: int32 per leaf, updates of that leaf; `mu`, `nu`: the moments, as the parameters."""

    count: Tree
    mu: Tree
    nu: Tree


class ScaleByLionState(NamedTuple):
    """`mu`: the moment, as the parameters."""

    mu: Tree


@takes_schedules
def scale_by_adam(
    b1: Scalar | Tree = 0.9,
    b2: Scalar | Tree = 0.999,
    eps: Scalar | Tree = 1e-8,
    eps_root: Scalar | Tree = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam's direction (arXiv 1412.6980, algorithm 1): `mu_hat / (sqrt(nu_hat + eps_root) + eps)`.

    Counts are per leaf: one whose gradient is `None` keeps count and moments. Updates are fp32. Every number may be a
    0-dim tensor, a tree of them per leaf, or a schedule of the calls so far.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: added outside the root.
        eps_root: added inside the root; above 0 it makes the update differentiable at a zero gradient.
        mu_dtype: dtype that stores `mu`, fp32 if None; `nu` is fp32.
        nesterov: look ahead, as NAdam: `mu_hat = b1 mu / (1 - b1^(t+1)) + (1 - b1) g / (1 - b1^t)` (Dozat 2016).

    Raises:
        ValueError: if a number is out of range, or the dtype is no floating one.
        StructureError: from `update`, if updates and state do not fit.

    Example:
        >>> tx = scale_by_adam()
        >>> updates, state = tx.update(torch.tensor([1e-4, -100.0]), tx.init(torch.zeros(2)))
        >>> [round(u, 3) for u in updates.tolist()]  # the sign, at a first step
        [1.0, -1.0]
    """
    for name, value in (("b1", b1), ("b2", b2)):
        check_decay(name, value)
    for name, value in (("eps", eps), ("eps_root", eps_root)):
        check_nonnegative(name, value)
    check_dtype("mu_dtype", mu_dtype)
    leaf = _nadam_leaf if nesterov else _adam_leaf

    def init(params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(counts(params), moments(params, mu_dtype), moments(params, None))

    def update(
        updates: Updates, state: ScaleByAdamState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, ScaleByAdamState]:
        check_state(state, ScaleByAdamState)
        out, new = map_update(leaf, updates, state, *(per_leaf(h, updates) for h in (b1, b2, eps, eps_root)))
        return out, ScaleByAdamState(*new)

    given = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "mu_dtype": mu_dtype, "nesterov": nesterov}
    return made(Recipe("scale_by_adam", (), given), init, update)


def _averages(
    g: Tensor, count: Tensor, mu: Tensor, nu: Tensor, b1: Scalar, b2: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    check_floating(mu, g)
    g = g.float()
    return count + 1, moving_average(b1, mu, g), moving_average(b2, nu, g * g)


def _root(nu: Tensor, b2: Scalar, t: Tensor, eps: Scalar, eps_root: Scalar) -> Tensor:
    return reference.root(nu / bias_correction(b2, t) + rounded(eps_root)) + rounded(eps)


def _adam_leaf(
    g: Tensor, count: Tensor, mu: Tensor, nu: Tensor, b1: Scalar, b2: Scalar, eps: Scalar, eps_root: Scalar
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, m, v = _averages(g, count, mu, nu, b1, b2)
    return m / bias_correction(b1, t) / _root(v, b2, t, eps, eps_root), t, m.to(mu.dtype), v


def _nadam_leaf(
    g: Tensor, count: Tensor, mu: Tensor, nu: Tensor, b1: Scalar, b2: Scalar, eps: Scalar, eps_root: Scalar
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, m, v = _averages(g, count, mu, nu, b1, b2)
    ahead = moving_average(b1, m / bias_correction(b1, t + 1), g.float() / bias_correction(b1, t))
    return ahead / _root(v, b2, t, eps, eps_root), t, m.to(mu.dtype), v


@takes_schedules
def scale_by_lion(
    b1: Scalar | Tree = 0.9, b2: Scalar | Tree = 0.99, mu_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Lion's direction (arXiv 2302.06675): `sign(b1 mu + (1 - b1) g)`, then `mu <- b2 mu + (1 - b2) g`.

    Args:
        b1: decay that mixes the update, in [0, 1): a number, a 0-dim tensor, a tree of those per leaf, or a schedule.
        b2: decay of the moment, in [0, 1), likewise.
        mu_dtype: dtype that stores `mu`, fp32 if None. Updates are fp32 in any case.

    Raises:
        ValueError: if a number is out of range, or the dtype is no floating one.

    Example:
        >>> tx = scale_by_lion()
        >>> updates, state = tx.update(torch.tensor([0.1, -5.0, 0.0]), tx.init(torch.zeros(3)))
        >>> updates
        tensor([ 1., -1.,  0.])
        >>> state._fields
        ('mu',)
    """
    for name, value in (("b1", b1), ("b2", b2)):
        check_decay(name, value)
    check_dtype("mu_dtype", mu_dtype)

    def init(params: Params) -> ScaleByLionState:
        return ScaleByLionState(moments(params, mu_dtype))

    def leaf(g: Tensor, mu: Tensor, d1: Scalar, d2: Scalar) -> tuple[Tensor, Tensor]:
        check_floating(mu, g)
        return moving_average(d1, mu, g).sign(), moving_average(d2, mu, g).to(mu.dtype)

    def update(
        updates: Updates, state: ScaleByLionState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, ScaleByLionState]:
        check_state(state, ScaleByLionState)
        out, new = map_update(leaf, updates, state, per_leaf(b1, updates), per_leaf(b2, updates))
        return out, ScaleByLionState(*new)

    return made(Recipe("scale_by_lion", (), {"b1": b1, "b2": b2, "mu_dtype": mu_dtype}), init, update)
