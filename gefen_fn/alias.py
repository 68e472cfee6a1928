"""Whole optimizers, each a chain of a few stages."""

from typing import Any

import torch

from gefen_fn.adam import scale_by_adam, scale_by_lion
from gefen_fn.base import GradientTransformation, ScalarOrSchedule, identity
from gefen_fn.combine import chain
from gefen_fn.gefen import scale_by_gefen
from gefen_fn.scale import add_decayed_weights, scale_by_learning_rate, trace
from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT, SecondMoment


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Any = None,
    nesterov: bool = False,
    accumulator_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Gradient descent: `m = g + momentum m`, `p = p - learning_rate m`.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        momentum: decay of the trace; `None` keeps no state.
        nesterov: step along `g + momentum m`.
        accumulator_dtype: dtype of the trace; fp32 by default.

    Example:
        >>> sgd(0.1, momentum=0.9, nesterov=True)
        chain(trace(0.9, nesterov=True, accumulator_dtype=None), scale_by_learning_rate(0.1, flip_sign=True))
    """
    moving = identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype)
    return chain(moving, scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam (Kingma and Ba, 2015, algorithm 1): `p = p - learning_rate m_hat / (sqrt(v_hat + eps_root) + eps)`.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1: decay of the mean of gradients.
        b2: decay of the mean of squares.
        eps: added outside the square root.
        eps_root: added inside the square root, which makes the update differentiable at 0.
        mu_dtype: dtype of the first moment; fp32 by default.
        nesterov: look ahead in the first moment (NAdam).

    Example:
        >>> tx, x = adam(0.1), torch.tensor(3.0)
        >>> state = tx.init(x)
        >>> for _ in range(200):  # the gradient of x^2 is 2 x
        ...     updates, state = tx.update(2 * x, state)
        ...     x = apply_updates(x, updates)
        >>> bool(x.abs() < 1e-2)
        True
    """
    adapt = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return chain(adapt, scale_by_learning_rate(learning_rate))


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: torch.dtype | None = None,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019): Adam's direction plus `weight_decay p`, times the learning rate.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1: decay of the mean of gradients.
        b2: decay of the mean of squares.
        eps: added outside the square root.
        eps_root: added inside the square root.
        mu_dtype: dtype of the first moment; fp32 by default.
        weight_decay: decoupled decay, multiplied by the learning rate.
        mask: which leaves decay: a tree of bool, or a function of params that returns one.
        nesterov: look ahead in the first moment.

    Example:
        >>> params = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
        >>> tx = adamw(0.1, weight_decay=0.5, mask=decay_mask)
        >>> zeros = tree_map(torch.zeros_like, params)
        >>> updates, state = tx.update(zeros, tx.init(params), params)
        >>> apply_updates(params, updates)["weight"][0], apply_updates(params, updates)["bias"]
        (tensor([0.9500, 0.9500]), tensor([1., 1.]))
    """
    adapt = scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return chain(adapt, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: torch.dtype | None = None,
    weight_decay: Any = 1e-3,
    mask: Any = None,
) -> GradientTransformation:
    """Lion (Chen et al., 2023, algorithm 2): the sign of `b1 m + (1 - b1) g`, plus decoupled decay.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1: weight of the momentum in the direction.
        b2: decay of the momentum.
        mu_dtype: dtype of the momentum; fp32 by default.
        weight_decay: decoupled decay, multiplied by the learning rate.
        mask: which leaves decay: a tree of bool, or a function of params that returns one.

    Example:
        >>> params = {"w": torch.ones(100, 100)}
        >>> state_bytes(lion(1e-4).init(params)), state_bytes(adam(1e-3).init(params))
        (40000, 80004)
    """
    adapt = scale_by_lion(b1, b2, mu_dtype)
    return chain(adapt, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


def gefen(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    *,
    mask: Any = None,
    second_moment: SecondMoment = DEFAULT_SECOND_MOMENT,
    b2_warmup: Any = 0.9,
    block: Any = 256,
    codebook: Any = "learned",
    drive: str = "m",
    rounding: str = "nearest",
) -> GradientTransformation:
    """Gefen: AdamW's rule at about one byte of state per parameter.

    The first moment is kept as 8-bit codes of a learned codebook with one scale per block, the second moment as sums
    that `second_moment` describes. Per leaf, `p = p - learning_rate (direction + weight_decay p)`.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        b1: decay of the mean of gradients.
        b2: decay of the mean of squares.
        eps: added outside the square root.
        weight_decay: decoupled decay, multiplied by the learning rate; 0.0 where `adamw` has 1e-4.
        mask: which leaves decay: a tree of bool, or a function of params that returns one.
        second_moment: the policy `Dense()`, `Block()` or `Factored()`.
        b2_warmup: exponent q of the warmed `min(b2, 1 - t^-q)`; `None` corrects the bias instead.
        block: entries per scale of the codes: an int, a tree of int, or `FlatBlocks(tree)`.
        codebook: `"learned"`, `"fixed"`, a tensor of levels, or a `Scope` that learns one together.
        drive: which moment gives the direction, `"m"` or the published `"m_hat"`.
        rounding: of the codes, `"nearest"` or `"stochastic"`.

    Raises:
        ValueError: if an argument is out of its range (see `scale_by_gefen`).

    Example:
        >>> params = {"w": torch.ones(512, 512)}
        >>> schedule = warmup_cosine_decay_schedule(0.0, 3e-4, warmup_steps=100, decay_steps=1000)
        >>> state = gefen(schedule, weight_decay=0.1, mask=decay_mask).init(params)
        >>> round(state_bytes(state) / params["w"].numel(), 2)  # AdamW keeps 8
        1.07
    """
    adapt = scale_by_gefen(
        b1,
        b2,
        eps,
        second_moment=second_moment,
        b2_warmup=b2_warmup,
        block=block,
        codebook=codebook,
        drive=drive,
        rounding=rounding,
    )
    return chain(adapt, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))
