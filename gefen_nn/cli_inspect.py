"""`gefen inspect`."""

import argparse
import sys
from pathlib import Path

from gefen_nn.arguments import picture
from gefen_nn.console import as_json, bar
from gefen_nn.inspecting import inspect_checkpoint

HELP = "say what is in a checkpoint, and whether it is sound"
_EPILOG = """PATH is a folder of gefen_nn.save or of torch.distributed.checkpoint, or a file of torch.save with an
optimizer's state dict, alone or among others. The exit code is 1 if something in it is damaged.
Nothing that it holds is run. Parameters without state are named, and are no fault: frozen ones have none.

"at ends" and "at zero" are shares of the codes. In each block the largest entry lies at an end, so
1/block of them (0.39 % of 256) is the least; much more means that few entries carry the block.
"empty" is the share of blocks whose scale is zero: nothing has moved there yet."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder or a file")
    parser.add_argument("--key", help="which of several states in it, such as 'optimizer'")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the codebooks and their use")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(call=run)


def run(arguments: argparse.Namespace) -> int:
    """Look, print, draw."""
    contents = inspect_checkpoint(arguments.path, key=arguments.key, watch=bar)
    if arguments.json:
        rows = [leaf._asdict() for leaf in contents.leaves]
        books = {stage: {**book._asdict(), "dead": book.dead} for stage, book in contents.codebooks.items()}
        print(as_json({**contents._asdict(), "leaves": rows, "codebooks": books, "faults": contents.faults}))
    else:
        print(contents)
    if arguments.plot is not None:
        from gefen_nn.codebook_picture import draw

        draw(contents, arguments.plot)
    if contents.faults:
        print(f"gefen inspect: {len(contents.faults)} faults, do not go on from this", file=sys.stderr)
    return 1 if contents.faults else 0
