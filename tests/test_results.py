"""What the page of results shows comes from the raw logs beside it."""

from pathlib import Path

import pytest

from gefen_nn.compare import Comparison
from gefen_nn.compare_log import read
from gefen_nn.compare_report import text
from gefen_nn.compare_stats import rows_of

REPORTS = sorted((Path(__file__).parent / "benchmarks" / "reports" / "quality").iterdir())
DEFAULT, PAPER = "128x256 warm", "block"
report = pytest.mark.parametrize("folder", REPORTS, ids=lambda folder: folder.name)


def judged(folder):
    """The plan of a report with the arms whose runs are all there, and their rows by name."""
    found = read(folder / "runs.jsonl")
    arms = tuple(dict.fromkeys(["adamw", *(cell.arm for cell in found)]))
    plan = Comparison(folder.name.replace("-b2-", ", b2 "), arms, seeds=3, steps=300).finished(found)
    return plan, {row.arm: row for row in rows_of(plan, found)}


@report
def test_a_table_is_that_of_its_raw_log_with_seeds_and_provenance_i6(folder):
    plan, rows = judged(folder)
    shown = (folder / "compare.txt").read_text()
    assert sorted(text(plan, list(rows.values()), 0.1).split()) == sorted(shown.split())
    found = read(folder / "runs.jsonl")
    assert all(len(run.losses) == 300 and run.provenance["commit"] for run in found.values())


def test_adamws_learning_rate_serves_the_default_and_twice_it_too_as_the_page_says_q19():
    for folder in REPORTS:
        _, rows = judged(folder)
        default, paper = rows[DEFAULT], rows[PAPER]
        assert 0 < default.shared.difference < 0.012 and default.shared.jumps(0.1) == 0
        assert default.twice.difference < 0.004 and default.twice.not_worse() < 3
        assert paper.shared.difference > default.shared.difference
        assert paper.twice.difference > max(0.02, default.twice.difference)
