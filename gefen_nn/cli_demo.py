"""`gefen demo`, and the commands that it calls in new processes."""

import argparse
import os
from pathlib import Path
from typing import Any

from gefen_nn.arguments import Within, folder

HELP = "train a small decoder, stop, resume, plot"
_CHOICES = ("adamw", "gefen", "gefen_muon")


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument(
        "--optimizer",
        type=_optimizers,
        action="extend",
        metavar="NAME[,NAME]",
        help=f"one or more of {', '.join(_CHOICES)}; may be repeated (default: all)",
    )
    parser.add_argument("--steps", type=Within(2, 10**6), default=300, help="training steps (default: %(default)s)")
    seed = Within(0, 2**32 - 1)
    parser.add_argument("--seed", type=seed, default=0, help="seed of model and data (default: %(default)s)")
    parser.add_argument("--out", type=folder, default=Path("demo-out"), help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.set_defaults(call=_demo)


def add_inner(commands: Any) -> None:
    """The commands of new processes; without help they stay out of the listing."""
    _add_resume(commands.add_parser("demo-resume"))
    _add_member(commands.add_parser("demo-member"))


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="file written by `gefen demo` half-way")
    parser.add_argument("result", type=Path, help="file for the final parameters and losses")
    parser.set_defaults(call=_demo_resume)


def _add_member(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rank", type=int, help="number of this process")
    parser.add_argument("world", type=int, help="number of processes")
    parser.add_argument("checkpoint", type=Path, help="file written by `gefen demo` half-way")
    parser.add_argument("saved", type=Path, help="folder that the first world saves and the second loads")
    parser.add_argument("folder", type=Path, help="where the processes meet, and the first writes what it found")
    parser.set_defaults(call=_demo_member)


def _demo(arguments: argparse.Namespace) -> int:
    # Imported here so that `gefen --help` and wrong arguments do not need the demo's extras.
    from gefen_nn.demo import run_demo
    from gefen_nn.demo_train import Settings

    names = list(dict.fromkeys(arguments.optimizer or _CHOICES))
    settings = Settings(steps=arguments.steps, seed=arguments.seed)
    return 0 if run_demo(names, settings, arguments.out, as_json=arguments.json) else 1


def _demo_resume(arguments: argparse.Namespace) -> int:
    from gefen_nn.demo import resume_demo

    resume_demo(arguments.checkpoint, arguments.result)
    return 0


def _demo_member(arguments: argparse.Namespace) -> int:
    from gefen_nn.demo_world import train_member

    train_member(arguments.rank, arguments.world, arguments.checkpoint, arguments.saved, arguments.folder)
    os._exit(0)  # gloo's threads can abort a process that takes itself apart


def _optimizers(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in _CHOICES]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(_CHOICES)}: got {unknown[0]!r}. Correct the name.")
    return names
