"""Which parameter of a model gets which rule, and why: Muon's for matrices, its backup's for all else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from gefen_fn.base import GradientTransformation, Params
from gefen_fn.describe import describe
from gefen_fn.muon_alias import gefen_muon
from gefen_fn.routing import MUON, other_reason
from gefen_fn.spec import MatrixAxes, adjust_scale, default_axes, matrices_of
from gefen_fn.text import table
from gefen_fn.tree import Tree

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_FUSED = ("qkv", "query_key_value", "c_attn", "in_proj_weight", "gate_up", "weight_ih", "weight_hh")


class Choice(NamedTuple):
    """The rule of one parameter.

    Attributes:
        rule: "muon" or the backup's name.
        why: in words.
        axes: its matrices, where its shape alone does not tell them.
    """

    rule: str
    why: str
    axes: MatrixAxes | None = None


Rule = str | MatrixAxes | Choice
Rules = Callable[[str, Tensor], Rule | None] | Mapping[Any, Rule]


class _Owner(NamedTuple):
    """A module that holds a parameter, and the parameter's name by this way."""

    module: nn.Module
    path: str


def choose(
    params: Iterable[tuple[str, Tensor]], model: nn.Module | None, rules: Rules | None, backup: str
) -> dict[str, Choice]:
    """The rule of each parameter: as the user says, else by the modules that hold it, else by its shape and name.

    Args:
        params: names and parameters.
        model: whose modules hold them; without it shapes and names decide.
        rules: as of `route`.
        backup: label of the leaves that are not Muon's.

    Raises:
        TypeError: if a key of the rules is none.
        ValueError: if a rule is none, or does not fit its parameter.
    """
    for key, rule in rules.items() if isinstance(rules, Mapping) else ():
        _check_rule(_shown(key), rule, backup)
    owners, out = _owners(model), {}
    for name, p in params:
        own = owners.get(p, [])
        wanted = _wanted(name, p, own, rules)
        out[name] = _automatic(name, p, own, backup) if wanted is None else _as_wanted(name, p, own, wanted, backup)
    return out


def _owners(model: nn.Module | None) -> dict[Tensor, list[_Owner]]:
    """The modules that hold each parameter, all of them where it is tied."""
    found: dict[Tensor, list[_Owner]] = {}
    for path, module in () if model is None else model.named_modules(remove_duplicate=False):
        for name, p in module.named_parameters(path, recurse=False):
            found.setdefault(p, []).append(_Owner(module, name))
    return found


def _automatic(name: str, p: Tensor, owners: list[_Owner], backup: str) -> Choice:
    axes = _axes(p, owners)
    shapes = [p.shape] if axes is None else matrices_of(p.shape, axes).sizes
    by_shape = next(filter(None, (other_reason(name, shape) for shape in shapes)), None)
    reason = _module_reason(name, p, owners) or by_shape
    return Choice(backup, reason) if reason else Choice(MUON, _words(name, p, axes), axes)


def _module_reason(name: str, p: Tensor, owners: list[_Owner]) -> str | None:
    """Why a parameter is not Muon's by the modules that hold it."""
    if any(isinstance(module, _TABLES) or "Embed" in type(module).__name__ for module, _ in owners):
        others = ", ".join(path for _, path in owners if path != name)
        return f"an embedding, tied to {others}" if others else "an embedding"
    is_scale = p.dim() > 1 and any(isinstance(module, _NORMS) for module, _ in owners)
    return "the scales of a norm" if is_scale else None


def _axes(p: Tensor, owners: list[_Owner]) -> MatrixAxes | None:
    """The matrices of a weight that its module does not use as its first axis by all others."""
    for module, _ in owners:
        if p.dim() == 2 and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
            return MatrixAxes(1, 0)
        groups = getattr(module, "groups", 1) if isinstance(module, nn.modules.conv._ConvNd) else 1
        if p.dim() > 2 and 1 < groups < p.shape[0]:
            return MatrixAxes(0, tuple(range(1, p.dim())), split=(p.shape[0] // groups,) * groups)
    return None


def _words(name: str, p: Tensor, axes: MatrixAxes | None) -> str:
    """What the matrices of a leaf are."""
    found = matrices_of(p.shape, axes or default_axes(p.shape))
    sizes = dict.fromkeys(found.sizes)
    count = len(found.sizes) * math.prod(p.shape[n] for n in found.batch)
    text = " and ".join(f"{rows} x {cols}" for rows, cols in sizes)
    text = f"matrix {text}" if count == 1 else f"{count} matrices {text}"
    one = len(found.sizes) == 1 and any(word in name for word in _FUSED)
    return f"{text}; if fused, a MatrixAxes with `split` parts it" if one else text


def _wanted(name: str, p: Tensor, owners: list[_Owner], rules: Rules | None) -> Rule | None:
    """What the user says of a parameter: a function is asked, of a dict the first key that fits counts."""
    if rules is None or not isinstance(rules, Mapping):
        return None if rules is None else rules(name, p)
    return next((rule for key, rule in rules.items() if _fits(key, name, p, owners)), None)


def _fits(key: Any, name: str, p: Tensor, owners: list[_Owner]) -> bool:
    if isinstance(key, str):
        return key == name or fnmatchcase(name, key)
    if isinstance(key, nn.Module):
        held = set(key.modules())
        return any(module in held for module, _ in owners)
    raise TypeError(f"A rule is for a name, a pattern or a module: got {type(key).__name__}. Write '*.router.weight'.")


def _as_wanted(name: str, p: Tensor, owners: list[_Owner], rule: Rule, backup: str) -> Choice:
    """The user's rule, checked."""
    _check_rule(f"`{name}`", rule, backup)
    if isinstance(rule, Choice):
        return rule
    if rule == backup:
        return Choice(backup, "your rule")
    if p.dim() < 2:
        raise ValueError(
            f"`{name}` of shape {tuple(p.shape)} cannot be Muon's: it has fewer than 2 axes, and Muon takes matrices. "
            f"Narrow the rule, e.g. to 'layer1.*conv*', or put '*{'.'.join(name.split('.')[-2:])}': {backup!r} first."
        )
    try:
        axes = rule if isinstance(rule, MatrixAxes) else _axes(p, owners) or default_axes(p.shape)
        return Choice(MUON, f"your rule: {_words(name, p, axes)}", axes)
    except (ValueError, IndexError) as error:
        raise ValueError(f"`{name}` of shape {tuple(p.shape)} cannot be Muon's: {error}") from error


def _check_rule(place: str, rule: Any, backup: str) -> None:
    """Raise `ValueError` unless this is a rule."""
    known = (MUON, backup)
    if not (isinstance(rule, MatrixAxes) or (rule.rule if isinstance(rule, Choice) else rule) in known):
        raise ValueError(
            f"A rule must be {MUON!r}, {backup!r} or a MatrixAxes: got {rule!r} for {place}. Correct it, or leave the "
            "parameter out."
        )


def check_used(rules: Rules | None, params: Iterable[tuple[str, Tensor]], model: nn.Module | None) -> None:
    """Refuse a key that fits no parameter.

    A plain name may be of a parameter that comes later or is left out: where its value is a `Choice`, as those of
    another routing are, and where no model tells which names there are.

    Raises:
        TypeError: if a key is no name, pattern or module.
        ValueError: naming it, and names like it.
    """
    owners, named = _owners(model), list(params)
    for key, rule in rules.items() if isinstance(rules, Mapping) else ():
        is_name = isinstance(key, str) and not set(key) & set("*?[")
        may_be_absent = is_name and (model is None or isinstance(rule, Choice))
        if not may_be_absent and not any(_fits(key, name, p, owners.get(p, [])) for name, p in named):
            fix = _near(key, named, owners) if isinstance(key, str) else ""
            raise ValueError(
                f"A rule must fit a parameter: got {_shown(key)}, which fits none of {len(named)}. "
                + (f"Did you mean {fix}?" if fix else "Correct it.")
            )


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, str) else type(key).__name__


def _near(key: str, named: list[tuple[str, Tensor]], owners: dict[Tensor, list[_Owner]]) -> str:
    """What a key that fits nothing may have meant: a tied parameter's other name, a module's parameters, a likeness."""
    tied = [name for name, p in named if any(path == key for _, path in owners.get(p, []))]
    parts = [name.split(".") for name, _ in named]
    inside = dict.fromkeys(".".join(keys[:n]) + ".*" for keys in parts for n in range(1, len(keys)))
    held = [f"{key}.*"] if f"{key}.*" in inside else []
    like = get_close_matches(key, [*(name for name, _ in named), *inside], cutoff=0.7)
    return " or ".join(map(repr, tied or held or like))


class RoutedLeaf(NamedTuple):
    """One parameter.

    Attributes:
        path: its name.
        shape: its shape.
        rule: "muon" or the backup's name.
        why: in words.
        lr: its learning rate; None if none was given.
        scales: what `lr` is multiplied by for each size of its matrices; (1.0,) for the backup.
        bytes: of its state.
    """

    path: str
    shape: tuple[int, ...]
    rule: str
    why: str
    lr: float | None
    scales: tuple[float, ...]
    bytes: int


class Routing(NamedTuple):
    """What `route` returns; printed, it is a table.

    Attributes:
        leaves: one row per parameter.
        choices: the choice for each by name, the `rules` of `GefenMuon` over groups of these parameters.
    """

    leaves: tuple[RoutedLeaf, ...]
    choices: dict[str, Choice]

    @property
    def labels(self) -> dict[str, str]:
        """The rule of each parameter by name, the `param_labels` of `gefen_fn.gefen_muon`."""
        return {name: choice.rule for name, choice in self.choices.items()}

    @property
    def spec(self) -> dict[str, MatrixAxes | None]:
        """The matrices of each where its shape does not tell them, else None: the `spec` of `gefen_fn.gefen_muon`."""
        return {name: choice.axes for name, choice in self.choices.items()}

    def __str__(self) -> str:
        """A table of the leaves, and the sums by rule."""
        rows = [("leaf", "shape", "rule", "lr", "bytes", "why"), *map(_row, self.leaves)]
        if all(leaf.lr is None for leaf in self.leaves):
            rows = [(*row[:3], *row[4:]) for row in rows]
        return "\n".join([table(rows, left=len(rows[0])), *map(self._sum, dict.fromkeys(self.labels.values()))])

    def _sum(self, rule: str) -> str:
        own = [leaf for leaf in self.leaves if leaf.rule == rule]
        entries, whole = (sum(math.prod(leaf.shape) for leaf in leaves) for leaves in (own, self.leaves))
        share = f"{entries:,} entries ({entries / max(whole, 1):.1%})"
        return f"{rule}: {len(own)} leaves, {share}, {sum(leaf.bytes for leaf in own):,} bytes of state"


def _row(leaf: RoutedLeaf) -> tuple[str, ...]:
    lr = "" if leaf.lr is None else f"{leaf.lr:g}"
    scaled = f"{lr} x {', '.join(f'{x:.3g}' for x in leaf.scales)}" if leaf.rule == MUON else lr
    return leaf.path, f"[{', '.join(map(str, leaf.shape))}]", leaf.rule, scaled, f"{leaf.bytes:,}", leaf.why


def route(model: Any, rules: Rules | None = None, *, lr: float | None = None, backup: str = "gefen") -> Routing:
    """Say which parameters `GefenMuon(model, lr)` gives to Muon and which to its backup, and why.

    Embeddings, whatever is tied to one, output layers, vectors, depthwise convolutions and matrices with a side below
    32 go to the backup; matrices, experts `[E, M, N]` and convolutions, as `O x (I kh kw)`, to Muon. The module that
    holds a parameter tells first, then the shape, then the name (`lm_head`, `classifier`, `score`, `embed`, `pos`).

    Args:
        model: a module, or its named parameters, of which shapes and names alone tell.
        rules: what you want otherwise: a dict from a name, a pattern as `"*.router.weight"`, or a module to `"muon"`,
            the backup's name or the `MatrixAxes` of Muon's matrices, of which the first that fits counts; or a function
            of name and parameter that returns one of those, or None to leave it. Another routing's `choices` are such
            a dict: a name with a `Choice` may be of a parameter that this model lacks, or that `add_param_group` brings
            later. So may every plain name where no module is given.
        lr: learning rate, of which the table then has a column; `optimizer.routing()` shows those in use.
        backup: `"gefen"` or `"adamw"`.

    Returns:
        A report; `print` it for a table. Its `labels` and `spec` are arguments of `gefen_fn.gefen_muon`.

    Raises:
        TypeError: for parameters without names, or a key of the rules that is none.
        ValueError: if a rule is none, does not fit its parameter, or fits no parameter: names like it are told.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64))
        >>> routing = route(model)  # print it for a table
        >>> [(leaf.rule, leaf.why) for leaf in routing.leaves]
        [('gefen', 'an embedding'), ('muon', 'matrix 64 x 64'), ('gefen', 'fewer than 2 axes')]
    """
    module = model if isinstance(model, nn.Module) else None
    named = list(model.named_parameters()) if module is not None else list(model)
    _check_pairs(model, named)
    check_used(rules, named, module)
    choices = choose(named, module, rules, backup)
    labels, spec = chosen_by(lambda name, p: choices[name])
    tx = gefen_muon(0.0 if lr is None else lr, backup=backup, param_labels=labels, spec=spec, require_muon=False)
    return routing(dict(named), choices, tx, dict.fromkeys(choices, lr), "match_rms_adamw")


def _check_pairs(model: Any, named: Sequence[Any]) -> None:
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor) for pair in named):
        kind = type(model).__name__
        fix = "Pass its `.items()`." if isinstance(model, Mapping) else "Pass the model, or its `named_parameters()`."
        raise TypeError(f"`model` must be a module or `(name, parameter)` pairs: got a {kind} without those. {fix}")


def chosen_by(choice: Callable[[str, Tensor], Choice]) -> tuple[Callable[[Params], Tree], Callable[[Params], Tree]]:
    """The `param_labels` and the `spec` of `gefen_fn.gefen_muon` by which each leaf has this choice."""

    def labels(params: Params) -> Tree:
        return {name: choice(name, p).rule for name, p in params.items()}

    def spec(params: Params) -> Tree:
        return {name: None if p is None else choice(name, p).axes for name, p in params.items()}

    return labels, spec


def routing(
    params: Mapping[str, Tensor],
    choices: Mapping[str, Choice],
    tx: GradientTransformation,
    lrs: Mapping[str, float] | Mapping[str, None],
    adjust: str | None,
) -> Routing:
    """The report of these choices.

    Args:
        params: by name; frozen ones have no state.
        choices: one for each.
        tx: whose state is counted; its labels and spec are those of the choices.
        lrs: the learning rate of each, if known.
        adjust: scale of Muon's learning rate by shape.
    """
    trained = {name: p for name, p in params.items() if p.requires_grad}
    held = {leaf.path: leaf.bytes for leaf in describe(tx, trained).leaves}
    leaves = []
    for name, p in params.items():
        rule, why, axes = choices[name]
        scales = _scales(tuple(p.shape), axes, adjust) if rule == MUON else (1.0,)
        told = why if name in held else f"frozen; {why}"
        leaves.append(RoutedLeaf(name, tuple(p.shape), rule, told, lrs[name], scales, held.get(name, 0)))
    return Routing(tuple(leaves), {name: choices[name] for name in params})


def _scales(shape: Sequence[int], axes: MatrixAxes | None, adjust: str | None) -> tuple[float, ...]:
    sizes = matrices_of(shape, axes or default_axes(shape)).sizes
    return tuple(adjust_scale(size, adjust) for size in dict.fromkeys(sizes))
