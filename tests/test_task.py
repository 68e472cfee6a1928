"""Functions and optimizers by name, as they are written on the command line."""

import sys

import pytest
from torch import nn

from gefen_nn.errors import WrongArgumentError
from gefen_nn.task import BUILDS, build_named, function_named, model_named


@pytest.mark.parametrize("name", BUILDS)
def test_every_named_optimizer_takes_a_model_and_a_learning_rate_and_does_not_decay(name):
    optimizer = build_named(name)(nn.Linear(64, 80), 0.25)
    assert {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(0.25, 0.0)}


def test_a_module_is_found_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine_of_test_task.py").write_text("class Made:\n    def build(model, lr):\n        return lr\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert build_named("mine_of_test_task:Made.build")(None, 0.5) == 0.5


BAD = {
    "no colon": ("torch", "module:function: got 'torch'"),
    "a file": ("sub/mine.py:task", "got 'sub/mine.py:task'. Write 'sub.mine:task'"),
    "a function of something": ("tests.test_task:task", "of nothing: got one of seed"),
    "no name": ("torch:", "module:function: got 'torch:'"),
    "no such module": ("no_such_module:f", "got no 'no_such_module' from"),
    "no such part of a package": ("torch.no_such:f", "got no 'torch.no_such' from"),
    "no such function": ("tests.test_task:absent", r"must define 'absent': got \['WrongArgumentError'"),
    "a number": ("tests.test_task:NUMBER", "must be a function: got a int"),
}
NUMBER = 3


def task(seed):
    return seed


def three():
    return 3


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD)
def test_a_name_of_nothing_is_refused_with_the_reason(text, words):
    with pytest.raises(WrongArgumentError, match=words):
        function_named(text)


def test_a_factory_must_make_a_model():
    with pytest.raises(WrongArgumentError, match=r"must make a torch.nn.Module: got a int"):
        model_named("tests.test_task:three")


def test_an_import_that_fails_inside_the_module_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_of_test_task.py").write_text("import nothing_like_this\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="nothing_like_this"):
        function_named("broken_of_test_task:f")
