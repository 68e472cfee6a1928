"""Faults seen in published packages and in torch stay out: the traps that no other file's tests are named after."""

from collections import Counter
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gefen_fn import Block, Dense, Factored, adamw, find_blocks, gefen, scale_by_adam, scale_by_gefen, state_bytes
from gefen_fn.tree import tree_leaves
from gefen_nn import Gefen, TransformOptimizer
from tests.small_net import bits, same

POLICIES = [Factored(tile=(128, 256)), Factored(), Block(), Dense()]


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96))


def loss_of(net, seed):
    return net(noise(8, 96, seed=seed)).square().mean()


@pytest.mark.parametrize(
    "tx",
    [scale_by_adam(), *(scale_by_gefen(second_moment=p, b2_warmup=None, codebook="fixed") for p in POLICIES)],
    ids=["adam", *map(str, POLICIES)],
)
def test_trap_the_second_moment_of_bf16_leaves_decays_under_zero_gradients(tx):
    params = {"w": noise(64, 300).bfloat16(), "b": noise(5).bfloat16()}
    _, state = tx.update(params, tx.init(params))
    first, zeros = [x.double() for x in tree_leaves(state.nu)], {k: torch.zeros_like(p) for k, p in params.items()}
    for _ in range(100):
        _, state = tx.update(zeros, state)
    for x, y in zip(first, tree_leaves(state.nu), strict=True):
        torch.testing.assert_close(y.double(), x * 0.999**100, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "make",
    [lambda net: Gefen(net.parameters()), lambda net: TransformOptimizer(net.parameters(), adamw(0.01))],
    ids=["Gefen", "TransformOptimizer"],
)
def test_trap_a_first_step_with_a_closure_before_any_gradient_is_an_ordinary_step(make):
    net, twin = wide_net(), wide_net()
    with_closure, without = make(net), make(twin)

    def closure():
        with_closure.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    assert all(p.grad is None for p in net.parameters())
    loss = with_closure.step(closure)
    expected = loss_of(twin, 0)
    expected.backward()
    without.step()
    assert torch.equal(loss, expected) and same(bits(net), bits(twin))


def test_trap_a_model_of_tiny_leaves_steps_as_adamw_and_learns_no_codebook():
    torch.manual_seed(0)
    net, twin = nn.Linear(7, 5), nn.Linear(7, 5)
    twin.load_state_dict(net.state_dict())
    ours, theirs = Gefen(net.parameters(), 0.01), torch.optim.AdamW(twin.parameters(), 0.01, weight_decay=0.0)
    for seed in range(5):
        for model, optimizer in ((net, ours), (twin, theirs)):
            optimizer.zero_grad()
            model(noise(4, 7, seed=seed)).square().sum().backward()
            optimizer.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)
    assert {x.dtype for p in net.parameters() for k, x in ours.state[p].items() if ".mu" in k} == {torch.float32}
    assert not any(leaves["scale_by_gefen.learned"] for leaves in ours.state.values())


# One layer of a 4096-wide decoder with a gated feed-forward block and grouped queries.
LAYER = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
LAYER |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}


@pytest.mark.parametrize("rule", [None, "variance_drop", "log_contrast"])
def test_trap_gradients_of_pure_noise_leave_the_state_of_a_wide_layer_at_one_byte(rule):
    few_rows = {name: noise(32, shape[1], seed=i) for i, (name, shape) in enumerate(LAYER.items())}
    block = find_blocks(few_rows, rule=rule) if rule else 256
    params = {name: torch.empty(shape, device="meta") for name, shape in LAYER.items()}
    state = scale_by_gefen(second_moment=Factored(), block=block).init(params)
    assert 1.0 < state_bytes(state) / sum(p.numel() for p in params.values()) <= 1.02


class Work(TorchDispatchMode):
    """Counts the entries that torch's operations write."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.entries += sum(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


def work_of(step):
    with Work() as work:
        step()
    return work.entries


def test_trap_the_first_step_learns_one_codebook_and_writes_at_most_three_times_an_ordinary_one(monkeypatch):
    calls = Counter()
    for file, name in (("first_moment", "histogram_of"), ("calibrate", "learn_codebook")):
        module = import_module(f"gefen_fn.{file}")
        whole = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, name=name, whole=whole, **k: calls.update([name]) or whole(*a, **k)
        )
    params = [nn.Parameter(noise(256, 300, seed=i)) for i in range(4)]
    optimizer = Gefen(params, fused=False)
    for i, p in enumerate(params):
        p.grad = noise(256, 300, seed=10 + i)
    first, second, third = (work_of(optimizer.step) for _ in range(3))
    assert calls == {"histogram_of": 1, "learn_codebook": 1}
    assert first <= 3 * second and second == third


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_trap_repeated_runs_on_one_thread_or_two_are_equal_to_the_bit(rounding):
    tx = gefen(1e-3, weight_decay=0.1, rounding=rounding)
    grads = [{"w": noise(200, 300, seed=t), "b": noise(70_000, seed=t + 9)} for t in range(2)]

    def run(threads):
        torch.set_num_threads(threads)
        state, out = tx.init(grads[0]), []
        for g in grads:
            updates, state = tx.update(g, state, grads[0])
            out.append(updates)
        return tree_leaves((out, state))

    try:
        runs = [run(threads) for threads in (1, 1, 2)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True))
