"""DistributedDataParallel with `no_sync` and a gradient scaler, on two processes, resumed from rank 0's file."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gefen_nn import Gefen, GefenMuon
from gefen_nn.demo_model import Decoder, next_byte_loss
from tests.distributed.adapter import tensors

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "gefen": lambda model: Gefen(model.named_parameters(), lr=1e-3, weight_decay=0.1),
    "gefen_muon": lambda model: GefenMuon(model, lr=1e-3, weight_decay=0.1),
}
OVERFLOWS = 2  # the step that the scaler leaves out


class Run:
    def __init__(self, kind):
        torch.manual_seed(0)
        self.model = Decoder(dim=64, layers=2, heads=2, hidden=176, context=16)
        self.optimizer = OPTIMIZERS[kind](self.model)  # before the model is wrapped, which puts `module.` before names
        self.net = DistributedDataParallel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.held = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def micro(self, rank, step, number):
        seed = torch.Generator().manual_seed(100 * step + 10 * number + rank)
        tokens = torch.randint(0, 256, (4, 17), generator=seed)
        with nullcontext() if number else self.net.no_sync():
            loss = next_byte_loss(self.net, tokens) / 2
            self.scaler.scale(loss * float("inf") if step == OVERFLOWS else loss).backward()

    def steps(self, rank, first, last):
        for step in range(first, last + 1):
            for number in range(2):
                self.micro(rank, step, number)
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            before = tensors(self.model, self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            after = tensors(self.model, self.optimizer)
            assert all(torch.equal(x, after[key]) for key, x in before.items()) == (step == OVERFLOWS)
        return self


def resumed_beside_uninterrupted(rank, kind, path):
    """Tensors of both after five steps."""
    first, second = Run(kind).steps(rank, 1, 3), Run(kind)
    if rank == 0:
        torch.save({key: x.state_dict() for key, x in first.held.items()}, path)
    dist.barrier()
    saved = torch.load(path, weights_only=True)
    for key, x in second.held.items():
        x.load_state_dict(saved[key])
    return [tensors(run.model, run.optimizer) for run in (first.steps(rank, 4, 5), second.steps(rank, 4, 5))]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replicas_stay_alike_and_resume_to_the_bit(kind, pools, tmp_path):
    answers = pools(2).run(resumed_beside_uninterrupted, kind, str(tmp_path / "run.pt"), seconds=120.0)
    runs = [run for pair in answers for run in pair]
    assert len(runs) == 4 and any(x.dtype == torch.uint8 for x in runs[0].values())
    for other in runs[1:]:
        assert other.keys() == runs[0].keys()
        assert [key for key, x in other.items() if not torch.equal(x, runs[0][key])] == []
