"""A learning rate is found where short runs are best, whatever the range test began with."""

import json
import math
from collections import Counter
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from torch import nn

from gefen_nn import lr_picture
from gefen_nn.cli import main
from gefen_nn.lr_finder import lr_find
from gefen_nn.task import BUILDS, Run

SHORT = {"range_steps": 30, "steps": 30}


def line(seed, held_out=True):
    """Fit a linear map; fresh batches are drawn from the seed."""
    torch.manual_seed(seed)
    net, generator = nn.Linear(32, 32), torch.Generator().manual_seed(seed)
    target = torch.randn(32, 32, generator=generator)

    def loss():
        x = torch.randn(8, 32, generator=generator)
        return (net(x) - x @ target.mT).square().mean()

    def judged():
        return float((net.weight - target).square().mean())

    return Run(net, loss, judged if held_out else None)


def sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr)


def module(seed):
    return nn.Linear(2, 2)


def falling(seed):
    """A loss that falls without end, so that no rate is too high."""
    p = nn.Parameter(torch.zeros(()))
    return Run(nn.ParameterList([p]), lambda: -p.clamp(max=1e30) / 1e3, lambda: float(-p))


@pytest.mark.parametrize("build", [*BUILDS.values(), sgd], ids=[*BUILDS, "sgd"])
def test_the_suggestion_is_the_best_of_the_short_runs_and_its_neighbours_are_worse(build):
    report = lr_find(line, build, high=10.0, **SHORT)
    losses = dict(report.sweep)
    assert report.enclosed and losses[report.suggestion] == min(losses.values()) < 1.2
    assert min(losses) < report.suggestion < max(losses)


def test_rates_are_round_and_seeds_repeat_them():
    first, again = (lr_find(line, sgd, **SHORT, seed=3) for _ in range(2))
    assert first == again
    assert {f"{lr:e}"[0] for lr, _ in first.sweep} <= {"1", "2", "5"}


@pytest.mark.parametrize("low", [1e-6, 1e-3])
def test_the_range_test_ends_where_the_loss_has_doubled(low):
    rates, losses, untrained = zip(*lr_find(line, sgd, low=low, high=1e3, **SHORT).range_test, strict=True)
    assert rates[0] == low and rates[-1] < 1e3 and len(rates) < 30
    assert losses[0] == untrained[0] and all(a <= 2 * b for a, b in zip(losses, untrained, strict=True))


def test_the_untrained_model_sees_the_same_batches_of_a_task_that_draws_from_torchs_own_generator():
    numbers = count()

    def task(seed):
        torch.manual_seed(seed)
        net = nn.Linear(4, 1)
        return Run(net, lambda: (torch.rand(()) + 0 * net.weight.sum()).exp(), lambda: float(next(numbers)))

    test = lr_find(task, sgd, **SHORT).range_test
    assert all(loss == start for _, loss, start in test) and len({loss for _, loss, _ in test}) == len(test) == 30


@pytest.mark.parametrize(
    ("low", "runs", "words"),
    [
        (1e-6, 3, "0.001 was not tried: allow more runs (--runs)"),
        (1e-6, 10, "0.002 was not tried: allow higher rates (--high)"),
        (1e-4, 10, "0.002 was not tried: allow higher rates (--high)"),
    ],
    ids=["few runs", "a low bound", "close bounds"],
)
def test_a_best_rate_at_the_edge_is_said_to_be_one(low, runs, words):
    report = lr_find(falling, sgd, low=low, high=1e-3, **SHORT, runs=runs)
    assert not report.enclosed and words in str(report) and len(report.sweep) <= runs
    assert low <= report.sweep[0][0] and report.sweep[-1][0] <= 1e-3


def test_without_held_out_data_the_last_training_losses_judge():
    report = lr_find(lambda seed: line(seed, held_out=False), sgd, **SHORT)
    assert report.judged_by == "training loss" and "training loss" in str(report)


def test_a_rate_at_which_the_loss_is_lost_is_told_so():
    report = lr_find(line, sgd, low=1e-3, high=1e2, **SHORT)
    assert ("diverged" in str(report)) == any(math.isinf(loss) for _, loss in report.sweep)


BAD = {
    "a range upside down": ({"low": 1.0, "high": 0.1}, "low < high <= 1e\\+30"),
    "a narrow range": ({"low": 2e-3, "high": 8e-3}, "with 3 rates"),
    "a rate that fp32 has not": ({"low": 1e-320}, r"1e-30 <= low < high <= 1e\+30"),
    "rates whose ratio is no number": ({"low": 1e-300, "high": 1e300}, r"1e-30 <= low < high <= 1e\+30"),
    "few steps": ({"steps": 3}, "`steps` must be at least 10"),
    "few runs": ({"runs": 2}, "`runs` must be at least 3"),
    "an unknown optimizer": ({"optimizer": "adm"}, "must be of adamw"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        lr_find(line, **options)


def test_the_bar_has_a_part_for_each_step():
    parts = Counter()

    @contextmanager
    def watch(label, total):
        parts[label] -= total
        yield lambda: parts.update([label])

    lr_find(line, sgd, **SHORT, watch=watch)
    assert len(parts) > 3 and not any(count for label, count in parts.items() if label.startswith("short run"))


def test_a_task_without_a_finite_loss_is_refused():
    with pytest.raises(ValueError, match="finite loss"):
        lr_find(lambda seed: Run(nn.Linear(2, 2), lambda: torch.full((), math.nan, requires_grad=True)), sgd, **SHORT)


def linear():
    return nn.Linear(2, 2)


def frozen(seed):
    net = linear().requires_grad_(False)
    return Run(net, lambda: net(torch.ones(2)).sum())


def flat(seed):
    net = linear()
    return Run(net, lambda: 0 * net.weight.sum() + 3)


UNFIT = {
    "a frozen model": (frozen, sgd, "parameters to train: got none from frozen"),
    "a model without parameters": (lambda seed: Run(nn.ReLU(), lambda: None), sgd, "parameters to train: got none"),
    "a loss that is no function": (lambda seed: Run(linear(), torch.ones(())), sgd, "functions: got Tensor and None"),
    "a held-out loss that is none": (lambda seed: line(seed)._replace(held_out=lambda: "1"), sgd, "number: got str"),
    "no model": (lambda seed: Run(3, lambda: None), sgd, "torch.nn.Module: got int"),
    "a loss that does not depend on the model": (flat, sgd, "got the loss 3 at each of"),
    "a number for a loss": (lambda seed: Run(linear(), lambda: 3.0), sgd, "differentiated: got float"),
    "a loss cut off": (lambda seed: Run(linear(), lambda: torch.ones(())), sgd, r"got Tensor \(\) without a gradient"),
    "many losses": (lambda seed: Run(net := linear(), lambda: net.weight), sgd, r"got Parameter \(2, 2\)"),
    "a number for an optimizer": (line, lambda model, lr: 3, "a torch.optim.Optimizer: got int"),
}


@pytest.mark.parametrize(("task", "build", "words"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_be_trained_is_refused_with_its_reason(task, build, words):
    with pytest.raises(ValueError, match=words):
        lr_find(task, build, **SHORT)


def test_a_picture_that_fails_does_not_take_the_report_along(tmp_path, monkeypatch, capsys):
    def full(*size):
        raise OSError("the disk is full")

    monkeypatch.setattr(lr_picture, "new_figure", full)
    arguments = ["lr-find", "--task", "tests.test_lr_finder:line", "--optimizer", "tests.test_lr_finder:sgd"]
    arguments += ["--range-steps", "10", "--steps", "10", "--runs", "3", "--plot", str(tmp_path / "lr.png")]
    assert main(arguments) == 1
    assert "suggested: lr=" in capsys.readouterr().out


def test_the_command_finds_draws_and_prints(capsys, tmp_path):
    arguments = ["lr-find", "--task", "tests.test_lr_finder:line", "--optimizer", "tests.test_lr_finder:sgd"]
    arguments += ["--range-steps", "20", "--steps", "20", "--high", "10", "--plot", str(tmp_path / "lr.png"), "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["enclosed"] and told["suggestion"] in [lr for lr, _ in told["sweep"]]
    assert (tmp_path / "lr.png").stat().st_size > 1000


REFUSED = {
    "no task": (["lr-find"], 2, "--task"),
    "no picture": (["lr-find", "--task", "a:b", "--plot", "lr.txt"], 2, "must end in .png"),
    "no number": (["lr-find", "--task", "a:b", "--low", "-1"], 2, "a number above 0"),
    "no such task": (["lr-find", "--task", "tests.test_lr_finder:lime"], 2, "must define 'lime'"),
    "no task of a seed": (
        ["lr-find", "--task", "tests.test_lr_finder:sgd"],
        2,
        "function of seed: got one of model, lr",
    ),
    "no run": (["lr-find", "--task", "tests.test_lr_finder:module"], 1, "gefen_nn.Run: got Linear from module"),
    "no optimizer": (["lr-find", "--task", "tests.test_lr_finder:line", "--optimizer", "adm"], 2, "of adamw, gefen"),
    "upside down": (
        ["lr-find", "--task", "tests.test_lr_finder:line", "--low", "1", "--high", "1e-3"],
        2,
        "low < high",
    ),
}


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_the_command_says_what_is_wrong(arguments, code, words, capsys):
    assert main(arguments) == code
    assert words in capsys.readouterr().err
