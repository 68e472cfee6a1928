"""Gefen under torch's names."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gefen_fn import Block, Dense, Factored
from gefen_fn.alias import gefen
from gefen_nn.errors import CheckpointError
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.presets import Gefen


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        net.zero_grad()
        inputs = torch.randn(8, 96, generator=generator).to(net[0].weight.dtype)
        net(inputs).square().mean().backward()
        optimizer.step()


def bits(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def stepped(steps: int = 2) -> tuple[nn.Module, Gefen]:
    net = model()
    optimizer = Gefen(net.named_parameters(), weight_decay=0.1)
    train(net, optimizer, range(steps))
    return net, optimizer


def reloaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_q24_tiny_leaves_step_as_adamw_with_decay() -> None:
    torch.manual_seed(0)
    start = torch.randn(7)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = Gefen([p], 0.01, (0.9, 0.99), 1e-8, 0.1)
    theirs = torch.optim.AdamW([q], 0.01, (0.9, 0.99), 1e-8, 0.1)
    for i in range(20):
        p.grad = torch.randn(7, generator=torch.Generator().manual_seed(i))
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)


def test_the_step_is_the_transforms_to_the_bit() -> None:
    (net, _), twin = stepped(3), model()
    train(twin, TransformOptimizer(twin.named_parameters(), gefen(1e-3, weight_decay=0.1)), range(3))
    assert same(bits(net), bits(twin))


def test_q6_a_load_keeps_dtypes_and_bits_and_the_next_step_is_the_same() -> None:
    (net, optimizer), other = stepped(), model(1).bfloat16()
    narrow = Gefen(other.named_parameters())
    narrow.load_state_dict(reloaded(optimizer.state_dict()))
    pairs = [(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True)]
    for p, q in pairs:
        for key, leaf in optimizer.state[p].items():
            assert narrow.state[q][key].dtype == leaf.dtype and torch.equal(narrow.state[q][key], leaf)
    assert {leaf.dtype for leaf in optimizer.state[net[0].weight].values()} >= {torch.uint8, torch.float32, torch.int32}
    assert narrow.param_groups[0]["weight_decay"] == 0.1
    twin = model(2)
    twin.load_state_dict(net.state_dict())
    resumed = Gefen(twin.named_parameters())
    resumed.load_state_dict(reloaded(optimizer.state_dict()))
    train(net, optimizer, range(2, 4))
    train(twin, resumed, range(2, 4))
    assert same(bits(net), bits(twin))


def test_q27_the_state_dict_holds_tensors_and_plain_scalars_only() -> None:
    state = stepped()[1].state_dict()
    assert all(type(v) is Tensor for leaves in state["state"].values() for v in leaves.values())
    plain = (int, float, bool, str, type(None))
    for value in (v for group in state["param_groups"] for v in group.values()):
        assert all(isinstance(v, plain) for v in (value if isinstance(value, (list, tuple)) else [value]))
    assert state["param_groups"][0]["format_version"] == 1 and state["param_groups"][0]["block"] == 256


def _edit(field: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict], None]:
    def edit(saved: dict) -> None:
        for i, leaves in saved["state"].items():
            new = {k: change(v) if k.endswith(field) else v for k, v in leaves.items()}
            saved["state"][i] = {k: v for k, v in new.items() if v is not None}

    return edit


DAMAGE = [
    ("q21 no codebook", "codebook", _edit(".codebook", lambda x: None)),
    ("unsorted codebook", "codebook", _edit(".codebook", lambda x: x.flip(0))),
    ("q16 lopsided codebook", "codebook", _edit(".codebook", lambda x: x.abs().sort().values.mul(2).sub(1))),
    ("infinite absmax", "absmax", _edit(".absmax", lambda x: x + float("inf"))),
    ("negative absmax", "absmax", _edit(".absmax", lambda x: -x - 1)),
    ("q6 codes cast", "codes", _edit(".codes", lambda x: x.bfloat16())),
    ("q22 codes cut", "codes", _edit(".codes", lambda x: x[:-1])),
    ("another block", "block", lambda saved: saved["param_groups"][0].update(block=64)),
]


@pytest.mark.parametrize(("key", "damage"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_a_damaged_checkpoint_is_refused_by_name_and_changes_nothing_q21_q22(
    key: str, damage: Callable[[dict], None]
) -> None:
    _, optimizer = stepped()
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(CheckpointError, match=key):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert all(torch.equal(v, after["state"][i][k]) for i, d in before["state"].items() for k, v in d.items())


def test_codebooks_that_differ_between_parameters_are_refused() -> None:
    _, optimizer = stepped()
    saved = copy.deepcopy(optimizer.state_dict())
    key = next(k for k in saved["state"][0] if k.endswith(".codebook"))
    book = saved["state"][0][key].clone()
    book[3] = book[4]
    saved["state"][0][key] = book
    with pytest.raises(CheckpointError, match="codebook"):
        optimizer.load_state_dict(saved)


def test_presets_pickle_and_go_on_to_the_bit() -> None:
    net, optimizer = stepped()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(net, optimizer, range(2, 3))
    scheduler.step()
    twin, other = pickle.loads(pickle.dumps((net, optimizer)))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 5e-4
    train(net, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert same(bits(net), bits(twin))


def test_deep_copies_go_on_to_the_bit() -> None:
    net, optimizer = stepped()
    twin, other = copy.deepcopy((net, optimizer))
    train(net, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert same(bits(net), bits(twin))


REFUSED = [
    ("amsgrad", True),
    ("differentiable", True),
    ("lr", -1.0),
    ("eps", -1e-8),
    ("weight_decay", float("nan")),
    ("betas", (0.9, 1.0)),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[r[0] for r in REFUSED])
def test_what_means_nothing_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Gefen(model().parameters(), **{name: value})


@pytest.mark.parametrize("name", ["fused", "foreach", "deterministic"])
def test_arguments_about_speed_change_nothing(name: str) -> None:
    (net, _), twin = stepped(), model()
    train(twin, Gefen(twin.named_parameters(), weight_decay=0.1, **{name: True}), range(2))
    assert same(bits(net), bits(twin))


def test_maximize_steps_on_the_negated_loss() -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    p.grad, q.grad = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-1.0, 2.0, -3.0])
    Gefen([p], maximize=True).step()
    Gefen([q]).step()
    assert torch.equal(p, q) and float(p.detach()[0]) > 1


def test_groups_carry_betas_and_each_its_own() -> None:
    p, q, r = (nn.Parameter(torch.ones(3)) for _ in range(3))
    both = Gefen([{"params": [p], "betas": (0.5, 0.9), "lr": 0.1}, {"params": [q]}])
    alone = Gefen([r], 0.1, (0.5, 0.9))
    for i in range(3):
        for x in (p, q, r):
            x.grad = torch.tensor([1.0, -2.0, 3.0]) + i
        both.step()
        alone.step()
    assert torch.equal(p, r) and not torch.equal(p, q)


def test_a_tensor_lr_is_read_at_each_step_and_filled_in_place_on_load() -> None:
    p = nn.Parameter(torch.ones(3))
    lr = torch.tensor(0.25)
    optimizer = Gefen([p], lr)
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(p.detach(), torch.full((3,), 0.75))
    saved = copy.deepcopy(optimizer.state_dict())
    lr.fill_(0.5)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr and float(lr) == 0.25


def test_a_non_finite_gradient_raises_by_name_if_asked() -> None:
    net = model()
    optimizer = Gefen(net.named_parameters(), error_if_nonfinite=True)
    before = bits(net)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    net[2].bias.grad[0] = float("nan")
    with pytest.raises(RuntimeError, match=r"2\.bias"):
        optimizer.step()
    assert same(before, bits(net))


def test_stochastic_rounding_is_that_of_bf16_parameters_and_resumes_to_the_bit() -> None:
    net, nearest = model().bfloat16(), model().bfloat16()
    optimizer = Gefen(net.named_parameters(), stochastic_rounding=True)
    train(net, optimizer, range(2))
    train(nearest, Gefen(nearest.named_parameters()), range(2))
    assert not same(bits(net), bits(nearest))
    twin, other = pickle.loads(pickle.dumps((net, optimizer)))
    train(net, optimizer, range(2, 4))
    train(twin, other, range(2, 4))
    assert same(bits(net), bits(twin))


DETERMINISTIC = {
    "default": {},
    "pure": {"fused": False},
    "blocks": {"second_moment": Block(), "weight_decay": 0.1},
    "whole sides": {"second_moment": Factored()},
    "corrected": {"second_moment": Dense(), "b2_warmup": None, "maximize": True},
}


def run_of(threads: int, others: int, options: dict) -> list[Tensor]:
    """Parameters and state after three steps on these threads, beside some other parameters."""
    shapes = {"w": (320, 300), "t": (300, 70), "b": (70,), **{f"other {n}": (64 * (n + 1), 130) for n in range(others)}}
    draws = [torch.Generator().manual_seed(i) for i in range(len(shapes))]
    pairs = zip(shapes.items(), draws, strict=True)
    params = {name: nn.Parameter(torch.randn(shape, generator=draw).bfloat16()) for (name, shape), draw in pairs}
    optimizer = Gefen(params.items(), 1e-2, deterministic=True, codebook="fixed", **options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for _ in range(3):
        for p, draw in zip(params.values(), draws, strict=True):
            p.grad = torch.randn(p.shape, generator=draw).bfloat16()
        optimizer.step()
    torch.set_num_threads(before)
    own = [params[name] for name in ("w", "t", "b")]
    return [p.detach() for p in own] + [x for p in own for x in optimizer.state[p].values()]


@pytest.mark.parametrize("options", DETERMINISTIC.values(), ids=DETERMINISTIC)
def test_a_deterministic_step_has_the_same_bits_in_every_run_on_any_threads_and_in_any_company(options: dict) -> None:
    first = run_of(1, 0, options)
    assert all(same(first, run_of(*form, options)) for form in [(1, 0), (2, 0), (2, 2)])


def test_replicas_learn_and_step_alike() -> None:
    runs = []
    for threads in (1, 1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        net, optimizer = stepped(3)
        torch.set_num_threads(before)
        runs.append(bits(net) + list(optimizer.state[net[0].weight].values()))
    assert same(runs[0], runs[1]) and same(runs[0], runs[2])
