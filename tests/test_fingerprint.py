"""Transforms that members would step apart by have other fingerprints; the same ones, built again, have one."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gefen_fn import (
    Factored,
    GradientTransformation,
    MultiSteps,
    adamw,
    chain,
    cosine_decay_schedule,
    default_codebook,
    gefen,
    inject_hyperparams,
    join_schedules,
    masked,
    partition,
    scale,
    scale_by_adam,
    scale_by_gefen,
    stateless,
)
from gefen_nn.fingerprint import fingerprint
from gefen_nn.groups import find_injection


@dataclass(frozen=True)
class Policy(Factored):
    """Of somebody's own."""

    power: float = 1.0


class Rule:
    """An object without a text of its own."""

    def __init__(self, power):
        self.power = power

    def __call__(self, *args):
        return False


def number(tx):
    return fingerprint(tx, find_injection(tx).tx)


def own(rate):
    return GradientTransformation(lambda params: (), lambda u, state, params=None, **extra: (u * rate, state))


def recursive(rate):
    def schedule(count):
        return rate if count < 1 else schedule(count - 1)

    return schedule


def inside(b1):
    return inject_hyperparams(lambda lr: gefen(lr, b1=b1))(1e-3)


def names(of):
    return lambda params: {k: k in of for k in params}


def on(device):
    return lambda count: torch.ones((), device=device)


def joined(steps):
    return join_schedules([cosine_decay_schedule(1e-3, steps), lambda count: 0.1], [5])


BOOKS = default_codebook(), torch.linspace(-1, 1, 256)
ROWS: dict[str, tuple[Callable[[Any], GradientTransformation], Any, Any]] = {
    "a codebook": (lambda x: gefen(1e-3, codebook=x), *BOOKS),
    "a tensor": (lambda x: scale(torch.tensor(x)), 0.1, 0.2),
    "numbers by leaf": (lambda x: scale_by_adam(b1={"w": torch.tensor(x)}), 0.1, 0.2),
    "a schedule's length": (lambda x: gefen(cosine_decay_schedule(1e-3, x)), 100, 200),
    "a schedule inside of another": (lambda x: gefen(joined(x)), 100, 200),
    "a schedule that calls itself": (lambda x: gefen(recursive(x)), 0.1, 0.2),
    "a function's default": (lambda x: stateless(lambda u, p, k=x: u * k), 2, 3),
    "a transform of one's own": (own, 0.1, 0.2),
    "what a factory passes on": (inside, 0.8, 0.9),
    "what a factory passes on, in a chain": (lambda x: chain(scale(2.0), inside(x)), 0.8, 0.9),
    "the stages of a factory that computes": (
        lambda x: inject_hyperparams(lambda lr: gefen(lr * 2, block=x))(1e-3),
        64,
        128,
    ),
    "a rate that no group carries": (lambda x: masked(inject_hyperparams(gefen)(x), {"w": True}), 1e-3, 1e-2),
    "rates of two injections": (
        lambda x: chain(inject_hyperparams(gefen)(x), inject_hyperparams(adamw)(1e-3)),
        1e-3,
        1e-2,
    ),
    "a policy's field": (lambda x: scale_by_gefen(second_moment=Policy(power=x)), 1.0, 2.0),
    "what an object holds": (lambda x: MultiSteps(gefen(1e-3), 2, should_skip_update_fn=Rule(x)), 1.0, 2.0),
    "a label": (lambda x: partition({x: gefen(1e-3)}, x), "a", "b"),
}


@pytest.mark.parametrize(("build", "one", "other"), ROWS.values(), ids=ROWS)
def test_what_a_step_rests_on_is_told_apart_and_the_same_is_the_same(build, one, other):
    assert number(build(one)) == number(build(one)) != number(build(other))


MEMBERS_OWN: dict[str, tuple[Callable[[Any], GradientTransformation], Any, Any]] = {
    "the rate of groups": (lambda x: inject_hyperparams(gefen)(x), 1e-3, 1e-2),
    "the rate of groups, in a chain": (lambda x: chain(scale(1.0), inject_hyperparams(gefen)(x)), 1e-3, 1e-2),
    "the rate that a factory computes with": (lambda x: inject_hyperparams(lambda lr: gefen(lr * 2))(x), 1e-3, 1e-2),
    "names that a mask knows": (lambda x: masked(gefen(1e-3), names(x)), ("a",), ("b",)),
    "the number of a device": (lambda x: gefen(on(x)), torch.device("cuda", 0), torch.device("cuda", 1)),
    "objects that a function knows": (lambda x: gefen(lambda count: x.power * 0.1), Rule(1), Rule(2)),
}


@pytest.mark.parametrize(("build", "one", "other"), MEMBERS_OWN.values(), ids=MEMBERS_OWN)
def test_what_members_may_have_of_their_own_is_left_out(build, one, other):
    assert number(build(one)) == number(build(other))


def test_masks_of_other_code_are_told_apart():
    assert number(masked(gefen(1e-3), lambda p: p.ndim > 1)) != number(masked(gefen(1e-3), lambda p: p.ndim > 2))


OF_CODE = """
from gefen_fn import gefen, masked, stateless
from gefen_nn.fingerprint import fingerprint
mask = lambda params: {k: k.split(".")[-1] not in {"bias", "norm", "scale"} for k in params}
for tx in masked(gefen(1e-3), mask), stateless(lambda u, p, own={("a", frozenset("xyz")): 1}: u):
    print(fingerprint(tx, tx))
"""


def test_a_number_is_the_same_in_processes_that_order_sets_otherwise():
    paths = os.pathsep.join(map(str, (root := Path(__file__).parents[1], root / "kernels")))
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", OF_CODE],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in "12"
    ]
    printed = {run.communicate()[0] for run in runs}
    assert len(printed) == 1 and len(printed.pop().split()) == 2
