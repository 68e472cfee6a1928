"""Long runs, started by `make test-slow`."""

import pytest
import torch

from gefen_fn import Block, Factored, apply_updates, gefen
from gefen_fn.tree import tree_leaves


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Factored(tile=(128, 256)), Factored(), Block()], ids=str)
def test_bf16_leaves_follow_the_exact_ema_through_2000_zero_gradients(policy):
    tx = gefen(1e-3, second_moment=policy, b2_warmup=None)
    params = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, state = tx.update(torch.randn_like(params), tx.init(params), params)
    first = [x.double() for x in tree_leaves(state[0].nu)]
    for _ in range(2000):
        _, state = tx.update(torch.zeros_like(params), state, params)
    for x, y in zip(first, tree_leaves(state[0].nu), strict=True):
        torch.testing.assert_close(y.double(), x * 0.999**2000, rtol=1e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Factored(tile=(128, 256)), Factored(), Block()], ids=str)
def test_embedding_rows_without_gradient_do_not_move_in_500_steps_q17(policy):
    tx, generator = gefen(1e-2, second_moment=policy), torch.Generator().manual_seed(0)
    start = params = torch.randn(256, 64, generator=generator)
    state = tx.init(params)
    for _ in range(500):
        grads = torch.randn(256, 64, generator=generator)
        grads[100:] = 0
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
    assert torch.equal(params[100:], start[100:]) and not torch.equal(params[:100], start[:100])
