"""The `gefen` command: a module for each subcommand, with `HELP`, and with `add` for arguments and what to call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import gefen_fn
from gefen_nn import cli_bench, cli_compare, cli_convert, cli_demo, cli_inspect, cli_lr_find, cli_memory
from gefen_nn.errors import WrongArgumentError, place_of

_COMMANDS = {
    "demo": cli_demo,
    "compare": cli_compare,
    "lr-find": cli_lr_find,
    "memory": cli_memory,
    "inspect": cli_inspect,
    "convert": cli_convert,
    "bench": cli_bench,
}

_OWN = (ImportError, OSError, RuntimeError, ValueError)  # what commands raise in words for their user


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments after the program's name; the process's own if None.

    Returns:
        0 on success, 1 when the command failed, 2 when its arguments were wrong, 130 when it was interrupted.
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
    except KeyboardInterrupt:
        print(f"gefen {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:
        if not isinstance(error, _OWN) and place_of(error) is None:
            raise  # nobody's but ours, so say all
        print(f"gefen {arguments.command}: {_told(error)}", file=sys.stderr)
        return 2 if isinstance(error, WrongArgumentError) else 1


def _told(error: BaseException) -> str:
    """The error's own words; of a user's code, with its type and place; of a file, without the system's number."""
    place = place_of(error)
    if place is not None:
        return f"{type(error).__name__}: {' '.join(str(error).split())} (in {place})"
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
