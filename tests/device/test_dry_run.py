"""The device run without a device: what cannot run is not run, what breaks costs its section, and all is reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device.__main__ import NO_CARD, Run
from tests.device.checks import Checks, Skip, difference
from tests.device.sections import SECTIONS, Section

SCRIPT = Path(__file__).with_name("run.sh")


def test_a_dry_run_reports_every_section_and_passes_what_a_cpu_can_tell(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    subprocess.run(["bash", str(SCRIPT), "--dry"], env=environment, check=True, timeout=170, stdout=subprocess.DEVNULL)
    sections, text = (
        json.loads((tmp_path / "report.json").read_text())["sections"],
        (tmp_path / "report.md").read_text(),
    )
    assert list(sorted(sections)) == sorted(section.name for section in SECTIONS)
    for section in SECTIONS:
        result = sections[section.name]
        assert f"| {section.name} | {result['outcome']} |" in text
        if section.card:
            assert (result["outcome"], result["reason"], result["checks"]) == ("not run", NO_CARD, [])
        elif section.name != "facts":
            assert result["outcome"] == "passed" and len(result["checks"]) > 1
    assert f"torch {torch.__version__}" in text and "- card: no CUDA device; driver none" in text


class _Other(Run):
    """A run whose sections are programs."""

    def command(self, section, found):
        program = "import json, os, sys, time; from pathlib import Path; file = Path(sys.argv[1]).open('a')\n"
        note = "print(json.dumps({'name': 'first', 'outcome': 'passed'}), file=file, flush=True)\n"
        return [sys.executable, "-c", program + note + section.call, str(found)]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("os.kill(os.getpid(), 11)", "its process ended with code -11; see log.txt"),
        ("raise ValueError", "its process ended with code 1; see log.txt"),
        ("time.sleep(60)", "stopped after 4 s"),
        ("pass", "its process ended with code 0; see log.txt"),
    ],
    ids=["a crash", "an error", "a hang", "no end noted"],
)
def test_a_section_that_does_not_end_well_has_failed_whatever_passed_before(tmp_path, call, reason, capsys):
    run = _Other(tmp_path, dry=False, limit=60)
    run.take(Section("broken", call, deadline=4))
    assert run.results["broken"]["outcome"] == "failed" and run.results["broken"]["reason"] == reason
    assert run.results["broken"]["checks"] == [{"name": "first", "outcome": "passed"}]
    assert (
        f"| broken | failed | 1 | 0 | 0 | 0 | {run.results['broken']['seconds']:.1f} | {reason} |"
        in (tmp_path / "report.md").read_text()
    )


def test_a_section_without_time_left_is_not_run(tmp_path, capsys):
    run = Run(tmp_path, dry=False, limit=0)
    run.take(SECTIONS[0])
    assert run.results["facts"]["outcome"] == "not run"


def test_without_a_card_nothing_but_a_dry_run_runs(tmp_path, capsys):
    run = Run(tmp_path, dry=False, limit=60)
    run.results["facts"] = {"facts": {"cuda": None}, "checks": [], "outcome": "measured", "seconds": 1.0}
    run.take(next(section for section in SECTIONS if section.name == "step fp32"))
    assert (run.results["step fp32"]["outcome"], run.results["step fp32"]["reason"]) == ("not run", NO_CARD)


def skipped():
    raise Skip("because")


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (lambda: {"passed": True, "ulp": 1}, {"outcome": "passed", "ulp": 1}),
        (lambda: {"passed": False}, {"outcome": "failed"}),
        (lambda: {"ms": 1.5}, {"outcome": "measured", "ms": 1.5}),
        (lambda: {}["ms"], {"outcome": "failed", "reason": "KeyError: 'ms'"}),
        (skipped, {"outcome": "not run", "reason": "because"}),
    ],
    ids=["passed", "failed", "measured", "an error", "skipped"],
)
def test_a_check_is_written_with_its_outcome(tmp_path, check, line, capsys):
    Checks(tmp_path / "found", dry=True).make("it", check)
    assert json.loads((tmp_path / "found").read_text()) == {"name": "it"} | line


ONE, NEXT = torch.tensor([1.0, -0.0]), torch.tensor([1.0 + 2**-23, 0.0])


@pytest.mark.parametrize(
    ("got", "expected", "found"),
    [
        (ONE, ONE.clone(), {"passed": True, "differing": 0}),
        (ONE, NEXT, {"passed": False, "differing": 2, "ulp": 1.0}),
        (ONE, ONE.bfloat16(), {"passed": False}),
        (ONE / 0 * 0, ONE / 0 * 0, {"passed": True}),
        (ONE, ONE * float("nan"), {"passed": False, "ulp": float("inf")}),
        (torch.tensor([3, 250], dtype=torch.uint8), torch.tensor([5, 250], dtype=torch.uint8), {"codes": 2.0}),
    ],
    ids=["the same", "an ulp and a sign of zero", "another dtype", "NaN twice", "NaN once", "codes"],
)
def test_a_difference_is_counted_in_entries_and_ulp(got, expected, found):
    assert found.items() <= difference(got, expected).items()
