"""Muon under torch's names, alone and with a backup as one optimizer."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR

from gefen_fn import MatrixAxes, fuse, orthogonalize
from gefen_nn import CheckpointError, Choice, GefenMuon, Muon, route
from tests import model_zoo
from tests.model_zoo import Conv1D, Parts, linear
from tests.small_net import bits, same


def net(seed=0):
    torch.manual_seed(seed)
    return Parts(body=nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)), lm_head=linear(64, 80))


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def stepped(steps=2, dtype=torch.float32, **options):
    model = net().to(dtype)
    optimizer = GefenMuon(model, 1e-2, **{"weight_decay": 0.1, **options})
    for seed in range(steps):
        step(model, optimizer, seed)
    return model, optimizer


def rates(optimizer):
    return {group["rule"]: group["lr"] for group in optimizer.param_groups}


def reloaded(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


RESUMED = {
    "gefen": {},
    "adamw": {"backup": "adamw"},
    "at random": {"stochastic_rounding": True},
    "capturable": {"capturable": True},
}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_one_object_has_one_state_dict_and_resumes_to_the_bit_m24(options):
    dtype = torch.bfloat16 if "stochastic_rounding" in options else torch.float32
    model, optimizer = stepped(dtype=dtype, muon_lr=0.02, **options)
    twin = net(1).to(dtype)
    twin.load_state_dict(model.state_dict())
    other = GefenMuon(twin, **options)
    other.load_state_dict(reloaded(optimizer.state_dict()))
    assert rates(other) == rates(optimizer) == {"muon": 0.02, options.get("backup", "gefen"): 0.01}
    for seed in range(2, 4):
        step(model, optimizer, seed)
        step(twin, other, seed)
    assert same(bits(model), bits(twin))


def test_a_state_is_loaded_by_name_whatever_the_groups_were_m24():
    model, optimizer = stepped()
    twin = copy.deepcopy(model)
    named = list(twin.named_parameters())
    rules = route(twin).choices
    other = GefenMuon([{"params": named[3:]}, {"params": named[:3], "weight_decay": 0.3}], rules=rules)
    other.load_state_dict(reloaded(optimizer.state_dict()))
    assert {group["weight_decay"] for group in other.param_groups} == {0.1}
    step(model, optimizer, 5)
    step(twin, other, 5)
    assert same(bits(model), bits(twin))


SCHEDULES = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda at: 1 / (1 + at)),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, [0.04, 0.01], 10),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_one_scheduler_moves_both_parts_and_keeps_their_ratio_m24(make):
    model = net()
    optimizer = GefenMuon(model, 0.01, muon_lr=0.04)
    scheduler, seen = make(optimizer), set()
    for seed in range(3):
        step(model, optimizer, seed)
        scheduler.step()
        found = rates(optimizer)
        assert found["muon"] == pytest.approx(4 * found["gefen"])
        seen.add(round(found["gefen"], 9))
    assert len(seen) == 3


def test_a_learning_rate_moves_its_own_part_alone():
    model = net()
    optimizer, before = GefenMuon(model, muon_lr=0.0, backup_lr=0.01), bits(model)
    step(model, optimizer, 0)
    moved = {n for (n, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)}
    assert moved == {"body.0.bias", "body.2.bias", "lm_head.weight"}


def test_groups_of_yours_are_split_and_keep_their_own_values():
    model = net()
    named = list(model.named_parameters())
    groups = [{"params": named[:2], "lr": 0.5, "weight_decay": 0.0}, {"params": named[2:], "mine": "kept"}]
    optimizer = GefenMuon(groups, 0.01, muon_lr=0.04, weight_decay=0.1)
    found = [(g["param_names"], g["rule"], g["lr"], g["weight_decay"], g.get("mine")) for g in optimizer.param_groups]
    assert found == [
        (["body.0.weight"], "muon", 0.5, 0.0, None),
        (["body.0.bias"], "gefen", 0.5, 0.0, None),
        (["body.2.weight"], "muon", 0.04, 0.1, "kept"),
        (["body.2.bias", "lm_head.weight"], "gefen", 0.01, 0.1, "kept"),
    ]


def test_groups_of_yours_step_as_one_optimizer_with_these_values_each():
    model, twin = net(), net()
    named = list(twin.named_parameters())
    together = GefenMuon([{"params": named[:2]}, {"params": named[2:]}], 0.01, weight_decay=0.1)
    whole = GefenMuon(model, 0.01, weight_decay=0.1)
    for seed in range(2):
        step(model, whole, seed)
        step(twin, together, seed)
    assert same(bits(model), bits(twin))


def test_a_group_added_later_is_split_by_shape_and_name_and_a_bad_one_leaves_nothing():
    model, optimizer = stepped(1, rules={"late.weight": Choice("gefen", "comes later")})
    late, head = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(ValueError, match=r"twice|more than one"):  # when Muon's part is in already
        optimizer.add_param_group({"params": [("more.weight", head), ("body.0.bias", model.body[0].bias)]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [("more.weight", late), ("late.weight", head)]})
    assert [(g["param_names"], g["rule"]) for g in optimizer.param_groups[2:]] == [
        (["more.weight"], "muon"),
        (["late.weight"], "gefen"),
    ]
    late.grad = torch.randn(64, 64)
    optimizer.step()
    assert late.detach().norm() > 0
    assert optimizer.routing().leaves[-1].path == "late.weight"


def squeezed(pair):
    return pickle.loads(pickle.dumps(pair))


def weights():
    torch.manual_seed(0)
    return nn.Sequential(linear(64, 96), nn.Tanh(), linear(96, 64))


MAKES = {
    "both": (model_zoo.gpt2, lambda model: GefenMuon(model, muon_lr=0.02)),
    "alone": (weights, lambda model: Muon(model.parameters())),
    "at random": (lambda: weights().bfloat16(), lambda model: Muon(model.parameters(), stochastic_rounding=True)),
    "both at random": (lambda: net().bfloat16(), lambda model: GefenMuon(model, stochastic_rounding=True)),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, squeezed])
@pytest.mark.parametrize(("build", "make"), MAKES.values(), ids=MAKES)
def test_copies_go_on_to_the_bit(build, make, copied):
    model = build()
    optimizer = make(model)
    step(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.03
    twin, other = copied((model, optimizer))
    step(model, optimizer, 1)
    step(twin, other, 1)
    assert same(bits(model), bits(twin))
    assert not same(bits(model), bits(build()))


@pytest.mark.parametrize("copied", [copy.deepcopy, squeezed])
def test_copies_tell_the_same_reasons_and_give_later_parameters_the_same_rate(copied):
    _, optimizer = stepped(1, muon_lr=0.02, rules={"body.2.weight": "gefen"})
    other = copied(optimizer)
    assert sorted(other.routing().leaves) == sorted(optimizer.routing().leaves)
    other.add_param_group({"params": [("late.weight", nn.Parameter(torch.zeros(64, 64)))]})
    assert (other.param_groups[-1]["lr"], len(optimizer.param_groups)) == (0.02, 2)


@pytest.mark.parametrize("damage", [float("inf"), float("nan")])
def test_an_overflow_leaves_both_parts_state_alone_m7(damage):
    model, optimizer = stepped()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, state = bits(model), copy.deepcopy(optimizer.state_dict())
    for p in model.parameters():
        p.grad = scaler.scale(torch.ones_like(p))
    model.lm_head.weight.grad[0, 0] = damage  # the backup's leaf stops Muon's part too
    scaler.step(optimizer)
    scaler.update()
    after = optimizer.state_dict()["state"]
    assert same(before, bits(model)) and scaler.get_scale() == 2.0
    assert all(torch.equal(x, after[i][key]) for i, leaves in state["state"].items() for key, x in leaves.items())
    for p in model.parameters():
        p.grad = torch.ones_like(p) * scaler.get_scale()
    scaler.step(optimizer)
    assert all(p.isfinite().all() for p in model.parameters()) and not same(before, bits(model))


def test_a_model_without_a_matrix_is_refused_unless_you_say_so_m6():
    model = Parts(table=nn.Embedding(64, 64), norm=nn.LayerNorm(64))
    with pytest.raises(ValueError, match=r"at least one matrix: got none among 3 leaves.*norm\.bias"):
        GefenMuon(model)
    assert set(rates(GefenMuon(model, require_muon=False))) == {"gefen"}


def experts():
    torch.manual_seed(0)
    return torch.randn(3, 64, 96)


def apart(whole, dim=0):
    return [nn.Parameter(part.clone()) for part in whole.unbind(dim)]


def follow(optimizer, whole, parts, steps=3, dim=0):
    """Steps a whole and its parts with the same gradients; the greatest difference of their parameters."""
    generator, start = torch.Generator().manual_seed(3), whole.detach().clone()
    for _ in range(steps):
        whole.grad = torch.randn(whole.shape, generator=generator)
        for p, grad in zip(parts, whole.grad.unbind(dim), strict=True):
            p.grad = grad.clone()
        for one in optimizer:
            one.step()
    assert (whole.detach() - start).norm() > 0
    return (whole.detach() - torch.stack([p.detach() for p in parts], dim)).abs().max() / (whole - start).abs().max()


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original", "none"])
def test_experts_step_as_separate_parameters_with_a_scale_each_m12(adjust, quantize):
    whole = nn.Parameter(experts())
    parts = apart(whole.detach())
    options = {"adjust_lr_fn": adjust, "quantize": quantize}
    both = Muon([whole], **options), Muon(parts, **options)
    assert follow(both, whole, parts) < 0.02


def test_heads_of_a_three_axis_weight_are_matrices_of_their_own_m12():
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(64, 4, 32))  # [inputs, heads, entries of a head]
    parts = apart(whole.detach(), 1)
    optimizer = GefenMuon([("w", whole)], rules={"w": MatrixAxes(2, 0)}, quantize=False)
    assert optimizer.routing().leaves[0].why == "your rule: 4 matrices 32 x 64"
    assert (
        follow(
            (optimizer, Muon(parts, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", quantize=False)),
            whole,
            parts,
            dim=1,
        )
        < 0.02
    )


FUSED = {
    "a linear layer": (
        lambda w: linear(64, 192),
        lambda w: w.unflatten(0, (3, 64)),
        MatrixAxes(0, 1, split=(64, 64, 64)),
    ),
    "GPT-2's": (lambda w: Conv1D(192, 64), lambda w: w.mT.unflatten(0, (3, 64)), MatrixAxes(1, 0, split=(64, 64, 64))),
}


@pytest.mark.parametrize(("make", "view", "axes"), FUSED.values(), ids=FUSED)
def test_a_fused_weight_that_is_split_steps_as_separate_parameters_m13(make, view, axes):
    torch.manual_seed(0)
    layer = make(None)
    parts = [nn.Parameter(part.detach().clone()) for part in view(layer.weight)]
    optimizer = GefenMuon(Parts(qkv=layer), rules={"*.weight": axes}, quantize=False)
    alone = Muon(parts, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", quantize=False)
    start = layer.weight.detach().clone()
    for seed in range(3):
        step(Parts(qkv=layer), optimizer, seed)
        for p, grad in zip(parts, view(layer.weight.grad), strict=True):
            p.grad = grad.contiguous()
        alone.step()
    moved = (layer.weight.detach() - start).abs().max()
    assert (view(layer.weight.detach()) - torch.stack([p.detach() for p in parts])).abs().max() < 0.02 * moved


@pytest.mark.parametrize("make", [GefenMuon, Muon])
def test_how_parts_of_a_matrix_are_made_orthogonal_is_one_of_four_modes_that_agree_on_a_whole_one_m14(make):
    def stepped_weight(sharded):
        p = nn.Parameter(torch.eye(64))
        p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        make([("w", p)], sharded=sharded).step()
        return p

    whole = stepped_weight("auto")
    assert all(torch.equal(whole, stepped_weight(mode)) for mode in ("distributed", "exact", "blockwise"))
    with pytest.raises(ValueError, match=r"`sharded` must be one of .*'exact'.*got 'full'"):
        make([("w", nn.Parameter(torch.eye(64)))], sharded="full")


def test_compiled_orthogonalization_equals_eager_m22():
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), orthogonalize(x))


def test_a_compiled_step_equals_an_eager_one_m22():
    torch.manual_seed(0)
    model = Parts(a=linear(64, 64, bias=True))
    optimizer = GefenMuon(model, codebook="fixed", backup="adamw")
    twin, other = copy.deepcopy((model, optimizer))
    fast = torch.compile(lambda: other.step(), backend="eager", fullgraph=True)
    for seed in range(2):
        step(model, optimizer, seed)
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        fast()
    assert same(bits(model), bits(twin))


def test_convolutions_and_experts_train_without_editing_the_model():
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
    model = nn.Sequential(nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 2), nn.Flatten(), nn.Linear(64, 10))
    optimizer = GefenMuon(model, 1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.routing().labels["0.weight"] == optimizer.routing().labels["2.weight"] == "muon"
    assert losses[-1] < 0.5 * losses[0]


ADJUST = [None, "original", "match_rms_adamw"]


@pytest.mark.parametrize("adjust", ADJUST)
def test_muon_takes_the_arguments_of_torch_and_follows_it(adjust):
    given = (0.02, 0.2, 0.9, False, (3.0, -4.0, 2.0), 1e-6, 4, adjust)
    torch.manual_seed(0)
    start = torch.randn(96, 64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    both = Muon([ours], *given, quantize=False), torch.optim.Muon([theirs], *given)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        ours.grad = torch.randn(start.shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in both:
            optimizer.step()
    assert (ours - theirs).norm() < 0.01 * (theirs - start).norm()


TRIPLE = (3.4445, -4.775, 2.0315)
FILLED = {
    "as they are": ({}, {}),
    "by name": ({}, {"ns_coefficients": "standard", "adjust_lr_fn": "original"}),
    "other iterations": (
        {"ns_coefficients": (3.0, -4.0, 2.0), "ns_steps": 4},
        {"ns_coefficients": [(3.0, -4.0, 2.0)] * 4},
    ),
    "no look ahead": ({"nesterov": False, "eps": 1e-6}, {"nesterov": False, "eps": 1e-6}),
    "AdamW's rates": ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust_lr_fn": "match_rms_adamw"}),
}


def filled(**options):
    """Groups as torch's Muon leaves them, a value of each key."""
    groups = [{"params": [("w", nn.Parameter(torch.eye(64)))], "lr": 0.5, "momentum": 0.9}]
    torch.optim.Muon(groups, **options)
    return groups


@pytest.mark.parametrize(("theirs", "ours"), FILLED.values(), ids=FILLED)
def test_groups_that_torchs_muon_has_filled_are_taken_where_they_say_what_the_arguments_do(theirs, ours):
    optimizer = Muon(filled(**theirs), **ours)
    assert [optimizer.param_groups[0][key] for key in ("lr", "momentum", "weight_decay")] == [0.5, 0.9, 0.1]
    again = squeezed(optimizer)
    again.load_state_dict(reloaded(optimizer.state_dict()))
    assert again.param_groups[0]["lr"] == 0.5


OTHERWISE = {
    "nesterov": False,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 4,
    "adjust_lr_fn": "match_rms_adamw",
    "eps": 1e-6,
}


@pytest.mark.parametrize(("key", "value"), OTHERWISE.items(), ids=OTHERWISE)
def test_groups_that_say_otherwise_are_refused_by_the_key_and_told_where_it_belongs(key, value):
    text = rf"`{key}` must be .* in all groups: got .*\. Give it to the optimizer"
    with pytest.raises(ValueError, match=text):
        Muon(filled(**{key: value}))
    optimizer = Muon(filled())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][key] = value
    with pytest.raises(CheckpointError, match=text):
        optimizer.load_state_dict(saved)


def test_torchs_own_state_is_refused_with_the_way_to_take_it():
    groups = filled()
    with pytest.raises(CheckpointError, match=r"convert_state.*AdamW and Muon"):
        Muon(filled()).load_state_dict(torch.optim.Muon(groups).state_dict())


def test_both_parts_of_a_split_group_that_torchs_muon_has_filled_are_one_rule():
    assert rates(GefenMuon(filled(), adjust_lr_fn=None)) == {"muon": 0.5}
    with pytest.raises(ValueError, match="`adjust_lr_fn` must be 'match_rms_adamw' in all groups: got None"):
        GefenMuon(filled())


def test_coefficients_are_a_triple_a_name_or_triples():
    def weight(**options):
        p = nn.Parameter(torch.eye(64))
        p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        Muon([p], 0.1, **options).step()
        return p.detach()

    assert torch.equal(weight(), weight(ns_coefficients="standard"))
    assert torch.equal(weight(ns_steps=2), weight(ns_coefficients=[TRIPLE, TRIPLE]))
    assert not torch.equal(weight(), weight(ns_coefficients="tuned4"))


def test_stochastic_rounding_is_of_both_parts_and_the_same_in_place():
    model, optimizer = stepped(dtype=torch.bfloat16, stochastic_rounding=True)
    pure = stepped(dtype=torch.bfloat16, stochastic_rounding=True, fused=False)[0]
    nearest = stepped(dtype=torch.bfloat16)[0]
    assert same(bits(model), bits(pure))
    same_as_nearest = zip(model.parameters(), nearest.parameters(), strict=True)
    assert not any(torch.equal(p, q) for p, q in same_as_nearest)
    assert {"stochastic_rounding.count"} <= set(optimizer.state[model.lm_head.weight])
    fused = str(fuse(optimizer.transform))
    assert fused.endswith("scale_by_learning_rate + stochastic_rounding for 'gefen'") and "muon" not in fused


def test_a_step_that_looks_for_bad_gradients_is_refused_as_capturable():
    for make in (GefenMuon, lambda model, **options: Muon(weights().parameters(), **options)):
        with pytest.raises(ValueError, match=r"`error_if_nonfinite` must be False.*capturable=True"):
            make(net(), capturable=True, error_if_nonfinite=True)


def test_maximize_ascends():
    p, q = (nn.Parameter(torch.eye(64)) for _ in range(2))
    p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    q.grad = -p.grad
    GefenMuon([("w", p)], maximize=True).step()
    GefenMuon([("w", q)]).step()
    assert torch.equal(p, q)


REFUSED = {
    "no names": (lambda: GefenMuon(net().parameters()), TypeError, "must have names.*`model.named_parameters"),
    "no parameters": (lambda: GefenMuon([]), ValueError, "empty parameter list"),
    "a backup": (lambda: GefenMuon(net(), backup="sgd"), ValueError, "`backup`.*got 'sgd'"),
    "a scale": (lambda: Muon([torch.zeros(64, 64)], adjust_lr_fn="rms"), ValueError, "`adjust_lr_fn`.*got 'rms'"),
    "an eps": (lambda: Muon([torch.zeros(64, 64)], eps=-1.0), ValueError, "^0 <= eps"),
    "a mode": (lambda: GefenMuon(net(), sharded="full"), ValueError, "^`sharded`"),
    "a vector": (lambda: Muon([("b", nn.Parameter(torch.zeros(64)))]), ValueError, "leaf `b`.*fewer than 2 axes"),
    "iterations": (lambda: Muon([torch.zeros(64, 64)], ns_steps=0), ValueError, "`ns_steps`"),
    "steps of a name": (
        lambda: Muon([torch.zeros(64, 64)], ns_coefficients="tuned3", ns_steps=3),
        ValueError,
        "`ns_steps` repeats one triple: got 3 beside 'tuned3'",
    ),
    "two coefficients": (
        lambda: Muon([torch.zeros(64, 64)], ns_coefficients=(1.0, 2.0)),
        TypeError,
        r"^`ns_coefficients` must be one triple.* got \(1.0, 2.0\)",
    ),
    "no coefficients": (
        lambda: GefenMuon(net(), ns_coefficients=None),
        TypeError,
        "^`ns_coefficients` must be one triple.* got None",
    ),
    "a coefficient that is none": (
        lambda: Muon([torch.zeros(64, 64)], ns_coefficients=(1.0, 2.0, float("nan"))),
        TypeError,
        "^`ns_coefficients` must be one triple.* got .*nan",
    ),
    "an unknown name": (
        lambda: Muon([torch.zeros(64, 64)], ns_coefficients="best"),
        ValueError,
        "^`ns_coefficients` must be one triple.* got 'best'",
    ),
    "a rule for nothing": (
        lambda: GefenMuon(net(), rules={"lm_haed.weight": "muon"}),
        ValueError,
        "got 'lm_haed.weight'.*Did you mean 'lm_head.weight'",
    ),
    "a rate": (lambda: GefenMuon(net(), muon_lr=-1.0), ValueError, "`muon_lr`.*-1.0"),
    "a momentum": (lambda: GefenMuon(net(), momentum=1.0), ValueError, "momentum"),
    "an odd key": (
        lambda: GefenMuon([{"params": net().named_parameters(), "dampening": 0.1}]),
        ValueError,
        "dampening",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_means_nothing_is_refused_with_a_reason(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_the_state_has_a_view_and_the_optimizer_a_text():
    model, optimizer = stepped()
    assert {"scale_by_muon.mu.codes", "scale_by_muon.mu.absmax"} <= set(optimizer.state[model.body[0].weight])
    assert any(key.startswith("scale_by_gefen.nu") for key in optimizer.state[model.lm_head.weight])
    assert "rule: muon" in repr(optimizer) and "gefen_muon" in repr(optimizer)
    assert "body.0.weight" in str(optimizer.describe())


def test_a_name_that_stands_twice_is_refused_and_a_refused_group_leaves_no_choice_behind():
    twice = [("x", nn.Parameter(torch.zeros(64, 64))), ("x", nn.Parameter(torch.zeros(64, 32)))]
    with pytest.raises(ValueError, match="appears once"):
        GefenMuon(twice)
    optimizer = GefenMuon([("w", nn.Parameter(torch.zeros(64, 64)))])
    optimizer.add_param_group({"params": [("v", nn.Parameter(torch.zeros(7)))]})
    with pytest.raises(ValueError, match="appears once"):
        optimizer.add_param_group({"params": [("v", nn.Parameter(torch.zeros(64, 64)))]})
    assert "v" in str(optimizer.routing())


def test_a_matrix_without_columns_takes_part_and_changes_nothing_of_the_others():
    w, empty = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 0))
    optimizer = Muon([("w", w), ("empty", empty)], lr=0.1, spec=MatrixAxes(0, 1))
    w.grad, empty.grad = torch.randn(64, 64), torch.zeros(64, 0)
    optimizer.step()
    assert w.abs().sum() > 0


def test_where_no_leaf_has_codes_there_is_no_codebook_to_learn_before_a_compiled_step():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    optimizer = GefenMuon(model, lr=0.01)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    torch.compile(lambda: optimizer.step(), backend="eager")()
