"""What `gefen inspect` says of a checkpoint, whatever it was saved by."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gefen_fn import Block, adamw, chain, scale, scale_by_gefen
from gefen_nn import CheckpointError, Gefen, GefenMuon, OptimizerState, StateTree, TransformOptimizer, load, save
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


ZERO, NEAR, ONE = (torch.tensor([0]), 0.0), (torch.tensor([1]), -0.999), torch.ones(())
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


G = "scale_by_gefen."


def put(key, change):
    """Replace a tensor of the first weight, or take it away."""

    def damage(state):
        old = state["state"][0].pop(G + key)
        if change is not None:
            state["state"][0][G + key] = change(old.clone())

    return damage


def everywhere(key, change):
    """Replace what belongs to all parameters."""

    def damage(state):
        for leaves in state["state"].values():
            leaves[G + key] = change(leaves[G + key].clone())

    return damage


def of_group(**values):
    return lambda state: state["param_groups"][0].update(values)


REFUSED = {
    "a codebook of NaN": (everywhere("codebook", lambda x: x.fill_(float("nan"))), "codebook` must be sorted"),
    "an asymmetric codebook": (everywhere("codebook", lambda x: x.index_fill_(0, *NEAR)), "must be symmetric"),
    "a codebook in two axes": (
        everywhere("codebook", lambda x: x.view(2, 128)),
        "codebook` must be torch.float32 (256",
    ),
    "a codebook that differs in one": (put("codebook", lambda x: -x), "must be equal for all parameters"),
    "one codebook missing": (put("codebook", None), "0.weight: scale_by_gefen.codebook is missing"),
    "no codebook at all": (
        lambda state: [leaves.pop(G + "codebook") for leaves in state["state"].values()],
        "is missing",
    ),
    "codes that are floats": (put("mu.codes", lambda x: x.float()), "mu.codes` must be torch.uint8"),
    "codes of another shape": (put("mu.codes", lambda x: x[:, :256]), "must be torch"),
    "scales that are cut": (put("mu.absmax", lambda x: x[:-1]), "mu.absmax` must be torch.float32 (64, 2)"),
    "no scales": (put("mu.absmax", None), "scale_by_gefen.mu.absmax is missing"),
    "a leaf too many": (lambda state: state["state"][0].update({G + "a": ONE}), "not exp"),
    "a count below 0": (put("count", lambda x: x.fill_(-5)), "must count from 0 upwards"),
    "a count that is NaN": (put("count", lambda x: torch.tensor(float("nan"))), "not finite"),
    "a rate that is NaN": (of_group(lr=float("nan")), "group 0: `lr` must be finite"),
    "a rate below 0": (of_group(lr=-1.0), "group 0: "),
    "rules in another form": (of_group(kept_as="[1]"), "`kept_as` of a group must be"),
    "another version": (of_group(format_version=7), "`format_version` must be"),
    "an empty state": (lambda state: state["state"].update({0: {}}), "0.weight: state is empty"),
    "no state at all": (lambda state: state["state"].clear(), "no parameter has state"),
}


@pytest.mark.parametrize(("damage", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_load_refuses_is_a_fault(damage, words, trained, tmp_path, capsys):
    model, optimizer = trained
    state = optimizer.state_dict()
    state["state"] = {i: dict(leaves) for i, leaves in state["state"].items()}
    damage(state)
    with pytest.raises(CheckpointError):
        Gefen(model.named_parameters()).load_state_dict(state)
    torch.save(state, tmp_path / "it.pt")
    assert main(["inspect", "--json", str(tmp_path / "it.pt")]) == 1
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert any(words in fault for fault in told["faults"])


def test_parameters_without_state_are_named_and_no_fault(trained, tmp_path):
    """Frozen ones have none, and a file does not say which were."""
    state = trained[1].state_dict()
    del state["state"][0]
    torch.save(state, tmp_path / "it.pt")
    found = inspect_checkpoint(tmp_path / "it.pt")
    assert found.stateless == ("0.weight",) and not found.faults and "without state, as frozen" in str(found)


OTHERS = {
    "another policy": lambda model: Gefen(model.named_parameters(), second_moment=Block()),
    "blocks of another length": lambda model: Gefen(model.named_parameters(), block=64),
    "both of ours": GefenMuon,
    "an expression": lambda model: TransformOptimizer(model.named_parameters(), chain(scale_by_gefen(), scale(-1e-3))),
    "dense moments": lambda model: TransformOptimizer(model.named_parameters(), adamw(1e-3)),
}


@pytest.mark.parametrize("build", OTHERS.values(), ids=OTHERS)
def test_a_sound_checkpoint_has_no_fault_whatever_keeps_it(build, tmp_path):
    model = nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 40), nn.Conv1d(2, 3, 5))
    optimizer = build(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    by_file(tmp_path / "it.pt", model, optimizer)
    assert not inspect_checkpoint(tmp_path / "it.pt").faults


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


def holding(held):
    return lambda path, trained: torch.save(held, path)


def bytes_of_metadata(content):
    def write(path, trained):
        path.mkdir()
        (path / ".metadata").write_bytes(content)

    return write


def of_one(**leaves):
    return holding({"state": {0: leaves}, "param_groups": [{"params": [0]}]})


FORMS = {
    "a list of states": (holding({"state": [], "param_groups": {}}), "A state dict has `state`"),
    "a number of groups": (holding({"state": {}, "param_groups": 5}), "A state dict has `param_groups`"),
    "a group without parameters": (holding({"state": {}, "param_groups": [{}]}), "A state dict has `params`"),
    "a number for state": (holding({"state": {0: 5}, "param_groups": [{"params": [0]}]}), "A state dict has `0`"),
    "a key that is a number": (
        holding({"state": {0: {5: torch.ones(2)}}, "param_groups": [{"params": [0]}]}),
        "must be text: got 5",
    ),
    "tensors without data": (of_one(exp_avg=torch.ones(2, device="meta")), "must be a dense tensor with data"),
    "sparse tensors": (of_one(exp_avg=torch.eye(2).to_sparse()), "must be a dense tensor with data"),
    "garbage for metadata": (bytes_of_metadata(b"garbage"), "`.metadata` must be as"),
    "nothing for metadata": (bytes_of_metadata(b""), "`.metadata` must be as"),
    "a number for metadata": (bytes_of_metadata(pickle.dumps(5)), "`.metadata` must be as"),
}


@pytest.mark.parametrize(("write", "words"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_what_is_no_state_dict_is_refused_in_words(command, write, words, trained, tmp_path, capsys):
    write(tmp_path / "it", trained)
    target = [str(tmp_path / "out.pt")] * (command == "convert")
    assert main([command, str(tmp_path / "it"), *target]) == 1
    err = capsys.readouterr().err
    assert f"gefen {command}: " in err and words in err and "Traceback" not in err


def test_the_root_is_no_checkpoint(capsys):
    assert main(["inspect", "/"]) == 1
    assert "must be a checkpoint that `gefen_nn.save` wrote" in capsys.readouterr().err


INDICES = {
    "no text": 5,
    "no JSON": "{",
    "JSON in JSON": "[" * 100_000,
    "parts of another kind": json.dumps({"format_version": 1, "params": [], "leaves": 5, "groups": {}}),
    "a shape below 0": json.dumps({"format_version": 1, "params": {"w": [-1]}, "leaves": {}, "groups": []}),
    "a dtype that is none": json.dumps(
        {"format_version": 1, "params": {}, "leaves": {"a.b": [None, "nn", []]}, "groups": []}
    ),
    "leaves that are not there": json.dumps(
        {"format_version": 1, "params": {}, "leaves": {"a.b": [None, "uint8", [2]]}, "groups": []}
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as above
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_an_index_that_is_damaged_is_refused_in_words(index, tmp_path, capsys):
    dcp.save({"optimizer": {"index": index, "x": torch.ones(2)}}, checkpoint_id=tmp_path / "it")
    assert main(["inspect", str(tmp_path / "it")]) == 1
    err = capsys.readouterr().err
    assert "must hold the `index`" in err or "must hold what its index lists" in err


class Planted:
    """Runs when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def planted_metadata(path, model, optimizer, mark):
    by_state_dict(path, model, optimizer)
    (path / ".metadata").write_bytes(pickle.dumps(Planted(mark)))


def planted_field(path, model, optimizer, mark):
    by_state_dict(path, model, optimizer)
    held = pickle.loads((path / ".metadata").read_bytes())
    held.planner_data = {"optim.state": Planted(mark)}
    (path / ".metadata").write_bytes(pickle.dumps(held))


def planted_value(path, model, optimizer, mark):
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = Planted(mark)
    by_state_dict(path, model, SimpleNamespace(state_dict=lambda: state))


def planted_index(path, model, optimizer, mark):
    dcp.save({"optimizer": {"index": Planted(mark), "x": torch.ones(2)}}, checkpoint_id=path)


PLANTS = {
    "metadata": planted_metadata,
    "a field of the metadata": planted_field,
    "a group's value": planted_value,
    "the index": planted_index,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as above
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_what_a_folder_holds_is_not_run(plant, trained, tmp_path, capsys):
    plant(tmp_path / "it", *trained, tmp_path / "mark")
    assert main(["inspect", str(tmp_path / "it")]) == 1
    assert "may run code" in capsys.readouterr().err and not (tmp_path / "mark").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as above
def test_files_out_of_the_folder_are_not_read(trained, tmp_path, capsys):
    by_state_dict(tmp_path / "it", *trained)
    held = pickle.loads((tmp_path / "it" / ".metadata").read_bytes())
    for place in held.storage_data.values():
        place.relative_path = "../../etc/passwd"
    (tmp_path / "it" / ".metadata").write_bytes(pickle.dumps(held))
    assert main(["inspect", str(tmp_path / "it")]) == 1
    assert "got files ['../../etc/passwd'" in capsys.readouterr().err


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
