"""`gefen memory`."""

import argparse

from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_nn.arguments import Within
from gefen_nn.console import as_json, aside
from gefen_nn.errors import WrongArgumentError
from gefen_nn.memory import memory_of
from gefen_nn.model_files import model_of
from gefen_nn.model_shapes import MODELS, Model
from gefen_nn.scale_model import simulate

HELP = "bytes of optimizer state of a model, on one process or many"
_EPILOG = f"""MODEL is one of {", ".join(sorted(MODELS))}; a config.json of Hugging Face (Llama, Mistral, Mixtral,
Qwen 2 and 3, Gemma, and their MoE forms), a .safetensors file, whose header alone is read, its index, or a folder
with one of those; or module:function, a factory of a model, which is built on meta.

With --world, what FSDP2 leaves to one process, and what a step sends. Per process the most that any of a
sample of processes has, the first and the last among them, is said."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="llama-3-70b", metavar="MODEL", help="(default: %(default)s), see below")
    parser.add_argument("--world", type=Within(1, 65_536), default=1, help="processes (default: %(default)s)")
    parser.add_argument(
        "--experts-over", type=Within(1, 65_536), default=1, help="processes that share out experts (default: 1)"
    )
    parser.add_argument("--optimizer", choices=("gefen", "gefen_muon"), default="gefen", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(call=run)


def run(arguments: argparse.Namespace) -> int:
    """Count, print."""
    with aside():
        model = model_of(arguments.model)
    muon = arguments.optimizer == "gefen_muon"
    _check_experts(model, arguments.experts_over)
    memory = memory_of(model)
    options = {"muon": muon, "expert_parallel": arguments.experts_over, "policy": DEFAULT_SECOND_MOMENT}
    report = simulate(model, arguments.world, **options)
    if arguments.json:
        print(as_json({**memory.plain(), "optimizer": arguments.optimizer, "process": report._asdict()}))
    else:
        told = f"\n\n{arguments.optimizer} on {arguments.world:,} processes\n{report}" if arguments.world > 1 else ""
        print(f"{memory}{told}")
    return 0


def _check_experts(model: Model, over: int) -> None:
    if over > 1 and not any(leaf.experts for leaf in model.values()):
        raise WrongArgumentError(
            f"--experts-over must be of a model with experts: got {over} for one without. Leave it out."
        )
