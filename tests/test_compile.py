"""One graph serves every step, under any schedule (case q11); compiled equals eager; what cannot compile says why."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from gefen_fn import (
    Block,
    Dense,
    Factored,
    adamw,
    chain,
    clip_by_global_norm,
    cosine_decay_schedule,
    gefen,
    inject_hyperparams,
    learn_codebook,
    lion,
    masked,
    partition,
    sgd,
)
from gefen_fn.tree import tree_leaves

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

# Inductor's own imports warn of torch.jit.
INDUCTOR = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@INDUCTOR
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


GIVEN = learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False)
POLICIES = {
    "dense": {"second_moment": Dense(), "codebook": "fixed"},
    "block": {"second_moment": Block(), "codebook": GIVEN},
    "one tile": {"second_moment": Factored(), "codebook": "fixed", "drive": "m_hat"},
}


@INDUCTOR
@pytest.mark.parametrize("form", POLICIES.values(), ids=POLICIES)
def test_compiled_equals_eager_on_ragged_rows_for_every_policy(form):
    torch._dynamo.reset()
    tx = gefen(1.0, weight_decay=0.1, **form)
    fast = torch.compile(tx.update, fullgraph=True)
    shapes = {"rows": (128, 300), "convolution": (64, 32, 3, 3)}
    draws = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    state = other = tx.init(params)
    for _ in range(2):
        grads = {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}
        updates, state = tx.update(grads, state, params)
        compiled, other = fast(grads, other, params)
        for a, b in zip(tree_leaves((updates, state)), tree_leaves((compiled, other)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_stochastic_rounding_refuses_compile_and_says_why():
    torch._dynamo.reset()
    tx, params = gefen(0.1, codebook="fixed", rounding="stochastic"), {"w": torch.ones(64, 72)}
    with pytest.raises(RuntimeError, match=r'trace by torch\.compile.*rounding="nearest"'):
        torch.compile(tx.update, fullgraph=True, backend="eager")(params, tx.init(params), params)
