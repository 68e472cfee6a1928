"""`gefen convert`."""

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gefen_nn import folders
from gefen_nn.arguments import file
from gefen_nn.console import as_json, aside, bar
from gefen_nn.converting import MAKERS, Conversion, convert_files
from gefen_nn.errors import CheckpointError, WrongArgumentError
from gefen_nn.task import function_named, model_named

HELP = "make state of AdamW, torch's Muon or Gefen-X into ours, and ours into AdamW's"
_EPILOG = """IN is a file of torch.save with an optimizer's state dict, alone or among others; two of them where
torch.optim.Muon and AdamW shared a model. OUT is such a file, for `optimizer.load_state_dict`.
State of ours, also a folder of gefen_nn.save, becomes AdamW's with its moments in fp32.

The model's factory is needed where the state does not tell shapes: for Gefen-X, which flattens
moments, and for parameters that never had a gradient. Its modules also tell which parameters are
Muon's, as `GefenMuon(model)` has them; without it names and shapes do."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("sources", type=Path, nargs="+", metavar="IN", help="state to read")
    parser.add_argument("out", type=file, metavar="OUT", help="new file to write")
    choices = (*MAKERS, "adamw")
    parser.add_argument("--to", choices=choices, help="(default: gefen, or adamw where the source is ours)")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="makes the model whose parameters they are")
    parser.add_argument("--optimizer", metavar="MODULE:FUNCTION", help="makes ours of groups, for other arguments")
    parser.add_argument("--key", help="which of several states in a file, such as 'optimizer'")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(call=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert, write, print."""
    if arguments.out.exists():
        raise WrongArgumentError(f"OUT must be new: got {arguments.out}, which is there. Name another file.")
    with aside():
        told = _written(arguments)
    rows = [leaf._asdict() for leaf in told.leaves]
    print(as_json({**told._asdict(), "leaves": rows}) if arguments.json else told)
    return 0


def _written(arguments: argparse.Namespace) -> Conversion:
    model = None if arguments.model is None else model_named(arguments.model)
    make = None if arguments.optimizer is None else function_named(arguments.optimizer, "groups")
    with bar("converting and writing", 2) as advance:
        made, told = convert_files(arguments.sources, arguments.to, model=model, make=make, key=arguments.key)
        advance()
        _write(made, arguments.out)
        advance()
    return told


def _write(made: Mapping[str, Any], out: Path) -> None:
    """Put a file in its place when it is whole; nothing stays of one that could not be written."""
    part = folders.beside(out, "part")
    try:
        torch.save(made, part)
        part.replace(out)
    except (OSError, RuntimeError) as error:  # torch's own, of a disk that is full
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise CheckpointError(folders.failure(out, repr(error).splitlines()[0])) from error
