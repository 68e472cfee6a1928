"""The `gefen` command as a whole."""

import json
import os
import sys

import pytest
import torch

from gefen_nn.cli import main
from gefen_nn.console import as_json

COMMANDS = ("demo", "compare", "lr-find", "memory", "inspect", "convert", "bench")


def test_the_listing_names_every_command_and_no_inner_one(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name}" in out for name in COMMANDS) and "demo-resume" not in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name, capsys):
    assert main([name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["no-such"], ["inspect"], ["memory", "--world", "0"]], ids=str)
def test_wrong_arguments_end_with_2(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: gefen" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error_to_speak_of(capsys, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["memory", "--model", "llama-3-8b"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_read_is_named(capsys, tmp_path):
    assert main(["inspect", str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err.startswith(f"gefen inspect: '{tmp_path / 'absent'}' must be a file")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a user's module into the current folder, and gives the name of its function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        name = f"users_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}:make"

    return write


TALKING = """
import torch
from gefen_nn import Run
print("imported")
def make(seed=0):
    print("called")
    p = torch.nn.Linear(2, 2)
    def loss():
        print("step")
        return p(torch.ones(1, 2)).square().sum()
    return p if NET else Run(p, loss, lambda: float(loss()))
"""
TALKS = {
    "memory": ("memory --json --model {}", True),
    "bench": ("bench --json --rounds 1 adamw --model {}", True),
    "lr-find": ("lr-find --json --range-steps 10 --steps 10 --runs 3 --task {}", False),
    "compare": ("compare --json --steps 2 --seeds 1 --rates 1e-3 --optimizer adamw --task {}", False),
}


@pytest.mark.parametrize(("line", "net"), TALKS.values(), ids=TALKS)
def test_what_a_users_module_prints_is_kept_out_of_the_answer(line, net, module, capsys):
    assert main(line.format(module(TALKING.replace("NET", str(net)))).split()) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "imported\ncalled\n" in err


def test_numbers_that_are_not_finite_are_null_in_an_answer():
    value = {"a": float("nan"), 2: [float("inf"), 1.5], "t": torch.tensor([1.0, float("-inf")])}
    assert json.loads(as_json(value)) == {"a": None, "2": [None, 1.5], "t": [1.0, None]}


FAILS = {
    "a key": ("def make():\n    return {}['gone']", "KeyError: 'gone' (in {}, line 2)"),
    "words of torch": ("import torch\ndef make():\n    torch.ones(2) @ torch.ones(3)", "RuntimeError: {}, line 3)"),
    "a value refused by us": (
        "from torch import nn\nfrom gefen_nn import Gefen\ndef make():\n    Gefen(nn.Linear(1, 1).parameters(), -1.0)",
        "ValueError: {}, line 4)",
    ),
    "an import": ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing' (in {}, line 1)"),
    "syntax": ("def make(:", "SyntaxError: {}, line 1)"),
    "an exit": ("import sys\nsys.exit(3)", "SystemExit: 3 (in {}, line 2)"),
    "a file": ("def make():\n    open('gone')", "FileNotFoundError: {}, line 2)"),
}


@pytest.mark.parametrize(("text", "words"), FAILS.values(), ids=FAILS)
def test_an_error_of_a_users_module_is_one_line_with_its_place(text, words, module, tmp_path, capsys):
    name = module(text)
    assert main(["memory", "--model", name]) == 1
    err = capsys.readouterr().err
    start, end = words.split("{}")
    assert err.startswith(f"gefen memory: {start}") and err.count("\n") == 1
    assert str(tmp_path / name.replace(":make", ".py")) + end in err


def test_a_relative_name_of_a_module_is_refused(capsys):
    assert main(["memory", "--model", "..t:task"]) == 2
    assert "must be named as module:function: got '..t:task'. Write 't:task'" in capsys.readouterr().err


def test_an_interrupted_command_says_so_in_a_line(module, capsys):
    assert main(["memory", "--model", module("def make():\n    raise KeyboardInterrupt")]) == 130
    assert capsys.readouterr().err == "gefen memory: interrupted\n"


def test_an_error_that_is_ours_shows_all(monkeypatch):
    monkeypatch.setattr("gefen_nn.cli_memory.memory_of", {}.__getitem__)
    with pytest.raises(TypeError):
        main(["memory"])


LONG = "x" * 300
PLACES = {
    "a folder with a long name": ("demo --out {}/" + LONG, "'File name too long'"),
    "a folder below a file": ("compare --out {}/file/inner", "'Not a directory'"),
    "a folder that is a file": ("compare --out {}/file", "must be a folder: got the file"),
    "a picture with a long name": ("inspect x --plot {}/" + LONG + ".png", "'File name too long'"),
    "a picture in no folder": ("lr-find --task m:t --plot {}/gone/it.png", "must lie in a folder that is there"),
    "a picture that is a folder": ("inspect x --plot {}/folder.png", "must be a file: got the folder"),
    "a target in no folder": ("convert {}/file {}/gone/it.pt", "must lie in a folder that is there"),
    "a target with a long name": ("convert {}/file {}/" + LONG, "'File name too long'"),
}


@pytest.mark.parametrize(("line", "words"), PLACES.values(), ids=PLACES)
def test_a_place_where_nothing_can_be_made_is_refused_before_a_command_begins(line, words, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    assert main(line.replace("{}", str(tmp_path)).split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("line", ["demo --out {}/a", "inspect x --plot {}/a.png", "convert x {}/a.pt"])
def test_a_folder_that_one_may_not_write_is_refused(line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    assert main(line.format(tmp_path).split()) == 2
    assert f"no right to write in '{tmp_path}'" in capsys.readouterr().err.replace('"', "")


def test_a_picture_without_matplotlib_is_refused_before_a_command_begins(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["lr-find", "--task", "m:t", "--plot", str(tmp_path / "it.png")]) == 2
    assert "needs matplotlib: got none installed" in capsys.readouterr().err


def test_a_demo_is_not_resumed_from_another_file(tmp_path, capsys):
    (tmp_path / "it.pt").write_text("garbage")
    assert main(["demo-resume", str(tmp_path / "it.pt"), str(tmp_path / "out.pt")]) == 1
    assert "a file that `gefen demo` wrote half-way: got UnpicklingError" in capsys.readouterr().err
