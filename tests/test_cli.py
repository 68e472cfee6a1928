"""The `gefen` command as a whole."""

import os
import sys

import pytest

from gefen_nn.cli import main

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
