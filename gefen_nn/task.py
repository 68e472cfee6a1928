"""What the tools of the `gefen` command train: a task makes runs, a build makes their optimizers.

On the command line both are `module:function`, found from the current folder.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gefen_nn.muon import GefenMuon
from gefen_nn.presets import Gefen


class Run(NamedTuple):
    """A training run before its first step.

    Attributes:
        model: with fresh parameters.
        loss: the loss of the next training batch, 0-dim and differentiable; called once a step.
        held_out: the loss on data that is not trained on; None if there is none.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    held_out: Callable[[], float] | None = None


Task = Callable[[int], Run]
"""Makes a run of a seed: the same seed, the same parameters and batches."""

Build = Callable[[nn.Module, float], torch.optim.Optimizer]
"""Makes an optimizer of a model and a learning rate."""

BUILDS: Mapping[str, Build] = {
    "adamw": lambda model, lr: torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0, fused=True),
    "gefen": lambda model, lr: Gefen(model.named_parameters(), lr),
    "gefen_muon": lambda model, lr: GefenMuon(model, lr),
}
"""Optimizers by name, without weight decay."""


def build_named(text: str) -> Build:
    """The optimizer of a name in `BUILDS`, or a function of a model and a learning rate, as `module:function`.

    Raises:
        ValueError: for another name, or what `function_named` refuses.
    """
    if text in BUILDS:
        return BUILDS[text]
    if ":" not in text:
        raise ValueError(
            f"An optimizer must be of {', '.join(BUILDS)}, or module:function: got {text!r}. Correct the name."
        )
    return function_named(text)


def function_named(text: str) -> Callable[..., Any]:
    """What `module:function` names.

    Raises:
        ValueError: if it is no such text, or names nothing that can be called.
        ImportError: whatever the module's own import raises.
    """
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise ValueError(f"A function must be named as module:function: got {text!r}. Write 'my_model:build'.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            known = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
            raise ValueError(f"{module_name} must define {path!r}: got {known[:8]}. Correct the name.")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{text} must be a function: got a {type(found).__name__}. Name one that makes it.")
    return found  # type: ignore[no-any-return]  # any callable


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ValueError(
            f"A module must be installed, or lie in the current folder: got no {error.name!r} from {Path.cwd()}. "
            "Change the folder, or correct the name."
        ) from error
