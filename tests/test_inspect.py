"""What `gefen inspect` says of a checkpoint, whatever it was saved by."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gefen_nn import CheckpointError, Gefen, OptimizerState, StateTree, load, save
from gefen_nn.cli import main
from gefen_nn.inspecting import inspect_checkpoint

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 40))
    optimizer = Gefen(model.named_parameters(), 1e-3)
    for _ in range(3):
        model(torch.randn(8, 512)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def by_save(path, model, optimizer):
    save(path, model, optimizer)


def by_object(path, model, optimizer):
    dcp.save({"optimizer": OptimizerState(optimizer), "model": model.state_dict()}, checkpoint_id=path)


def by_state_dict(path, model, optimizer):
    dcp.save({"optim": optimizer.state_dict(), "model": model.state_dict()}, checkpoint_id=path)


def by_tree(path, model, optimizer):
    tree = StateTree(optimizer.state_tree().inner_state, dict(model.named_parameters()))
    dcp.save({"state": tree, "model": model.state_dict()}, checkpoint_id=path)


def by_file(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, path)


WRITERS = {"save": by_save, "DCP object": by_object, "DCP state dict": by_state_dict, "tree": by_tree, "file": by_file}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP's own save on one process says so
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_form_of_a_checkpoint_shows_the_same_state(write, trained, tmp_path):
    model, optimizer = trained
    write(tmp_path / "it", model, optimizer)
    found = inspect_checkpoint(tmp_path / "it")
    report = {leaf.path: leaf for leaf in optimizer.describe().leaves}
    rows = {leaf.name: leaf for leaf in found.leaves}
    assert rows.keys() == report.keys() and not found.faults
    for name, leaf in rows.items():
        told = report[name]
        assert (leaf.shape, leaf.steps, leaf.bytes, leaf.kept) == (told.shape, 3, told.bytes, dict(told.kept))
    assert (rows["0.bias"].rule, rows["0.bias"].at_ends) == ("scale_by_gefen", None)
    assert found.other_bytes == sum(4 * p.numel() for p in model.parameters())
    assert found.codebooks["scale_by_gefen"].learned


def test_shares_and_scales_are_those_of_the_codes(trained, tmp_path):
    model, optimizer = trained
    by_file(tmp_path / "it.pt", model, optimizer)
    leaf = next(leaf for leaf in inspect_checkpoint(tmp_path / "it.pt").leaves if leaf.name == "0.weight")
    held = optimizer.state[model[0].weight]
    codes, scales = held["scale_by_gefen.mu.codes"].int(), held["scale_by_gefen.mu.absmax"]
    assert leaf.at_ends == pytest.approx(float(((codes == 0) | (codes == 255)).float().mean())) and leaf.at_ends > 0
    assert leaf.at_zero == pytest.approx(float(((codes == 127) | (codes == 128)).float().mean())) and leaf.at_zero > 0
    assert leaf.scales == (float(scales.min()), float(scales.max())) and leaf.empty_blocks == 0.0


def saved_with(tmp_path, trained, **changes):
    """A file with some tensors of the first weight replaced."""
    state = trained[1].state_dict()
    for key, change in changes.items():
        name = f"scale_by_gefen.{key.replace('_', '.')}"
        state["state"][0] = {**state["state"][0], name: change(state["state"][0][name].clone())}
    torch.save(state, tmp_path / "it.pt")
    return tmp_path / "it.pt"


def test_unused_levels_and_empty_blocks_are_counted(trained, tmp_path):
    path = saved_with(tmp_path, trained, mu_codes=lambda x: x.fill_(5), mu_absmax=lambda x: x.index_fill_(1, *ZERO))
    found = inspect_checkpoint(path)
    assert found.codebooks["scale_by_gefen"].dead == 254 and "254 of them unused" in str(found)
    assert next(leaf for leaf in found.leaves if leaf.name == "0.weight").empty_blocks == 0.5


ZERO = (torch.tensor([0]), 0.0)
FAULTS = {
    "a NaN": ({"mu_absmax": lambda x: x.fill_(float("nan"))}, "not finite"),
    "a negative scale": ({"mu_absmax": lambda x: x.neg_()}, "below 0"),
    "a negative square": ({"nu_row": lambda x: x.sub_(1.0)}, "below 0"),
}


@pytest.mark.parametrize(("changes", "words"), FAULTS.values(), ids=FAULTS)
def test_the_command_ends_with_1_where_state_is_damaged(changes, words, trained, tmp_path, capsys):
    assert main(["inspect", str(saved_with(tmp_path, trained, **changes))]) == 1
    out = capsys.readouterr()
    assert "FAULT 0.weight: " in out.out and words in out.out and "1 faults" in out.err


@pytest.mark.parametrize("form", ["block", "factored"])
def test_state_of_gefen_x_is_shown_too(form, tmp_path):
    held = torch.load(DATA / "gefen_x_050_state.pt", weights_only=True)[form]["state_dict"]
    torch.save(held, tmp_path / "it.pt")
    found = inspect_checkpoint(tmp_path / "it.pt")
    assert {leaf.rule for leaf in found.leaves} == {"Gefen-X"} and found.leaves[0].at_ends > 0 and not found.faults


def test_state_of_adamw_is_shown_too(tmp_path):
    p = nn.Parameter(torch.ones(5, 3))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([("w", p)])
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "it.pt")
    leaf = inspect_checkpoint(tmp_path / "it.pt").leaves[0]
    assert (leaf.name, leaf.shape, leaf.rule, leaf.steps, leaf.bytes) == ("w", (5, 3), "Adam of torch", 1, 124)


def test_the_current_folder_is_a_path_too(trained, tmp_path, monkeypatch):
    save(tmp_path / "it", *trained)
    monkeypatch.chdir(tmp_path / "it")
    assert inspect_checkpoint(".").leaves
    load(".", *trained)
    save(".", *trained)
    monkeypatch.chdir(tmp_path / "it")  # another one, which was written beside the old
    assert inspect_checkpoint(".").leaves


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as above
def test_a_folder_of_dcp_is_not_taken_for_a_damaged_one(trained, tmp_path):
    by_object(tmp_path / "it", *trained)
    with pytest.raises(CheckpointError, match=r"one of torch\.distributed\.checkpoint .* by `dcp\.load`"):
        load(tmp_path / "it", *trained)


def test_one_of_several_states_is_named_by_its_key(trained, tmp_path):
    optimizer = trained[1]
    torch.save({"a": optimizer.state_dict(), "b": optimizer.state_dict()}, tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match=r"\['a', 'b'\].*--key"):
        inspect_checkpoint(tmp_path / "it.pt")
    assert inspect_checkpoint(tmp_path / "it.pt", key="b").leaves


def text_file(path, trained):
    path.write_text("no checkpoint")


def other_tensors(path, trained):
    torch.save({"w": torch.ones(3)}, path)


def truncated(path, trained):
    by_file(path, *trained)
    path.write_bytes(path.read_bytes()[:900])


def damaged_folder(path, trained):
    save(path, *trained)
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def empty_folder(path, trained):
    path.mkdir()


def stray_state(path, trained):
    torch.save({"state": {7: {}}, "param_groups": [{"params": [0]}]}, path)


BAD = {
    "no file": (lambda path, trained: None, "No such file"),
    "text": (text_file, "must be a file of torch.save"),
    "a model alone": (other_tensors, "one optimizer's state"),
    "half a file": (truncated, "must be a file of torch.save"),
    "a damaged folder": (damaged_folder, "The file is damaged"),
    "an empty folder": (empty_folder, "no complete one"),
    "state of nobody": (stray_state, "must belong to a parameter"),
}


@pytest.mark.parametrize(("write", "words"), BAD.values(), ids=BAD)
def test_what_is_no_checkpoint_is_refused_with_a_reason(write, words, trained, tmp_path, capsys):
    write(tmp_path / "it", trained)
    assert main(["inspect", str(tmp_path / "it")]) == 1
    assert words in capsys.readouterr().err


def test_the_command_prints_json_and_draws(trained, tmp_path, capsys):
    by_file(tmp_path / "it.pt", *trained)
    arguments = ["inspect", str(tmp_path / "it.pt"), "--json", "--plot", str(tmp_path / "book.png")]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["leaves"][0]["name"] == "0.weight" and sum(told["codebooks"]["scale_by_gefen"]["used"]) == 512 * 64
    assert (tmp_path / "book.png").stat().st_size > 1000


def test_a_picture_needs_a_codebook(tmp_path, capsys):
    torch.save({"state": {}, "param_groups": [{"params": []}]}, tmp_path / "it.pt")
    assert main(["inspect", str(tmp_path / "it.pt"), "--plot", str(tmp_path / "it.png")]) == 1
    assert "needs a codebook" in capsys.readouterr().err
