"""The `gefen` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import gefen_fn
from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_nn.model_shapes import MODELS
from gefen_nn.scale_model import simulate

_CHOICES = ("adamw", "gefen", "gefen_muon")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments after the program's name; the process's own if None.

    Returns:
        0 on success, 1 when the command failed, 2 when its arguments were wrong.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its help (0) or the reason (2)
        return int(stop.code or 0)
    try:
        return int(arguments.call(arguments))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"gefen {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gefen", description="Optimizers at about one byte of state per parameter.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {gefen_fn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a small decoder, stop, resume, plot"))
    _add_resume(commands.add_parser("demo-resume"))  # without help it stays out of the listing: `demo` calls it
    _add_memory(commands.add_parser("memory", help="bytes of state and traffic of a large model on many processes"))
    return parser


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-70b", help="(default: %(default)s)")
    parser.add_argument("--world", type=_Within(1, 65_536), default=64, help="processes (default: %(default)s)")
    parser.add_argument("--experts-over", type=_Within(1, 65_536), default=1, help="processes that share out experts")
    parser.add_argument("--optimizer", choices=("gefen", "gefen_muon"), default="gefen", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(call=_memory)


def _memory(arguments: argparse.Namespace) -> int:
    model, muon = MODELS[arguments.model](), arguments.optimizer == "gefen_muon"
    options = {"muon": muon, "expert_parallel": arguments.experts_over, "policy": DEFAULT_SECOND_MOMENT}
    report = simulate(model, arguments.world, **options)
    print(json.dumps(report._asdict()) if arguments.json else report)
    return 0


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizer",
        type=_optimizers,
        action="extend",
        metavar="NAME[,NAME]",
        help=f"one or more of {', '.join(_CHOICES)}; may be repeated (default: all)",
    )
    parser.add_argument("--steps", type=_Within(2, 10**6), default=300, help="training steps (default: %(default)s)")
    seed = _Within(0, 2**32 - 1)
    parser.add_argument("--seed", type=seed, default=0, help="seed of model and data (default: %(default)s)")
    parser.add_argument("--out", type=_folder, default=Path("demo-out"), help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.set_defaults(call=_demo)


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="file written by `gefen demo` half-way")
    parser.add_argument("result", type=Path, help="file for the final parameters and losses")
    parser.set_defaults(call=_demo_resume)


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


def _optimizers(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in _CHOICES]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(_CHOICES)}: got {unknown[0]!r}. Correct the name.")
    return names


class _Within:
    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or not self.least <= int(text) <= self.most:
            rule = f"must be an integer from {self.least} to {self.most}"
            raise argparse.ArgumentTypeError(f"{rule}: got {text!r}. Choose another.")
        return int(text)


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder: got the file {text!r}. Name a folder, new or old.")
    return path


if __name__ == "__main__":
    sys.exit(main())
