"""Accelerate: `prepare`, accumulation, whole states saved and loaded, steps left out, and parameters put in place."""

import gc
import os
import warnings
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gefen_nn import Gefen, GefenMuon, load, save
from tests.distributed.adapter import give_gradients, tensors
from tests.distributed.training import mesh_of
from tests.integrations import tiny

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "gefen": lambda model: Gefen(model.named_parameters(), lr=1e-3, weight_decay=0.1),
    "positions": lambda model: Gefen(model.parameters(), lr=1e-3),
    "gefen_muon": lambda model: GefenMuon(model, lr=1e-3, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps one state for the whole process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def accelerator_with(**options):
    from accelerate import Accelerator

    return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def prepared(build, **options):
    return prepared_by(accelerator_with(**options), build)


def prepared_by(accelerator, build):
    model = tiny.llama()
    optimizer = build(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train(accelerator, model, optimizer, scheduler, batches):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def train_plainly(model, optimizer, scheduler, batches):
    """The same without Accelerate."""
    for number, batch in enumerate(batches, 1):
        (model(**batch).loss / 2).backward()
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_prepared_optimizer_steps_as_it_does_alone(build):
    run = prepared(build)
    train(*run, tiny.batches(6))
    model = tiny.llama()
    optimizer = build(model)
    train_plainly(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), tiny.batches(6))
    tiny.assert_same(tiny.bits(*run[1:3]), tiny.bits(model, optimizer))
    assert [g["lr"] for g in run[2].param_groups] == [g["lr"] for g in optimizer.param_groups]
    tiny.assert_quantized(optimizer)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_loaded_state_goes_on_as_the_saved_one(build, precision, tmp_path):
    rows = tiny.batches(8)
    whole = prepared(build, mixed_precision=precision)
    train(*whole, rows[:4])
    whole[0].save_state(str(tmp_path))
    train(*whole, rows[4:])
    resumed = prepared(build, mixed_precision=precision)
    resumed[0].load_state(str(tmp_path))
    train(*resumed, rows[4:])
    tiny.assert_same(tiny.bits(*whole[1:3]), tiny.bits(*resumed[1:3]))
    assert [g["lr"] for g in whole[2].param_groups] == [g["lr"] for g in resumed[2].param_groups]


def test_our_folders_take_the_optimizer_inside_the_wrapper(tmp_path):
    run = prepared(OPTIMIZERS["gefen_muon"])
    train(*run, tiny.batches(2))
    _, model, wrapper, _ = run
    with pytest.raises(TypeError, match="A wrapper may hold yours as its `optimizer`"):
        save(tmp_path / "run", model, wrapper)
    save(tmp_path / "run", model, wrapper.optimizer)
    other = prepared(OPTIMIZERS["gefen_muon"])
    load(tmp_path / "run", other[1], other[2].optimizer)
    tiny.assert_same(tiny.bits(model, wrapper), tiny.bits(*other[1:3]))


def test_a_step_that_a_scaler_leaves_out_changes_nothing():
    from accelerate.optimizer import AcceleratedOptimizer

    prepared(OPTIMIZERS["gefen"])
    model = tiny.llama()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = AcceleratedOptimizer(OPTIMIZERS["gefen"](model), scaler=scaler)
    for bad in (False, True, False):
        before = tiny.bits(model, optimizer)
        scaler.scale(model(**tiny.batches(1)[0]).loss).backward()
        if bad:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        after = tiny.bits(model, optimizer)
        assert optimizer.step_was_skipped == bad == all(torch.equal(x, after[k]) for k, x in before.items())


def test_parameters_that_the_wrapper_replaces_keep_their_state_i1():
    rows = tiny.batches(4)
    run, twin = prepared(OPTIMIZERS["gefen_muon"]), prepared(OPTIMIZERS["gefen_muon"])
    for each in (run, twin):
        train(*each, rows[:2])
    _, model, optimizer, _ = run
    new = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            new[p] = nn.Parameter(p.detach().clone())
            setattr(module, name, new[p])
    optimizer._switch_parameters(new)  # as Accelerate does on a TPU
    for each in (run, twin):
        train(*each, rows[2:])
    tiny.assert_same(tiny.bits(*run[1:3]), tiny.bits(*twin[1:3]))


def prepared_under_fsdp2(rank, kind, form):
    """As `prepared`, by what Accelerate does on two GPUs; it has FSDP2 nowhere else, and is told that it is there."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    model = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # neither is used: there is a group
    with patch.dict(os.environ, launched):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type=form, **model
        )
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator = accelerator_with()
    accelerator.state.fsdp_plugin = plugin
    run = prepared_by(accelerator, OPTIMIZERS[kind])
    assert all(isinstance(p, DTensor) for group in run[2].param_groups for p in group["params"])
    return run


def resumed_under_fsdp2(rank, kind, form, folder):
    """Names of what differs from a run that nothing interrupted, and of what there is."""
    rows = tiny.batches(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = prepared_under_fsdp2(rank, kind, form)
        train(*whole, rows[:4])
        whole[0].save_state(folder)
        train(*whole, rows[4:])
        resumed = prepared_under_fsdp2(rank, kind, form)
        resumed[0].load_state(folder)
        train(*resumed, rows[4:])
    first, second = (tensors(model, optimizer) for _, model, optimizer, _ in (whole, resumed))
    rates = [[group["lr"] for group in run[2].param_groups] for run in (whole, resumed)]
    return [key for key, x in first.items() if not torch.equal(x, second[key])], sorted(first), rates[0] == rates[1]


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_that_prepare_shards_under_fsdp2_take_their_state_along_i1(kind, form, pools, tmp_path):
    for answer in pools(2).run(resumed_under_fsdp2, kind, form, str(tmp_path), seconds=240.0):
        differ, names, same_rates = answer
        assert differ == [] and same_rates
        assert any(name.endswith("mu.codes") or name.endswith("momentum.codes") for name in names)


def overflow_under_fsdp2(rank):
    """Whether nothing changed, and what the wrapper and the optimizer say of a step that one process cannot take."""
    from accelerate.optimizer import AcceleratedOptimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, model, wrapped, _ = prepared_under_fsdp2(rank, "gefen", "SHARDED_STATE_DICT")
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        scaled = AcceleratedOptimizer(wrapped.optimizer, device_placement=False, scaler=scaler)
        before = tensors(model, scaled)
        scaler.scale(model(**tiny.batches(1)[0]).loss).backward()
        if rank == 1:
            next(model.parameters()).grad.to_local().view(-1)[0] = float("inf")
        scaled.step()
    after = tensors(model, scaled)
    unchanged = all(torch.equal(x, after[key]) for key, x in before.items())
    return unchanged, scaled.step_was_skipped, scaled.optimizer.step_was_skipped


def test_under_fsdp2_the_optimizer_and_not_the_wrapper_knows_of_a_step_left_out(pools):
    assert pools(2).run(overflow_under_fsdp2, seconds=120.0) == [(True, False, True)] * 2


class Rows(nn.Module):
    """Matrices with quantized state, of which two processes have unequal parts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 301), nn.Linear(301, 64, bias=False)


def switched(rank, kind, switch):
    """Tensors after 3 steps; with `switch` the model is sharded when the optimizer is there, as Accelerate does it."""
    from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters

    torch.manual_seed(0)
    model = Rows()
    if not switch:
        fully_shard(model, mesh=mesh_of((2,)))
    optimizer = OPTIMIZERS[kind](model)
    if switch:
        names = {p.data_ptr(): name for name, p in model.named_parameters()}
        whole = list(map(weakref.ref, model.parameters()))
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):  # nothing may hold the whole parameters while they are sharded
                group["params"][i] = torch.empty(1)
                group["params"][i].data_ptr = p.data_ptr()
        del p
        fully_shard(model, mesh=mesh_of((2,)))
        gc.collect()
        assert not any(ref() is not None for ref in whole)
        sharded = dict(model.named_parameters())
        fsdp2_switch_optimizer_parameters(optimizer, {at: sharded[name] for at, name in names.items()})
    for step in (1, 2, 3):
        give_gradients(model, step)
        optimizer.step()
    return tensors(model, optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_sharded_late_step_as_those_sharded_early_and_nothing_holds_the_whole_ones(kind, pools):
    late, early = (pools(2).run(switched, kind, switch, seconds=120.0)[0] for switch in (True, False))
    tiny.assert_same(late, early)
