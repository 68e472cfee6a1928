"""The demo, run small through its command line."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.text import Text as Label

from gefen_nn import cli, demo_world
from gefen_nn.curves import smoothed
from gefen_nn.demo_data import batch_at, standard_library_text
from gefen_nn.demo_model import Decoder, next_byte_loss
from gefen_nn.demo_picture import picture
from gefen_nn.demo_report import show
from gefen_nn.demo_train import (
    LABELS,
    OPTIMIZERS,
    RATES,
    Run,
    Settings,
    load_run,
    same_bits,
    torch_threads,
    validation_steps,
)
from gefen_nn.demo_world import change_world

TINY = Settings(steps=4, batch=2, context=16, threads=1)


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def text():
    return standard_library_text()


def test_the_demo_trains_all_resumes_to_the_bit_and_leaves_its_report(tmp_path, capsys):
    assert cli.main(["demo", "--steps", "3", "--seed", "3", "--out", str(tmp_path), "--json"]) == 0
    report, printed = json.loads((tmp_path / "demo.json").read_text()), capsys.readouterr()
    assert json.loads(printed.out) == report
    assert "Python's standard library" in printed.err
    assert list(report["optimizers"]) == ["adamw", "gefen", "gefen_muon"]
    for row in report["optimizers"].values():
        assert len(row["losses"]) == 3
        assert row["losses"][-1] < row["losses"][0]
        assert [step for step, _ in row["validation"]] == [1, 2, 3]
        assert 0 < row["validation_loss"] == row["validation"][-1][1] < row["validation"][0][1] < 6
        assert 0 < row["optimizer_ms"] <= row["step_ms"]
    assert 7.9 < report["optimizers"]["adamw"]["state_bytes_per_param"] < 8.1
    assert report["optimizers"]["gefen"]["state_bytes_per_param"] < 1.2
    assert report["optimizers"]["gefen_muon"]["state_bytes_per_param"] < 1.2
    resume = report["resume"]
    assert (resume["label"], resume["step"], resume["equal"]) == ("GefenMuon", 1, True)
    assert resume["losses"] == report["optimizers"]["gefen_muon"]["losses"][1:]
    move = report["move"]
    assert (move["worlds"], move["step"], move["equal"], move["continued"]) == ([2, 3], 3, True, True)
    assert [len(losses) for losses in move["losses"]] == [2, 2]
    left = ["demo.json", "demo.png", "half-way.pt", "saved-by-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def made_up(steps=300, names=tuple(LABELS), final=(2.5275, 2.5151, 2.2087), equal=True, moved=True):
    """A report as `demo.json` holds it, with losses that fall like the real ones."""
    rows = {}
    for name, loss in zip(names, final, strict=False):
        losses = [loss + 3 * 0.5 ** (9 * step / steps) + 0.2 * (-1) ** step for step in range(steps)]
        fall = [(step, loss + 3 * 0.5 ** (9 * step / steps)) for step in sorted(validation_steps(steps))]
        validation = [*fall[:-1], (steps, loss)]
        times = {"step_ms": 134.6, "optimizer_ms": 4.5, "first_step_ms": 204.0, "state_bytes_per_param": 8.0}
        rows[name] = {
            "label": LABELS[name],
            "lr": RATES[name],
            "validation_loss": loss,
            "losses": losses,
            "validation": validation,
            **times,
        }
    return {
        "parameters": 935_040,
        "settings": {"steps": steps},
        "data": {"name": "Python's standard library", "train_bytes": 4_285_015, "validation_bytes": 413_539},
        "compile_s": 0.8,
        "optimizers": rows,
        "resume": {"label": LABELS[names[-1]], "step": steps // 2, "equal": equal},
        "move": {"equal": moved, "continued": True, "difference": 2.3e-7},
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps": 2},
        {"steps": 3000},
        {"final": (2.5, 2.5, 2.5)},
        {"final": (0.1, 3.9, 2.0)},
        {"names": ("gefen", "gefen_muon")},
        {"names": ("gefen",)},
    ],
    ids=["as-usual", "two-steps", "many-steps", "equal-ends", "far-ends", "two-optimizers", "one-optimizer"],
)
def test_no_word_of_the_picture_stands_on_another_or_outside(changes):
    figure = picture(made_up(**changes))
    figure.draw_without_rendering()
    labels = [label for label in figure.findobj(Label) if label.get_visible() and label.get_text().strip()]
    boxes = {(label.get_text(), index): label.get_window_extent() for index, label in enumerate(labels)}
    assert [pair for pair in itertools.combinations(boxes, 2) if boxes[pair[0]].overlaps(boxes[pair[1]])] == []
    assert [text for text, box in boxes.items() if box.x0 < 0 or box.y0 < 0 or box.x1 > 1200 or box.y1 > 500] == []


ENDS = [
    (True, True, "new process: same bits", "on 3: same bits"),
    (False, True, "new process: OTHER BITS", "on 3: same bits"),
    (True, False, "new process: same bits", "on 3: NOT THE SAME"),
]


@pytest.mark.parametrize("equal, moved, resumed, shared", ENDS, ids=["good", "resume failed", "move failed"])
def test_the_picture_says_what_was_trained_on_what_and_how_it_ended(equal, moved, resumed, shared):
    words = " ".join(label.get_text() for label in picture(made_up(equal=equal, moved=moved)).findobj(Label))
    for word in (
        "0.94M",
        "300 steps",
        "Python's standard library (4.3 MB)",
        "2.527",
        "2.515",
        "2.209",
        "8.00",
        resumed,
        shared,
    ):
        assert word in words


def test_the_table_names_its_text_and_explains_the_state(capsys):
    show(made_up())
    printed = capsys.readouterr().out
    assert "Text: Python's standard library, 4.3 MB to train on, 0.4 MB held out." in printed
    assert "vectors and small leaves stay fp32" in printed and "GefenMuon: Muon with such codes" in printed
    assert "0.002" in printed and "0.008" in printed
    assert "saved, loaded by 3: state equal to the bit, losses within 2e-07 of those of the 2." in printed


def test_processes_that_fail_or_do_not_end_in_time_are_told_by_their_exit_codes(tmp_path, monkeypatch, capfd):
    with pytest.raises(RuntimeError, match=r"All 2 processes must exit with 0 .* got \[1, 1\]"):
        change_world(tmp_path / "absent.pt", tmp_path / "saved")
    assert "absent.pt" in capfd.readouterr().err
    monkeypatch.setattr(demo_world, "_DEADLINE_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match=r"within 0 s: got \[None, None\]"):
        change_world(tmp_path / "absent.pt", tmp_path / "saved")


def test_smoothing_keeps_a_straight_line_at_its_start_and_averages_the_rest():
    assert smoothed([0.0, 1.0, 2.0, 6.0], 1) == [0.0, 1.0, 3.0, 4.0]


@pytest.mark.parametrize("steps, expected", [(2, [1, 2]), (6, [1, 2, 3, 4, 5, 6]), (300, list(range(30, 301, 30)))])
def test_a_run_is_judged_ten_times_at_most_and_at_its_end(steps, expected):
    assert sorted(validation_steps(steps)) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_validation_on_the_way_changes_no_bit(name, text):
    judged, alone, before = Run(name, TINY), Run(name, TINY), torch.get_rng_state()
    for _ in range(4):
        judged.train_step(text)
        judged.validate(text)
        alone.train_step(text)
    assert judged.losses == alone.losses
    assert same_bits(judged.final_tensors(), alone.final_tensors())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ([], "COMMAND"),
        (["train"], "invalid choice"),
        (["demo", "--optimizer", "sgd"], "adamw, gefen, gefen_muon: got 'sgd'"),
        (["demo", "--optimizer", "adamw,"], "got ''"),
        (["demo", "--steps", "1"], "integer from 2 to 1000000: got '1'"),
        (["demo", "--steps", "many"], "integer from 2 to 1000000: got 'many'"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", str(2**64)], "integer from 0 to 4294967295"),
        (["demo", "--out", __file__], "must be a folder"),
        (["demo", "--colour"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments_exit_with_two_and_a_reason(arguments, reason, capsys):
    assert cli.main(arguments) == 2
    assert reason in capsys.readouterr().err


def test_help_exits_with_zero_and_hides_the_inner_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "demo" in shown
    assert "demo-resume" not in shown and "demo-member" not in shown


def test_a_missing_checkpoint_exits_with_one_and_a_reason(tmp_path, capsys):
    assert cli.main(["demo-resume", str(tmp_path / "absent.pt"), str(tmp_path / "out.pt")]) == 1
    assert "absent.pt" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["matplotlib", "rich"])
def test_without_the_extras_the_command_names_them(missing, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == missing or name.startswith("gefen_nn.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert "pip install 'gefen-fn[demo]'" in capsys.readouterr().err


def test_the_package_imports_without_the_extras():
    code = "import sys, gefen_nn, gefen_nn.cli; assert not {'rich', 'matplotlib'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_saved_and_loaded_continues_with_the_same_bits(name, text, tmp_path):
    whole = Run(name, TINY)
    for _ in range(2):
        whole.train_step(text)
    whole.save(tmp_path / "run.pt")
    resumed = load_run(tmp_path / "run.pt")
    for _ in range(2):
        assert whole.train_step(text) == resumed.train_step(text)
    assert same_bits(whole.final_tensors(), resumed.final_tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_runs_of_one_seed_start_from_equal_parameters_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first, second, other = Run("adamw", TINY), Run("adamw", TINY), Run("adamw", TINY._replace(seed=1))
    assert same_bits(first.model.state_dict(), second.model.state_dict())
    assert not same_bits(first.model.state_dict(), other.model.state_dict())
    assert torch.equal(before, torch.get_rng_state())


def test_same_bits_tells_zeros_by_sign_and_types_by_width():
    zero = {"x": torch.zeros(2)}
    assert same_bits(zero, {"x": torch.zeros(2)})
    assert not same_bits(zero, {"x": -torch.zeros(2)})
    assert not same_bits(zero, {"x": torch.zeros(2, dtype=torch.float64)})
    assert not same_bits(zero, {"y": torch.zeros(2)})


def test_a_batch_depends_on_seed_and_step_alone_and_stays_inside_the_text(text):
    size = {"batch": 4, "context": 8}
    batch = batch_at(text.train, 5, seed=2, **size)
    assert batch.shape == (4, 9)
    assert torch.equal(batch, batch_at(text.train, 5, seed=2, **size))
    assert not torch.equal(batch, batch_at(text.train, 6, seed=2, **size))
    shortest = torch.arange(9, dtype=torch.uint8)
    assert torch.equal(batch_at(shortest, 0, seed=0, **size), torch.arange(9).expand(4, 9))


def test_the_text_is_a_few_megabytes_and_its_two_parts_share_no_file(tmp_path):
    text = standard_library_text()
    assert 2e6 < text.train.numel() < 1e7
    assert 1e5 < text.validation.numel() < text.train.numel() / 4
    for index in range(10):
        (tmp_path / f"m{index}.py").write_text(str(index))
    small = standard_library_text(tmp_path)
    assert bytes(small.train.tolist()) == b"0\n1\n2\n3\n4\n5\n6\n7\n8"
    assert bytes(small.validation.tolist()) == b"9"


def test_a_python_without_sources_is_refused_with_a_reason(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"at least 10 \.py files: got 0"):
        standard_library_text(Path(tmp_path))


def test_the_demos_muon_trains_the_matrices_of_the_blocks_and_nothing_else_m6():
    routing = Run("gefen_muon", TINY).optimizer.routing()
    muon = {path for path, rule in routing.labels.items() if rule == "muon"}
    assert muon == {leaf.path for leaf in routing.leaves if leaf.path.startswith("blocks.") and len(leaf.shape) == 2}
    assert len(muon) == 16


def test_the_decoder_is_causal_has_about_a_million_parameters_and_starts_at_chance():
    torch.manual_seed(0)
    model = Decoder()
    assert 0.9e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.1e6
    tokens = torch.randint(256, (2, 17))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    first, second = model(tokens), model(changed)
    assert torch.equal(first[:, :9], second[:, :9])
    assert not torch.equal(first[:, 9:], second[:, 9:])
    assert next_byte_loss(model, tokens).item() == pytest.approx(5.545, abs=0.1)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="heads=3 for dim=8"):
        Decoder(dim=8, heads=3)
