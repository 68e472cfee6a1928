"""Long runs, started by `make test-slow`."""

import copy

import pytest
import torch
from torch import nn

from gefen_fn import Block, Factored, apply_updates, gefen
from gefen_fn.tree import tree_leaves
from gefen_nn import Gefen


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


TOLERANCE = 0.02  # of AdamW's loss, on average over the last 200 of 3,000 steps


def trained(kind, steps=3000, resume=None):
    """The losses of a small network that learns a fixed map from noise, and its parameters at the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    target = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).requires_grad_(False)
    optimizer, losses = kind(net.named_parameters(), lr=1e-3, weight_decay=0.01), []
    for step in range(steps):
        if step == resume:
            saved, optimizer = copy.deepcopy(optimizer.state_dict()), kind(net.named_parameters())
            optimizer.load_state_dict(saved)
        generator = torch.Generator().manual_seed(step)
        x, noise = torch.randn(32, 64, generator=generator), torch.randn(32, 64, generator=generator)
        loss = (net(x) - target(x) - 0.5 * noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in net.parameters()]


@pytest.mark.slow
def test_8_bits_follow_adamw_through_a_long_run_and_a_resume_changes_no_bit_q15():
    (ours, params), (theirs, _) = trained(Gefen), trained(torch.optim.AdamW)
    last, reference = sum(ours[-200:]) / 200, sum(theirs[-200:]) / 200
    assert last < (1 + TOLERANCE) * reference and max(ours[-200:]) < 2 * last
    losses, resumed = trained(Gefen, resume=1500)
    assert losses == ours and all(map(torch.equal, params, resumed))
