"""The recipes, and the script for many processes, run as they stand on their pages, and do what is said of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gefen_nn import Gefen
from tests.pages import ROOT, run_page


@pytest.fixture
def one_process():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_recipes_run_in_order(monkeypatch, one_process, tmp_path):
    monkeypatch.chdir(tmp_path)  # one saves a state
    monkeypatch.setattr(torch, "compile", lambda step: step)  # tests/test_compile.py does, and takes its time
    names = run_page(ROOT / "notebooks" / "recipes.md", count=20, longest=14)
    assert names["decays"]["0.weight"] and not names["decays"]["1.weight"] and not names["decays"]["0.bias"]
    assert names["every_fourth"].state_tree().gradient_step == 1
    assert names["average"].n_averaged == 1 and names["saved"].keys() == dict(names["model"].named_parameters()).keys()
    assert {x.dtype for x in names["mean"].values()} == {torch.float32}
    assert {"scale_by_gefen.mu.0%2Eweight.codes", "scale_by_gefen.codebook"} <= names["flat"].keys()
    assert names["rows"].keys() == names["params"].keys() == names["before"].keys()
    assert names["log"]["0.weight/at_ends"] > 0.003 and not {p.grad for p in names["small"].parameters()} - {None}


@pytest.mark.parametrize("n", range(4))
def test_each_block_of_the_front_page_runs_alone(n, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec((ROOT / "notebooks" / "index.md").read_text().split("```python\n")[n + 1].split("```")[0], {})


def test_the_script_for_many_processes_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    script = (ROOT / "notebooks" / "processes.md").read_text().split("```python\n")[1].split("```")[0]
    for _ in range(2):
        exec(compile(script, "train.py", "exec"), {})
    assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == list(range(20))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 96, bias=False))


def batch(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"stochastic_rounding": True}], ids=str)
def test_optimizers_in_backward_have_the_bits_of_one_for_all_with_the_fixed_codebook(options):
    together, apart = (network().bfloat16() if "stochastic_rounding" in options else network() for _ in range(2))
    one = Gefen(together.named_parameters(), codebook="fixed", **options)
    each = {p: Gefen([(name, p)], codebook="fixed", **options) for name, p in apart.named_parameters()}

    def step_now(p):
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(4):
        x = batch(step).to(together[0].weight.dtype)
        together(x).square().mean().backward()
        one.step()
        one.zero_grad()
        apart(x).square().mean().backward()
        assert all(p.grad is None for p in each)
    assert all(torch.equal(p, q) for p, q in zip(together.parameters(), apart.parameters(), strict=True))
    assert not torch.equal(apart[0].weight, network()[0].weight)
