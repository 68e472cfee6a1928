"""What `describe` says runs is what a step really does."""

import pytest
import torch
from torch import nn

from gefen_fn import (
    adamw,
    chain,
    clip_by_global_norm,
    describe,
    fuse,
    gefen,
    gefen_muon,
    partition,
    stochastic_rounding,
)
from gefen_fn.blocks import FlatBlocks
from gefen_nn import Gefen, GefenMuon

SHAPES = {"w": (64, 300), "v": (96, 128), "b": (70,)}


def params(dtype=torch.float32, **changes):
    kinds = {name: changes.get(name, dtype) for name in SHAPES}
    return {name: torch.ones(shape, dtype=kinds[name]) for name, shape in SHAPES.items()}


LABELS = {"w": "gefen", "v": "adamw", "b": "gefen"}
CASES = {
    "all": (gefen(1e-3), params(), "cpu: numba loops"),
    "clipped": (chain(clip_by_global_norm(1.0), gefen(1e-3)), params(), "cpu: numba loops"),
    "float64": (
        gefen(1e-3),
        params(v=torch.float64),
        "cpu: numba loops for 2 of 3 leaves, plain torch for the others (float64: v)",
    ),
    "codes at random": (
        gefen(1e-3, rounding="stochastic"),
        params(),
        "cpu: numba loops",
    ),
    "bf16 at random": (
        chain(gefen(1e-3), stochastic_rounding()),
        params(torch.bfloat16),
        "cpu: numba loops",
    ),
    "flattened": (
        gefen(1e-3, block=FlatBlocks(256)),
        params(),
        "cpu: numba loops for 1 of 3 leaves, plain torch for the others "
        "(tiles beside blocks of a flattened leaf: v, w)",
    ),
    "a partition": (
        partition({"gefen": gefen(1e-3), "adamw": adamw(1e-3)}, LABELS),
        params(),
        "cpu: numba loops for 2 of 3 leaves, plain torch for the others (its stages are not fused: v)",
    ),
    "the hybrid": (gefen_muon(1e-3), params(), "cpu: numba loops"),
    "another": (adamw(1e-3), params(), "cpu: plain torch (the expression is not fused)"),
}


def fused_by_a_step(tx, tree):
    """How many leaves a back end stepped."""
    step = fuse(tx)
    if step is None:
        return 0
    grads = {name: torch.ones_like(p) for name, p in tree.items()}
    own = {name: p.clone() for name, p in tree.items()}
    step(grads, tx.init(own), own)
    return len(step._plan.fused)


@pytest.mark.parametrize(("tx", "tree", "line"), CASES.values(), ids=CASES)
def test_the_line_says_what_a_step_does(tx, tree, line):
    report = describe(tx, tree)
    assert report.runs == (line,) and f"runs: {line}" in str(report).splitlines()
    told = 0 if "numba" not in line else int(line.split(" for ")[1].split()[0]) if " for " in line else len(SHAPES)
    assert told == fused_by_a_step(tx, tree)


def test_without_a_back_end_it_says_so(monkeypatch):
    monkeypatch.setenv("GEFEN_REFERENCE", "1")
    assert describe(gefen(1e-3), params()).runs == ("cpu: plain torch (no back end for cpu, or GEFEN_REFERENCE=1)",)


@pytest.mark.parametrize("kind", [Gefen, GefenMuon])
def test_an_optimizer_that_is_not_to_fuse_says_so(kind):
    net = nn.Linear(64, 96)
    assert kind(net.named_parameters(), fused=False).describe().runs == ("cpu: plain torch (fused=False)",)
    assert kind(net.named_parameters()).describe().runs == ("cpu: numba loops",)


def test_nothing_runs_on_meta():
    assert describe(gefen(1e-3), {"w": torch.empty(64, 300, device="meta")}).runs == ()
