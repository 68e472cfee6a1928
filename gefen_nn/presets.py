"""Optimizers with torch's names and argument order."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from gefen_fn import rounding
from gefen_fn.alias import gefen
from gefen_fn.base import GradientTransformation
from gefen_fn.combine import chain
from gefen_fn.inject import inject_hyperparams
from gefen_fn.scale import scale
from gefen_fn.scope import Scope
from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_nn import groups
from gefen_nn.checks import check_flags
from gefen_nn.optimizer import TransformOptimizer

_REFUSED = {
    **groups.REFUSED,
    "error_if_nonfinite": "It reads gradients on the host, which a step with capturable=True does not",
}


class Preset(TransformOptimizer):
    """An optimizer that can be built anew from its arguments, and so be pickled."""

    _arguments: Mapping[str, Any] = {}

    def _build(self, params: Iterable[Any], rule: Callable[..., GradientTransformation]) -> None:
        """Check the numbers that groups start from, and run `rule` of them; the arguments are kept before."""
        given = self._arguments
        self._settled = {**self._settled, "maximize": (given["maximize"],)}
        self.error_if_nonfinite = given["error_if_nonfinite"]
        self.block = given["block"] if isinstance(given["block"], int) else 0
        refuse(error_if_nonfinite=self.error_if_nonfinite and given["capturable"])
        rule()  # refuses what is fixed for its own sake, and not as a group's value
        groups.check_values(lambda values: rule(**values), self._start, self.keys, read=True)
        values = {name: float(x) for name, x in groups.read_values(self._start, self.keys).items()}
        tx = inject_hyperparams(rule)(**values)
        super().__init__(params, tx, fused=given["fused"], capturable=given["capturable"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the arguments, then put the state back."""
        arguments = {**self._start, **self._arguments}
        return _rebuild, (type(self), [dict(g) for g in self.param_groups], arguments, self.state_dict())


class Gefen(Preset):
    """AdamW with its first moment in one byte per entry and a factored second moment.

    Arguments up to `fused` are those of `torch.optim.AdamW`, but `weight_decay` is 0.0 where AdamW's is 0.01. The rule
    is `gefen_fn.gefen`. `lr`, `betas`, `eps` and `weight_decay` are group keys, read at each step.

    Args:
        params: parameters, `(name, parameter)` pairs or groups.
        lr: learning rate, a float or a 0-dim tensor.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, multiplied by `lr`.
        amsgrad: refused if True.
        foreach: accepted; every leaf is updated by the same code.
        maximize: ascend instead.
        capturable: keep counters and group values as tensors beside the parameters, and read nothing on the host, so
            that `step` may be captured in a CUDA graph after one that is not; see `TransformOptimizer`.
        differentiable: refused if True.
        fused: False keeps to the pure path; otherwise a back end steps in place where there is one.
        second_moment: `Factored`, `Block` or `Dense`.
        b2_warmup: exponent of the second moment's warm-up, None for a constant `b2`.
        block: entries per scale: an int, a tree of ints, or `FlatBlocks`.
        codebook: "learned", "fixed", a tensor, or a `Scope` of processes that learn one together.
        stochastic_rounding: round bf16 parameters up or down at random, by distance: small steps arrive on average.
        deterministic: accepted, being always so: from one state and gradients a step has the same bits in every run,
            on every replica, on any number of threads and, but for the codebook, beside any other parameters.
        error_if_nonfinite: raise before anything changes if a gradient is not finite; costs a host read per step.

    Raises:
        ValueError: for a value out of range, a flag that is no bool, or an argument that is refused.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = Gefen(model.named_parameters(), lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["scale_by_gefen.mu.codes"].dtype
        torch.uint8
    """

    keys: ClassVar[groups.Keys] = {
        "lr": ("learning_rate",),
        "betas": ("b1", "b2"),
        "eps": ("eps",),
        "weight_decay": ("weight_decay",),
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        second_moment: Any = DEFAULT_SECOND_MOMENT,
        b2_warmup: float | None = 0.9,
        block: Any = 256,
        codebook: str | Tensor | Scope = "learned",
        stochastic_rounding: bool = False,
        deterministic: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        check_flags(amsgrad=amsgrad, foreach=foreach, differentiable=differentiable, deterministic=deterministic)
        refuse(amsgrad=amsgrad, differentiable=differentiable)
        self._start = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        fixed = {"second_moment": second_moment, "b2_warmup": b2_warmup, "block": block, "codebook": codebook}
        flags: dict[str, Any] = {"maximize": maximize, "fused": fused, "error_if_nonfinite": error_if_nonfinite}
        flags |= {"capturable": capturable, "stochastic_rounding": stochastic_rounding}
        check_flags(**flags)
        self._arguments = {**fixed, **flags}
        self._build(params, _rule(flags, fixed))


def _rebuild(
    preset: type[Preset],
    param_groups: list[dict[str, Any]],
    arguments: dict[str, Any],
    state: dict[str, Any],
) -> TransformOptimizer:
    """Unpickle a preset: construct it from its arguments, then load its state.

    Args:
        preset: the class.
        param_groups: its groups, parameters included.
        arguments: the arguments that are no group keys, and the groups' defaults.
        state: its `state_dict()`.
    """
    optimizer = preset(param_groups, **arguments)
    optimizer.load_state_dict(state)
    return optimizer


def refuse(**flags: bool) -> None:
    """Raise `ValueError` for a flag that is set, saying why it may not be."""
    for name, flag in flags.items():
        if flag:
            raise ValueError(f"`{name}` must be False: got True. {_REFUSED[name]}.")


def between(tx: GradientTransformation, flags: Mapping[str, Any]) -> GradientTransformation:
    """`tx` of negated gradients with the flag `maximize`, and with parameters rounded with `stochastic_rounding`."""
    before = (scale(-1.0),) if flags["maximize"] else ()
    after = (rounding.stochastic_rounding(),) if flags["stochastic_rounding"] else ()
    return chain(*before, tx, *after) if before or after else tx


def _rule(flags: dict[str, Any], fixed: dict[str, Any]) -> Callable[..., GradientTransformation]:
    """The factory whose numbers are injected."""

    def rule(
        learning_rate: Any = 1e-3, b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-8, weight_decay: Any = 0.0
    ) -> GradientTransformation:
        return between(gefen(learning_rate, b1, b2, eps, weight_decay, **fixed), flags)

    rule.__name__ = "gefen"
    return rule
