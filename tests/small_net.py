"""A small network, its training, and its bits: what the tests of the torch optimizer share."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gefen_fn.alias import adamw
from gefen_fn.base import GradientTransformation
from gefen_fn.inject import inject_hyperparams


def injected(lr: float = 0.1) -> GradientTransformation:
    return inject_hyperparams(adamw)(lr, weight_decay=0.01)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    net.zero_grad()
    net(torch.randn(4, 6, generator=generator)).square().sum().backward()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        backward(net, i)
        optimizer.step()


def bits(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def flat(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (leaf for leaves in optimizer.state.values() for leaf in leaves.values())
