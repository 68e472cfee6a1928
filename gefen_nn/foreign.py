"""Reading what other packages' optimizers saved: torch's Adam and AdamW, and Gefen-X 0.5."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gefen_fn.tree import list_names
from gefen_kernels import reference
from gefen_nn.errors import CheckpointError

_VALUES = ("lr", "betas", "eps", "weight_decay")


class Moments(NamedTuple):
    """What another optimizer knows of a parameter.

    Attributes:
        mu: average of its gradients from a start at zero, fp32, as Adam keeps it.
        nu: average of their squares, likewise.
        steps: updates taken.
        betas: the decays of both.
    """

    mu: Tensor
    nu: Tensor
    steps: int
    betas: tuple[float, float]


class Foreign(NamedTuple):
    """A state dict of another package by parameter name: moments, of those that had any, and values of their group."""

    moments: dict[str, Moments]
    values: dict[str, dict[str, Any]]


def read_foreign(
    source: Mapping[str, Any], params: Mapping[str, Tensor], *, named: bool, regrouped: bool = False
) -> Foreign:
    """Sort another optimizer's state dict by parameter name.

    Args:
        source: its `state_dict()`, or what torch's `get_optimizer_state_dict` made of it.
        params: the target's parameters, in order.
        named: whether their names are known, and not only their positions.
        regrouped: whether the target has put them in another order than they were given in.

    Raises:
        CheckpointError: for another kind of state dict, or names or shapes that do not fit.
    """
    if not isinstance(source, Mapping) or not {"state", "param_groups"} <= source.keys():
        came = sorted(map(str, source)) if isinstance(source, Mapping) else type(source).__name__
        raise CheckpointError(
            f"A state dict has `state` and `param_groups`: got {came}. Pass `optimizer.state_dict()`."
        )
    names = _names(source["param_groups"], params, named, regrouped)
    values = {names[i]: _values(group) for group in source["param_groups"] for i in group["params"]}
    read: Callable[..., Moments] = _read_gefen_x if "gefen_codebook" in source else _read_adam
    moments = {}
    for i, leaves in source["state"].items():
        if leaves:
            name = names[i]
            moments[name] = read(name, leaves, params[name], values[name]["betas"], source)
    return Foreign(moments, values)


def _names(saved: Any, params: Mapping[str, Tensor], named: bool, regrouped: bool) -> dict[Any, str]:
    """The target's name of each index: the saved one where there is one, else that of the position."""
    ids = [i for group in saved for i in group["params"]]
    if named and all("param_names" in group for group in saved):
        names = [name for group in saved for name in group["param_names"]]
    else:
        names = ids if all(isinstance(i, str) for i in ids) else list(params)
    if names is not ids and regrouped and "param_names" not in saved[0]:
        raise CheckpointError(
            "Parameters must have names where their order differs: got a state that knows them by position, for an "
            "optimizer that puts Muon's first. Build the old optimizer with `model.named_parameters()`, load the old "
            "state into it, and convert its `state_dict()`."
        )
    missing = sorted(name for name in params.keys() - set(names) if params[name].requires_grad)
    extra = sorted(set(names) - params.keys())
    if missing or extra or len(ids) != len(names):
        came = list_names(missing=missing, unexpected=extra) or f"{len(ids)} for {len(names)}"
        raise CheckpointError(f"Parameters must match: got {came}. Build the optimizer with the same named parameters.")
    return dict(zip(ids, names, strict=True))


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values by torch's names; Gefen-X has two betas under names of their own."""
    if group.get("amsgrad"):
        raise CheckpointError("`amsgrad` must be False: got True, whose maximum has no place here. Start fresh.")
    betas = {"betas": (group["beta1"], group["beta2"])} if "beta1" in group else {}
    values = {key: x for key, x in {**group, **betas}.items() if key in _VALUES}
    if "betas" not in values:
        raise CheckpointError(
            f"A group must have `betas`, as of Adam, AdamW or Gefen-X: got {sorted(map(str, group))}. Another "
            "optimizer's moments mean something else: load the model alone and start fresh."
        )
    return {**values, "betas": tuple(map(float, values["betas"]))}


def _field(name: str, leaves: Mapping[str, Any], key: str) -> Any:
    if key not in leaves:
        raise CheckpointError(
            f"State of {name!r} must have `{key}`: got {sorted(map(str, leaves))}. "
            "Only Adam, AdamW and Gefen-X 0.5 are read."
        )
    return leaves[key]


def _moments(name: str, p: Tensor, mu: Tensor, nu: Tensor, count: Any, betas: tuple[float, float]) -> Moments:
    for what, x in (("first", mu), ("second", nu)):
        if x.shape != p.shape or not bool(x.isfinite().all()):
            came = tuple(x.shape) if x.shape != p.shape else "values that are not finite"
            raise CheckpointError(f"The {what} moment of {name!r} must be finite, {tuple(p.shape)}: got {came}.")
    number = float(count)
    if number < 1 or number != int(number):
        raise CheckpointError(f"`step` of {name!r} must count from 1 upwards: got {number}. The file is damaged.")
    return Moments(mu.float(), nu.float(), int(number), betas)


def _read_adam(
    name: str, leaves: Mapping[str, Any], p: Tensor, betas: tuple[float, float], source: Mapping[str, Any]
) -> Moments:
    mu, nu, step = (_field(name, leaves, key) for key in ("exp_avg", "exp_avg_sq", "step"))
    return _moments(name, p, mu, nu, step, betas)


def _read_gefen_x(
    name: str, leaves: Mapping[str, Any], p: Tensor, betas: tuple[float, float], source: Mapping[str, Any]
) -> Moments:
    """Codes `[N / B, B]` of the flattened leaf with a magnitude for each row, and block means or row and column means.

    The fields are those that its `state_dict()` shows; B is `automatic_period`.
    """
    codes, magnitude, step = (_field(name, leaves, key) for key in ("m_codebook", "m_magnitude", "step"))
    mu = reference.decode(codes, magnitude, source["gefen_codebook"], block=codes.shape[1])
    if "v_row" in leaves:
        row, col = leaves["v_row"].float(), _field(name, leaves, "v_col").float()
        nu = row.unsqueeze(1) * (col / row.mean().clamp(min=1e-38))
    else:
        nu = _field(name, leaves, "vmean").float().expand(codes.shape)
    return _moments(name, p, mu.reshape(p.shape), nu.reshape(p.shape), step, betas)
