"""Accumulation over micro-steps, and refusal of non-finite gradients."""

from typing import NamedTuple

import pytest
import torch

from gefen_fn.accumulate import MultiSteps, apply_if_finite, has_updated
from gefen_fn.base import GradientTransformation, identity
from gefen_fn.scale import scale, trace
from gefen_fn.state_io import state_bytes
from gefen_fn.tree import StructureError


class CallsState(NamedTuple):
    calls: torch.Tensor


def counting():
    def update(updates, state, params=None, **extra):
        return updates, CallsState(state.calls + 1)

    return GradientTransformation(lambda params: CallsState(torch.zeros((), dtype=torch.int32)), update)


def grads(value, dtype=torch.float32):
    return {"a": torch.full((2,), value, dtype=dtype), "b": torch.full((3,), 2 * value, dtype=dtype)}


def feed(tx, values, dtype=torch.float32):
    state, out = tx.init(grads(0.0, dtype)), []
    for value in values:
        updates, state = tx.update(grads(value, dtype), state)
        out.append((float(updates["a"][0]), bool(has_updated(state))))
    return out, state


@pytest.mark.parametrize(
    ("k", "mean", "expected"),
    [
        (1, True, [1, 2, 3, 6]),
        (2, True, [0, 1.5, 0, 4.5]),
        (3, True, [0, 0, 2, 0]),
        (2, False, [0, 3, 0, 9]),
        (lambda step: 1 + step, True, [1, 0, 2.5, 0]),
    ],
)
def test_every_kth_update_is_the_mean_or_the_sum(k, mean, expected):
    out, _ = feed(MultiSteps(identity(), k, use_grad_mean=mean), [1.0, 2.0, 3.0, 6.0])
    assert out == [(float(x), x != 0) for x in expected]


def test_f4_k_1_keeps_no_accumulator():
    p = {"w": torch.zeros(1000)}
    assert state_bytes(MultiSteps(trace(0.9), 1).init(p)) - state_bytes(trace(0.9).init(p)) < 16


def test_f4_bf16_gradients_are_summed_in_fp32():
    values = [256.0] + [1.0] * 255
    out, state = feed(MultiSteps(identity(), 256, use_grad_mean=False), values, torch.bfloat16)
    assert out[-1] == (511.0, True) and state.acc_grads["a"].dtype == torch.float32


def test_f4_the_inner_transform_is_not_called_between_updates():
    _, state = feed(MultiSteps(counting(), 3), [1.0] * 7)
    assert int(state.inner_opt_state.calls) == 2 and int(state.gradient_step) == 2 and int(state.mini_step) == 1


def test_a_leaf_is_averaged_over_the_micro_steps_that_had_a_gradient():
    tx = MultiSteps(identity(), 3)
    state = tx.init(grads(0.0) | {"c": torch.zeros(1)})
    for a in (1.0, None, 3.0):
        step = grads(2.0) | {"c": None}
        step["a"] = None if a is None else step["a"] * a
        updates, state = tx.update(step, state)
    assert updates["a"].tolist() == [4.0, 4.0] and updates["b"].tolist() == [4.0] * 3 and updates["c"] is None


def test_a_gradient_missing_in_the_last_micro_step_is_still_used():
    tx = MultiSteps(identity(), 2)
    _, state = tx.update(grads(2.0), tx.init(grads(0.0)))
    updates, _ = tx.update(grads(2.0) | {"a": None}, state)
    assert updates["a"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("k", "expected"), [(1, [1, 0, 3]), (2, [0, 0, 2])])
def test_a_skipped_micro_step_counts_nothing(k, expected):
    def skip(updates, gradient_step, params):
        return updates["a"].max() > 50, {"worst": updates["a"].max()}

    out, state = feed(MultiSteps(identity(), k, should_skip_update_fn=skip), [1.0, 99.0, 3.0])
    assert out == [(float(x), x != 0) for x in expected] and float(state.skip_state["worst"]) == 3.0


def test_non_finite_gradients_leave_the_inner_state_alone():
    tx = apply_if_finite(counting(), 2)
    state, calls = tx.init(grads(0.0)), []
    for value in (1.0, float("nan"), float("inf"), 1.0, float("nan"), float("nan"), float("nan")):
        updates, state = tx.update(grads(value), state)
        calls.append(int(state.inner_state.calls))
    assert calls == [1, 1, 1, 2, 2, 2, 3]
    assert int(state.total_notfinite) == 5 and not bool(state.last_finite)
    assert updates["a"].isnan().all()


def test_updates_are_zero_where_a_step_is_left_out():
    tx = apply_if_finite(scale(2.0), 5)
    updates, _ = tx.update(grads(float("nan")) | {"b": None}, tx.init(grads(0.0)))
    assert updates["a"].tolist() == [0.0, 0.0] and updates["b"] is None


@pytest.mark.parametrize(
    "tx", [MultiSteps(identity(), 2), apply_if_finite(identity(), 1)], ids=["MultiSteps", "finite"]
)
def test_vmap_is_refused_with_a_reason(tx):
    def step(g):
        return tx.update({"a": g}, tx.init({"a": g}))[0]["a"]

    with pytest.raises(RuntimeError, match=r"under torch\.vmap"):
        torch.vmap(step)(torch.ones(2, 3))


@pytest.mark.parametrize(
    "tx", [MultiSteps(identity(), 2), apply_if_finite(identity(), 1)], ids=["MultiSteps", "finite"]
)
def test_compile_is_refused_with_a_reason(tx, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"under torch\.compile"):
        tx.update(grads(1.0), tx.init(grads(1.0)))


def test_k_1_works_under_vmap():
    tx = MultiSteps(scale(2.0), 1)
    out = torch.vmap(lambda g: tx.update(g, tx.init(g))[0])(torch.ones(2, 3))
    assert out.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    ("error", "text", "act"),
    [
        (ValueError, "every_k_schedule", lambda: MultiSteps(identity(), 0)),
        (ValueError, "max_consecutive_errors", lambda: apply_if_finite(identity(), -1)),
        (TypeError, "MultiStepsState", lambda: has_updated(())),
        (
            StructureError,
            "structure",
            lambda: MultiSteps(identity(), 2).update({}, MultiSteps(identity(), 2).init([torch.ones(1)])),
        ),
    ],
)
def test_errors_name_the_rule(error, text, act):
    with pytest.raises(error, match=text):
        act()


def test_a_gradient_whose_square_overflows_counts_as_not_finite():
    tx, g = apply_if_finite(scale(1.0), 3), torch.full((3,), 2e19)
    updates, state = tx.update(g, tx.init(g))
    assert state.notfinite_count == 1 and (updates == 0).all()
