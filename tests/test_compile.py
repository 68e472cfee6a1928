"""One graph serves every step: no recompile under a schedule, for any of these expressions (case q11)."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from gefen_fn import (
    adamw,
    chain,
    clip_by_global_norm,
    cosine_decay_schedule,
    gefen,
    inject_hyperparams,
    lion,
    masked,
    partition,
    sgd,
)

COSINE = cosine_decay_schedule(1e-3, 50)
EXPRESSIONS = {
    "adamw": (lambda: adamw(COSINE), 50),
    "gefen, fixed codebook": (lambda: gefen(COSINE, codebook="fixed"), 50),
    "injected gefen": (lambda: inject_hyperparams(gefen)(learning_rate=COSINE, codebook="fixed"), 5),
    "clipped gefen": (lambda: chain(clip_by_global_norm(1.0), gefen(COSINE, codebook="fixed")), 5),
    "sgd": (lambda: sgd(COSINE, momentum=0.9), 5),
    "masked": (lambda: masked(adamw(COSINE), {"w": True, "b": False}), 5),
    "partition": (lambda: partition({"x": sgd(COSINE), "y": adamw(COSINE)}, {"w": "x", "b": "y"}), 5),
    "lion": (lambda: lion(COSINE), 5),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("make", "steps"), EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_one_graph_serves_every_step_of_a_schedule_q11(make, steps):
    torch._dynamo.reset()
    tx, graphs = make(), CompileCounter()
    params = {"w": torch.randn(128, 300), "b": torch.randn(7)}
    update = torch.compile(tx.update, fullgraph=True, backend=graphs)
    state = plain = tx.init(params)
    for t in range(steps):
        grads = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(t)) for name, p in params.items()}
        updates, state = update(grads, state, params)
        expected, plain = tx.update(grads, plain, params)
    assert graphs.frame_count == 1
    torch.testing.assert_close(updates, expected, rtol=1e-6, atol=1e-9)
