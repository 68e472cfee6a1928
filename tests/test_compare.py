"""Comparisons of optimizers: what is run, what is kept of it, and what is said about it."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gefen_nn import cli, compare_log
from gefen_nn.compare import Comparison, compare
from gefen_nn.compare_picture import picture
from gefen_nn.compare_report import plain, text
from gefen_nn.compare_run import Cell, Outcome, train
from gefen_nn.compare_stats import rows_of
from gefen_nn.curves import batch_noise, largest_rise
from gefen_nn.language_task import language
from gefen_nn.optimizer_bytes import state_bytes
from gefen_nn.task import BUILDS, Run
from tests.benchmarks.quality import summary, tasks
from tests.benchmarks.quality.arms import OURS, SETS, arms

BUILD = {"adamw": BUILDS["adamw"], "sgd": lambda model, lr: torch.optim.SGD(model.parameters(), lr)}
LINES = Comparison("line", ("adamw", "sgd"), (0.1, 0.2), seeds=2, steps=4)
MODULE = """
import tests.test_compare
line = tests.test_compare.line
def halves(model, lr):
    return tests.test_compare.BUILD["sgd"](model, lr / 2)
"""


def line(seed):
    """A regression to 0 on noise that depends on the seed."""
    model, source = torch.nn.Linear(8, 4), torch.Generator().manual_seed(seed)

    def loss():
        return F.mse_loss(model(torch.randn(16, 8, generator=source)), torch.zeros(16, 4))

    return Run(model, loss, lambda: model.weight.square().sum().item())


def made_up(score, comparison=LINES, rise=0.0):
    """The outcomes of a comparison whose held-out losses are `score(arm, lr, seed)`."""
    found = {}
    for cell in comparison.cells(found):
        held_out = score(cell.arm, cell.lr, cell.seed)
        curve = [4.0 - at / 200 + (rise if at > 30 and cell.arm == "sgd" else 0) for at in range(60)]
        found[cell] = Outcome(cell, held_out, curve if held_out else curve[:9], 100, 800, 1.0, 0.5, {"torch": "2"})
    return found


def test_the_command_trains_reports_and_is_carried_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODULE)
    command = ["compare", "--task", "mine:line", "--optimizer", "adamw,mine:halves", "--rates", "0.2,0.1"]
    command += ["--seeds", "2", "--steps", "3", "--out", "out"]
    assert cli.main(command) == 0
    shown, log = capsys.readouterr().out, Path("out/runs.jsonl").read_bytes()
    assert Path("out/compare.txt").read_text() == shown
    assert shown.splitlines()[0] == "mine:line: held-out loss after 3 steps, mean over seeds"
    assert [words.split()[0] for words in shown.splitlines()[2:4]] == ["adamw", "mine:halves"]
    assert Path("out/compare.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*command, "--quick", "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == json.loads(Path("out/compare.json").read_text())
    assert f"{len(log.splitlines())} runs are taken from out/runs.jsonl" in again.err
    assert Path("out/runs.jsonl").read_bytes() == log


@pytest.mark.parametrize(
    "command, code, message",
    [
        (["--optimizer", "adam"], 2, "got 'adam'"),
        (["--task", "json:dumps", "--steps", "1"], 1, "A task must return a gefen_nn.Run: got str"),
        (["--task", "nowhere:task"], 2, "got no 'nowhere'"),
        (["--rates", "1e-3,-1"], 2, "must be a number above 0: got '-1'"),
        (["--seeds", "0"], 2, "must be an integer from 1"),
        (["--rates", "1e-3,1e300"], 2, "must be from 1e-30 to 1e30: got '1e-3,1e300'"),
        (["--threads", str(os.cpu_count() + 1)], 2, f"must be an integer from 1 to {os.cpu_count()}"),
        (["--task", "tests.test_compare:frozen"], 1, "have parameters to train: got none from tests.test_compare:fro"),
        (["--task", "tests.test_compare:lost"], 1, "begin with a finite loss: got nan from tests.test_compare:lost"),
        (["--task", "tests.test_compare:number"], 1, "can be differentiated: got float"),
        (["--task", "tests.test_compare:line", "--optimizer", "tests.test_compare:three"], 1, "Optimizer: got int"),
    ],
    ids=["optimizer", "task", "module", "rates", "seeds", "rate", "threads", "frozen", "nan", "number", "three"],
)
def test_what_cannot_be_compared_is_refused_with_its_reason(command, code, message, tmp_path, capsys):
    assert cli.main(["compare", *command, "--out", str(tmp_path)]) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def frozen(seed):
    run = line(seed)
    run.model.requires_grad_(False)
    return run


def lost(seed):
    run = line(seed)
    return run._replace(loss=lambda: run.loss() * math.nan)


def number(seed):
    return line(seed)._replace(loss=lambda: 2.0)


def flat(seed):
    run = line(seed)
    return run._replace(held_out=lambda: 1.0)


def wild(seed):
    """Runs whose losses are finite at their first step alone."""
    run, taken = line(seed), []

    def loss():
        taken.append(1)
        return run.loss() * (1 if len(taken) == 1 else math.inf)

    return run._replace(loss=loss)


def three(model, lr):
    return 3


def test_without_matplotlib_no_run_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["compare", "--steps", "1", "--out", str(tmp_path)]) == 1
    assert "Run `pip install 'gefen-fn[demo]'`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "task, code, words",
    [
        (
            "wild",
            1,
            ["sgd: diverged at every rate, so none is best", "with a finite loss: got none, every one diverged"],
        ),
        ("flat", 0, ["sgd: every rate came to the same loss, so none is best"]),
    ],
    ids=["all diverge", "rates make no difference"],
)
def test_a_comparison_that_tells_nothing_says_so(task, code, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(BUILDS, "sgd", BUILD["sgd"])
    command = ["compare", "--task", f"tests.test_compare:{task}", "--optimizer", "sgd", "--out", str(tmp_path)]
    assert cli.main([*command, "--rates", "1e-3", "--steps", "2", "--seeds", "1"]) == code
    told = "".join(capsys.readouterr())
    assert all(part in told for part in words)
    assert code or len(compare_log.read(tmp_path / "runs.jsonl")) == 2


def test_a_run_without_held_out_data_is_refused():
    with pytest.raises(ValueError, match="the runs of line have none"):
        train(Cell("line", "sgd", 0.1, 0, 1), lambda seed: line(seed)._replace(held_out=None), BUILD["sgd"])


@pytest.mark.parametrize(
    "best, expected",
    [(0.1, [0.1, 0.2, 0.05]), (0.2, [0.1, 0.2, 0.4]), (0.8, [0.1, 0.2, 0.4, 0.8, 1.6])],
    ids=["lower-edge", "upper-edge", "far-above"],
)
def test_the_grid_grows_until_the_best_rate_is_enclosed(best, expected):
    found = made_up(lambda arm, lr, seed: 1 + abs(math.log(lr / best)), LINES._replace(arms=("sgd",), seeds=1))
    assert [cell.lr for cell in found][: len(expected)] == expected
    assert LINES.best_rate("sgd", found) == best


def test_a_gap_beside_the_best_rate_is_closed():
    comparison = LINES._replace(arms=("sgd",), rates=(0.1, 0.4, 1.6), seeds=1)
    assert sorted(comparison.tried("sgd", made_up(lambda arm, lr, seed: 1 + abs(lr - 0.4), comparison))) == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.6,
    ]


def test_a_plan_that_was_stopped_tells_which_arms_are_finished():
    found = made_up(lambda arm, lr, seed: 1 + abs(math.log(lr / 0.2)))
    assert LINES.finished(found) == LINES._replace(arms=["adamw", "sgd"])
    del found[LINES.cell("sgd", 0.4, 1)]
    assert LINES.finished(found).arms == ["adamw"]
    assert LINES._replace(seeds=3).finished(found).arms == LINES.finished({}).arms == []


def test_an_arm_is_judged_by_the_seeds_that_it_and_the_first_have_been_run_with():
    found = made_up(lambda arm, lr, seed: 1 + abs(math.log(lr / 0.2)) + seed, LINES._replace(seeds=3))
    del found[LINES.cell("sgd", 0.4, 2)]
    comparison = LINES._replace(seeds=3).finished(found, least=2)
    assert [comparison.seeds_of(arm, found) for arm in comparison.arms] == [3, 2]
    assert [len(losses.by_seed) for row in rows_of(comparison, found) for losses in row[2:5]] == [3, 3, 3, 2, 2, 2]
    shown = text(comparison, rows_of(comparison, found), 0.1).splitlines()
    assert [words.split()[1] for words in shown[2:4]] == ["3", "2"]


def test_all_seeds_decide_between_the_two_rates_that_came_lowest():
    losses = {0.05: 3, 0.1: 1, 0.2: 1.1, 0.4: 1.2, 0.8: 3}
    found = made_up(lambda arm, lr, seed: losses[lr] - (seed and 0.4 * (lr > 0.15)))
    assert LINES.best_rate("adamw", found) == 0.2 and LINES.shared_rates(found) == [0.2, 0.4]
    assert rows_of(LINES, found)[1].twice.by_seed == pytest.approx([1.2, 0.8])


def test_the_summary_shows_every_task_that_an_arm_ran_on_and_what_diverged(tmp_path):
    losses = {"adamw": 1.0, "sgd": 1.02, "far": 2.0, "lost": None}
    comparison = LINES._replace(arms=tuple(losses), rates=(0.1,))
    rows = rows_of(comparison, made_up(lambda arm, lr, seed: losses[arm], comparison))
    summary.draw({"one": rows, "other": rows[:2]}, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "losses, expected",
    [
        ({}, [0.1, 0.2, 0.05]),
        ({0.05: 0.9}, [0.1, 0.2, 0.05, 0.025]),
        ({0.2: 0.9}, [0.1, 0.2, 0.4]),
    ],
    ids=["flat", "lower is better", "higher is better"],
)
def test_equal_losses_do_not_lead_the_grid_down(losses, expected):
    comparison = LINES._replace(arms=("sgd",), seeds=1)
    found = made_up(lambda arm, lr, seed: losses.get(lr, 1.0), comparison)
    assert [lr for lr in dict.fromkeys(cell.lr for cell in found)][: len(expected)] == expected
    assert len(found) <= 5


def test_a_grid_whose_runs_all_diverge_comes_to_an_end():
    assert len(made_up(lambda arm, lr, seed: None, LINES._replace(arms=("sgd",), seeds=1))) <= 13


def test_each_arm_is_trained_at_its_own_rate_at_the_first_ones_and_at_twice_that_with_every_seed():
    bests = {"adamw": 0.2, "sgd": 1.6}
    found = made_up(lambda arm, lr, seed: abs(math.log2(lr / bests[arm])) + seed)
    assert sorted(cell.lr for cell in found if cell.arm == "adamw" and cell.seed == 1) == [0.1, 0.2, 0.4]
    assert sorted(cell.lr for cell in found if cell.arm == "sgd" and cell.seed == 1) == [0.2, 0.4, 0.8, 1.6]
    own, shared, twice = rows_of(LINES, found)[1][2:5]
    assert (own.lr, own.mean, own.difference) == (1.6, 0.5, 0)
    assert (shared.lr, shared.by_seed, shared.differences, shared.error) == (0.2, [3, 4], [3, 3], 0)
    assert (twice.lr, twice.by_seed, twice.differences, twice.not_worse()) == (0.4, [2, 3], [1, 1], 0)


def test_runs_of_one_seed_are_equal_and_of_another_are_not():
    first, again, other = (train(Cell("line", "sgd", 0.1, seed, 3), line, BUILD["sgd"]) for seed in (0, 0, 1))
    assert (first.losses, first.held_out) == (again.losses, again.held_out)
    assert first.losses != other.losses
    assert (first.parameters, first.state_bytes, first.provenance["threads"]) == (36, 0, 1)


def test_a_run_that_leaves_the_finite_numbers_ends_there_and_counts_as_a_jump(tmp_path):
    comparison = LINES._replace(arms=("adamw", "sgd"), rates=(1e30,), steps=5)
    found = compare(comparison, line, BUILD | {"adamw": lambda model, lr: BUILD["adamw"](model, 0.1)}, tmp_path / "log")
    assert compare_log.read(tmp_path / "log") == found
    ended = found[comparison.cell("sgd", 1e30, 0)]
    assert ended.held_out is None and len(ended.losses) < 5
    row = rows_of(comparison, found)[1]
    assert row.shared.jumps(0.1) == 2 and "diverged" in text(comparison, [row], 0.1)
    assert plain(comparison, [row], found, 0.1)["arms"]["sgd"]["shared"]["by_seed"] == [None, None]
    picture(comparison, rows_of(comparison, found)).draw_without_rendering()


@pytest.mark.parametrize("state", [800, 0], ids=["with state", "without state"])
def test_a_comparison_in_which_all_runs_diverge_is_shown(state):
    comparison = LINES._replace(rates=(0.1,))
    found = made_up(lambda arm, lr, seed: None, comparison)
    rows = rows_of(comparison, {cell: out._replace(state_bytes=state) for cell, out in found.items()})
    picture(comparison, rows).draw_without_rendering()
    assert [words.count("diverged") for words in text(comparison, rows, 0.1).splitlines()[2:4]] == [5, 5]


def test_a_jump_is_seen_through_the_noise_of_the_batches():
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(0.2).tolist()
    smooth = [2 + 3 * 0.98**at for at in range(200)]
    jumping = [loss + (0.3 if 120 <= at < 150 else 0) for at, loss in enumerate(smooth)]
    seen = [[loss + extra for loss, extra in zip(curve, noise, strict=True)] for curve in (smooth, smooth, jumping)]
    common = batch_noise(seen)
    assert largest_rise(seen[0], common) < 0.1 < 0.25 < largest_rise(seen[2], common) < 0.35
    assert largest_rise(smooth, [0.0] * 200) == 0


@pytest.mark.parametrize("rise, jumps", [(0.0, 0), (0.5, 2)], ids=["steady", "jumping"])
def test_the_table_tells_the_share_of_runs_that_jump(rise, jumps):
    comparison = LINES._replace(arms=("adamw", "gefen", "sgd"))
    found = made_up(lambda arm, lr, seed: 1 + abs(math.log(lr / 0.2)), comparison, rise)
    shown = text(comparison, rows_of(comparison, found), 0.1).splitlines()
    assert [words.split()[10] for words in shown[2:5]] == ["0/2", "0/2", f"{jumps}/2"]


def test_state_bytes_count_each_storage_once_and_no_parameter():
    p = torch.nn.Parameter(torch.zeros(100))
    p.grad = torch.zeros(100)
    optimizer = torch.optim.SGD([p], momentum=0.9)
    shared = torch.zeros(10, dtype=torch.float64)
    optimizer.state[p] = {"mu": [torch.zeros(25)], "views": (shared[:2], shared[5:]), "own": p.detach(), "grad": p.grad}
    assert state_bytes(optimizer) == 25 * 4 + 10 * 8


def test_the_language_task_starts_at_chance_and_is_judged_on_the_same_files_whatever_the_seed():
    torch.manual_seed(0)
    run = language(3)
    assert abs(run.loss().item() - math.log(256)) < 0.2 and run.loss() != run.loss()
    torch.manual_seed(0)
    assert language(4).held_out() == run.held_out()


@pytest.mark.parametrize("name", [*OURS])
def test_each_arm_of_the_laboratory_steps_and_says_what_it_keeps(name):
    def task(seed):
        model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 96))
        return Run(model, lambda: model(torch.ones(2, 96)).square().mean(), lambda: 0.0)

    first, last = (train(Cell("net", name, 1e-3, 0, steps), task, arms([name], 0.99)[name]) for steps in (1, 2))
    assert last.losses[1] < last.losses[0] == first.losses[0]
    assert 1 < last.state_bytes / last.parameters <= 8.01


def test_sets_and_names_of_arms_follow_adamw_without_repeating():
    assert list(arms(["muon", "adamw", "gefen_muon"], 0.99)) == ["adamw", "muon", "gefen_muon"]
    assert {name for names in SETS.values() for name in names} <= set(SETS["all"])
    with pytest.raises(ValueError, match=r"must be of core, .*: got 'adagrad'"):
        arms(["adagrad"], 0.99)


def test_fine_tuning_begins_with_one_model_whatever_the_seed(monkeypatch):
    monkeypatch.setitem(tasks._PRETRAINING, "steps", 2)
    first, other = tasks.fine_tuning(0), tasks.fine_tuning(1)
    assert first.held_out() == other.held_out() < math.log(256) - 0.2
    assert first.loss() != other.loss()


def test_the_pictures_of_digits_need_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="Run `pip install scikit-learn`"):
        tasks.digits(0)


@pytest.mark.slow
def test_digits_are_learnt():
    cell = Cell("digits", "adamw", 2e-3, 0, 100)
    assert train(cell, tasks.digits, arms(["adamw"], 0.99)["adamw"]).score < 1
