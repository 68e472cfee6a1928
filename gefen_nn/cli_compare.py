"""`gefen compare`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from gefen_nn import compare_log
from gefen_nn.arguments import Within, folder, positive
from gefen_nn.compare import Comparison, compare
from gefen_nn.compare_report import publish
from gefen_nn.compare_run import Outcome
from gefen_nn.console import aside, bar, new_figure
from gefen_nn.language_task import language
from gefen_nn.task import BUILDS, build_named, function_named

HELP = "train a model with several optimizers and compare what comes of it"
_EPILOG = """Every optimizer is trained over a grid of rates, which grows by factors of two until its best one
is enclosed, then with more seeds at its own best rate, at the best one of the first optimizer and at
twice that. A run warms up and decays by a cosine. Each is a line of runs.jsonl in the folder, so that
a stopped comparison is carried on; table and picture lie beside it. Runs that are there are not made
again: a task that begins with other parameters or losses than theirs is refused, and so is an
optimizer whose function has another source. Not seen is what else has changed: functions that it
calls, a later batch, another package. Name a new folder after such a change.

The task is a function of a seed that makes a fresh run of yours (see `gefen lr-find --help`), whose
field `held_out` gives the loss that judges. An optimizer may be module:function too, of the model
and a learning rate:

    gefen compare --task my_module:task --optimizer adamw,gefen,my_module:mine"""
_USUAL, _QUICK = {"steps": 300, "seeds": 3}, {"steps": 60, "seeds": 2}


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    names = ",".join(BUILDS)
    parser.add_argument("--task", metavar="MODULE:FUNCTION", help="see below (default: a small language model)")
    parser.add_argument("--optimizer", default=names, metavar="NAME[,NAME]", help="(default: %(default)s)")
    parser.add_argument(
        "--rates",
        type=_rates,
        default=[1e-3, 2e-3, 4e-3],
        metavar="LR[,LR]",
        help="the grid to begin with (default: 1e-3,2e-3,4e-3)",
    )
    parser.add_argument("--seeds", type=Within(1, 1000), metavar="N", help="of each optimizer (default: 3)")
    parser.add_argument("--steps", type=Within(1, 10**9), metavar="N", help="of each run (default: 300)")
    parser.add_argument("--quick", action="store_true", help="2 seeds and 60 steps, where you name no others")
    parser.add_argument(
        "--jump",
        type=positive,
        default=0.1,
        metavar="RISE",
        help="of the training loss that counts as one (default: 0.1)",
    )
    parser.add_argument(
        "--threads",
        type=Within(1, os.cpu_count() or 1),
        default=1,
        metavar="N",
        help="of torch, no more than there are cores (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=folder, default=Path("compare-out"), metavar="FOLDER", help="(default: compare-out)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(call=run)


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing; write `compare.json`, `compare.txt` and `compare.png`; print."""
    with aside():
        builds = {name: build_named(name) for name in dict.fromkeys(arguments.optimizer.split(","))}
        task = function_named(arguments.task, "seed") if arguments.task else language
    sizes = {key: getattr(arguments, key) or (_QUICK if arguments.quick else _USUAL)[key] for key in _QUICK}
    comparison = Comparison(arguments.task or "language", tuple(builds), arguments.rates, **sizes)
    new_figure(1, 1)  # refuses now where pictures cannot be drawn, not after all the runs
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "runs.jsonl"
    if taken := sum(cell.arm in builds for cell in comparison.known(compare_log.read(log))):
        print(f"gefen compare: {taken} runs are taken from {log}", file=sys.stderr)
    with aside():
        found = compare(comparison, task, builds, log, threads=arguments.threads, watch=bar)
    publish(comparison, found, arguments.out, jump=arguments.jump, as_json=arguments.json)
    _check(out for cell, out in comparison.known(found).items() if cell.arm in builds)
    return 0


def _check(outcomes: Iterable[Outcome]) -> None:
    """Refuse a comparison that tells nothing."""
    if not any(math.isfinite(outcome.score) for outcome in outcomes):
        raise ValueError(
            "A comparison must have a run that ends with a finite loss: got none, every one diverged. Look at the "
            "task, or name lower rates (--rates)."
        )


def _rates(text: str) -> list[float]:
    """Rates of a grid, ascending."""
    rates = sorted({positive(part) for part in text.split(",")})
    if not 1e-30 <= rates[0] <= rates[-1] <= 1e30:  # the grid grows, and fp32 ends beyond
        raise argparse.ArgumentTypeError(f"must be from 1e-30 to 1e30: got {text!r}. Write it like 1e-3.")
    return rates
