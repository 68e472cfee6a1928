"""`gefen lr-find`."""

import argparse

from gefen_nn.arguments import Within, picture, positive
from gefen_nn.console import as_json, aside, bar
from gefen_nn.lr_finder import lr_find
from gefen_nn.task import BUILDS, function_named

HELP = "find a learning rate for your model and data by a range test and short runs"
_EPILOG = """The task is a function of a seed that makes a fresh run:

    from gefen_nn import Run

    def task(seed):
        torch.manual_seed(seed)
        model, batches = ..., iter(...)
        return Run(model, loss=lambda: F.cross_entropy(model(...), ...))

`gefen lr-find --task my_module:task --optimizer gefen --plot lr.png` then runs where my_module.py lies.
A third field of Run, `held_out`, is a function that gives the loss on other data; without it the last
training losses judge. The optimizer may also be module:function, of the model and a learning rate."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    count, names = Within(10, 10**6), ", ".join(BUILDS)
    parser.add_argument("--task", required=True, metavar="MODULE:FUNCTION", help="makes a run of a seed, see below")
    parser.add_argument(
        "--optimizer", default="gefen", metavar="OPTIMIZER", help=f"{names} or module:function (default: gefen)"
    )
    parser.add_argument("--low", type=positive, default=1e-6, help="least rate to try (default: 1e-6)")
    parser.add_argument("--high", type=positive, default=1.0, help="largest rate to try (default: 1)")
    parser.add_argument("--range-steps", type=count, default=100, help="of the range test (default: %(default)s)")
    parser.add_argument("--steps", type=count, default=100, help="of each short run (default: %(default)s)")
    parser.add_argument("--runs", type=Within(3, 100), default=10, help="most short runs (default: %(default)s)")
    parser.add_argument("--seed", type=Within(0, 2**32 - 1), default=0, help="of every run (default: %(default)s)")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw both parts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(call=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, print, draw."""
    names = ("low", "high", "range_steps", "steps", "runs", "seed")
    options = {name: getattr(arguments, name) for name in names}
    with aside():
        report = lr_find(function_named(arguments.task, "seed"), arguments.optimizer, **options, watch=bar)
    print(as_json(report._asdict()) if arguments.json else report)
    if arguments.plot is not None:
        from gefen_nn.lr_picture import draw

        draw(report, arguments.plot)
    return 0
