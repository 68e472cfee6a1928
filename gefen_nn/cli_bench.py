"""`gefen bench`."""

import argparse

import torch

from gefen_nn.arguments import Within
from gefen_nn.bench import Bench, bench
from gefen_nn.console import as_json, aside, bar
from gefen_nn.task import BUILDS, model_named

HELP = "step time of optimizers on your model, in turn with fused AdamW"
_EPILOG = f"""OPTIMIZER is of {", ".join(BUILDS)}, or module:function, of a model and a learning rate.
The model is built and its parameters are stepped on random gradients; it is not run.

Times on a busy machine are worth little, ratios of one round more: all take turns within it."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="makes the model")
    parser.add_argument("optimizers", nargs="*", default=["gefen", "gefen_muon"], metavar="OPTIMIZER", help="see below")
    parser.add_argument("--rounds", type=Within(1, 10_000), default=9, help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument("--threads", type=Within(1, 1024), help="of torch (default: torch's own)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(call=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print."""
    with aside():
        told = _measured(arguments)
    print(as_json({**told._asdict(), "arms": [arm._asdict() for arm in told.arms]}) if arguments.json else told)
    return 0


def _measured(arguments: argparse.Namespace) -> Bench:
    before = torch.get_num_threads()
    torch.set_num_threads(arguments.threads or before)
    try:
        model = model_named(arguments.model)
        return bench(model, arguments.optimizers, rounds=arguments.rounds, device=arguments.device, watch=bar)
    finally:
        torch.set_num_threads(before)
