"""What the tools of the `gefen` command train: a task makes runs, a build makes their optimizers.

On the command line both are `module:function`, found from the current folder.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gefen_nn.errors import WrongArgumentError
from gefen_nn.muon import GefenMuon
from gefen_nn.presets import Gefen


class Run(NamedTuple):
    """A training run before its first step.

    Attributes:
        model: with fresh parameters.
        loss: the loss of the next training batch, 0-dim and differentiable; called once a step.
        held_out: the loss on data that is not trained on; None if there is none.

    Example:
        >>> def task(seed):
        ...     torch.manual_seed(seed)
        ...     model, x = nn.Linear(4, 1), torch.randn(16, 4)
        ...     return Run(model, lambda: model(x).square().mean())
        >>> task(0).loss().shape
        torch.Size([])
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
        WrongArgumentError: for another name, or what `function_named` refuses.
    """
    if text in BUILDS:
        return BUILDS[text]
    if ":" not in text:
        raise WrongArgumentError(
            f"An optimizer must be of {', '.join(BUILDS)}, or module:function: got {text!r}. Correct the name."
        )
    return function_named(text, "model", "lr")


def model_named(text: str) -> nn.Module:
    """The model that the factory `module:function` makes.

    Raises:
        WrongArgumentError: if it makes something else, or what `function_named` refuses.
    """
    model = function_named(text)()
    if not isinstance(model, nn.Module):
        raise WrongArgumentError(f"{text} must make a torch.nn.Module: got a {type(model).__name__}. Return the model.")
    return model


def check_run(run: Any, task: str) -> None:
    """Refuse what a task of this name returned, where it is no run, or trains nothing.

    Raises:
        ValueError: naming the task.
    """
    if not isinstance(run, Run):
        raise ValueError(
            f"A task must return a gefen_nn.Run: got {type(run).__name__} from {task}. Return Run(model, loss, "
            "held_out)."
        )
    if not isinstance(run.model, nn.Module):
        raise ValueError(
            f"The model of a run must be a torch.nn.Module: got {type(run.model).__name__} from {task}. Return "
            "Run(model, loss, held_out)."
        )
    if not callable(run.loss) or not (run.held_out is None or callable(run.held_out)):
        raise ValueError(
            f"`loss` and `held_out` of a run must be functions: got {type(run.loss).__name__} and "
            f"{type(run.held_out).__name__} from {task}. Return Run(model, lambda: ...)."
        )
    if not trained_entries(run.model):
        raise ValueError(f"The model of a run must have parameters to train: got none from {task}. Unfreeze some.")


def trained_entries(model: nn.Module) -> int:
    """How many numbers of a model are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def function_named(text: str, *takes: str) -> Callable[..., Any]:
    """What `module:function` names.

    Args:
        text: the name.
        takes: what it will be called with, in words.

    Raises:
        WrongArgumentError: if it is no such text, or names nothing that can be called so.
        ImportError: whatever the module's own import raises.
    """
    module_name, _, path = text.partition(":")
    if "" in module_name.split(".") or not path or module_name.endswith(".py"):
        name = module_name.removesuffix(".py").replace("/", ".").strip(".") or "my_model"
        raise WrongArgumentError(
            f"A function must be named as module:function: got {text!r}. Write '{name}:{path or 'build'}'."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            known = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
            raise WrongArgumentError(f"{module_name} must define {path!r}: got {known[:8]}. Correct the name.")
        found = getattr(found, part)
    if not callable(found):
        raise WrongArgumentError(f"{text} must be a function: got a {type(found).__name__}. Name one that makes it.")
    _check_takes(text, found, takes)
    return found  # type: ignore[no-any-return]  # any callable


def _check_takes(text: str, function: Callable[..., Any], takes: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of those written in C tell none
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        came = ", ".join(signature.parameters) or "nothing"
        raise WrongArgumentError(
            f"{text} must be a function of {', '.join(takes) or 'nothing'}: got one of {came}. Name another."
        ) from error


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise WrongArgumentError(
            f"A module must be installed, or lie in the current folder: got no {error.name!r} from {Path.cwd()}. "
            "Change the folder, or correct the name."
        ) from error
