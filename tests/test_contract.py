"""What optimizers claim of themselves; numbers are those of the acceptance list of the design for several processes."""

import pytest
import torch

import gefen_fn
import gefen_nn
from gefen_fn import (
    Factored,
    FlatBlocks,
    GradientTransformation,
    adamw,
    chain,
    clip_by_global_norm,
    describe,
    gefen,
    inject_hyperparams,
    partition,
    stateless,
)
from gefen_fn.contract import LAYOUTS, Capabilities, claims, of_parts, of_stages
from gefen_nn import Gefen

GOOD = {"name": "x", "layouts": ("rows",), "same_topology_exact": True, "resharding_exact": False}
BAD = {
    "1 a number among layouts": ({"layouts": ("rows", 1)}, TypeError, "layouts"),
    "1 a string for a tuple": ({"layouts": "rows"}, TypeError, "layouts"),
    "1 a layout twice": ({"layouts": ("rows", "rows")}, ValueError, "layouts"),
    "1 an empty reason": ({"refused": ("",)}, ValueError, "refused"),
    "2 a truthy string": ({"same_topology_exact": "yes"}, TypeError, "same_topology_exact"),
    "2 the number 1": ({"resharding_exact": 1}, TypeError, "resharding_exact"),
    "4 version True": ({"version": True}, TypeError, "version"),
    "4 version 1.0": ({"version": 1.0}, TypeError, "version"),
    "4 an unknown version": ({"version": 2}, ValueError, "version"),
    "an empty name": ({"name": ""}, ValueError, "name"),
}
NARROW = Capabilities("narrow", ("replicated",), True, False, ("it cannot",))
WIDE = Capabilities("wide", ("replicated", "rows"), True, True)


@pytest.mark.parametrize(("change", "error", "field"), BAD.values(), ids=BAD)
def test_1_2_4_a_wrong_claim_fails_where_it_is_written_and_names_the_field(change, error, field):
    with pytest.raises(error, match=f"`{field}`"):
        Capabilities(**{**GOOD, **change})


def test_3_a_part_of_another_type_is_refused():
    with pytest.raises(TypeError, match="parts"):
        of_parts("both", [WIDE, {"layouts": ("rows",)}])


@pytest.mark.parametrize(
    ("backup", "layouts"),
    [(gefen(1e-3), LAYOUTS), (stateless(lambda u, p: u), ("replicated",))],
    ids=["5 its backup's", "6 exactly replicated"],
)
def test_5_6_a_hybrid_of_a_backup_alone_claims_what_the_backup_does(backup, layouts):
    assert claims(partition({"backup": backup}, "backup")).layouts == layouts


def test_7_8_parts_claim_the_union_to_train_and_the_intersection_to_restore():
    assert of_parts("wide", [WIDE]) == WIDE
    assert of_parts("none", []).layouts == ("replicated",)
    both = of_parts("both", [NARROW, WIDE])
    assert both.layouts == ("replicated", "rows") and not both.resharding_exact and both.refused == ("it cannot",)


def test_stages_of_one_chain_claim_only_what_each_can_do():
    assert of_stages("chain", [NARROW, WIDE]).layouts == ("replicated",)


def own(contract=None):
    """A transform as a user writes it."""

    def update(updates, state, params=None, **extra):
        return updates, state

    if contract is not None:
        update.contract = contract
    return GradientTransformation(lambda params: (), update)


SILENT = {
    "alone": (own(), ("replicated",), LAYOUTS[1:]),
    "in a chain": (chain(own(), gefen(1e-3)), ("replicated",), LAYOUTS[1:]),
    "before what cannot": (chain(own(), gefen(1e-3, block=FlatBlocks(256))), ("replicated",), ()),
    "part of a model": (partition({"a": own(), "b": gefen(1e-3)}, "b"), LAYOUTS, LAYOUTS[1:]),
    "in a chain around a part": (chain(partition({"a": own(), "b": gefen(1e-3)}, "b")), LAYOUTS, LAYOUTS[1:]),
}


@pytest.mark.parametrize(("tx", "layouts", "unstated"), SILENT.values(), ids=SILENT)
def test_what_a_transform_of_ones_own_leaves_open_is_not_stated_by_it_alone(tx, layouts, unstated):
    claim = claims(tx)
    assert set(claim.layouts) == set(layouts) and set(claim.unstated) == set(unstated)
    assert claim.silent == ("own",) and claim.same_topology_exact and not claim.resharding_exact


def test_a_transform_of_ones_own_may_publish_its_contract():
    contract = Capabilities("own", LAYOUTS, True, True)
    tx = chain(own(contract), gefen(1e-3))
    assert claims(tx).layouts == LAYOUTS and claims(tx).resharding_exact and not claims(tx).silent


def test_containers_are_copied():
    layouts = ["rows"]
    claim = Capabilities(**{**GOOD, "layouts": layouts})
    layouts.append("replicated")
    assert claim.layouts == ("rows",)


EXPRESSIONS = {
    "default": (gefen(1e-3), LAYOUTS, True),
    "clipped": (chain(clip_by_global_norm(1.0), gefen(1e-3)), LAYOUTS, True),
    "flattened": (gefen(1e-3, block=FlatBlocks(256)), ("replicated",), False),
    "whole rows of columns": (
        gefen(1e-3, second_moment=Factored((128, None))),
        ("replicated", "rows", "leading axes", "replicas of shards", "offloaded"),
        True,
    ),
    "one's own function": (chain(stateless(lambda u, p: u), gefen(1e-3)), ("replicated",), False),
    "adamw": (adamw(1e-3), LAYOUTS, True),
    "a factory that computes with its number": (
        inject_hyperparams(lambda rate: gefen(2.0 * rate, block=FlatBlocks(256)))(1e-3),
        ("replicated",),
        False,
    ),
}


@pytest.mark.parametrize(("tx", "layouts", "reshards"), EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_claims_what_its_stages_do(tx, layouts, reshards):
    assert claims(tx).layouts == layouts and claims(tx).resharding_exact is reshards


def test_a_partition_trains_where_a_part_does_and_reshards_where_all_do():
    tx = partition({"a": gefen(1e-3, block=FlatBlocks(256)), "b": adamw(1e-3)}, {"x": "a", "y": "b"})
    claim = describe(tx, {"x": torch.empty(64, 64), "y": torch.empty(64)}).claims
    assert claim.layouts == LAYOUTS and not claim.resharding_exact


def test_9_asking_changes_nothing():
    torch.manual_seed(0)
    start = torch.randn(64, 300)
    twins = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    asked, other = (Gefen([("w", p)], lr=1e-2) for p in twins)
    for _ in range(2):
        for p in twins:
            p.grad = torch.ones(64, 300) * p.detach()
        assert asked.describe() == asked.describe()
        asked.step()
        other.step()
    assert torch.equal(*twins)


@pytest.mark.parametrize("package", [gefen_fn, gefen_nn], ids=lambda package: package.__name__)
def test_10_every_public_name_resolves(package):
    assert all(getattr(package, name) is not None for name in package.__all__)
