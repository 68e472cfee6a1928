"""The report of a run: report.json with everything, report.md to read. Standard library only."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUTCOMES = ("passed", "failed", "not run", "measured")
_ONE = threading.Lock()

Results = Mapping[str, Mapping[str, Any]]


def write(out: Path, results: Results, dry: bool) -> None:
    """Write both files anew."""
    with _ONE:
        ours = dict(results)
        (out / "report.json").write_text(json.dumps({"dry": dry, "sections": ours}, indent=1))
        (out / "report.md").write_text(text(ours, dry))


def text(results: Results, dry: bool) -> str:
    """The report as markdown."""
    parts = [_head(results, dry), _sections(results)]
    parts += [_failures(results), _skipped(results), *(_times(name, result) for name, result in results.items())]
    return "\n".join(part for part in parts if part) + "\n"


def _head(results: Results, dry: bool) -> str:
    facts = results.get("facts", {}).get("facts", {})
    versions = ", ".join(f"{k} {v or 'not there'}" for k, v in facts.get("versions", {}).items())
    outcomes = [check["outcome"] for result in results.values() for check in result["checks"]]
    counts = ", ".join(f"{outcomes.count(word)} {word}" for word in OUTCOMES)
    memory = f", {facts['memory'] / 2**30:.0f} GiB" if "memory" in facts else ""
    lines = [
        "# Checks and measurements on one card" + (" (dry run: tiny sizes, no card)" if dry else ""),
        "",
        f"- card: {facts.get('device', 'unknown')}{memory}; driver {facts.get('driver', 'unknown')}",
        f"- CUDA {facts.get('cuda')}, Python {facts.get('python')}, {versions}",
        f"- checks: {counts}; sections not run or cut short are listed below and count as nothing",
        "",
    ]
    return "\n".join(lines)


def _sections(results: Results) -> str:
    lines = [_line("section", "outcome", *OUTCOMES, "s", "reason"), _line(*["---"] * 8)]
    for name, result in results.items():
        outcomes = [check["outcome"] for check in result["checks"]]
        counts = [str(outcomes.count(word)) for word in OUTCOMES]
        lines.append(_line(name, result["outcome"], *counts, f"{result['seconds']:.1f}", result.get("reason", "")))
    return "\n".join([*lines, ""])


def _failures(results: Results) -> str:
    lines = []
    for name, result in results.items():
        for check in result["checks"]:
            if check["outcome"] == "failed":
                facts = {k: v for k, v in check.items() if k not in ("name", "outcome")}
                lines.append(f"- {name}: {check['name']}: {_short(facts)}")
    return "\n".join(["## Failed", "", *lines, ""]) if lines else ""


def _skipped(results: Results) -> str:
    lines = [f"- {name}: {result['reason']}" for name, result in results.items() if result["outcome"] == "not run"]
    for name, result in results.items():
        skipped = [check for check in result["checks"] if check["outcome"] == "not run"]
        lines += [f"- {name}: {check['name']}: {check['reason']}" for check in skipped]
    return "\n".join(["## Not run", "", *lines, ""]) if lines else ""


def _times(name: str, result: Mapping[str, Any]) -> str:
    rows = [check for check in result["checks"] if check.get("row") and check["outcome"] == "measured"]
    if not rows:
        return ""
    copied = result["facts"]["copy_bytes_per_s"] / 1e12
    head = (
        "arm",
        "step ms (min..max)",
        "host ms",
        "kernels ms",
        "of copy speed (kernels)",
        "moved B/param",
        "state B/param",
    )
    more = ("transient B/param (first)", "first step s (steps; as found s)", "kernels + copies + fills")
    lines = [f"## {name}: copy {copied:.2f} TB/s", "", _line(*head, *more), _line(*["---"] * 10)]
    return "\n".join([*lines, *(_line(*_cells(row)) for row in rows), ""])


def _cells(row: Mapping[str, Any]) -> list[str]:
    ms, launches = row["ms"], row.get("launches", {})
    counts = [str(launches.get(word, "?")) for word in ("kernels", "copies", "fills")]
    return [
        row["name"].partition(": ")[2],
        f"{ms['median']:.3f} ({ms['min']:.3f}..{ms['max']:.3f})",
        f"{row['host_ms']['median']:.3f}",
        _number(row["kernels_ms"]),
        f"{row['of_copy']:.2f} ({_number(row['kernels_of_copy'])})",
        f"{row['moved_B_per_param']:.2f}",
        f"{row['state_B/param']:.3f}",
        f"{row['transient_B/param']:.3f} ({row['first_transient_B/param']:.3f})",
        f"{row['first_step_s']:.3f} ({row['first_step_in_steps']:.0f}; {row['first_step_as_found_s']:.1f})",
        " + ".join(counts),
    ]


def _number(x: float | None) -> str:
    return "?" if x is None else f"{x:.3f}"


def _short(facts: Mapping[str, Any]) -> str:
    line = ", ".join(f"{k} {v}" for k, v in facts.items())
    return line if len(line) < 400 else f"{line[:400]} ..."


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
