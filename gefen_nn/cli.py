"""The `gefen` command: a module for each subcommand, with `HELP`, and with `add` for arguments and what to call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import gefen_fn
from gefen_nn import cli_bench, cli_compare, cli_convert, cli_demo, cli_inspect, cli_lr_find, cli_memory
from gefen_nn.errors import WrongArgumentError

_COMMANDS = {
    "demo": cli_demo,
    "compare": cli_compare,
    "lr-find": cli_lr_find,
    "memory": cli_memory,
    "inspect": cli_inspect,
    "convert": cli_convert,
    "bench": cli_bench,
}


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
        code = int(arguments.call(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest, which Python writes at its end
        return 1
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"gefen {arguments.command}: {_told(error)}", file=sys.stderr)
        return 2 if isinstance(error, WrongArgumentError) else 1


def _told(error: Exception) -> str:
    """The error's own words; of a file, without the number that the system gives to its kind."""
    if isinstance(error, OSError) and error.filename is not None:
        name = str(error.filename)
        return f"{name!r} must be a file or folder that you may use: got {error.strerror!r}. Correct the path."
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gefen", description="Optimizers at about one byte of state per parameter.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {gefen_fn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add(commands.add_parser(name, help=module.HELP))
    cli_demo.add_inner(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
