"""Reading an expression: which leaves of a transform a back end can step in place, as its recipe tells.

An expression is recognised if, from left to right, it is

    [scale(-1)] [clip_by_global_norm] parts
    parts = part      or      partition({label: part, ...}) [stochastic_rounding]
            or        masked(part) masked(part) ... [stochastic_rounding]
    part = direction [add_decayed_weights, masked or not] [scale_by_learning_rate or its like]
           [stochastic_rounding]
    direction = scale_by_gefen      or      scale_by_muon [scale_by_matrix_shape]: without NorMuon, NAdam and
                stochastic_rounding

in any nesting of `chain`, `named_chain` and `inject_hyperparams`. What is no such part in a partition or under a mask,
leaves that no mask shows, and leaves that no back end takes go through the pure path inside the same step; if masks
overlap all leaves do.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gefen_fn.base import GradientTransformation, OptState, Params, Recipe
from gefen_fn.combine import bools, choices_of, keeps_norm, recipe_of
from gefen_fn.second_moment import Block, Dense, Factored
from gefen_fn.tree import StructureError, Tree, tree_structure, tree_unflatten

Path = tuple[Any, ...]
_RATES = {"scale_by_learning_rate": -1.0, "scale": 1.0, "scale_by_schedule": 1.0}


class Stage(NamedTuple):
    """A stage of an expression, and where its state lies.

    Attributes:
        recipe: its name and arguments.
        path: fields, keys and indices from the root of the state to its state.
        owner: the `inject_hyperparams` around it, whose state holds its marked arguments; None without.
    """

    recipe: Recipe
    path: Path
    owner: "Stage | None"


class Part(NamedTuple):
    """The stages that step one set of leaves in one go.

    Attributes:
        core: `scale_by_gefen` or `scale_by_muon`.
        decay: `add_decayed_weights`, or None.
        mask: which leaves decay; None for all.
        rate: the stage that multiplies at the end, or None.
        rounding: `stochastic_rounding`, or None.
        label: in a partition, the label of the leaves; under masks, the number of theirs.
        where: which leaves those are, in words.
        shape: `scale_by_matrix_shape` of Muon, or None.
    """

    core: Stage
    decay: Stage | None
    mask: Any
    rate: Stage | None
    rounding: Stage | None
    label: Any = None
    where: str = ""
    shape: Stage | None = None

    @property
    def is_muon(self) -> bool:
        """Whether it makes matrices orthogonal."""
        return self.core.recipe.name == "scale_by_muon"

    @property
    def stages(self) -> list[Stage]:
        """Those that there are."""
        given = (self.core, self.shape, self.decay, self.rate, self.rounding)
        return [stage for stage in given if stage is not None]

    @property
    def sign(self) -> float:
        """What the rate is multiplied by: -1 for a learning rate."""
        if self.rate is None:
            return 1.0
        flips = self.rate.recipe.kwargs.get("flip_sign", True)
        return _RATES[self.rate.recipe.name] if flips else 1.0


class Program(NamedTuple):
    """A recognised expression.

    Attributes:
        negate: whether the gradient is negated first.
        clip: the `clip_by_global_norm`, or None.
        parts: what is stepped in one go.
        labels: of a partition or of masks: a tree of labels, or a function of params; None for one part.
        whole: whether the parts are all there is: nothing in a partition or under a mask is left to the pure path.
    """

    negate: bool
    clip: Stage | None
    parts: tuple[Part, ...]
    labels: Any
    whole: bool

    @property
    def stages(self) -> list[Stage]:
        """Every stage that is fused."""
        inside = [stage for part in self.parts for stage in part.stages]
        return inside if self.clip is None else [self.clip, *inside]

    def __str__(self) -> str:
        """The stages that are fused, part by part."""
        before = ["scale"] * self.negate + ([self.clip.recipe.name] if self.clip is not None else [])
        texts = []
        for part in self.parts:
            stages = [stage.recipe.name for stage in part.stages]
            texts.append(" + ".join([*before, *stages]) + part.where)
        return "; ".join(texts)


def at(state: OptState, path: Path) -> Any:
    """What lies at a path in a state.

    Raises:
        StructureError: if the state is another transform's.
    """
    try:
        for key in path:
            state = getattr(state, key) if hasattr(state, "_fields") else state[key]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise StructureError(
            f"State must be of this transform: got nothing at {path} ({error}). Use the state that its `init` made."
        ) from error
    return state


def put(state: OptState, path: Path, value: Any) -> OptState:
    """The state with `value` at a path."""
    if not path:
        return value
    key, inner = path[0], put(at(state, path[:1]), path[1:], value)
    if hasattr(state, "_fields"):
        return state._replace(**{key: inner})
    if isinstance(state, dict):
        return {**state, key: inner}
    return (*state[:key], inner, *state[key + 1 :])


def recognise(tx: GradientTransformation) -> Program | None:
    """Read a program off a transform's recipe; None if it is another expression."""
    negate, clip, rest = _opening(tx)
    parts, labels = _parts(rest)
    known = tuple(part for part in parts if part is not None)
    return Program(negate, clip, known, labels, len(known) == len(parts)) if known else None


def begins_with_clip(tx: GradientTransformation) -> bool:
    """Whether a transform needs the norm of all gradients before anything else."""
    return _opening(tx)[1] is not None


def _opening(tx: GradientTransformation) -> tuple[bool, Stage | None, list[Stage]]:
    """Whether the gradient is negated first, the clip of its norm, and the stages after it."""
    stages = list(_stages(tx, (), None))
    negate = bool(stages) and _is_negation(stages[0])
    rest = stages[negate:]
    clip = rest.pop(0) if rest and rest[0].recipe.name == "clip_by_global_norm" else None
    return negate, clip, rest


def _stages(tx: Any, path: Path, owner: Stage | None) -> Iterator[Stage]:
    """The stages from left to right, chains and injections opened."""
    recipe = recipe_of(tx)
    if recipe.name == "chain":
        for i, inner in enumerate(recipe.args):
            yield from _stages(inner, (*path, i), owner)
    elif recipe.name == "named_chain":
        for name, inner in recipe.args:
            yield from _stages(inner, (*path, name), owner)
    elif (inner := opened(recipe).tx) is not None:
        yield from _stages(inner, (*path, "inner_state"), Stage(recipe, path, owner))
    elif recipe.name != "identity":
        yield Stage(recipe, path, owner)


class Inside(NamedTuple):
    """What is inside an injection; nothing of either in any other transform.

    Attributes:
        tx: the transform, with marked arguments; None if it cannot be read.
        error: why not: what its factory raises if it does more with a number than pass it on, as a mark is no number.
    """

    tx: GradientTransformation | None
    error: Exception | None


def opened(recipe: Recipe) -> Inside:
    """What is inside, if this is the recipe of an injection."""
    try:
        return Inside(None if recipe.marked is None else recipe.marked(), None)
    except Exception as error:  # which of all errors that is, is the factory's to say
        return Inside(None, error)


def unread(tx: Any) -> str:
    """Which injection in a transform cannot be read, and why; empty if all can."""
    recipe = recipe_of(tx)
    error = opened(recipe).error
    if error is not None:
        why = f"{type(error).__name__}: {error}"
        return f"the factory of {recipe.name} does more with a number than pass it on, {why}"
    return next(filter(None, map(unread, inner_of(recipe))), "")


def _is_negation(stage: Stage) -> bool:
    return stage.recipe.name == "scale" and keeps_norm(stage.recipe)


def _parts(rest: list[Stage]) -> tuple[list[Part | None], Any]:
    """What is stepped in one go, None for what is no part, and the labels that tell whose each leaf is."""
    last = rest[-1:] if rest and rest[-1].recipe.name == "stochastic_rounding" else []  # of each part
    outer = rest[: len(rest) - len(last)]
    if len(outer) == 1 and outer[0].recipe.name == "partition":
        stage, (transforms, labels) = outer[0], outer[0].recipe.args
        rows = [(tx, ("inner_states", label), label, f" for {label!r}") for label, tx in transforms.items()]
        return [_inner_part(last, stage, *row) for row in rows], labels
    if outer and all(stage.recipe.name == "masked" for stage in outer):
        inside = [(stage, stage.recipe.args[0], ("inner_state",), n) for n, stage in enumerate(outer)]
        masks = [stage.recipe.args[1] for stage in outer]
        return [_inner_part(last, *row, " where masked") for row in inside], _only_shown(masks)
    return [_part(rest)], None


def _inner_part(
    last: list[Stage], stage: Stage, tx: GradientTransformation, path: Path, label: Any, where: str
) -> Part | None:
    part = _part([*_stages(tx, (*stage.path, *path), stage.owner), *last])
    return None if part is None else part._replace(label=label, where=where)


def _only_shown(masks: list[Any]) -> Callable[[Params], Tree]:
    """Labels: the number of the one mask that shows a leaf, None where none does; None everywhere if masks overlap."""

    def labels(params: Params) -> Tree:
        rows = list(zip(*(bools(choices_of(mask, params, params)) for mask in masks), strict=True))
        apart = all(sum(row) < 2 for row in rows)
        numbers = [row.index(True) if apart and any(row) else None for row in rows]
        return tree_unflatten(tree_structure(params), numbers)

    return labels


def _part(stages: list[Stage]) -> Part | None:
    if not stages or not _is_core(stages[0].recipe):
        return None
    core, rest, shape = stages[0], stages[1:], None
    if core.recipe.name == "scale_by_muon" and rest and rest[0].recipe.name == "scale_by_matrix_shape":
        shape, rest = rest[0], rest[1:]
    decay, mask = _decay(rest[0]) if rest else (None, None)
    if decay is not None:
        rest = rest[1:]
    rate = rest.pop(0) if rest and rest[0].recipe.name in _RATES else None
    rounding = rest.pop(0) if rest and rest[0].recipe.name == "stochastic_rounding" else None
    part = Part(core, decay, mask, rate, rounding, shape=shape)
    return None if rest or (part.is_muon and rounding is not None) else part


def _is_core(recipe: Recipe) -> bool:
    given = recipe.kwargs
    if recipe.name == "scale_by_muon":
        return not given["normuon"] and given["convention"] != "nadam"
    return recipe.name == "scale_by_gefen" and type(given["second_moment"]) in (Dense, Block, Factored)


def _decay(stage: Stage) -> tuple[Stage | None, Any]:
    """The decay in a stage, with its mask."""
    if stage.recipe.name == "add_decayed_weights":
        return stage, None
    if stage.recipe.name == "masked" and stage.recipe.args[0].update.recipe.name == "add_decayed_weights":
        inner, mask = stage.recipe.args
        return Stage(inner.update.recipe, (*stage.path, "inner_state"), stage.owner), mask
    return None, None


def inner_of(recipe: Recipe) -> list[Any]:
    """The transforms that a recipe puts together; labels in the order in which dictionaries of state are walked."""
    if recipe.inner is not None:
        return [recipe.inner]
    if recipe.name == "named_chain":
        return [tx for _, tx in sorted(recipe.args)]
    if recipe.name == "partition":
        return [recipe.args[0][label] for label in sorted(recipe.args[0], key=lambda x: (type(x).__name__, x))]
    return [tx for tx in recipe.args if isinstance(tx, GradientTransformation)]
