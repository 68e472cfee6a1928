"""The site builds without a warning, and its reference holds every public name once."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import gefen_fn
import gefen_nn
from gefen_nn import cli

PAGES = Path(__file__).parent.parent / "notebooks"
TYPES = {"OptState", "Params", "ScalarOrSchedule", "Schedule", "Updates"}  # described in words


def documented(module: str) -> list[str]:
    """The names under `.. currentmodule:: module`, over all pages of the reference."""
    names, current = [], ""
    for line in "\n".join(path.read_text() for path in sorted((PAGES / "api").glob("*.md"))).splitlines():
        found = re.fullmatch(r"\.\. (currentmodule|autofunction|autoclass|autodata):: (\S+)", line)
        if found and found[1] == "currentmodule":
            current = found[2]
        elif found and current == module:
            names.append(found[2])
    return names


@pytest.mark.parametrize("module", [gefen_fn, gefen_nn], ids=lambda module: module.__name__)
def test_the_reference_holds_every_public_name_once(module):
    assert Counter(documented(module.__name__)) == Counter(set(module.__all__) - TYPES)


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(PAGES), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    assert "scale_by_gefen" in (tmp_path / "api" / "directions.html").read_text()


def outputs_shown() -> list[tuple[list[str], str]]:
    """Commands that pages show with what they print: blocks that begin with `$ gefen`."""
    pages = "\n".join(path.read_text() for path in sorted(PAGES.glob("*.md")))
    return [(command.split(), text) for command, text in re.findall(r"```text\n\$ gefen (.*)\n((?s:.*?))```", pages)]


@pytest.mark.parametrize(("command", "text"), outputs_shown(), ids=lambda value: value[0])
def test_a_command_on_a_page_prints_what_the_page_shows(command, text, capsys):
    assert cli.main(command) == 0
    assert capsys.readouterr().out == text
