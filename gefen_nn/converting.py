"""Files of one optimizer's state made into another's: to ours, and back to AdamW, with what is lost on the way."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gefen_fn.text import table
from gefen_nn.convert import convert_state
from gefen_nn.dense_moments import adamw_state, dense_moments
from gefen_nn.errors import CheckpointError
from gefen_nn.foreign import Moments, read_foreign
from gefen_nn.muon import GefenMuon, Muon
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.presets import Gefen
from gefen_nn.route import route
from gefen_nn.stored import Stored, as_state_dict, read_stored, state_dict_in

Groups = list[dict[str, Any]]
Make = Callable[[Groups], TransformOptimizer]
MAKERS: Mapping[str, Callable[..., TransformOptimizer]] = {"gefen": Gefen, "gefen_muon": GefenMuon, "muon": Muon}
_LEGEND = """Errors are shares of each norm. A second moment kept as means loses what differs within: of its root
usually 60 % after one step, as squares of single gradients differ much, 10 to 20 % once a hundred are averaged."""
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer", "mu", "mu.codes")


class LeafError(NamedTuple):
    """How far the moments of a parameter are from those that they were made from.

    Attributes:
        name: of the parameter.
        shape: its shape.
        first: error of the first moment, as a share of its norm.
        second: of the root of the second moment, likewise; None where there is none.
    """

    name: str
    shape: tuple[int, ...]
    first: float
    second: float | None


class Conversion(NamedTuple):
    """What `convert_files` did; printed, it is a table.

    Attributes:
        target: what the state is for.
        leaves: one row per parameter with moments.
        fresh: parameters that start without state, because the source has none of theirs or the target takes none.
        bytes_before: of the source's tensors.
        bytes_after: of the result's.
    """

    target: str
    leaves: tuple[LeafError, ...]
    fresh: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        """The errors, and the sums."""
        rows = [("leaf", "shape", "first moment", "root of the second"), *map(_row, self.leaves)]
        lines = [table(rows), f"State for {self.target}: {self.bytes_before:,} bytes became {self.bytes_after:,}."]
        if any(leaf.first for leaf in self.leaves):
            lines.append(_LEGEND)
        lines += [f"Without state, and so started afresh: {', '.join(self.fresh)}."] if self.fresh else []
        return "\n".join(lines)


def _row(leaf: LeafError) -> tuple[str, str, str, str]:
    second = "none" if leaf.second is None else f"{leaf.second:.2%}"
    return leaf.name, "x".join(map(str, leaf.shape)) or "scalar", f"{leaf.first:.2%}", second


def convert_files(
    sources: Sequence[Path],
    to: str | None = None,
    *,
    model: nn.Module | None = None,
    make: Make | None = None,
    key: str | None = None,
) -> tuple[dict[str, Any], Conversion]:
    """Read state, convert it, and compare what came of it.

    Args:
        sources: files of `torch.save` with a state dict of torch's Adam, AdamW or Muon or of Gefen-X 0.5, several where
            optimizers shared the parameters; or a file or folder of ours.
        to: a name in `MAKERS` or "adamw"; None for "gefen", and for "adamw" if the source is ours.
        model: whose parameters they are; without it names and shapes are those of the state.
        make: makes our optimizer of groups of `(name, parameter)` pairs, where its arguments are not the defaults.
        key: which of several states in a file.

    Returns:
        A state dict for the target, and what was lost.

    Raises:
        CheckpointError: if a source cannot be read or does not fit.
        ValueError: for a target that the source cannot be brought to.
    """
    stored = [read_stored(path, key) for path in sources]
    ours = ["format_version" in group for one in stored for group in one.groups]
    if any(ours) and len(sources) > 1:
        raise ValueError(f"A state of ours is converted alone: got {len(sources)} sources. Name one.")
    target = to or ("adamw" if any(ours) else "gefen")
    if target not in (*MAKERS, "adamw"):
        raise ValueError(f"`to` must be of {', '.join([*MAKERS, 'adamw'])}: got {target!r}. Correct the name.")
    if any(ours) != (target == "adamw"):
        kind = "ours" if any(ours) else "another package's"
        raise ValueError(f"State goes from other packages to ours, and from ours to adamw: got {kind} to {target}.")
    names = _names(stored, model)
    if not names:
        raise CheckpointError("State must belong to parameters: got groups without any. Save a trained optimizer's.")
    if target == "gefen_muon" and all(name.isdigit() for name in names.values()):
        raise ValueError(
            f"Names must tell which parameters are Muon's: got positions, {', '.join(list(names)[:3])}, .... "
            "Name the model's factory (--model module:function)."
        )
    groups, before = _groups(stored, names, model), sum(leaf.bytes for one in stored for leaf in one.leaves)
    if target == "adamw":
        made, leaves = _to_adamw(stored[0], make or _maker_of(stored[0]), groups)
    else:
        dicts = [as_state_dict(stored[0])] if sources[0].is_dir() else [state_dict_in(p, key)[0] for p in sources]
        given = [_with_names(one, names) for one in dicts]
        made, leaves = _to_ours(given, make or _maker(target, model), groups)
    if all(name.isdigit() for name in names.values()):  # positions, which are no names to load by
        for group in made["param_groups"]:
            group.pop("param_names", None)
    fresh = tuple(name for name in names.values() if name not in {leaf.name for leaf in leaves})
    return made, Conversion(target, tuple(leaves), fresh, before, _bytes(made))


def _names(stored: Sequence[Stored], model: nn.Module | None) -> dict[str, str]:
    """The name of each parameter that a state has; the model's, where the state has positions alone."""
    given = [name for one in stored for group in one.groups for name in group["params"]]
    own = [] if model is None else [name for name, _ in model.named_parameters()]
    if model is None or set(given) <= set(own):
        return {name: name for name in given}
    if given != [str(i) for i in range(len(own))]:
        raise CheckpointError(
            f"The model must be the one that was trained: got parameters {own[:3]} for {given[:3]}, {len(own)} for "
            f"{len(given)}. Name its factory."
        )
    return dict(zip(given, own, strict=True))


def _with_names(source: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """A state dict whose groups say the names, unless those are positions."""
    told = [
        {**group, "param_names": [names[str(x)] for x in group.get("param_names", group["params"])]}
        for group in source["param_groups"]
    ]
    return source if all(name.isdigit() for name in names.values()) else {**source, "param_groups": told}


def _bytes(state: Mapping[str, Any]) -> int:
    """Of tensors in the state, each once."""
    tensors = {id(x): x for leaves in state["state"].values() for x in leaves.values() if isinstance(x, Tensor)}
    return sum(x.numel() * x.itemsize for x in tensors.values())


def _maker(target: str, model: nn.Module | None) -> Make:
    """One of ours with its default arguments; the model's modules tell which parameters are Muon's."""
    options = {} if model is None or target != "gefen_muon" else {"rules": route(model).choices}
    return lambda groups: MAKERS[target](groups, **options)


def _maker_of(stored: Stored) -> Make:
    """The optimizer with default arguments that keeps what a state of ours holds."""
    stages = {leaf.stage for leaf in stored.leaves if leaf.owner is not None and leaf.field.startswith("mu")}
    known = {
        ("scale_by_gefen",): "gefen",
        ("scale_by_muon",): "muon",
        ("scale_by_gefen", "scale_by_muon"): "gefen_muon",
    }
    name = known.get(tuple(sorted(stages)))
    block = stored.groups[0].get("block", 0)
    if name is None or not block:
        came = f"stages {sorted(stages)}" if name is None else "blocks of several lengths"
        raise CheckpointError(
            f"The optimizer must be told where it is none of {', '.join(MAKERS)} with usual arguments: got {came}. "
            "Give `make`, a function of groups (--optimizer module:function)."
        )
    return lambda groups: MAKERS[name](groups, block=block)


def _groups(stored: Sequence[Stored], names: Mapping[str, str], model: nn.Module | None) -> Groups:
    """Groups as they were, of pairs of name and parameter; parameters are of the right shape, and hold nothing."""
    shapes = {names[name]: shape for one in stored for name, shape in _shapes(one).items() if name in names}
    shapes |= {} if model is None else {name: tuple(p.shape) for name, p in model.named_parameters()}
    unknown = [name for name in names.values() if name not in shapes]
    if unknown:
        raise CheckpointError(
            f"Shapes of all parameters must be known: got none of {', '.join(unknown[:5])}. Name the model's factory "
            "(--model module:function)."
        )
    rows = [[names[name] for name in group["params"]] for one in stored for group in one.groups]
    return [{"params": [(name, nn.Parameter(torch.empty(shapes[name]))) for name in row]} for row in rows]


def _shapes(stored: Stored) -> dict[str, tuple[int, ...]]:
    """Of parameters, as written down, or as their first moments have them; Gefen-X flattens those."""
    first = {x.owner: x.shape for x in stored.leaves if x.owner is not None and x.field in _FIRST_MOMENTS}
    return {**first, **stored.shapes}


def _to_ours(
    sources: Sequence[Mapping[str, Any]], make: Make, groups: Groups
) -> tuple[dict[str, Any], list[LeafError]]:
    params = dict(pair for group in groups for pair in group["params"])
    optimizer = make(groups)
    made = convert_state(sources, optimizer)
    optimizer.load_state_dict(made)
    wanted = read_foreign(sources, params, named=True).moments
    found = dense_moments(optimizer)
    return made, [_compared(name, wanted[name], m) for name, m in found.items() if name in wanted]


def _compared(name: str, wanted: Moments, found: Moments) -> LeafError:
    """The errors of a parameter's moments; Muon's is of an average without bias."""
    corrects = found.nu is None and wanted.steps is not None
    first = wanted.mu / (1.0 - wanted.betas[0] ** (wanted.steps or 0)) if corrects else wanted.mu
    second = None if found.nu is None or wanted.nu is None else _error(found.nu.sqrt(), wanted.nu.sqrt())
    return LeafError(name, tuple(wanted.mu.shape), _error(found.mu, first), second)


def _error(found: Tensor, wanted: Tensor) -> float:
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / norm if norm else float(found.norm() and math.inf)


def _to_adamw(stored: Stored, make: Make, groups: Groups) -> tuple[dict[str, Any], list[LeafError]]:
    """The moments are those of our steps, so none is changed."""
    optimizer = make(groups)
    optimizer.load_state_dict(as_state_dict(stored))
    made = adamw_state(optimizer)
    rows = [zip(group["params"], group["param_names"], strict=True) for group in made["param_groups"]]
    held = {name: made["state"][i]["exp_avg"] for row in rows for i, name in row if i in made["state"]}
    return made, [LeafError(name, tuple(mu.shape), 0.0, 0.0) for name, mu in held.items()]
