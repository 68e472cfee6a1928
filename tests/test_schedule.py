"""Schedules against their formulas, on ints and on tensors."""

import inspect
import math

import pytest
import torch

from gefen_fn import schedule as s
from tests.test_bad_input import refuse

# schedule, {count: value}
ROWS = {
    "constant": (s.constant_schedule(0.3), {0: 0.3, 7: 0.3}),
    "linear": (s.linear_schedule(1.0, 0.0, 10), {0: 1.0, 5: 0.5, 10: 0.0, 99: 0.0}),
    "linear that begins late": (s.linear_schedule(1.0, 2.0, 4, 2), {0: 1.0, 2: 1.0, 4: 1.5, 6: 2.0}),
    "polynomial": (s.polynomial_schedule(1.0, 0.5, 2, 10), {0: 1.0, 5: 0.625, 10: 0.5}),
    "no transition": (s.linear_schedule(0.2, 1.0, 0), {0: 0.2, 50: 0.2}),
    "cosine": (s.cosine_decay_schedule(2.0, 10, 0.1), {0: 2.0, 5: 1.1, 10: 0.2, 40: 0.2}),
    "cosine squared": (s.cosine_decay_schedule(1.0, 10, exponent=2.0), {0: 1.0, 5: 0.25}),
    "exponential": (s.exponential_decay(1.0, 2, 0.25), {0: 1.0, 1: 0.5, 2: 0.25, 4: 0.0625}),
    "exponential staircase": (s.exponential_decay(1.0, 2, 0.25, staircase=True), {1: 1.0, 2: 0.25, 3: 0.25}),
    "exponential with a floor": (s.exponential_decay(1.0, 1, 0.5, 3, end_value=0.2), {0: 1.0, 3: 1.0, 4: 0.5, 9: 0.2}),
    "exponential with a roof": (s.exponential_decay(1.0, 1, 2.0, end_value=5.0), {1: 2.0, 2: 4.0, 3: 5.0}),
    "no exponential": (s.exponential_decay(1.0, 0, 0.5), {9: 1.0}),
    "piecewise": (s.piecewise_constant_schedule(1.0, {4: 0.5, 2: 0.1}), {0: 1.0, 1: 1.0, 2: 0.1, 4: 0.05}),
    "piecewise without steps": (s.piecewise_constant_schedule(1.5), {3: 1.5}),
    "joined": (s.join_schedules([lambda c: 0.1, s.linear_schedule(1.0, 0.0, 4)], [3]), {2: 0.1, 3: 1.0, 5: 0.5}),
    "warm-up and cosine": (
        s.warmup_cosine_decay_schedule(0.0, 1.0, 4, 12, 0.1),
        {0: 0.0, 2: 0.5, 4: 1.0, 8: 0.55, 12: 0.1},
    ),
    "no warm-up": (s.warmup_cosine_decay_schedule(0.0, 1.0, 0, 8), {0: 1.0, 4: 0.5}),
    "warm-up, stable, decay": (
        s.warmup_stable_decay_schedule(0.0, 1.0, 4, 10, 4, 0.2),
        {0: 0.0, 2: 0.5, 4: 1.0, 13: 1.0, 14: 1.0, 16: 0.6, 18: 0.2, 99: 0.2},
    ),
}
rows = pytest.mark.parametrize(("f", "expected"), ROWS.values(), ids=ROWS)


@rows
def test_a_schedule_follows_its_formula(f, expected):
    for count, value in expected.items():
        assert isinstance(f(count), float)
        assert math.isclose(f(count), value, rel_tol=1e-12, abs_tol=1e-12)


@rows
def test_a_tensor_count_gives_the_same_float64(f, expected):
    for count in expected:
        out = f(torch.tensor(count, dtype=torch.int32))
        assert out.dtype == torch.float64 and out.shape == () and out.item() == f(count)


@rows
def test_counts_may_be_mapped(f, expected):
    counts = torch.arange(20, dtype=torch.int32)
    assert torch.allclose(
        torch.vmap(f)(counts), torch.tensor([f(c) for c in range(20)], dtype=torch.float64), rtol=1e-12
    )


def test_tensor_counts_are_not_read_on_the_host():
    meta = torch.zeros((), dtype=torch.int32, device="meta")
    assert all(f(meta).is_meta for name, (f, _) in ROWS.items())


def test_tensors_may_be_the_values():
    f = s.linear_schedule(torch.tensor(1.0, dtype=torch.float64), 0.0, 10)
    assert f(torch.tensor(5)).item() == 0.5 and f(5) == 0.5


BAD = {
    "negative steps": lambda: s.linear_schedule(1.0, 0.0, -1),
    "negative begin": lambda: s.linear_schedule(1.0, 0.0, 1, -1),
    "no cosine": lambda: s.cosine_decay_schedule(1.0, 0),
    "negative rate": lambda: s.exponential_decay(1.0, 1, -0.5),
    "negative scale": lambda: s.piecewise_constant_schedule(1.0, {2: -1.0}),
    "boundaries down": lambda: s.join_schedules([s.constant_schedule(1.0)] * 3, [4, 2]),
    "too few boundaries": lambda: s.join_schedules([s.constant_schedule(1.0)] * 3, [4]),
    "all warm-up": lambda: s.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10),
    "no decay": lambda: s.warmup_stable_decay_schedule(0.0, 1.0, 1, 1, 0),
    "negative plateau": lambda: s.warmup_stable_decay_schedule(0.0, 1.0, 1, -1, 1),
}


@pytest.mark.parametrize("build", BAD.values(), ids=BAD)
def test_an_impossible_schedule_is_refused_when_built(build):
    with pytest.raises(ValueError, match="got"):
        build()


FACTORIES = [s.constant_schedule, s.linear_schedule, s.polynomial_schedule, s.cosine_decay_schedule]
FACTORIES += [s.exponential_decay, s.warmup_cosine_decay_schedule, s.warmup_stable_decay_schedule]
FACTORIES += [s.piecewise_constant_schedule]
GIVEN = {"transition_steps": 9, "warmup_steps": 1, "stable_steps": 9, "decay_steps": 10}
OTHER = ("staircase", "boundaries_and_scales")
PLACES = [(f, name) for f in FACTORIES for name in inspect.signature(f).parameters if name not in OTHER]
KINDS = {"text": "1e-3", "bool": True, "list": [0.1], "schedule": s.constant_schedule(1.0), "NaN": math.nan}
KINDS |= {"None": None, "vector": torch.ones(2), "huge": -(10**400), "bool tensor": torch.tensor(True)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("factory", "name"), PLACES, ids=[f"{f.__name__} {name}" for f, name in PLACES])
def test_what_is_no_number_is_refused_when_the_schedule_is_built_and_its_argument_named(factory, name, kind):
    wanted = [p.name for p in inspect.signature(factory).parameters.values() if p.default is p.empty]
    given = {**{key: GIVEN.get(key, 0.5) for key in wanted}, name: kind}
    if (name, kind) == ("end_value", None) and factory is s.exponential_decay:  # no bound
        assert factory(**given)(0) == 0.5
    else:
        refuse(ValueError, lambda: factory(**given), f"`{name}` must be ")


LISTS = {
    "text among counts": (ValueError, "Write an int", lambda: s.piecewise_constant_schedule(1.0, {"30": 0.5, 60: 0.5})),
    "None among counts": (ValueError, "Write an int", lambda: s.piecewise_constant_schedule(1.0, {None: 0.5, 60: 0.5})),
    "factor None": (ValueError, "`boundaries_and_scales[30]`", lambda: s.piecewise_constant_schedule(1.0, {30: None})),
    "a list of boundaries": (TypeError, "a dict", lambda: s.piecewise_constant_schedule(1.0, [30, 60])),
    "boundary None": (ValueError, "`boundaries`", lambda: s.join_schedules([s.constant_schedule(1.0)] * 2, [None])),
    "boundary as text": (ValueError, "Write an int", lambda: s.join_schedules([s.constant_schedule(1.0)] * 2, ["5"])),
    "one boundary": (TypeError, "a list", lambda: s.join_schedules([s.constant_schedule(1.0)] * 2, 5)),
    "one schedule": (TypeError, "a list", lambda: s.join_schedules(s.constant_schedule(1.0), [])),
}


@pytest.mark.parametrize(("error", "text", "build"), LISTS.values(), ids=LISTS)
def test_counts_and_factors_of_another_kind_are_refused_before_any_is_sorted(error, text, build):
    refuse(error, build, text)
