"""Reading what other packages' optimizers saved: torch's Adam, AdamW and Muon, and Gefen-X 0.5."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.quantize import is_codebook
from gefen_fn.tree import list_names
from gefen_kernels import reference
from gefen_nn.errors import CheckpointError

_VALUES = ("lr", "betas", "eps", "weight_decay")
_MUON_VALUES = ("lr", "weight_decay", "momentum")
_MUON_SETTLED = ("nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")

Source = Mapping[str, Any]


class Moments(NamedTuple):
    """What another optimizer knows of a parameter.

    Attributes:
        mu: average of its gradients from a start at zero, fp32, as Adam keeps it.
        nu: average of their squares, likewise; None of Muon, which keeps none.
        steps: updates taken; None of Muon, which does not count.
        betas: the decays of both.
    """

    mu: Tensor
    nu: Tensor | None
    steps: int | None
    betas: tuple[float, float]


class Foreign(NamedTuple):
    """A state dict of another package by parameter name.

    Attributes:
        moments: of parameters that had any.
        values: of their group.
        settled: what a group of torch's Muon says of arguments that are one for all groups of ours; empty of others.
    """

    moments: dict[str, Moments]
    values: dict[str, dict[str, Any]]
    settled: dict[str, dict[str, Any]]


def read_foreign(
    source: Source | Sequence[Source], params: Mapping[str, Tensor], *, named: bool, regrouped: bool = False
) -> Foreign:
    """Sort another optimizer's state dict by parameter name.

    Args:
        source: its `state_dict()`, or what torch's `get_optimizer_state_dict` made of it; or those of several
            optimizers that had the parameters among them.
        params: the target's parameters, in order.
        named: whether their names are known, and not only their positions.
        regrouped: whether the target has put them in another order than they were given in.

    Raises:
        CheckpointError: for another kind of state dict, or names or shapes that do not fit.
    """
    sources: list[Any] = list(source) if isinstance(source, (list, tuple)) else [source]
    for one in sources:
        if not isinstance(one, Mapping) or not {"state", "param_groups"} <= one.keys():
            came = sorted(map(str, one)) if isinstance(one, Mapping) else type(one).__name__
            raise CheckpointError(
                f"A state dict has `state` and `param_groups`: got {came}. Pass `optimizer.state_dict()`."
            )
    names = [_names(one["param_groups"], params, named, regrouped, len(sources) == 1) for one in sources]
    _check_names([name for own in names for name in own.values()], params)
    read = [_read(one, own, params) for one, own in zip(sources, names, strict=True)]
    return Foreign(*({k: x for part in parts for k, x in part.items()} for parts in zip(*read, strict=True)))


def _read(source: Source, names: Mapping[Any, str], params: Mapping[str, Tensor]) -> Foreign:
    """One state dict."""
    owners = {names[i]: group for group in source["param_groups"] for i in group["params"]}
    values = {name: _values(group) for name, group in owners.items()}
    moments = {}
    for i, leaves in source["state"].items():
        if leaves:
            name = names[i]
            read = _read_gefen_x if "gefen_codebook" in source else _read_muon if _is_muon(owners[name]) else _read_adam
            moments[name] = read(name, leaves, params[name], values[name], source)
    settled = {name: {k: x for k, x in group.items() if k in _MUON_SETTLED} for name, group in owners.items()}
    return Foreign(moments, values, {name: x if _is_muon(owners[name]) else {} for name, x in settled.items()})


def _is_muon(group: Mapping[str, Any]) -> bool:
    return {"momentum", "ns_steps"} <= group.keys()


def _names(saved: Any, params: Mapping[str, Tensor], named: bool, regrouped: bool, alone: bool) -> dict[Any, str]:
    """The target's name of each index: the saved one where there is one, else that of the position."""
    ids = [i for group in saved for i in group["params"]]
    if named and all("param_names" in group for group in saved):
        names = [name for group in saved for name in group["param_names"]]
    elif all(isinstance(i, str) for i in ids):
        names = ids
    else:
        names = list(params)
        if not alone or regrouped:
            where = "an optimizer that puts Muon's first" if alone else "one of several optimizers"
            raise CheckpointError(
                "Parameters must have names where their order differs: got a state that knows them by position, for "
                f"{where}. Build the old optimizer with `model.named_parameters()`, load the old state into it, and "
                "convert its `state_dict()`."
            )
    if len(ids) != len(names):
        raise CheckpointError(
            f"Parameters must match: got {len(ids)} for {len(names)}. Build the optimizer with the same parameters."
        )
    return dict(zip(ids, names, strict=True))


def _check_names(names: Sequence[str], params: Mapping[str, Tensor]) -> None:
    missing = sorted(name for name in params.keys() - set(names) if params[name].requires_grad)
    extra = sorted(set(names) - params.keys())
    twice = sorted({name for name in names if names.count(name) > 1})
    if missing or extra or twice:
        came = list_names(missing=missing, unexpected=extra, twice=twice)
        raise CheckpointError(f"Parameters must match: got {came}. Build the optimizer with the same named parameters.")


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values by torch's names; Gefen-X has two betas under names of their own."""
    if group.get("amsgrad"):
        raise CheckpointError("`amsgrad` must be False: got True, whose maximum has no place here. Start fresh.")
    if _is_muon(group):
        return {key: x for key, x in group.items() if key in _MUON_VALUES}
    both = {"betas": (group["beta1"], group.get("beta2"))} if "beta1" in group else {}
    values = {key: x for key, x in {**group, **both}.items() if key in _VALUES}
    if "betas" not in values:
        raise CheckpointError(
            f"A group must have `betas`, as of Adam, AdamW or Gefen-X, or be Muon's: got {sorted(map(str, group))}. "
            "Another optimizer's moments mean something else: load the model alone and start fresh."
        )
    betas = values["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(map(_is_number, betas)):
        raise CheckpointError(f"`betas` of a group must be two numbers: got {betas!r}. The file is damaged.")
    return {**values, "betas": tuple(map(float, betas))}


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex())


def _field(name: str, leaves: Mapping[str, Any], key: str) -> Any:
    if key not in leaves:
        raise CheckpointError(
            f"State of {name!r} must have `{key}`: got {sorted(map(str, leaves))}. "
            "Only Adam, AdamW, Muon and Gefen-X 0.5 are read."
        )
    return leaves[key]


def _check_tensor(name: str, what: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.is_meta or x.is_complex():
        raise CheckpointError(
            f"The {what} moment of {name!r} must be a tensor with data: got a {type(x).__name__}. The file is damaged."
        )


def _checked(name: str, what: str, x: Tensor, p: Tensor) -> Tensor:
    """A moment in fp32."""
    _check_tensor(name, what, x)
    if x.shape != p.shape or not bool(x.isfinite().all()):
        came = tuple(x.shape) if x.shape != p.shape else "values that are not finite"
        raise CheckpointError(f"The {what} moment of {name!r} must be finite, {tuple(p.shape)}: got {came}.")
    return x.float()


def _moments(name: str, p: Tensor, mu: Tensor, nu: Tensor, count: Any, values: Mapping[str, Any]) -> Moments:
    first, second = _checked(name, "first", mu, p), _checked(name, "second", nu, p)
    number = float(count) if _is_number(count) else math.nan
    if not number >= 1 or number % 1 != 0:  # NaN is neither
        raise CheckpointError(f"`step` of {name!r} must count from 1 upwards: got {number}. The file is damaged.")
    return Moments(first, second, int(number), values["betas"])


def _read_adam(
    name: str, leaves: Mapping[str, Any], p: Tensor, values: Mapping[str, Any], source: Mapping[str, Any]
) -> Moments:
    mu, nu, step = (_field(name, leaves, key) for key in ("exp_avg", "exp_avg_sq", "step"))
    return _moments(name, p, mu, nu, step, values)


def _read_muon(
    name: str, leaves: Mapping[str, Any], p: Tensor, values: Mapping[str, Any], source: Mapping[str, Any]
) -> Moments:
    """The buffer is an average from zero, `m = momentum m + (1 - momentum) g`, as its documentation and steps show."""
    mu = _checked(name, "first", _field(name, leaves, "momentum_buffer"), p)
    if not _is_number(values["momentum"]):
        raise CheckpointError(f"`momentum` of a group must be a number: got {values['momentum']!r}. It is damaged.")
    return Moments(mu, None, None, (float(values["momentum"]), 0.0))


def _check_codes(name: str, codes: Tensor, magnitude: Tensor, book: Any, p: Tensor) -> None:
    """Refuse codes that this codebook and these magnitudes cannot decode into the parameter's moment."""
    if not isinstance(book, Tensor) or book.dim() != 1 or not is_codebook(book):
        raise CheckpointError("`gefen_codebook` must be sorted, finite and end at -1 and 1. The file is damaged.")
    for part in (codes, magnitude):
        _check_tensor(name, "first", part)
    whole = codes.dim() == 2 and magnitude.numel() == codes.shape[0] and codes.numel() == p.numel()
    if codes.dtype != torch.uint8 or not whole or (codes.numel() and int(codes.max()) >= len(book)):
        came = f"{codes.dtype} {tuple(codes.shape)} with {magnitude.numel()} magnitudes"
        raise CheckpointError(
            f"Codes of {name!r} must be uint8 rows with a magnitude each, {p.numel()} in all, below {len(book)}: got "
            f"{came}. The file is damaged."
        )


def _read_gefen_x(
    name: str, leaves: Mapping[str, Any], p: Tensor, values: Mapping[str, Any], source: Mapping[str, Any]
) -> Moments:
    """Codes `[N / B, B]` of the flattened leaf with a magnitude for each row, and block means or row and column means.

    The fields are those that its `state_dict()` shows; B is `automatic_period`.
    """
    codes, magnitude, step = (_field(name, leaves, key) for key in ("m_codebook", "m_magnitude", "step"))
    _check_codes(name, codes, magnitude, source["gefen_codebook"], p)
    mu = reference.decode(codes, magnitude, source["gefen_codebook"], block=codes.shape[1])
    if "v_row" in leaves:
        row, col = leaves["v_row"], _field(name, leaves, "v_col")
        for part in (row, col):
            _check_tensor(name, "second", part)
        row, col = row.float(), col.float()
        nu = row.unsqueeze(1) * (col / row.mean().clamp(min=1e-38))
    else:
        means = _field(name, leaves, "vmean")
        _check_tensor(name, "second", means)
        nu = means.float().expand(codes.shape)
    return _moments(name, p, mu.reshape(p.shape), nu.reshape(p.shape), step, values)
