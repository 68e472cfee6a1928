"""Moments as fp32 tensors in the shapes of the parameters, decoded from an optimizer's state; AdamW's state of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gefen_fn.blocks import LeafLayout, layout_list
from gefen_fn.describe import quantizing
from gefen_fn.muon import block_lengths, momentum_layout
from gefen_fn.second_moment import FactoredState, policy_for
from gefen_fn.shards import is_sharded
from gefen_fn.spec import matrices
from gefen_kernels import reference
from gefen_nn import groups
from gefen_nn.dcp import check_ours
from gefen_nn.errors import CheckpointError
from gefen_nn.foreign import Moments
from gefen_nn.optimizer import TransformOptimizer

_BETAS = (0.9, 0.999)


def adamw_state(optimizer: TransformOptimizer) -> dict[str, Any]:
    """The state dict with which `torch.optim.AdamW` goes on where an optimizer of ours stands.

    Its moments are those that our steps use, so nothing is lost on this way. Parameters whose moments are Muon's have
    no second moment and are left without state: AdamW starts them afresh. Learning rate, betas, eps and weight decay
    are taken over from groups that carry them.

    Args:
        optimizer: with whole parameters.

    Returns:
        What `load_state_dict` of an AdamW over the same parameters in the same order takes.

    Raises:
        TypeError: for another package's optimizer.
        CheckpointError: if parameters are sharded, or no moments are kept.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = Gefen(model.named_parameters(), lr=3e-4)
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> adamw.load_state_dict(adamw_state(optimizer))
        >>> adamw.param_groups[0]["lr"]
        0.0003
    """
    check_ours(optimizer)
    moments = dense_moments(optimizer)
    target = torch.optim.AdamW([_group(group) for group in optimizer.param_groups]).state_dict()
    names = [name for member in groups.members(optimizer.param_groups) for name in member]
    ids = dict(zip(names, (i for group in target["param_groups"] for i in group["params"]), strict=True))
    target["state"] = {
        ids[name]: {"step": torch.tensor(float(m.steps), device="cpu"), "exp_avg": m.mu, "exp_avg_sq": m.nu}
        for name, m in moments.items()
        if m.nu is not None and m.steps is not None
    }
    return target


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group as AdamW takes it, with names if it has any."""
    values = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay") if key in group}
    named = "param_names" in group
    pairs = list(zip(group["param_names"], group["params"], strict=True)) if named else group["params"]
    return {**values, "params": pairs}


def dense_moments(optimizer: TransformOptimizer) -> dict[str, Moments]:
    """What an optimizer knows of each parameter that has had a step, in Adam's convention; it is not changed.

    Raises:
        CheckpointError: if parameters are sharded, or no moments are kept.
    """
    members, rules = groups.members(optimizer.param_groups), quantizing(optimizer.transform)
    rows = [
        (group, name, p)
        for group, names in zip(optimizer.param_groups, members, strict=True)
        for name, p in zip(names, group["params"], strict=True)
    ]
    params = {name: p for _, name, p in rows}
    if any(map(is_sharded, params.values())):
        raise CheckpointError("Parameters must be whole: got DTensors. Load the checkpoint on one process.")
    out: dict[str, Moments] = {}
    state = optimizer.state
    for group, name, p in rows:
        for stage in dict.fromkeys(key.split(".")[0] for key in state[p]):
            fields = {key.split(".", 1)[1]: x for key, x in state[p].items() if key.startswith(f"{stage}.")}
            if "mu" in fields or "mu.codes" in fields:
                layout = _layout(rules[stage], name, params) if stage in rules else None
                out[name] = _moments(fields, rules.get(stage), layout, group.get("betas", _BETAS))
    if not out:
        raise CheckpointError(
            f"The optimizer must keep moments as Adam, Gefen or Muon do: got {optimizer.transform!r}. Use one of those."
        )
    return {name: m for name, m in out.items() if m.steps != 0}


def _layout(rule: Mapping[str, Any], name: str, params: Mapping[str, Tensor]) -> LeafLayout:
    """How the codes of a parameter lie under a stage's arguments."""
    leaf = {other: p if other == name else None for other, p in params.items()}
    at = sorted(leaf).index(name)
    if "second_moment" in rule:
        return layout_list(rule["block"], leaf)[at]  # type: ignore[return-value]  # this leaf is there
    spec = rule["spec"](dict(params)) if callable(rule["spec"]) else rule["spec"]
    seen, length = matrices(spec, leaf, leaf)[at], block_lengths(rule["block"], leaf)[at]
    return momentum_layout(params[name], seen, length, rule)  # type: ignore[arg-type]  # likewise


def _moments(
    fields: Mapping[str, Tensor], rule: Mapping[str, Any] | None, layout: LeafLayout | None, betas: tuple[float, float]
) -> Moments:
    """Decode one stage's fields of one parameter; `rule` and `layout` are None of a stage without codes.

    Nothing is the state's own, which steps write to.
    """
    if rule is None or layout is None:
        mu, nu = (fields[field].to(torch.float32, copy=True) for field in ("mu", "nu"))
        return Moments(mu, nu, int(fields["count"]), betas)
    if "mu" in fields:
        mu = fields["mu"].clone()
    else:
        lie = {"block": layout.block, "start": layout.start}
        mu = reference.decode(fields["mu.codes"], fields["mu.absmax"], fields["codebook"], **lie)
    if "second_moment" not in rule:
        return Moments(mu, None, None, (float("nan"), 0.0))
    policy, steps = policy_for(rule["second_moment"], layout), int(fields["count"])
    kept: Any = fields["nu"] if "nu" in fields else FactoredState(fields["nu.row"], fields["nu.col"])
    keep = torch.ones((), dtype=torch.float64, device="cpu")
    root, _ = policy.update(torch.zeros_like(mu), kept, keep, layout)
    corrected = rule["b2_warmup"] is not None and policy.warms
    return Moments(mu, root.square() * (1.0 - betas[1] ** steps if corrected else 1.0), steps, betas)
