"""State of other packages' optimizers as state of ours: moments are decoded, and kept as our policies keep them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.agree import together
from gefen_fn.blocks import layout_list
from gefen_fn.calibrate import learn_from
from gefen_fn.describe import quantizing
from gefen_fn.gefen import scale_by_gefen
from gefen_fn.muon import scale_by_muon
from gefen_fn.quantize import gradient_histogram
from gefen_fn.scope import learns
from gefen_fn.second_moment import policy_for
from gefen_nn import groups
from gefen_nn.dcp import check_ours
from gefen_nn.errors import CheckpointError
from gefen_nn.foreign import Foreign, Moments, Source, read_foreign
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.state_view import own_part

Leaves = dict[str, Tensor]  # of one parameter, as in `optimizer.state`
_EPS_OF_MUON = 1e-7  # of `gefen_muon`, whose own `eps` is its backup's
_KEEP_SHAPE = ((1.0, 0.0, 0.0),)  # coefficients of an iteration that leaves a matrix as it is


def convert_state(source_state_dict: Source | Sequence[Source], optimizer: TransformOptimizer) -> dict[str, Any]:
    """Make a state dict for an optimizer of another package's; neither is changed.

    Takes those of torch's Adam, AdamW and Muon, and of Gefen-X 0.5. First moments are encoded with the optimizer's
    codebook, which is learned from all of them unless it is learned already, or fixed. Second moments are averaged as
    each leaf's policy does; where its decay is warmed up they are stored with their bias corrected, because nothing
    corrects it later. Counts are taken over, and learning rate, betas, momentum, eps and weight decay where groups
    carry them; what torch's Muon says of `nesterov`, `ns_coefficients`, `ns_steps`, `eps` and `adjust_lr_fn` must be
    what a preset was built with, as of groups that are loaded. What other stages of the expression keep stays as it
    is. With sharded parameters all processes call this together.

    Args:
        source_state_dict: `state_dict()` of the other optimizer; or a list of several, which had the parameters among
            them, such as torch.optim.Muon and AdamW.
        optimizer: the one that is to go on.

    Returns:
        What `optimizer.load_state_dict` takes.

    Where the source does not name its parameters they go by position, through all groups in turn.

    Raises:
        TypeError: for another package's optimizer.
        CheckpointError: for a state dict of another kind, names or shapes that do not fit, or arguments of torch's Muon
            that are not the optimizer's.
        GroupFailure: if another process refuses it.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> adamw = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> adamw.step()
        >>> optimizer = Gefen(model.named_parameters())
        >>> report = optimizer.load_state_dict(convert_state(adamw.state_dict(), optimizer))
        >>> optimizer.param_groups[0]["lr"]
        0.0003
    """
    check_ours(optimizer)
    target, members = optimizer.state_dict(), groups.members(optimizer.param_groups)
    rows = zip(optimizer.param_groups, members, strict=True)
    params = {name: p for group, names in rows for name, p in zip(names, group["params"], strict=True)}
    first = optimizer.param_groups[0]

    def read() -> tuple[Foreign, list[dict[str, Any]]]:
        foreign = read_foreign(source_state_dict, params, named="param_names" in first, regrouped="rule" in first)
        held = zip(target["param_groups"], members, strict=True)
        return foreign, [_group(optimizer, group, names, foreign) for group, names in held]

    foreign, values = together(read, agree.group_of(list(params.values())), "convert_state")
    ids = dict(zip(params, (i for group in target["param_groups"] for i in group["params"]), strict=True))
    state = {name: dict(target["state"][i]) for name, i in ids.items() if i in target["state"]}
    _fill(optimizer, state, foreign, params)
    return {"state": {ids[name]: leaves for name, leaves in state.items()}, "param_groups": values}


def _group(
    optimizer: TransformOptimizer, group: Mapping[str, Any], names: Sequence[str], foreign: Foreign
) -> dict[str, Any]:
    """A group with what its parameters had in the other optimizer."""
    for told in [foreign.settled[name] for name in names if foreign.settled.get(name)]:
        _check_settled(optimizer, group, told)
    rows = [foreign.values[name] for name in names if name in foreign.values]
    for row in rows[1:]:
        if row != rows[0]:
            raise CheckpointError(
                f"Parameters of one group must have had one set of values: got {rows[0]} and {row}. "
                "Group them as they were."
            )
    return {**group, **{key: x for key, x in (rows[0] if rows else {}).items() if key in group}}


def _check_settled(optimizer: TransformOptimizer, group: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Refuse what a group of torch's Muon says otherwise than the optimizer's arguments."""
    try:
        optimizer.check_settled(told)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if "rule" in group and told.get("eps", _EPS_OF_MUON) != _EPS_OF_MUON:
        raise CheckpointError(
            f"`eps` of Muon's part must be {_EPS_OF_MUON:g}: got {told['eps']!r}. Convert into `Muon`, which takes it."
        )


def _fill(
    optimizer: TransformOptimizer, state: Mapping[str, Leaves], foreign: Foreign, params: Mapping[str, Tensor]
) -> None:
    """Write the moments into the leaves of every stage that keeps some."""
    rules = quantizing(optimizer.transform)
    stages = {key.split(".")[0] for leaves in state.values() for key in leaves}
    known = [stage for stage in sorted(stages) if stage in rules or stage.startswith("scale_by_adam")]
    if not known:
        raise CheckpointError(
            f"The optimizer must keep moments as Adam, Gefen or Muon do: got {sorted(stages)}. "
            "Convert into one of those."
        )
    for stage in known:
        own = {
            name: foreign.moments[name]
            for name, leaves in state.items()
            if name in foreign.moments and {f"{stage}.mu", f"{stage}.mu.codes"} & leaves.keys()
        }
        if stage in rules:
            _fill_quantizing(stage, rules[stage], state, own, params)
        else:
            for name, m in own.items():
                nu, steps = _adams(stage, name, m)
                _put(state[name], stage, mu=own_part(m.mu, params[name]), nu=own_part(nu, params[name]), count=steps)


def _adams(stage: str, name: str, m: Moments) -> tuple[Tensor, int]:
    """The second moment and the steps, without which Adam's rules cannot go on."""
    if m.nu is None or m.steps is None:
        raise CheckpointError(
            f"State of {name!r} must have a second moment, which {stage} keeps: got torch.optim.Muon's, which has "
            "none. Convert into `Muon`, or give `GefenMuon` the same matrices."
        )
    return m.nu, m.steps


def _fill_quantizing(
    stage: str,
    rule: Mapping[str, Any],
    state: Mapping[str, Leaves],
    own: Mapping[str, Moments],
    params: Mapping[str, Tensor],
) -> None:
    first = next(leaves for leaves in state.values() if f"{stage}.codebook" in leaves)
    book, learned = first[f"{stage}.codebook"], first[f"{stage}.learned"]
    parts = {name: own_part(m.mu, params[name]) for name, m in own.items()}
    if learns(rule["codebook"]) and not learned:
        everything = {name: parts.get(name) for name in params}
        book, learned = learn_from(gradient_histogram(everything, block=rule["block"]), book, learned)
    for leaves in state.values():
        if f"{stage}.codebook" in leaves:
            leaves.update({f"{stage}.codebook": book, f"{stage}.learned": learned})
    encode = _encoded_gefen if stage.startswith("scale_by_gefen") else _encoded_muon
    for name, m in own.items():
        kept = encode(rule, book, name, m._replace(mu=parts[name]), params)
        _put(state[name], stage, **kept)


def _alone(name: str, x: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """`x` in a tree like the parameters', without the others."""
    return {other: x if other == name else None for other in params}


def _encoded_gefen(
    rule: Mapping[str, Any], book: Tensor, name: str, m: Moments, params: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What the transform itself keeps after one step that forgets all it knew: of the moment, and of the root."""
    policy, block = rule["second_moment"], rule["block"]
    nu, steps = _adams("scale_by_gefen", name, m)
    nu = own_part(nu, params[name])
    tx = scale_by_gefen(0.0, 0.0, second_moment=policy, b2_warmup=None, block=block, codebook=book)
    leaf = _alone(name, params[name], params)
    layout = next(at for at in layout_list(block, leaf) if at is not None)
    warms = rule["b2_warmup"] is not None and policy_for(policy, layout).warms
    square = nu / (1.0 - m.betas[1] ** steps) if warms else nu
    first, second = (tx.update(_alone(name, x, params), tx.init(leaf))[1] for x in (m.mu, square.sqrt()))
    return {"mu": first.mu[name], "nu": second.nu[name], "count": steps}


def _encoded_muon(
    rule: Mapping[str, Any], book: Tensor, name: str, m: Moments, params: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The average of gradients alone; Muon corrects no bias of it, so that of Adam's is corrected here."""
    if rule["convention"] != "ema":
        raise CheckpointError(
            f'`convention` of Muon must be "ema" to take over averages: got {rule["convention"]!r}. Start fresh.'
        )
    spec = rule["spec"](dict(params)) if callable(rule["spec"]) else rule["spec"]
    kept = {"quantize": rule["quantize"], "block": rule["block"], "codebook": book}
    tx = scale_by_muon(0.0, False, coeffs=_KEEP_SHAPE, spec=spec, **kept)
    leaf = _alone(name, params[name], params)
    average = m.mu if m.steps is None else m.mu / (1.0 - m.betas[0] ** m.steps)
    return {"mu": tx.update(_alone(name, average, params), tx.init(leaf), leaf)[1].mu[name]}


def _put(leaves: Leaves, stage: str, **fields: Any) -> None:
    """Write fields, which may be records of tensors or numbers, into a parameter's leaves, in the dtypes there."""
    for field, value in fields.items():
        parts = value._asdict() if hasattr(value, "_asdict") else {"": value}
        for part, x in parts.items():
            key = f"{stage}.{field}.{part}".rstrip(".")
            old = leaves[key]
            leaves[key] = x.to(old.dtype) if isinstance(x, Tensor) else torch.full_like(old, x)
