"""Cost on many processes, simulated; tests/distributed/test_collectives.py compares it with what is really sent."""

import json

import pytest

from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT, Factored
from gefen_nn.cli import main
from gefen_nn.model_shapes import MODELS, LeafShape
from gefen_nn.scale_model import piece_at, simulate

WORLDS = [("llama-3-8b", 8, 1), ("llama-3-70b", 64, 1), ("llama-3-70b", 2048, 1), ("moe-1t", 2048, 64)]


@pytest.mark.parametrize(("model", "world", "experts"), WORLDS, ids=[f"{m} on {w}" for m, w, _ in WORLDS])
def test_a_process_keeps_at_most_1_07_bytes_a_parameter_in_any_world(model, world, experts):
    report = simulate(MODELS[model](), world, expert_parallel=experts, policy=DEFAULT_SECOND_MOMENT)
    assert report.local_state <= 1.07 * report.local_entries
    assert report.local_entries < 1.03 * report.entries / world + 1e6
    assert report.collectives in (1, 3) and report.vote < 1024


def test_cut_tiles_of_70b_cost_what_the_design_says():
    sent = [simulate(MODELS["llama-3-70b"](), world, policy=DEFAULT_SECOND_MOMENT).sent for world in (64, 2048)]
    assert 14e6 < sent[0] < 16e6 and 55e6 < sent[1] < 60e6


def test_a_moment_of_muon_costs_1_02_bytes_and_each_matrix_goes_out_and_back_in_bf16():
    model = {"w": LeafShape((1024, 1024), 4)}
    report = simulate(model, 4, muon=True, policy=Factored())
    assert report.local_state <= 1.02 * report.local_entries and report.collectives == 3
    # A member sends its quarter of the three matrices of others, and three quarters of its own back.
    assert report.sent == 2 * 1024 * 1024 * (3 / 4 + 3 / 4)


def test_nothing_is_sent_where_no_tile_is_cut():
    report = simulate({"w": LeafShape((1024, 512), 3)}, 8, policy=DEFAULT_SECOND_MOMENT)
    assert (report.sent, report.collectives) == (0, 1)


def test_parts_are_cut_as_torch_chunk_cuts():
    parts = [piece_at((10, 4), {0: 4}, (n,)) for n in range(4)]
    assert [(p.offset[0], p.shape[0]) for p in parts] == [(0, 3), (3, 3), (6, 3), (9, 1)]


def test_the_command_prints_lines_or_json_and_refuses_what_does_not_divide(capsys):
    assert main(["memory", "--model", "llama-3-8b", "--world", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world"] == 8
    assert main(["memory", "--model", "llama-3-8b", "--world", "8"]) == 0
    assert "B a parameter" in capsys.readouterr().out
    assert main(["memory", "--world", "10", "--experts-over", "3"]) == 1
    assert "must divide" in capsys.readouterr().err
