"""The site builds without a warning, its reference holds every public name once, and its examples run."""

import ast
import doctest
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import gefen_fn
import gefen_nn
from gefen_nn import cli
from tests.test_layout import SOURCES

PAGES = Path(__file__).parent.parent / "notebooks"
TYPES = {"OptState", "Params", "ScalarOrSchedule", "Schedule", "Updates"}  # described in words
IMPORTED = {name: getattr(module, name) for module in (gefen_fn, gefen_nn) for name in module.__all__}


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


def examples() -> list[doctest.DocTest]:
    """Those in the docstrings of functions and classes; of the names in them a reader imports the public ones."""
    found = []
    for _, path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
            if text and ">>>" in text:
                names = {**IMPORTED, "torch": torch, "nn": torch.nn}
                found.append(doctest.DocTestParser().get_doctest(text, names, node.name, str(path), node.lineno))
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_an_example_in_a_docstring_does_what_it_shows(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a checkpoint
    torch.manual_seed(0)
    told: list[str] = []
    failed, tried = doctest.DocTestRunner().run(example, out=told.append)
    assert tried and not failed, "".join(told)
