"""Extra arguments of a step: those that the stages of an expression need, and a digest that members compare."""

import inspect
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation
from gefen_fn.combine import recipe_of
from gefen_fn.program import inner_of
from gefen_fn.tree import tree_leaves, tree_paths

_OWN = "a stage of your own"
_PLAIN = (int, float, str)


class Extras(NamedTuple):
    """What an expression reads besides gradients, state and params.

    Attributes:
        needs: the name of each argument, with that of the stage that reads it.
        takes_any: whether a stage is somebody's own, which may read any.
    """

    needs: Mapping[str, str]
    takes_any: bool

    @classmethod
    def of(cls, tx: GradientTransformation) -> "Extras":
        """Those of an expression."""
        stages = list(_stages(tx))
        needs = {name: stage for stage, names in stages for name in names}
        return cls(needs, any(stage == _OWN for stage, _ in stages))

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse a step without what a stage needs, or with what none reads.

        Raises:
            ValueError: naming what is missing.
            TypeError: naming what nobody reads.
        """
        for name, stage in self.needs.items():
            if name not in given:
                raise ValueError(
                    f"`step` takes the extra arguments that its stages read: got {_names(given)}, and {stage} reads "
                    f"`{name}`. Call `optimizer.step({name}=...)`, or return it from a pre-hook of the step."
                )
        if not self.takes_any and len(given) > len(self.needs):
            raise TypeError(
                f"An extra argument of `step` must be one that a stage reads: got {_names(given)}, and stages that "
                f"read {_names(self.needs)}. Correct the name, or leave it out."
            )


def _names(given: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in given) or "none"


def _stages(tx: GradientTransformation) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A transform and all that it is put together from: what each is called, and the arguments that it needs."""
    recipe = recipe_of(tx)
    yield (recipe.name, recipe.needs) if hasattr(tx.update, "recipe") else (_OWN, _named_alone(tx.update))
    for inner in inner_of(recipe):
        yield from _stages(inner)


def _named_alone(update: Any) -> tuple[str, ...]:
    """The arguments that somebody's own update takes by name alone, without a default."""
    try:
        given = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):  # nothing is known of it
        return ()
    return tuple(p.name for p in given if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def digest(given: Mapping[str, Any], start: int) -> int:
    """32 bits that members with the same extra arguments have in common; tensors are read if they lie on the CPU.

    Args:
        given: trees by name.
        start: the digest of what comes before, which it is without arguments.
    """
    tree = dict(given)
    for path, x in zip(tree_paths(tree), tree_leaves(tree), strict=True):
        form = (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x if isinstance(x, _PLAIN) else type(x).__name__
        start = zlib.crc32(repr((path, form)).encode(), start)
        if type(x) is Tensor and x.device.type == "cpu":
            start = zlib.crc32(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), start)
    return start
