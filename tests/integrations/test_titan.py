"""A loop as torchtitan's: FSDP2, micro-batches, a clip, a schedule, and stock checkpoints, on two processes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gefen_nn import Gefen, GefenMuon
from gefen_nn.demo_model import Decoder, next_byte_loss
from tests.distributed.adapter import tensors
from tests.distributed.training import mesh_of

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "gefen": lambda model: Gefen(model.named_parameters(), lr=1e-3, weight_decay=0.1),
    "gefen without names": lambda model: Gefen(model.parameters(), lr=1e-3, weight_decay=0.1),
    "gefen_muon": lambda model: GefenMuon(model, lr=1e-3, weight_decay=0.1),
}


class ModelWrapper(Stateful):
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return torch_state.get_model_state_dict(self.model)

    def load_state_dict(self, state_dict):
        torch_state.set_model_state_dict(self.model, state_dict)


class OptimizerWrapper(Stateful):
    flat = torch_state.StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return torch_state.get_optimizer_state_dict(self.model, self.optimizer, options=self.flat)

    def load_state_dict(self, state_dict):
        torch_state.set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.flat)


class Both(Stateful):
    """Model and optimizer by one call, in the nested form, as torch's tutorial has them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = torch_state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict):
        parts = {"model_state_dict": state_dict["model"], "optim_state_dict": state_dict["optimizer"]}
        torch_state.set_state_dict(self.model, self.optimizer, **parts)


class Run:
    def __init__(self, kind, nested):
        torch.manual_seed(0)
        self.model = Decoder(dim=64, layers=2, heads=2, hidden=176, context=16)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.model.blocks, self.model):
            fully_shard(part, mesh=mesh_of((2,)), mp_policy=policy)
        self.optimizer = OPTIMIZERS[kind](self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 4))
        held = {"both": Both(self.model, self.optimizer)} if nested else self.wrapped()
        self.state = {**held, "schedule": self.schedule}

    def wrapped(self):
        return {"model": ModelWrapper(self.model), "optimizer": OptimizerWrapper(self.model, self.optimizer)}

    def steps(self, rank, first, last):
        for step in range(first, last + 1):
            for micro in range(2):
                self.model.set_requires_gradient_sync(micro == 1)
                seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                tokens = torch.randint(0, 256, (4, 17), generator=seed)
                (next_byte_loss(self.model, tokens) / 2).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return self

    def whole(self):
        return tensors(self.model, self.optimizer)


def resumed_beside_uninterrupted(rank, kind, how, folder):
    """Names of the tensors that differ after six steps, and how many there are with codes that do not."""
    first, second = Run(kind, how == "nested").steps(rank, 1, 3), Run(kind, how == "nested")
    if how == "async":
        apart = dist.new_group(backend="gloo")  # the thread that writes must not meet the steps' collectives
        writing = dcp.async_save(first.state, checkpoint_id=folder, process_group=apart)
        first.steps(rank, 4, 6)  # while it is written
        writing.result()
    else:
        dcp.save(first.state, checkpoint_id=folder)
        first.steps(rank, 4, 6)
    with torch.no_grad():
        for p in second.model.parameters():
            p.zero_()
    dcp.load(second.state, checkpoint_id=folder)
    one, other = first.whole(), second.steps(rank, 4, 6).whole()
    lr = [[group["lr"] for group in run.optimizer.param_groups] for run in (first, second)]
    differ = [key for key in one if not torch.equal(one[key], other[key])]
    codes = [x for x in one.values() if x.dtype == torch.uint8 and x.float().var() > 0]
    return differ, one.keys() == other.keys(), lr[0] == lr[1], len(codes)


@pytest.mark.parametrize("how", ["flattened", "async", "nested"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_loop_is_the_uninterrupted_one(kind, how, pools, tmp_path):
    for answer in pools(2).run(resumed_beside_uninterrupted, kind, how, str(tmp_path / "step-3"), seconds=120.0):
        differ, same_names, same_rates, codes = answer
        assert differ == [] and same_names and same_rates and codes
