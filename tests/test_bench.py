"""`gefen bench`: what it runs, not how long that takes."""

import json

import pytest
import torch
from torch import nn

from gefen_nn.bench import bench
from gefen_nn.cli import main

SEEN = []


class Counted(torch.optim.SGD):
    """Writes down whose step it was."""

    def step(self, closure=None):
        SEEN.append(self)
        return super().step(closure)


def network():
    torch.manual_seed(0)
    return nn.Linear(300, 64)


def counted(model, lr):
    return Counted(model.parameters(), lr, momentum=0.9)


def number():
    return 3


def frozen():
    return network().requires_grad_(False)


def test_all_take_turns_on_copies_of_the_model():
    SEEN.clear()
    net = network()
    found = bench(net, ["gefen", "tests.test_bench:counted"], rounds=2)
    assert [arm.name for arm in found.arms] == ["adamw", "gefen", "tests.test_bench:counted"]
    assert len(SEEN) == 1 + 2 + 2 * (1 + found.steps) and len(set(SEEN)) == 1
    assert torch.equal(net.weight, network().weight) and net.weight.grad is None


def test_bytes_and_ratios_belong_to_the_arms():
    found = bench(network(), ["gefen"], rounds=3)
    adamw, gefen = found.arms
    assert adamw.state_bytes == 8 * found.entries + 2 * 4 and 1.0 < gefen.state_bytes / found.entries < 1.3
    assert set(adamw.ratios) == {1.0} and len(gefen.ratios) == len(gefen.step_s) == 3
    assert gefen.ratios[0] == pytest.approx(gefen.step_s[0] / adamw.step_s[0])


def test_the_command_prints_a_table_or_json_and_leaves_the_threads(capsys):
    arguments = ["bench", "--model", "tests.test_bench:network", "--rounds", "1", "--threads", "1", "gefen"]
    before = torch.get_num_threads()
    assert main(arguments) == 0
    assert "against AdamW" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in told["arms"]] == ["adamw", "gefen"] and told["threads"] == 1
    assert torch.get_num_threads() == before


BAD = {
    "an unknown optimizer": (["network", "sgd"], 2, "must be of adamw"),
    "nothing to train": (["frozen"], 1, "none"),
    "a task": (["counted"], 2, "of nothing: got one of model, lr"),
    "no model": (["number"], 2, "must make a torch.nn.Module: got a int"),
    "a device that is not there": (["network", "--device", "privateuseone"], 2, "torch can use here: got 'privateuse"),
    "no device": (["network", "--device", "gpu"], 2, "torch can use here: got 'gpu'"),
}


@pytest.mark.parametrize(("arguments", "code", "words"), BAD.values(), ids=BAD)
def test_wrong_arguments_are_refused(arguments, code, words, capsys):
    model, *rest = arguments
    assert main(["bench", "--model", f"tests.test_bench:{model}", *rest]) == code
    assert words in capsys.readouterr().err
