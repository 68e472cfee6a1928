"""Health of a state while it trains: what is counted is there, and the host reads nothing."""

import math

import pytest
import torch
from torch import nn

from gefen_fn import (
    adamw,
    chain,
    clip_by_global_norm,
    flatten_state,
    gefen,
    gefen_muon,
    health,
    inject_hyperparams,
    move_state,
)
from gefen_nn import Gefen
from tests.recorded_graph import Graph, tensors

SHAPES = {"w": (64, 512), "bias": (64,), "layers.0.up": (128, 256)}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(tx):
    """State and updates after one step, with a leaf that has no gradient in every second block."""
    params, grads = ({k: noise(*shape, seed=seed) for k, shape in SHAPES.items()} for seed in (0, 1))
    grads["w"][:, :256] = 0
    updates, state = tx.update(grads, tx.init(params), params)
    return state, updates


@pytest.mark.parametrize(
    "tx",
    [gefen(1e-3), chain(clip_by_global_norm(1.0), inject_hyperparams(gefen)(1e-3)), gefen_muon(1e-3)],
    ids=["gefen", "chain", "partition"],
)
def test_shares_scales_and_updates_are_those_of_the_state(tx):
    state, updates = stepped(tx)
    rows, flat = health(state, updates), flatten_state(state)
    assert rows.keys() == SHAPES.keys()
    for name, row in rows.items():
        assert row.update_rms == pytest.approx(float(updates[name].square().mean().sqrt()))
        codes = [x for k, x in flat.items() if k.endswith(f".mu.{name.replace('.', '%2E')}.codes")]
        if not codes:
            assert row[1:] == (None,) * 5
            continue
        scales = next(x for k, x in flat.items() if k.endswith(f".mu.{name.replace('.', '%2E')}.absmax"))
        codes = codes[0].int()
        assert row.at_ends == ((codes == 0) | (codes == 255)).float().mean() and row.at_ends > 0
        assert row.at_zero == ((codes == 127) | (codes == 128)).float().mean() and row.at_zero > 0
        assert (row.least_scale, row.largest_scale) == (scales[scales > 0].min(), scales.max())
        assert row.empty_blocks == (0.5 if name == "w" else 0.0)


def test_a_state_without_codes_shows_its_updates_alone():
    state, updates = stepped(adamw(1e-3))
    rows = health(state, {**updates, "bias": None})
    assert rows.keys() == {"w", "layers.0.up"} and rows["w"].at_ends is None and not health(state)


def test_a_fresh_state_and_empty_parts_are_no_errors():
    row = health(gefen(1e-3).init({"w": torch.zeros(64, 512)}), {"w": torch.zeros(0, 512)})["w"]
    assert (row.at_ends, row.at_zero, row.least_scale, row.largest_scale, row.empty_blocks) == (0, 1, math.inf, 0, 1)
    assert row.update_rms.isnan()


def test_what_is_not_finite_shows():
    state, _ = stepped(gefen(1e-3))
    flatten_state(state)["scale_by_gefen.mu.w.absmax"][3, 1] = math.nan
    assert health(state)["w"].largest_scale.isnan()


def test_the_host_reads_nothing_and_every_value_is_on_the_device_of_its_leaf():
    state, updates = stepped(gefen(1e-3))
    shown = []
    Graph(lambda: shown.append(health(state, updates)), [], [])
    rows = health(move_state(state, "meta"), {k: u.to("meta") for k, u in updates.items()})
    assert all(x.is_meta and x.dim() == 0 for x in tensors(rows)) and len(tensors(rows)) == len(tensors(shown)) == 13


def test_an_optimizer_shows_the_health_of_its_state_and_of_the_step_it_took():
    torch.manual_seed(0)
    model = nn.Linear(512, 64)
    optimizer = Gefen(model.named_parameters(), lr=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(8, 512)).square().sum().backward()
    optimizer.step()
    rows = health(optimizer.state_tree(), {name: p.detach() - before[name] for name, p in model.named_parameters()})
    assert rows.keys() == {"weight", "bias"} and 1e-4 < rows["weight"].update_rms < 2e-3
