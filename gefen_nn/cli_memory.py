"""`gefen memory`."""

import argparse
import json

from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_nn.arguments import Within
from gefen_nn.model_shapes import MODELS
from gefen_nn.scale_model import simulate

HELP = "bytes of state and traffic of a large model on many processes"


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-70b", help="(default: %(default)s)")
    parser.add_argument("--world", type=Within(1, 65_536), default=64, help="processes (default: %(default)s)")
    parser.add_argument("--experts-over", type=Within(1, 65_536), default=1, help="processes that share out experts")
    parser.add_argument("--optimizer", choices=("gefen", "gefen_muon"), default="gefen", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(call=_memory)


def _memory(arguments: argparse.Namespace) -> int:
    model, muon = MODELS[arguments.model](), arguments.optimizer == "gefen_muon"
    options = {"muon": muon, "expert_parallel": arguments.experts_over, "policy": DEFAULT_SECOND_MOMENT}
    report = simulate(model, arguments.world, **options)
    print(json.dumps(report._asdict()) if arguments.json else report)
    return 0
