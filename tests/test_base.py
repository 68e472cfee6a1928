"""Trees, the smallest transforms, and the errors that swapped arguments meet."""

from collections import namedtuple

import pytest
import torch

from gefen_fn import base, global_norm, tree

Pair = namedtuple("Pair", "w b")
TREES = {
    "dict": lambda a, b: {"w": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "namedtuple": Pair,
}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_apply_updates_adds_on_any_tree(make):
    out = base.apply_updates(make(torch.ones(3), torch.zeros(2)), make(torch.ones(3), torch.ones(2)))
    assert [x.tolist() for x in tree.tree_leaves(out)] == [
        x.tolist() for x in tree.tree_leaves(make(torch.full((3,), 2.0), torch.ones(2)))
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_apply_updates_keeps_the_dtype_and_rounds_once(dtype):
    p, u = torch.tensor([1.0], dtype=dtype), torch.tensor([2.0**-9 + 2.0**-20])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(base.apply_updates(p, u), (p.to(wide) + u.to(wide)).to(dtype))


def test_a_none_update_leaves_its_parameter():
    p = {"a": torch.ones(2), "b": torch.ones(2)}
    out = base.apply_updates(p, {"a": None, "b": torch.ones(2)})
    assert out["a"] is p["a"] and out["b"].tolist() == [2.0, 2.0]


BAD_LEAVES = {
    "sparse": torch.ones(3).to_sparse(),
    "complex": torch.ones(3, dtype=torch.complex64),
    "integer": torch.ones(3, dtype=torch.int64),
    "shape": torch.ones(4),
    "number": "text",
}


@pytest.mark.parametrize("bad", BAD_LEAVES.values(), ids=BAD_LEAVES)
def test_what_is_no_update_is_refused(bad):
    with pytest.raises(tree.StructureError, match="got"):
        base.apply_updates({"w": torch.ones(3)}, {"w": bad})


def test_another_structure_is_refused_with_the_fix():
    with pytest.raises(tree.StructureError, match="Pass updates, state and params in this order"):
        base.apply_updates({"w": torch.ones(3)}, {"v": torch.ones(3)})


def test_paths_escape_dots_and_name_fields():
    assert tree.tree_paths({"a.b": Pair(torch.ones(1), None), "c": [torch.ones(1)]}) == ["a%2Eb.w", "a%2Eb.b", "c.0"]


def test_broadcast_takes_a_number_or_a_tree():
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    assert tree.broadcast(0.5, params) == {"a": 0.5, "b": 0.5}
    assert tree.broadcast({"a": 1.0, "b": 2.0}, params) == {"a": 1.0, "b": 2.0}


def test_global_norm_skips_none_and_matches_float64():
    leaves = {"a": torch.randn(1000), "b": None, "c": torch.randn(7, 3)}
    exact = torch.cat([leaves["a"], leaves["c"].reshape(-1)]).double().norm()
    assert abs(global_norm(leaves).double() - exact) <= 1e-6 * exact
    assert global_norm({"a": None}) == 0


def test_identity_and_set_to_zero():
    g = {"w": torch.ones(2), "n": None}
    assert base.identity().update(g, base.EmptyState())[0] is g
    zeroed, _ = base.set_to_zero().update(g, base.EmptyState())
    assert zeroed["w"].tolist() == [0.0, 0.0] and zeroed["n"] is None


@pytest.mark.parametrize("step_size", [0.3, torch.tensor(0.3, dtype=torch.float64)], ids=["float", "tensor"])
def test_a_polyak_average_of_bf16_is_rounded_once(step_size):
    generator = torch.Generator().manual_seed(0)
    new, old = (torch.randn(1000, generator=generator).bfloat16() for _ in range(2))
    expected = (new.float() * 0.3 + old.float() * 0.7).bfloat16()
    assert torch.equal(base.incremental_update(new, old, step_size), expected)
