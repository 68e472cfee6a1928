"""Muon for models' matrices, alone as in torch.optim and with another rule for all other parameters."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, ClassVar

from torch import Tensor, nn

from gefen_fn.base import GradientTransformation
from gefen_fn.muon_alias import gefen_muon, muon
from gefen_fn.routing import MUON
from gefen_fn.scalar import check_choice, check_int
from gefen_fn.scope import Scope
from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_fn.spec import Spec, check_rule
from gefen_kernels import ns_coefficients as triples_of
from gefen_nn import groups
from gefen_nn.checks import check_flags
from gefen_nn.presets import Preset, between
from gefen_nn.route import Choice, Routing, Rules, check_used, choose, chosen_by, routing

_STANDARD = (3.4445, -4.775, 2.0315)
_NO_TRIPLES = (
    "`ns_coefficients` must be one triple of finite numbers, a name in `gefen_fn.NS_COEFFS`, or a triple for each "
    f"iteration: got {{!r}}. Use {_STANDARD}, the default."
)


class Muon(Preset):
    """Muon with its momentum in one byte per entry; every parameter must be a matrix, see `GefenMuon` for models.

    Arguments up to `adjust_lr_fn` are those of `torch.optim.Muon`, which also takes no more than 2 axes. The rule is
    `gefen_fn.muon`. `lr`, `weight_decay` and `momentum` are group keys, read at each step. What groups say of
    `nesterov`, `ns_coefficients`, `eps`, `ns_steps` and `adjust_lr_fn`, as those that torch's Muon filled do, must be
    what the arguments say.

    Args:
        params: parameters, `(name, parameter)` pairs or groups.
        lr: learning rate, a float or a 0-dim tensor.
        weight_decay: decoupled decay, multiplied by `lr`.
        momentum: decay of the momentum.
        nesterov: look one step ahead.
        ns_coefficients: of the iterations: one triple, taken `ns_steps` times, a name in `gefen_fn.NS_COEFFS`, or a
            triple for each iteration.
        eps: least norm that a matrix is divided by.
        ns_steps: iterations of one triple; 5 beside a name or several triples, which say themselves how many.
        adjust_lr_fn: scale of the learning rate by shape, see `gefen_fn.adjust_scale`; None for "original".
        normuon: "norm_kept" or "paper" normalises rows.
        quantize: False keeps the momentum in fp32.
        sharded: how matrices cut by shards are made orthogonal: "auto", "distributed", "exact" or "blockwise", see
            `gefen_fn.scale_by_muon`.
        spec: which axes are the matrix: a `MatrixAxes`, a tree of those by name, or a function of such params.
        block: entries per scale: an int, a tree of ints, or `FlatBlocks`.
        codebook: "learned", "fixed", a tensor, or a `Scope` of processes that learn one together.
        maximize: ascend instead.
        capturable: as of `Gefen`, like the next one.
        stochastic_rounding: see there.
        fused: False keeps to the pure path; otherwise a back end steps in place where there is one.
        error_if_nonfinite: raise before anything changes if a gradient is not finite; costs a host read per step.

    Raises:
        ValueError: for a value out of range, or a parameter that is no matrix, naming it.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        >>> weights = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
        >>> optimizer = Muon(weights, lr=0.02, adjust_lr_fn="match_rms_adamw")
        >>> optimizer.param_groups[0]["param_names"]
        ['0.weight', '1.weight']
    """

    keys: ClassVar[groups.Keys] = {
        "lr": ("learning_rate",),
        "weight_decay": ("weight_decay",),
        "momentum": ("momentum",),
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = _STANDARD,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        normuon: bool | str = False,
        quantize: bool = True,
        sharded: str = "auto",
        spec: Spec = None,
        block: Any = 256,
        codebook: str | Tensor | Scope = "learned",
        maximize: bool = False,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        fused: bool | None = None,
        error_if_nonfinite: bool = False,
    ) -> None:
        check_rule(adjust_lr_fn, "adjust_lr_fn")
        self._start = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        self._settled = {"eps": (eps,), **_settled(nesterov, ns_coefficients, ns_steps, adjust_lr_fn)}
        fixed = {"nesterov": nesterov, "eps": eps, "normuon": normuon, "quantize": quantize, "spec": spec}
        fixed |= {"block": block, "codebook": codebook, "sharded": sharded}
        named_otherwise = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        flags: dict[str, Any] = {"maximize": maximize, "fused": fused, "error_if_nonfinite": error_if_nonfinite}
        flags |= {"capturable": capturable, "stochastic_rounding": stochastic_rounding}
        check_flags(nesterov=nesterov, quantize=quantize, **flags)
        self._arguments = {**fixed, **named_otherwise, **flags}
        inner = {"coeffs": _coefficients(ns_coefficients, ns_steps), "adjust": adjust_lr_fn}
        self._build(params, _muon_rule(flags, {**fixed, **inner}))


def _coefficients(given: Any, steps: int) -> Any:
    """What `gefen_fn.muon` takes as `coeffs`.

    Raises:
        ValueError: for what is neither a triple nor a name nor triples, or steps of a name.
        TypeError: for what is no sequence.
    """
    if _is_triple(given):
        check_int("ns_steps", steps, 1, "Use 5.")
        return (tuple(given),) * steps
    try:
        triples_of(given)
    except (TypeError, ValueError) as error:
        raise type(error)(_NO_TRIPLES.format(given)) from error
    if steps != 5:
        raise ValueError(
            f"`ns_steps` repeats one triple: got {steps} beside {given!r}. Leave it out, or give a triple."
        )
    return given


def _is_triple(given: Any) -> bool:
    is_row = isinstance(given, (tuple, list)) and len(given) == 3
    return is_row and all(isinstance(x, Real) and math.isfinite(x) for x in given)


def _settled(nesterov: bool, given: Any, steps: int, adjust: str | None) -> dict[str, tuple[Any, ...]]:
    """What a group may say of these arguments, in this optimizer's form or in that of torch's Muon."""
    triples = triples_of(_coefficients(given, steps))
    is_one = len(set(triples)) == 1
    return {
        "nesterov": (nesterov,),
        "ns_coefficients": (given, *triples[:1]) if is_one else (given,),
        "ns_steps": (len(triples) if is_one else steps,),
        "adjust_lr_fn": (adjust, None, "original") if adjust in (None, "original") else (adjust,),
    }


def _muon_rule(flags: dict[str, Any], fixed: dict[str, Any]) -> Callable[..., GradientTransformation]:
    """The factory whose numbers are injected."""

    def rule(learning_rate: Any = 1e-3, weight_decay: Any = 0.1, momentum: Any = 0.95) -> GradientTransformation:
        return between(muon(learning_rate, momentum, weight_decay=weight_decay, **fixed), flags)

    rule.__name__ = "muon"
    return rule


class GefenMuon(Preset):
    """Muon for the matrices of a model and Gefen or AdamW for its other parameters, as one optimizer.

    `route` decides which parameter is whose; `optimizer.routing()` prints it. Each group is split in two by it, marked
    by the key `rule`, so that a scheduler keeps the ratio of their learning rates. With "match_rms_adamw" both parts
    take AdamW's learning rate. The rule is `gefen_fn.gefen_muon`. `lr`, `weight_decay`, `momentum` (of Muon), `betas`
    and `eps` (of the backup) are group keys, read at each step.

    Args:
        model: a module; or `(name, parameter)` pairs or groups of them, of which shapes and names alone tell, unless
            `rules=route(model).choices`.
        lr: learning rate, a float or a 0-dim tensor; of a group that has its own, both parts take that.
        muon_lr: of Muon's part; None for `lr`.
        backup_lr: of the backup's part; None for `lr`.
        backup: "gefen" or "adamw".
        weight_decay: decoupled decay of both parts, multiplied by their learning rates.
        adjust_lr_fn: scale of Muon's learning rate by shape, see `gefen_fn.adjust_scale`.
        momentum: as of `Muon`, like the next five.
        nesterov: see there.
        ns_coefficients: see there.
        ns_steps: see there.
        normuon: see there.
        quantize: see there.
        betas: as of `Gefen`, like the next three.
        eps: see there.
        second_moment: see there.
        b2_warmup: see there.
        block: entries per scale of every quantized moment: an int, or `FlatBlocks`.
        codebook: of each part: "learned", "fixed", a tensor, or a `Scope`, as of `Muon`.
        rules: what you want otherwise than `route` does, see there; a dict or a function.
        require_muon: refuse a model of which no parameter is Muon's.
        sharded: as of `Muon`, like the next five.
        maximize: see there.
        capturable: see there.
        stochastic_rounding: see there; of both parts.
        fused: see there.
        error_if_nonfinite: see there.

    Raises:
        TypeError: for parameters without names.
        ValueError: for a value out of range, a rule that is none or does not fit, or if no parameter is Muon's.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64))
        >>> optimizer = GefenMuon(model, lr=1e-3, muon_lr=2e-3)
        >>> [(group["rule"], group["param_names"], group["lr"]) for group in optimizer.param_groups]
        [('muon', ['1.weight'], 0.002), ('gefen', ['0.weight', '1.bias'], 0.001)]
    """

    keys: ClassVar[groups.Keys] = {
        "lr": ("learning_rate",),
        "weight_decay": ("weight_decay",),
        "momentum": ("momentum",),
        "betas": ("b1", "b2"),
        "eps": ("eps",),
    }

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        muon_lr: float | Tensor | None = None,
        backup_lr: float | Tensor | None = None,
        backup: str = "gefen",
        weight_decay: float = 0.0,
        adjust_lr_fn: str | None = "match_rms_adamw",
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = _STANDARD,
        ns_steps: int = 5,
        normuon: bool | str = False,
        quantize: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        second_moment: Any = DEFAULT_SECOND_MOMENT,
        b2_warmup: float | None = 0.9,
        block: Any = 256,
        codebook: str | Tensor | Scope = "learned",
        rules: Rules | None = None,
        require_muon: bool = True,
        sharded: str = "auto",
        maximize: bool = False,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        fused: bool | None = None,
        error_if_nonfinite: bool = False,
    ) -> None:
        check_rule(adjust_lr_fn, "adjust_lr_fn")
        check_choice("backup", backup, ("gefen", "adamw"))
        given, module = _groups(model), model if isinstance(model, nn.Module) else None
        named = [pair for group in given for pair in group["params"]]
        check_used(rules, named, module)
        self._choices = choose(named, module, rules, backup)
        self._choice = _chooser(dict(self._choices), rules, backup)
        self._lrs = {MUON: lr if muon_lr is None else muon_lr, backup: lr if backup_lr is None else backup_lr}
        self._start = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        self._settled = _settled(nesterov, ns_coefficients, ns_steps, adjust_lr_fn)
        of_muon = {"nesterov": nesterov, "normuon": normuon, "quantize": quantize, "sharded": sharded}
        of_backup = {"backup": backup, "second_moment": second_moment, "b2_warmup": b2_warmup}
        fixed = {**of_muon, **of_backup, "block": block, "codebook": codebook, "require_muon": require_muon}
        named_otherwise = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        rates = {"muon_lr": muon_lr, "backup_lr": backup_lr}
        flags: dict[str, Any] = {"maximize": maximize, "fused": fused, "error_if_nonfinite": error_if_nonfinite}
        flags |= {"capturable": capturable, "stochastic_rounding": stochastic_rounding}
        check_flags(nesterov=nesterov, quantize=quantize, require_muon=require_muon, **flags)
        self._arguments = {**fixed, **named_otherwise, **rates, **flags, "rules": self._choices}
        labels, spec = chosen_by(self._choice)
        inner = {"coeffs": _coefficients(ns_coefficients, ns_steps), "adjust": adjust_lr_fn}
        rule = _gefen_muon_rule(flags, {**fixed, **inner, "param_labels": labels, "spec": spec})
        for name in [name for name, x in rates.items() if x is not None]:
            groups.check_values(lambda x: rule(*x.values()), rates, {name: (name,)}, read=True)
        self._build(given if named else [], rule)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, split by rule; a new name is routed by `rules`, its shape and itself.

        Raises:
            TypeError: for parameters without names.
            ValueError: for a parameter or name given twice, a key that no step would read, or a value out of range.
        """
        before, choices = len(self.param_groups), dict(self._choices)
        try:
            for part in self._split(param_group):
                super().add_param_group(part)
        except BaseException:
            del self.param_groups[before:]
            self._choices.clear()
            self._choices.update(choices)
            raise

    def _split(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Muon's part of a group and the backup's, those that are not empty."""
        rest = {key: value for key, value in group.items() if key not in ("params", "param_names", "rule")}
        chosen = {name: (p, self._choice(name, p)) for name, p in _pairs(group)}
        self._choices.update({name: choice for name, (_, choice) in chosen.items()})
        for rule, lr in self._lrs.items():
            own = [(name, p) for name, (p, choice) in chosen.items() if choice.rule == rule]
            if own:
                yield {"lr": lr, **rest, "params": own, "rule": rule}

    def routing(self) -> Routing:
        """Which parameter is whose and why, with its learning rate and the bytes of its state; print it for a table."""
        named = self._named()
        lrs = {
            name: float(group["lr"])
            for group, names in zip(self.param_groups, self._members(), strict=True)
            for name in names
        }
        params = {name: named[name] for name in self._choices if name in named}
        return routing(params, self._choices, self._tx, lrs, self._arguments["adjust_lr_fn"])


def _groups(model: Any) -> list[dict[str, Any]]:
    """A module, pairs or groups as groups of pairs.

    Raises:
        TypeError: if parameters have no names.
    """
    parts = list(model.named_parameters() if isinstance(model, nn.Module) else model)
    grouped = parts if parts and isinstance(parts[0], dict) else [{"params": parts}]
    kept = [{key: value for key, value in group.items() if key != "param_names"} for group in grouped]
    return [{**rest, "params": _pairs(group)} for rest, group in zip(kept, grouped, strict=True)]


def _pairs(group: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Names and parameters of a group.

    Raises:
        TypeError: if it has no names.
        ValueError: if a name stands twice.
    """
    given = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    pairs: list[Any] = list(zip(group["param_names"], given, strict=True)) if "param_names" in group else given
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor) for pair in pairs):
        raise TypeError(
            "Parameters must have names, by which embeddings and output layers are known: got some without. "
            "Pass the model, or `model.named_parameters()`."
        )
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"Each parameter and name appears once: got {twice} twice. Drop one.")
    return pairs


def _chooser(known: dict[str, Choice], rules: Rules | None, backup: str) -> Callable[[str, Tensor], Choice]:
    """The choice for any parameter: what was found with the model's modules, for later ones what can be told alone."""
    return lambda name, p: known[name] if name in known else choose([(name, p)], None, rules, backup)[name]


def _gefen_muon_rule(flags: dict[str, Any], fixed: dict[str, Any]) -> Callable[..., GradientTransformation]:
    """The factory whose numbers are injected."""

    def rule(
        learning_rate: Any = 1e-3,
        weight_decay: Any = 0.0,
        momentum: Any = 0.95,
        b1: Any = 0.9,
        b2: Any = 0.999,
        eps: Any = 1e-8,
    ) -> GradientTransformation:
        numbers = {"weight_decay": weight_decay, "momentum": momentum, "b1": b1, "b2": b2, "eps": eps}
        return between(gefen_muon(learning_rate, **numbers, **fixed), flags)

    rule.__name__ = "gefen_muon"
    return rule
