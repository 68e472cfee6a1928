"""`python -m tests.device`, started by run.sh: every section in a process of its own, then the report.

Nothing but the standard library is imported here, so that there is a report whatever is broken.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.device import report
from tests.device.sections import SECTIONS, Section

NO_CARD = "no CUDA device"


class Run:
    """One run: where it writes, what it found.

    Args:
        out: folder of the report.
        dry: tiny sizes, no card.
        limit: seconds for all sections.
    """

    def __init__(self, out: Path, dry: bool, limit: float) -> None:
        self.out, self.dry, self.end = out, dry, time.monotonic() + limit
        self.results: dict[str, dict[str, Any]] = {}
        self.scratch = Path(tempfile.mkdtemp())

    def command(self, section: Section, found: Path) -> list[str]:
        """How a section's process is started."""
        dry = ["--dry"] if self.dry else []
        return [sys.executable, "-m", "tests.device.child", section.call, str(found), *section.args, *dry]

    def take(self, section: Section) -> None:
        """Run a section within its deadline and what is left of the run's, and write the report as it stands."""
        here = self.results.get("facts", {}).get("facts", {}).get("cuda", True)  # not known yet, or at all: try
        left = self.end - time.monotonic()
        if (section.card and self.dry) or not (self.dry or here):
            result: dict[str, Any] = {"outcome": "not run", "reason": NO_CARD, "checks": [], "seconds": 0.0}
        elif left < 5:
            result = {"outcome": "not run", "reason": "no time left in this run", "checks": [], "seconds": 0.0}
        else:
            result = self._process(section, min(left, section.deadline))
        self.results[section.name] = result
        outcomes = [check["outcome"] for check in result["checks"]]
        counts = ", ".join(f"{outcomes.count(word)} {word}" for word in report.OUTCOMES if word in outcomes)
        reason = f" ({result['reason']})" if result.get("reason") else ""
        print(f"{section.name}: {result['outcome']}{reason}, {result['seconds']:.1f} s; {counts or 'no check'}")
        report.write(self.out, self.results, self.dry)

    def _process(self, section: Section, deadline: float) -> dict[str, Any]:
        found, log = (self.scratch / f"{section.name}.{ending}".replace(" ", "-") for ending in ("jsonl", "log"))
        start, reason = time.monotonic(), ""
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(section, found), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(deadline)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
                reason = f"stopped after {deadline:.0f} s"
        with (self.out / "log.txt").open("a") as whole:
            whole.write(f"==== {section.name}\n{log.read_text(errors='replace')[-200_000:]}\n")
        result = _judged(found, code, reason)
        return result | {"seconds": time.monotonic() - start}


def _judged(found: Path, code: int, reason: str) -> dict[str, Any]:
    """What a section's process left; one that did not come to its end has failed, whatever passed before."""
    lines = [json.loads(x) for x in found.read_text().splitlines()] if found.exists() else []
    checks = [line for line in lines if "outcome" in line]
    facts = {key: value for line in lines if "outcome" not in line for key, value in line.items()}
    ended = facts.pop("ended", False)
    if not ended:
        outcome, reason = "failed", reason or f"its process ended with code {code}; see log.txt"
    elif any(check["outcome"] == "failed" for check in checks):
        outcome = "failed"
    else:
        outcome = next((w for w in ("passed", "measured") if any(c["outcome"] == w for c in checks)), "not run")
        reason = "" if outcome != "not run" or facts else "; ".join(c.get("reason", "") for c in checks)
        outcome = "measured" if facts and outcome == "not run" else outcome
    return {"outcome": outcome, "reason": reason, "checks": checks, "facts": facts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="tests.device", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--limit", type=float, default=440)
    parser.add_argument("--sections", default="")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    names = [name for name in given.sections.split(",") if name]
    if given.list or not {section.name for section in SECTIONS}.issuperset(names):
        print("\n".join(section.name for section in SECTIONS))
        return 0 if given.list else 2
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "log.txt").write_text("")
    run = Run(given.out, given.dry, given.limit)
    first, *others = [s for s in SECTIONS if not names or s.name in names or s.call == "facts:facts"]
    run.take(first)
    together = [section for section in others if not section.alone]
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 2)) as pool:
        list(pool.map(run.take, together))
    for section in others:
        if section.alone:
            run.take(section)
    print(f"report: {given.out / 'report.md'}")
    return int(any(result["outcome"] == "failed" for result in run.results.values()))


if __name__ == "__main__":
    sys.exit(main())
