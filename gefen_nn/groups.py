"""Group keys and hyperparameters: the one place where torch's names become the transform's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gefen_fn.base import GradientTransformation, OptState, check_transform
from gefen_fn.combine import recipe_of
from gefen_fn.program import Path, at, put
from gefen_fn.scalar import WRITE_A_FLOAT, came, is_number, scalar_on
from gefen_fn.tree import StructureError

FORMAT_VERSION = 1
FIXED_KEYS = ("format_version", "block", "kept_as")
Keys = Mapping[str, tuple[str, ...]]  # from group key to the hyperparameters it holds: {"betas": ("b1", "b2")}
_TORCH_NAMES = {"learning_rate": "lr"}
_NAMES = "lr betas eps weight_decay momentum dampening nesterov decay amsgrad maximize"
_ELSEWHERE = {  # as other libraries and scripts call them
    "lr": "learning_rate learningrate learn_rate lrate",
    "betas": "beta beta1 beta2 beta_1 beta_2 b1 b2",
    "eps": "epsilon",
    "weight_decay": "wd weight_decay_rate",
    "momentum": "mom",
}
_MEANT = {other: ours for ours, others in _ELSEWHERE.items() for other in others.split()}
_HYPERPARAMETERS = frozenset(_NAMES.split()) | set(_MEANT)
_IDLE: dict[str, tuple[Any, ...]] = {  # what torch's optimizers write into groups, at the values that ask for nothing
    "amsgrad": (False,),
    "maximize": (False,),
    "capturable": (False,),
    "differentiable": (False,),
    "decoupled_weight_decay": (True,),
    "momentum": (0,),
    "dampening": (0,),
    "nesterov": (False,),
}
REFUSED = {
    "amsgrad": "The running maximum of the second moment is not kept: leave it out",
    "differentiable": "Use the pure transform, `gefen_fn.gefen`, and differentiate through its updates",
    "decoupled_weight_decay": "Decay is always decoupled: leave it out",
}
_LEAST_LETTERS, _LIKENESS = 4, 0.9  # `rate`, `bets` and `moment` may be notes of the user's
_GUARDS = {"MultiSteps": "inner_opt_state", "apply_if_finite": "inner_state"}
_ROUNDING = 1e-12  # torch's LinearLR from 1/3 to 0 ends at -1.4e-20


class ExpressionGroup(dict[str, Any]):
    """A group of a transform without injected hyperparameters: reading or writing `lr` says how to get one."""

    def __missing__(self, key: str) -> Any:
        """Raise with the fix for a hyperparameter, plainly for another key."""
        raise KeyError(_no_such_key(key, {}) if key in _HYPERPARAMETERS else key)

    def __setitem__(self, key: str, value: Any) -> None:
        """Refuse a hyperparameter that no step would read."""
        if key in _HYPERPARAMETERS:
            raise KeyError(_no_such_key(key, {}))
        super().__setitem__(key, value)


def _meant(key: str, known: Mapping[str, Any]) -> str | None:
    """The hyperparameter that a key is, nearly or as others call it; None for a note, as `max_momentum` is one."""
    word, names = key.lower().strip("_"), {**_MEANT, **{name: name for name in (*_NAMES.split(), *known)}}
    long = [name for name in names if len(name) >= _LEAST_LETTERS and name not in FIXED_KEYS]
    close = get_close_matches(word, long, 1, _LIKENESS) if len(word) >= _LEAST_LETTERS else []
    return names.get(word) or (names[close[0]] if close else None)


def _no_such_key(key: str, known: Mapping[str, Any], preset: str = "") -> str:
    meant, shown = _meant(key, known), sorted(set(known) - set(FIXED_KEYS))
    if meant in shown:
        return f"A group key must be one that a step reads: got `{key}`. Did you mean `{meant}`?"
    if preset:
        return f"A group key of {preset} must be one of {shown}: got `{key}`, which no step reads. Leave it out."
    return (
        f"A group has `{key}` only if one `inject_hyperparams` of the transform injects it: got groups that have "
        f"{shown or 'none'}. Correct the name, or write `inject_hyperparams(adamw)(learning_rate=1e-3)`, around "
        "several stages `inject_hyperparams(lambda learning_rate: chain(clip_by_global_norm(1.0), "
        "gefen(learning_rate)))(1e-3)`, or pass a schedule."
    )


class Injection(NamedTuple):
    """Where a transform reads its hyperparameters.

    Attributes:
        tx: the `inject_hyperparams`, or the whole transform if it has none, or several.
        path: from the root of the state to the state of `tx`.
    """

    tx: GradientTransformation
    path: Path


def find_injection(tx: GradientTransformation) -> Injection:
    """The one `inject_hyperparams` of a transform, looked for in chains, `MultiSteps` and `apply_if_finite`."""
    found = list(_injections(tx, ()))
    return found[0] if len(found) == 1 else Injection(tx, ())


def _injections(tx: Any, path: Path) -> Iterator[Injection]:
    recipe = recipe_of(tx)
    if getattr(tx.update, "hyperparams", ()):
        yield Injection(tx, path)
    elif recipe.name in ("chain", "named_chain"):
        for key, inner in enumerate(recipe.args) if recipe.name == "chain" else recipe.args:
            yield from _injections(inner, (*path, key))
    elif recipe.name in _GUARDS:
        yield from _injections(recipe.args[0], (*path, _GUARDS[recipe.name]))


def group_keys(tx: GradientTransformation) -> Keys:
    """A key for each hyperparameter that `tx`, an `inject_hyperparams`, reads from its state; none for another."""
    return {_TORCH_NAMES.get(name, name): (name,) for name in getattr(tx.update, "hyperparams", ())}


def group_defaults(tx: GradientTransformation, keys: Keys, block: int) -> dict[str, Any]:
    """What every group starts from: the injected values, `format_version` and `block`.

    Args:
        tx: the `inject_hyperparams`, if there is one.
        keys: its group keys.
        block: the block length, 0 if there is none for the whole model.
    """
    floats = getattr(tx.update, "defaults", {})
    names = [name for held in keys.values() for name in held]
    made = tx.init({}).hyperparams if any(name not in floats for name in names) else {}
    values = {name: floats[name] if name in floats else made[name] for name in names}
    joined = {key: tuple(values[name] for name in held) for key, held in keys.items()}
    shown = {key: parts if len(parts) > 1 else parts[0] for key, parts in joined.items()}
    return {**shown, "format_version": FORMAT_VERSION, "block": block}


def check_keys(
    group: Mapping[str, Any],
    defaults: Mapping[str, Any],
    settled: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    preset: str = "",
) -> None:
    """Refuse a group's own hyperparameter, or what is spelt like one, that no step would read.

    Args:
        group: a group, or part of it; a key that is no hyperparameter may say what it likes.
        defaults: what every group holds.
        settled: by key what a group may say of an argument that is one for all groups, and was given elsewhere.
        preset: the name of an optimizer whose keys are fixed; none for an expression's, which injects what it likes.

    Raises:
        ValueError: naming the key and the fix.
    """
    common = {**{key: (defaults[key],) for key in FIXED_KEYS}, **settled}
    for key, value in group.items():
        if key in common:
            if _frozen(value) not in map(_frozen, common[key]):
                where = f": {preset}({key}=...)" if key in settled and preset else ""
                rule = f"`{key}` must be {common[key][0]!r} in all groups: got {value!r}"
                raise ValueError(f"{rule}. Give it to the optimizer{where}.")
        elif key not in defaults and not _is_idle(group, key) and _meant(str(key), defaults) is not None:
            raise ValueError(_no_such_key(key, defaults, preset))


def _frozen(value: Any) -> Any:
    """A value with tuples for lists, as files may hold them."""
    return tuple(map(_frozen, value)) if isinstance(value, (tuple, list)) else value


def _is_idle(group: Mapping[str, Any], key: str) -> bool:
    """Whether torch's optimizers write this key, and it asks for nothing.

    Raises:
        ValueError: if it asks for what no step does.
    """
    value = group[key]
    if key == "decoupled_weight_decay" and not group.get("weight_decay"):
        return isinstance(value, bool)  # of no decay nothing is to be decoupled
    if key in REFUSED and isinstance(value, bool) and value not in _IDLE[key]:
        raise ValueError(f"`{key}` must be {_IDLE[key][0]}: got {value}. {REFUSED[key]}.")
    return key in _IDLE and isinstance(value, (bool, int, float)) and value in _IDLE[key]


def check_values(rebuild: Callable[[dict[str, Any]], Any], group: Mapping[str, Any], keys: Keys, read: bool) -> None:
    """Refuse hyperparameters that are no numbers, or that the transform refuses.

    Args:
        rebuild: builds the transform with these hyperparameters, and checks them so.
        group: a group.
        keys: its keys.
        read: read tensors on the host; else their shape alone is checked.

    Raises:
        ValueError: naming the key.
    """
    for key, names in keys.items():
        parts = _parts(group.get(key), names)
        if len(parts) != len(names) or not all(map(_is_number, parts)):
            raise ValueError(_no_number(key, len(names), group.get(key)))
        try:
            rebuild({name: _plain(x, read) for name, x in zip(names, parts, strict=True)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{key}`: {error}") from error


def _no_number(key: str, count: int, value: Any) -> str:
    wanted = f"{count} numbers" if count > 1 else "a number or a 0-dim tensor"
    if isinstance(value, str) or (isinstance(value, (tuple, list)) and any(isinstance(x, str) for x in value)):
        kind = "a string" if isinstance(value, str) else "strings"
        return f"`{key}` must be {wanted}: got {kind}, {value!r}. {WRITE_A_FLOAT}"
    return f"`{key}` must be {wanted}: got {came(value)}. Leave it out for the default."


def check_arguments(params: Any, tx: Any) -> None:
    """Raise `TypeError` for a transform that is none, and for a module, whose parameters are meant."""
    check_transform(tx)
    if isinstance(params, nn.Module):
        raise TypeError(
            f"`params` must be parameters, pairs or groups: got a {type(params).__name__}, a module. "
            "Pass `model.named_parameters()`."
        )


def _parts(value: Any, names: tuple[str, ...]) -> Sequence[Any]:
    """The values that a key holds, one per name; none if it should hold several and does not."""
    if len(names) == 1:
        return (value,)
    return value if isinstance(value, (tuple, list)) else ()


def _is_number(x: Any) -> bool:
    return is_number(x.reshape(()) if isinstance(x, Tensor) and x.numel() == 1 else x)


def _plain(x: Any, read: bool) -> float | Tensor:
    if isinstance(x, Tensor) and not read:
        return x.reshape(())
    number = float(x.detach() if isinstance(x, Tensor) else x)
    return 0.0 if -_ROUNDING < number < 0.0 else number


def check_changes(
    rebuild: Callable[[dict[str, Any]], Any], group: Mapping[str, Any], keys: Keys, seen: Mapping[str, Any]
) -> dict[str, Any]:
    """`check_values`, without reading tensors, of the values that are not those in `seen`; returns what it saw."""
    now = {key: _visible(group.get(key)) for key in keys}
    changed = {key: names for key, names in keys.items() if key not in seen or now[key] != seen[key]}
    check_values(rebuild, group, changed, read=False)
    return now


def _visible(value: Any) -> Any:
    """What can be told of a value without reading tensors."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_visible, value))
    return value.shape if isinstance(value, Tensor) else value


def members(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Names of the parameters of each group: those given, else their positions.

    Raises:
        StructureError: if a group has another number of names than of parameters.
    """
    out: list[list[str]] = []
    for group in groups:
        start, count = sum(map(len, out)), len(group["params"])
        out.append(list(group.get("param_names") or map(str, range(start, start + count))))
        if len(out[-1]) != count:
            raise StructureError(
                f"`param_names` must name each parameter of its group: got {len(out[-1])} for {count}. "
                "Replace both; for flat partitions, as DeepSpeed's ZeRO puts there, use FSDP2 instead."
            )
    return out


def read_values(group: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The hyperparameters of a group by the transform's names."""
    return {n: x for key, names in keys.items() for n, x in zip(names, _parts(group[key], names), strict=True)}


def make_live(group: dict[str, Any], keys: Keys) -> None:
    """Replace a group's numbers by float64 tensors beside its parameters, which a captured step reads anew."""
    device = next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))
    for key, names in keys.items():
        parts = tuple(x if isinstance(x, Tensor) else scalar_on(x, device) for x in _parts(group[key], names))
        group[key] = parts if len(names) > 1 else parts[0]


def check_live(group: Mapping[str, Any], keys: Keys, device: torch.device) -> None:
    """Refuse to capture a number, which a replay would keep whatever the group says then.

    Raises:
        RuntimeError: naming the key.
    """
    for key, names in keys.items():
        for x in _parts(group[key], names):
            if not isinstance(x, Tensor) or x.device != device:
                found = f"one on {x.device}" if isinstance(x, Tensor) else repr(x)
                raise RuntimeError(
                    f"`{key}` must be a tensor on {device} while a step is captured: got {found}. "
                    "Fill the tensors that the group starts with, instead of putting other objects there."
                )


def group_hyperparams(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
    keys: Keys,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Read the groups into the values that the transform's state carries.

    Args:
        groups: the parameter groups.
        members: the names of each group's parameters that have state.
        keys: the groups' keys.
        device: where to put them, without a look at tensors; None for numbers on the CPU and tensors where they are.

    Returns:
        For each hyperparameter a 0-dim float64 tensor, or `{parameter: 0-dim tensor}` where groups differ.
    """
    rows = [read_values(group, keys) for group, names in zip(groups, members, strict=True) if names]
    owners = [names for names in members if names]
    return {
        name: _spread([_scalar(row[name], device) for row in rows], owners, device)
        for name in (rows[0] if rows else ())
    }


def values_in(state: OptState, path: Path) -> dict[str, Any]:
    """The hyperparameters that a state carries; `path` leads to the `inject_hyperparams`."""
    values: dict[str, Any] = at(state, path).hyperparams
    return values


def with_values(state: OptState, path: Path, values: Mapping[str, Any]) -> OptState:
    """The state with some hyperparameters replaced."""
    return put(state, path, at(state, path)._replace(hyperparams={**values_in(state, path), **values}))


def without_values(state: OptState, path: Path, keys: Keys) -> OptState:
    """The state without the hyperparameters that groups carry under these keys."""
    if not keys:
        return state
    carried = {name for names in keys.values() for name in names}
    kept = {name: x for name, x in values_in(state, path).items() if name not in carried}
    return put(state, path, at(state, path)._replace(hyperparams=kept))


def _scalar(value: Any, device: torch.device | None) -> Tensor:
    if isinstance(value, Tensor):
        value = value.detach().reshape(())
        return scalar_on(value, value.device if device is None else device)
    return scalar_on(value, device or torch.device("cpu"))


def _spread(
    values: list[Tensor], members: list[Sequence[str]], device: torch.device | None
) -> Tensor | dict[str, Tensor]:
    # Neither Dynamo nor a step without host reads can compare tensors: they take every value per leaf.
    blind = device is not None or torch.compiler.is_compiling()
    if len(values) == 1 or (not blind and all(torch.equal(x.cpu(), values[0].cpu()) for x in values[1:])):
        return values[0]
    return {name: value for value, names in zip(values, members, strict=True) for name in names}


def check_capture(groups: Sequence[Mapping[str, Any]], keys: Keys, device: torch.device | None) -> None:
    """Refuse a captured step whose replays would not be steps.

    Args:
        groups: of the optimizer.
        keys: its hyperparameters.
        device: where it has its counters; None for the CPU.

    Raises:
        RuntimeError: if a number that a replay needs is not on the GPU.
    """
    if device is None:
        raise RuntimeError(
            "A captured step must have its counters on the GPU: got an optimizer that has them on the CPU. "
            "Build it with capturable=True."
        )
    for group in groups:
        check_live(group, keys, device)
