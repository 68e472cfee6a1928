"""One graph serves every step, under any schedule (case q11); compiled equals eager; what cannot compile says why."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from gefen_fn import (
    Block,
    Dense,
    Factored,
    MultiSteps,
    adamw,
    apply_if_finite,
    chain,
    clip_by_global_norm,
    cosine_decay_schedule,
    gefen,
    gefen_muon,
    inject_hyperparams,
    learn_codebook,
    lion,
    masked,
    partition,
    sgd,
    stochastic_rounding,
)
from gefen_fn.tree import tree_leaves
from gefen_nn import Gefen, TransformOptimizer

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
    "gefen_muon": (lambda: gefen_muon(COSINE, codebook="fixed", param_labels={"w": "muon", "b": "gefen"}), 5),
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


UNCOMPILED = {
    "MultiSteps": (lambda: MultiSteps(adamw(0.1), 2), r"under torch\.compile.*every_k_schedule=1"),
    "apply_if_finite": (lambda: apply_if_finite(adamw(0.1), 2), r"under torch\.compile.*zero_nans"),
    "stochastic rounding": (
        lambda: gefen(0.1, codebook="fixed", rounding="stochastic"),
        r'rounding="stochastic" must see the paths.*trace by torch\.compile.*Round to nearest',
    ),
    "stochastic parameters": (lambda: chain(sgd(0.1), stochastic_rounding()), r"stochastic_rounding\(\) must see"),
}


@pytest.mark.parametrize(("build", "reason"), UNCOMPILED.values(), ids=UNCOMPILED)
def test_what_cannot_be_traced_refuses_compile_and_says_why(build, reason):
    torch._dynamo.reset()
    tx, params = build(), {"w": torch.ones(64, 72)}
    with pytest.raises(RuntimeError, match=reason):
        torch.compile(tx.update, fullgraph=True, backend="eager")(params, tx.init(params), params)


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "b1"])
def test_a_hyperparameter_per_leaf_compiles_into_one_graph(name):
    torch._dynamo.reset()
    tx, params = inject_hyperparams(adamw)(0.1), {"w": torch.ones(6, 5), "b": torch.ones(5)}
    state = tx.init(params)
    state.hyperparams[name] = {"w": torch.tensor(0.1).double(), "b": torch.tensor(0.2).double()}
    updates, _ = torch.compile(tx.update, fullgraph=True, backend="eager")(params, state, params)
    expected, _ = tx.update(params, state, params)
    assert all(torch.equal(updates[k], expected[k]) for k in params)


def adapter(net, lr):
    return TransformOptimizer(net.named_parameters(), inject_hyperparams(adamw)(lr))


def clipped(net, lr):
    return TransformOptimizer(net.named_parameters(), chain(clip_by_global_norm(1.0), inject_hyperparams(adamw)(lr)))


def two_groups(net, lr):
    pairs = list(net.named_parameters())
    return Gefen([{"params": pairs[:1], "lr": lr * 2}, {"params": pairs[1:]}], lr, codebook="fixed")


def one_group(net, lr):
    return Gefen(net.named_parameters(), lr, codebook="fixed")


def live_group(net, lr):
    return Gefen(net.named_parameters(), lr, codebook="fixed", capturable=True)


def exponential(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t).step


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).step


def one_cycle(optimizer):
    moves_betas = "betas" in optimizer.param_groups[0]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=21, cycle_momentum=moves_betas).step


def plateau(optimizer):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    return lambda: scheduler.step(1.0)


def number():
    return 0.01


def tensor():
    return torch.tensor(0.01)


RUNS = [
    *((one_group, schedule, lr) for schedule in (exponential, cosine, one_cycle, plateau) for lr in (number, tensor)),
    (adapter, exponential, number),
    (adapter, one_cycle, tensor),
    (clipped, exponential, number),
    (two_groups, cosine, number),
    (two_groups, plateau, number),
    (live_group, cosine, number),
]


def train(make, schedule, lr, graphs=None):
    """The weights after 20 steps, compiled by the backend `graphs` if there is one, and its graphs after each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Linear(72, 64)
    optimizer = make(net, lr())
    step, schedule_step, seen = optimizer.step, schedule(optimizer), []
    compiled = torch.compile(lambda: optimizer.step(), backend=graphs) if graphs else step
    for seed in range(20):
        net.zero_grad()
        net(torch.randn(8, 72, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        compiled()
        schedule_step()
        seen.append(graphs.frame_count if graphs else 0)
    return [p.detach() for p in net.parameters()], seen


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(("make", "schedule", "lr"), RUNS, ids=["-".join(f.__name__ for f in run) for run in RUNS])
def test_a_compiled_optimizer_step_is_one_graph_and_recompiles_at_most_once_q11(make, schedule, lr):
    got, graphs = train(make, schedule, lr, CompileCounter())
    expected, _ = train(make, schedule, lr)
    assert graphs[0] == 1 and graphs[-1] <= 2
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_a_learned_codebook_compiles_after_one_plain_step():
    torch._dynamo.reset()
    nets = [torch.nn.Linear(72, 64, bias=False) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    first, second = (Gefen(net.named_parameters()) for net in nets)
    fast = torch.compile(lambda: first.step(), backend="eager")
    for i in range(3):
        for net in nets:
            net.weight.grad = torch.randn(64, 72, generator=torch.Generator().manual_seed(i))
        (fast if i else first.step)()
        second.step()
    assert torch.equal(nets[0].weight, nets[1].weight)
