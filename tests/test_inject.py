"""Hyperparameters read from the state."""

import pytest
import torch

from gefen_fn.adam import scale_by_adam, scale_by_lion
from gefen_fn.alias import adamw, gefen, sgd
from gefen_fn.base import apply_updates, identity, stateless
from gefen_fn.combine import chain
from gefen_fn.gefen import scale_by_gefen
from gefen_fn.inject import inject_hyperparams
from gefen_fn.scale import add_decayed_weights, ema, scale_by_learning_rate, scale_by_schedule, trace
from gefen_fn.schedule import linear_schedule
from gefen_fn.tree import StructureError, tree_leaves, tree_map


def adamw_like(learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-2, mask=None, nesterov=False):
    decay = add_decayed_weights(weight_decay, mask)
    return chain(scale_by_adam(b1, b2, eps, nesterov=nesterov), decay, scale_by_learning_rate(learning_rate))


def sgd_like(learning_rate, momentum=None):
    return chain(identity() if momentum is None else trace(momentum), scale_by_learning_rate(learning_rate))


def halving(count):
    return 0.1 * 0.5**count


def params():
    return {"w": torch.linspace(-1.0, 2.0, 15).view(3, 5), "b": torch.linspace(0.5, 1.0, 5)}


def run(tx, steps=5):
    p = params()
    state = tx.init(p)
    for _ in range(steps):
        updates, state = tx.update(tree_map(torch.sin, p), state, p)
        p = apply_updates(p, updates)
    return p, state


@pytest.mark.parametrize(
    ("factory", "kwargs"),
    [
        (adamw_like, {"learning_rate": 1e-3}),
        (adamw_like, {"learning_rate": 0.1, "b1": 0.8, "nesterov": True}),
        (adamw_like, {"learning_rate": halving}),
        (adamw_like, {"learning_rate": 0.1, "mask": lambda p: tree_map(lambda x: x.ndim > 1, p)}),
        (sgd_like, {"learning_rate": 0.1}),
        (sgd_like, {"learning_rate": halving, "momentum": 0.9}),
    ],
)
def test_f3_injected_and_plain_trajectories_are_equal_to_the_bit(factory, kwargs):
    plain, _ = run(factory(**kwargs))
    injected, _ = run(inject_hyperparams(factory)(**kwargs))
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(plain), tree_leaves(injected), strict=True))


def test_f1_injected_schedule_and_scale_by_schedule_both_start_at_0():
    grads = {"w": torch.ones(2)}
    injected, plain = inject_hyperparams(sgd_like)(halving), scale_by_schedule(lambda count: -halving(count))
    state, other = injected.init(grads), plain.init(grads)
    for step in range(3):
        updates, state = injected.update(grads, state)
        expected, other = plain.update(grads, other)
        assert torch.equal(updates["w"], expected["w"])
        assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.1 * 0.5**step)


@pytest.mark.parametrize(
    ("name", "value", "is_injected"),
    [
        ("float", 0.5, True),
        ("scalar tensor", torch.tensor(0.5), True),
        ("schedule", halving, True),
        ("int", 3, False),
        ("bool", True, False),
        ("string", "fixed", False),
        ("None", None, False),
        ("class", dict, False),
        ("vector", torch.ones(3), False),
        ("int tensor", torch.tensor(3), False),
    ],
)
def test_only_numbers_and_schedules_are_injected(name, value, is_injected):
    seen = []
    tx = inject_hyperparams(lambda x: seen.append(x) or identity())(value)
    state = tx.init(params())
    assert ("x" in state.hyperparams) is is_injected
    if is_injected:
        assert seen[-1].dtype == torch.float64 and seen[-1].shape == () and seen[-1].device.type == "cpu"
    else:
        assert seen[-1] is value


def test_update_names_the_injected_values_and_their_defaults():
    tx = inject_hyperparams(adamw_like)(halving, b1=torch.tensor(0.9), weight_decay=0.3)
    assert set(tx.update.hyperparams) == {"b1", "b2", "eps", "weight_decay"}
    assert tx.update.defaults == {"b2": 0.999, "eps": 1e-8, "weight_decay": 0.3}
    assert repr(tx).startswith("inject_hyperparams(adamw_like)(")


def test_values_replaced_in_the_state_are_used_also_one_per_leaf():
    grads = {"a": torch.ones(2), "b": torch.ones(2)}
    tx = inject_hyperparams(sgd_like)(0.1)
    state = tx.init(grads)
    rates = {"a": torch.tensor(1.0, dtype=torch.float64), "b": torch.tensor(2.0, dtype=torch.float64)}
    updates, state = tx.update(grads, state._replace(hyperparams={"learning_rate": rates}))
    assert updates["a"].tolist() == [-1.0, -1.0] and updates["b"].tolist() == [-2.0, -2.0]
    assert int(state.count) == 1 and state.hyperparams["learning_rate"] is rates


def test_static_args_keyword_and_variable_arguments_reach_the_factory():
    seen = {}

    def factory(first, *more, scale=1.0, **others):
        seen.update(first=first, more=more, scale=scale, others=others)
        return identity()

    state = inject_hyperparams(factory, static_args="first")(0.5, 1, 2, other=0.25).init(params())
    assert seen["first"] == 0.5 and seen["more"] == (1, 2)
    assert set(state.hyperparams) == {"scale", "other"} and float(seen["others"]["other"]) == 0.25


def test_the_callers_tensor_is_not_shared_with_the_state():
    rate = torch.tensor(0.5, dtype=torch.float64)
    state = inject_hyperparams(sgd_like)(rate).init(params())
    rate.fill_(7.0)
    assert float(state.hyperparams["learning_rate"]) == 0.5


def test_extra_arguments_and_none_leaves_pass_through():
    tx = inject_hyperparams(lambda rate: stateless(lambda u, p: tree_map(lambda x: x * rate, u)))(0.5)
    updates, _ = tx.update({"a": None, "b": torch.ones(1)}, tx.init(params()), loss=1.0)
    assert updates["a"] is None and float(updates["b"]) == 0.5


@pytest.mark.parametrize(
    ("error", "text", "act"),
    [
        (ValueError, "static_args", lambda: inject_hyperparams(sgd_like, static_args="rate")),
        (TypeError, "learning_rate", lambda: inject_hyperparams(sgd_like)()),
        (StructureError, "hyperparameters", lambda: _update_without_values()),
    ],
)
def test_errors_name_the_rule(error, text, act):
    with pytest.raises(error, match=text):
        act()


def _update_without_values():
    tx = inject_hyperparams(sgd_like)(0.1)
    return tx.update(params(), tx.init(params())._replace(hyperparams={}))


def test_f11_an_ensemble_over_learning_rates_equals_its_members():
    rates = torch.tensor([0.1, 0.2, 0.3])

    def member(rate):
        p, _ = run(inject_hyperparams(sgd_like)(rate, momentum=0.9), steps=3)
        return p["w"]

    together = torch.vmap(member)(rates)
    for i, rate in enumerate(rates):
        assert torch.allclose(together[i], member(rate), rtol=1e-6)


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (scale_by_adam, "b1"),
        (scale_by_adam, "eps"),
        (scale_by_lion, "b2"),
        (trace, "decay"),
        (ema, "decay"),
        (scale_by_gefen, "b1"),
        (scale_by_gefen, "b2_warmup"),
        (gefen, "b2"),
        (adamw, "b1"),
        (sgd, "momentum"),
    ],
)
def test_f8_a_schedule_is_taken_where_a_number_is(factory, name):
    schedule = linear_schedule(0.8, 0.95, 3)
    first = {"learning_rate": 0.1} if factory in (gefen, adamw, sgd) else {}
    direct, injected = factory(**first, **{name: schedule}), inject_hyperparams(factory)(**first, **{name: schedule})
    leaves = {"w": torch.randn(64, 72)}
    states = [direct.init(leaves), injected.init(leaves)]
    for i in range(4):
        grads = {"w": torch.randn(64, 72, generator=torch.Generator().manual_seed(i))}
        (one, states[0]), (two, states[1]) = (
            tx.update(grads, s, leaves) for tx, s in zip((direct, injected), states, strict=True)
        )
        assert torch.equal(one["w"], two["w"])


def test_values_per_leaf_compile_into_one_graph():
    grads = params()
    tx = inject_hyperparams(adamw)(0.1)
    state = tx.init(grads)
    rates = {"w": torch.tensor(0.1, dtype=torch.float64), "b": torch.tensor(0.2, dtype=torch.float64)}
    state = state._replace(hyperparams={**state.hyperparams, "learning_rate": rates})
    compiled, _ = torch.compile(tx.update, fullgraph=True, backend="eager")(grads, state, grads)
    expected, _ = tx.update(grads, state, grads)
    assert all(torch.equal(compiled[name], expected[name]) for name in grads)
