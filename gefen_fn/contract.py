"""What an optimizer promises: the layouts it can train on, and what its checkpoints restore.

A claim that is False means unsupported, never unknown. A transform's contract is its `Capabilities`. Those of the
transforms here are read off the `Recipe` that their constructors leave at `update.recipe`: their name and arguments.

A transform of one's own has no recipe, and may publish a contract by `update.contract = Capabilities(...)`. One that
publishes none trains and is saved all the same: it claims only what holds of every pure function, that it trains on
replicated tensors and is restored where it was saved; of all else it is said that it is not stated, and by whom.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gefen_fn.base import GradientTransformation, Recipe
from gefen_fn.blocks import FlatBlocks
from gefen_fn.program import inner_of
from gefen_fn.second_moment import Factored

CONTRACT_VERSION = 1
LAYOUTS = (
    "replicated",
    "rows",
    "leading axes",
    "aligned columns",
    "replicas of shards",
    "rows and columns",
    "offloaded",
)
"""How a DTensor may lie, in the order in which a report names them: HSDP is replicas of shards, FSDP2 over tensor
parallelism is rows and columns, and offloaded shards live on the CPU."""


@dataclass(frozen=True)
class Capabilities:
    """The claims of one transform, or of several parts together.

    Attributes:
        name: what it is.
        layouts: those it can train on, each once.
        same_topology_exact: a checkpoint restores the bits on the mesh that saved it.
        resharding_exact: it restores them on any other too.
        refused: why not, where it does not; one reason each.
        version: of this contract.
        unstated: layouts that stages which publish no contract are silent on, and that no stage of theirs is short of.
        silent: those stages.

    Raises:
        TypeError: naming the field, for a value of another type; a truthy value is no bool, and True no version.
        ValueError: naming the field, for an empty or repeated name, or an unknown version.
    """

    name: str
    layouts: tuple[str, ...]
    same_topology_exact: bool
    resharding_exact: bool
    refused: tuple[str, ...] = ()
    version: int = CONTRACT_VERSION
    unstated: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no claim, where it is made."""
        for field in ("layouts", "refused", "unstated", "silent"):
            object.__setattr__(self, field, _names(field, getattr(self, field)))
        _exactly("name", self.name, str)
        for flag in ("same_topology_exact", "resharding_exact"):
            _exactly(flag, getattr(self, flag), bool)
        _exactly("version", self.version, int)
        if not self.name:
            raise ValueError("`name` must not be empty: got ''. Name the transform.")
        if self.version != CONTRACT_VERSION:
            raise ValueError(f"`version` must be {CONTRACT_VERSION}: got {self.version}. Update the package.")


def _exactly(field: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise TypeError(f"`{field}` must be a {kind.__name__}: got {value!r}. Write it out.")


def _names(field: str, values: Any) -> tuple[str, ...]:
    """A copy of a container of names."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"`{field}` must be a tuple of names: got {values!r}. Write a tuple.")
    names = tuple(values)
    for name in names:
        _exactly(field, name, str)
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"`{field}` must hold names, each once: got {names}. Drop empty and repeated ones.")
    return names


def unpublished(name: str) -> Capabilities:
    """The claims of a transform that makes none."""
    reason = f"elsewhere not stated by {name}: unknown stage, publishes no contract (see gefen_fn.contract)"
    return Capabilities(name, ("replicated",), True, False, (reason,), unstated=LAYOUTS[1:], silent=(name,))


def of_parts(name: str, parts: Sequence[Capabilities]) -> Capabilities:
    """The claims of parts that step different leaves of one model.

    They can train on what any of them can; a checkpoint, which holds them all, restores what all of them do.

    Args:
        name: of the whole.
        parts: the claims of the parts that there are.

    Raises:
        TypeError: if a part is no `Capabilities`.
    """
    for part in parts:
        _exactly("parts", part, Capabilities)
    layouts, refused, unstated, silent = (
        dict.fromkeys(name for part in parts for name in getattr(part, field))
        for field in ("layouts", "refused", "unstated", "silent")
    )
    same, resharded = (
        all(getattr(part, flag) for part in parts) for flag in ("same_topology_exact", "resharding_exact")
    )
    stated = tuple(layouts) or ("replicated",), same, resharded, tuple(refused)
    return Capabilities(name, *stated, unstated=tuple(unstated), silent=tuple(silent))


def of_stages(name: str, stages: Sequence[Capabilities]) -> Capabilities:
    """The claims of stages that each step the same leaves: what every one of them can do."""
    layouts = tuple(layout for layout in LAYOUTS if all(layout in stage.layouts for stage in stages))
    possible = [layout for layout in LAYOUTS if all(layout in stage.layouts + stage.unstated for stage in stages)]
    unstated = tuple(layout for layout in possible if any(layout in stage.unstated for stage in stages))
    return replace(of_parts(name, stages), layouts=layouts, unstated=unstated)


def claims(tx: GradientTransformation) -> Capabilities:
    """What a transform promises, by its contract or read off its recipe; the leaves are not looked at."""
    update = getattr(tx, "update", None)
    recipe, contract = getattr(update, "recipe", None), getattr(update, "contract", None)
    if isinstance(contract, Capabilities):
        return contract
    if not isinstance(recipe, Recipe):
        return unpublished(_own_name(update))
    inner = [claims(part) for part in inner_of(recipe)]
    if inner:
        return of_parts(recipe.name, inner) if recipe.name == "partition" else of_stages(recipe.name, inner)
    return _CLAIMS.get(recipe.name, _anywhere)(recipe)


def _own_name(update: Any) -> str:
    """What a transform of one's own is called: the function that made it."""
    return str(getattr(update, "__qualname__", type(update).__name__)).split(".")[0]


def _anywhere(recipe: Recipe) -> Capabilities:
    return Capabilities(recipe.name, LAYOUTS, True, True)


def _without_columns(recipe: Recipe) -> Capabilities:
    layouts = tuple(layout for layout in LAYOUTS if "columns" not in layout)
    return Capabilities(recipe.name, layouts, True, True)


def _quantized(recipe: Recipe) -> Capabilities:
    if isinstance(recipe.kwargs["block"], FlatBlocks):
        return Capabilities(recipe.name, ("replicated",), True, False, ("blocks over flattened leaves do not shard",))
    policy = recipe.kwargs.get("second_moment")
    crosses = isinstance(policy, Factored) and policy.sides[1] is None
    return (_without_columns if crosses else _anywhere)(recipe)


_CLAIMS: dict[str, Callable[[Recipe], Capabilities]] = {
    "scale_by_gefen": _quantized,
    "scale_by_muon": _quantized,
    "adaptive_grad_clip": _without_columns,
    "stateless": lambda recipe: unpublished("a function of one's own"),
}
