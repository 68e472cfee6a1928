"""The log of a comparison: what is no run is named, processes share it, and other code does not carry it on."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from gefen_nn import compare_log
from gefen_nn.compare import compare
from gefen_nn.compare_report import plain
from gefen_nn.compare_run import Cell, Outcome, train
from gefen_nn.compare_stats import rows_of
from tests.test_compare import BUILD, LINES, line

RUN = {
    **{"task": "line", "arm": "sgd", "lr": 0.1, "seed": 0, "steps": 2, "held_out": 1.5, "losses": [2.0, 1.0]},
    **{"parameters": 36, "state_bytes": 0, "seconds": 0.1, "optimizer_ms": 0.01, "provenance": {"torch": "2"}},
}


def test_a_line_cut_short_is_run_again_and_a_damaged_one_is_named(tmp_path):
    log = tmp_path / "runs.jsonl"
    found = compare(LINES, line, BUILD, log)
    whole = log.read_text()
    log.write_text(whole[:-9])
    again = compare(LINES, line, BUILD, log)
    assert [out.losses for out in again.values()] == [out.losses for out in found.values()]
    assert list(compare_log.read(log)) == list(found)
    log.write_text("{}\n" + whole)
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1 is none \(KeyError: 'task'\)"):
        compare_log.read(log)


def other_start(seed):
    torch.manual_seed(seed + 100)
    return line(seed)


def other_loss(seed):
    run = line(seed)
    return run._replace(loss=lambda: 1.01 * run.loss())


def other_judge(seed):
    return line(seed)._replace(held_out=lambda: 7.0)


def other_halves(model, lr):
    return BUILD["sgd"](model, lr / 2)


OTHER = {
    "parameters": (other_start, BUILD["sgd"], "the start of line was another"),
    "a first loss": (other_loss, BUILD["sgd"], "the start of line was another"),
    "a held-out loss": (other_judge, BUILD["sgd"], "the start of line was another"),
    "an optimizer": (line, other_halves, "the source of sgd was another"),
}


@pytest.mark.parametrize("task, build, words", OTHER.values(), ids=OTHER)
def test_a_log_made_by_other_code_is_refused_by_folder_and_fix(task, build, words, tmp_path):
    comparison, log = LINES._replace(arms=("sgd",), seeds=1), tmp_path / "runs.jsonl"
    found = compare(comparison, line, BUILD, log)
    assert compare(comparison, line, BUILD, log) == found
    with pytest.raises(ValueError, match=f"{words}.*Name another folder, or delete runs.jsonl") as caught:
        compare(comparison, task, {"sgd": build}, log)
    assert str(log) in str(caught.value)


def test_a_log_without_marks_is_carried_on_by_other_code(tmp_path):
    comparison, log = LINES._replace(arms=("sgd",), seeds=1), tmp_path / "runs.jsonl"
    found = {cell: out._replace(provenance={}) for cell, out in compare(comparison, line, BUILD, log).items()}
    log.write_text("".join(compare_log.line(out) + "\n" for out in found.values()))
    assert compare(comparison, other_start, {"sgd": other_halves}, log) == found


def test_marks_change_no_bit_of_a_run_and_are_not_told_as_versions(tmp_path):
    comparison = LINES._replace(arms=("sgd",), seeds=1)
    found = compare(comparison, line, BUILD, tmp_path / "log")
    for cell, outcome in found.items():
        alone = train(cell, line, BUILD["sgd"])
        assert (alone.losses, alone.held_out) == (outcome.losses, outcome.held_out)
        assert set(outcome.provenance) - set(alone.provenance) == {"start", "source"}
    told = plain(comparison, rows_of(comparison, found), found, 0.1)
    assert len(told["made_by"]) == 1 and "start" not in told["made_by"][0]


TAMPERED = {
    "a rate in words": {"lr": "x"},
    "a list of rates": {"lr": [1]},
    "a rate of 0": {"lr": 0},
    "a rate beyond all": {"lr": 10**400},
    "a truth": {"seed": True},
    "half a seed": {"seed": 0.5},
    "no steps": {"steps": 0},
    "a held-out loss in words": {"held_out": "1.5"},
    "a held-out loss that is none": {"held_out": math.nan},
    "a list for provenance": {"provenance": []},
    "no losses": {"losses": []},
    "losses in words": {"losses": ["2.0", "1.0"]},
    "more losses than steps": {"losses": [1.0] * 3},
    "no parameters": {"parameters": 0},
    "bytes below 0": {"state_bytes": -1},
    "a number for a task": {"task": 3},
}


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_a_run_with_a_field_that_cannot_be_is_named_by_its_line(change, tmp_path):
    log = tmp_path / "runs.jsonl"
    log.write_text("".join(json.dumps(run) + "\n" for run in (RUN, {**RUN, **change})))
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 2 is none \((Value|Overflow)Error: "):
        compare_log.read(log)


@pytest.mark.parametrize("line", [b"\xff\xfe{}", b"null", b"[]", b"[" * 10**5], ids=["bytes", "null", "list", "deep"])
def test_a_line_that_is_no_object_is_named_but_passed_over_where_it_has_no_end(line, tmp_path):
    log = tmp_path / "runs.jsonl"
    log.write_bytes(json.dumps(RUN).encode() + b"\n" + line)
    assert len(compare_log.read(log)) == 1
    log.write_bytes(log.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 2 is none"):
        compare_log.read(log)


def add_runs(path, first):
    for seed in range(first, first + 150):
        compare_log.append(path, Outcome(Cell("line", "sgd", 0.1, seed, 1), 1.0, [1.0] * 300, 36, 0, 1.0, 0.5, {}))


def test_three_writers_that_add_to_one_log_lose_no_run(tmp_path):
    log = tmp_path / "runs.jsonl"
    with ThreadPoolExecutor(
        3
    ) as writers:  # a lock is of an opened file, so threads wait for each other as processes do
        list(writers.map(partial(add_runs, log), (0, 1000, 2000)))
    lines = log.read_text().splitlines()
    assert len({json.loads(line)["seed"] for line in lines}) == len(lines) == 450
