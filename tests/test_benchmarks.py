"""The benchmark run small: every arm is in its table, its JSON and its picture, measured or with a reason."""

import json
import multiprocessing

import pytest

from tests.benchmarks.arms import ARMS
from tests.benchmarks.measure import Options
from tests.benchmarks.muon_step import step_ratios
from tests.benchmarks.run import main
from tests.benchmarks.turns import Failed, Player

HERE = [name for name, arm in ARMS.items() if arm.refusal("small") is None]


def test_a_run_leaves_a_table_a_json_and_a_picture_with_every_arm(tmp_path, capsys):
    options = ["--scale", "small", "--dtype", "bf16", "--threads", "1", "--rounds", "1", "--no-cold"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    table, screen = (tmp_path / "bench.txt").read_text(), capsys.readouterr().out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    rows = result["dtypes"]["bf16"]["arms"]
    assert list(rows) == list(ARMS)
    assert all(row["label"] in table and row["label"] in screen for row in rows.values())
    assert [name for name in rows if "reason" not in rows[name]] == HERE
    assert all(row["reason"] in table for row in rows.values() if "reason" in row)
    for name in HERE:
        assert rows[name]["step_ns"]["min"] > 0
        assert rows[name]["first_step_s"]["min"] > 0
        assert rows[name]["memory_reasons"] == []
    assert rows["adamw-fused"]["ratio"]["all"] == [1.0]
    assert rows["adamw-fused"]["state_bytes_per_param"] == pytest.approx(4, abs=0.01)
    assert rows["adamw-foreach"]["transient_bytes_per_param"] > rows["ours"]["transient_bytes_per_param"]
    assert rows["ours"]["state_bytes_per_param"] < 1.4


def _kill(player):
    for process in multiprocessing.active_children():
        process.kill()


FAILURES = {
    "an error in the arm": ("no such arm", 60, lambda player: None, "KeyError: 'no such arm'"),
    "a process that dies": ("ours", 60, _kill, "its process ended with code -9"),
    "a measure that takes too long": ("ours", 0, lambda player: None, "took longer than 0 s"),
}


@pytest.mark.parametrize("name, limit, harm, reason", FAILURES.values(), ids=FAILURES)
def test_what_goes_wrong_in_an_arm_becomes_its_reason(name, limit, harm, reason):
    player = Player("time", name, Options("small", "fp32", 1, False), limit)
    try:
        harm(player)
        with pytest.raises(Failed, match=reason):
            player.answer()
    finally:
        player.close()


@pytest.mark.parametrize("option", ["--arms=ours,adam", "--rounds=0", "--scale=7b", "--dtype=fp8"])
def test_wrong_arguments_are_refused(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([option])
    assert option.partition("=")[0] in capsys.readouterr().err


def test_steps_of_gefen_muon_and_of_torchs_hybrid_are_compared():
    assert all(ratio > 0 for ratio in step_ratios(2, steps=1))
