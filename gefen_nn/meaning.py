"""What stored state means beyond its shapes, as text that each group and so each checkpoint carries."""

import json
from collections.abc import Mapping
from typing import Any

from gefen_fn.base import GradientTransformation
from gefen_fn.describe import quantizing
from gefen_fn.first_moment import check_codebook
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
    """An argument as text that another process would write too."""
    if name == "b2_warmup":  # any exponent leaves an average of weight one, and no other bias to correct
        return "None" if value is None else "a number"
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
    try:
        came = json.loads(saved.get("kept_as", "{}"))
    except (TypeError, ValueError):
        raise CheckpointError(
            f"`kept_as` of a group must be as it was saved: got {saved['kept_as']!r}. Load an older checkpoint."
        ) from None
    wanted = json.loads(own["kept_as"])
    for stage in wanted.keys() & came.keys():
        for name, value in wanted[stage].items():
            if came[stage].get(name, value) != value:
                raise CheckpointError(
                    f"`{name}` of {stage} must be {value}, as the target's: got {came[stage][name]}. "
                    "Build the same optimizer as the one that saved."
                )
