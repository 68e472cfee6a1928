"""What stored state means beyond its shapes, as text that each group and so each checkpoint carries."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

from gefen_fn.base import GradientTransformation
from gefen_fn.blocks import FlatBlocks
from gefen_fn.describe import quantizing
from gefen_fn.first_moment import check_codebook
from gefen_fn.tree import tree_leaves, tree_paths
from gefen_nn.errors import CheckpointError

_ARGUMENTS = ("second_moment", "block", "quantize", "b2_warmup", "convention")


def kept_as(tx: GradientTransformation) -> str:
    """The arguments that say what leaves mean, of each stage that keeps codes, as JSON.

    What else an optimizer is built with may differ from one load to the next: rates, decays, what drives a step, how
    codes are rounded, and the codebook, which is state, but for its ties.
    """
    return json.dumps({stage: _told(rule) for stage, rule in quantizing(tx).items()})


def _told(rule: Mapping[str, Any]) -> dict[str, str]:
    told = {name: _text(name, rule[name]) for name in _ARGUMENTS if name in rule}
    return {**told, "ties": check_codebook(rule["codebook"])}


def _text(name: str, value: Any) -> str:
    """An argument as text that another process would write too, and short, as each group carries it."""
    if name == "b2_warmup":  # any exponent leaves an average of weight one, and no other bias to correct
        return "None" if value is None else "a number"
    if isinstance(value, FlatBlocks):
        return f"FlatBlocks(tree={_text('tree', value.tree)})"
    if isinstance(value, (Mapping, tuple, list)):
        items = sorted(zip(tree_paths(value), map(str, tree_leaves(value)), strict=True))
        return f"a tree of {len(items)}, {zlib.crc32(repr(items).encode()):08x}"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def check_kept_as(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse leaves that are kept by other rules, though their shapes may be the same.

    Args:
        saved: a group of the checkpoint; one that an older package wrote tells less, or nothing.
        own: a group of the target.

    Raises:
        CheckpointError: naming the argument, with both values.
    """
    came, wanted = _read(saved.get("kept_as", "{}")), _read(own["kept_as"])
    for stage in wanted.keys() & came.keys():
        for name, value in wanted[stage].items():
            if came[stage].get(name, value) != value:
                raise CheckpointError(
                    f"`{name}` of {stage} must be {value}, as the target's: got {came[stage][name]}. "
                    "Build the same optimizer as the one that saved."
                )


def _read(text: Any) -> dict[str, dict[str, Any]]:
    """The arguments by stage.

    Raises:
        CheckpointError: if this is not what `kept_as` makes.
    """
    try:
        told = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or not all(isinstance(rule, dict) for rule in told.values()):
        raise CheckpointError(
            f"`kept_as` of a group must be as it was saved: got {text!r}. The file is damaged; load an older one."
        )
    return told
