"""Cost on many processes, simulated; tests/distributed/test_collectives.py compares it with what is really sent."""

import itertools
import json

import pytest
import torch

from gefen_fn.muon_shards import Done, Job, talks
from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT, Factored
from gefen_fn.spec import default_axes, matrices_of
from gefen_nn.cli import main
from gefen_nn.model_shapes import MODELS, LeafShape
from gefen_nn.scale_model import gefen_costs, muon_traffic, piece_at, simulate

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


CUTS = [((300, 64), {0: 4}), ((64, 300), {0: 3}), ((6, 64, 96), {0: 2, 1: 3}), ((10, 64), {0: 4})]


def talked(pieces):
    """Bytes of each exchange as the talks of a step send them, answered by tensors without data."""
    seen = [matrices_of(p.whole, default_axes(p.whole)) for p in pieces]
    jobs = [Job(torch.empty(p.shape, device="meta"), own, None, None) for p, own in zip(pieces, seen, strict=True)]
    rounds = []
    for talk in talks(jobs, [[p] for p in pieces], "distributed", torch.bfloat16, unworked):
        parcels = [next(talk)]
        parcels.append(talk.send(answered(parcels[0])))
        rounds.append([sum(2 * x.numel() for xs in parcel.send.values() for x in xs) for parcel in parcels])
    return tuple(map(sum, zip(*rounds, strict=True)))


def unworked(jobs):
    return [Done(job.x.float(), None) for job in jobs]


def answered(parcel):
    wanted = {m: list(forms) for m, forms in parcel.expect.items()}
    return {m: iter([torch.empty(s, dtype=d, device="meta") for s, d in forms]) for m, forms in wanted.items()}


@pytest.mark.parametrize(("shape", "cut"), CUTS, ids=[str(shape) for shape, _ in CUTS])
def test_what_muon_sends_in_closed_form_is_what_its_talks_send(shape, cut):
    for place in itertools.product(*(range(count) for count in cut.values())):
        pieces = [piece_at(shape, cut, place), piece_at((*shape[:-1], shape[-1] + 32), cut, place)]
        assert muon_traffic([(pieces[0], 3), (pieces[1], 2)]) == talked([pieces[0]] * 3 + [pieces[1]] * 2)


def test_members_out_of_reach_change_nothing():
    for rank in (0, 5, 31):
        near, far = (piece_at((1000, 512), {0: 32}, (rank,), reach) for reach in (256, None))
        assert len(near.peers(frozenset({0})).boxes) < 20 < len(far.peers(frozenset({0})).boxes)
        assert gefen_costs(near, DEFAULT_SECOND_MOMENT) == gefen_costs(far, DEFAULT_SECOND_MOMENT)


def test_one_process_sends_nothing_and_does_not_vote():
    report = simulate(MODELS["llama-3-8b"](), 1, policy=DEFAULT_SECOND_MOMENT)
    assert (report.sent, report.vote, report.collectives) == (0, 0, 0)


def test_the_command_prints_lines_or_json(capsys):
    assert main(["memory", "--model", "llama-3-8b", "--world", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["process"]["world"] == 8 and told["bytes"]["adamw"] == 8 * told["entries"] == 8 * 8_030_261_248
    assert main(["memory", "--model", "llama-3-8b", "--world", "8"]) == 0
    assert "B a parameter" in capsys.readouterr().out
