"""The quality laboratory: tasks x arms x learning rates x seeds, as `gefen compare` makes them.

`python -m tests.benchmarks.quality --tasks language --arms core` takes about half an hour on one quiet core. Each run
is kept in the folder of its task, so the command may be stopped and given again, with more seeds or arms too. Arms
that have been run with fewer seeds than others are judged by those.
"""

import argparse
from pathlib import Path

from gefen_nn.arguments import Within, folder, positive
from gefen_nn.compare import Comparison, compare
from gefen_nn.compare_log import read
from gefen_nn.compare_report import publish
from gefen_nn.compare_stats import rows_of
from gefen_nn.console import bar
from tests.benchmarks.quality import summary
from tests.benchmarks.quality.arms import SETS, arms
from tests.benchmarks.quality.tasks import TASKS

_LEAST = 3  # seeds of an arm in the table, where no fewer are asked for


def main() -> None:
    """Run what is missing, and report every task."""
    given = _parser().parse_args()
    builds, judged = arms(given.arms, given.b2), {}
    for name in given.tasks:
        out = given.out / f"{name}-b2-{given.b2:g}"
        out.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(f"{name}, b2 {given.b2:g}", tuple(builds), seeds=given.seeds, steps=given.steps)
        if not given.report:
            compare(comparison, TASKS[name], builds, out / "runs.jsonl", watch=bar)
        found = read(out / "runs.jsonl")
        if (finished := comparison.finished(found, least=min(_LEAST, given.seeds))).arms:
            publish(finished, found, out, jump=given.jump)
            judged[name] = rows_of(finished, found)
    if judged:
        summary.draw(judged, given.out / f"summary-b2-{given.b2:g}.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quality", description=__doc__)
    parser.add_argument("--tasks", type=_tasks, default=list(TASKS), help=f"of {', '.join(TASKS)} (all)")
    parser.add_argument(
        "--arms", type=lambda text: text.split(","), default=["core"], help=f"or {', '.join(SETS)} (core)"
    )
    parser.add_argument("--b2", type=positive, default=0.999, help="decay of every second moment (0.999)")
    parser.add_argument("--seeds", type=Within(1, 1000), default=3, help="at each rate that is compared (3)")
    parser.add_argument("--steps", type=Within(1, 10**6), default=300, help="of each run (300)")
    parser.add_argument("--jump", type=positive, default=0.1, help="rise of the loss that counts as one (0.1)")
    parser.add_argument(
        "--report", action="store_true", help="train nothing, tell of the arms whose runs are all there"
    )
    parser.add_argument("--out", type=folder, default=Path("bench-out/quality"), help="(bench-out/quality)")
    return parser


def _tasks(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(TASKS)}: got {name!r}. Correct the name.")
    return names


if __name__ == "__main__":
    main()
