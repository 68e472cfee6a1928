"""What workers run with a decoder: the same gradients on any layout, moves between layouts, and real training."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gefen_nn import Gefen, GefenMuon, load, save
from gefen_nn.demo_data import batch_at, standard_library_text
from gefen_nn.demo_model import Decoder, next_byte_loss
from tests.distributed.adapter import give_gradients, tensors
from tests.distributed.training import mesh_of

OPTIMIZERS = {
    "gefen": lambda model, **options: Gefen(model.named_parameters(), **options),
    "gefen_muon": GefenMuon,
}
TENSOR_PARALLEL = {
    "blocks.0.attention.qkv": ColwiseParallel,
    "blocks.0.attention.out": RowwiseParallel,
    "blocks.0.feed_forward.gate_up": ColwiseParallel,
    "blocks.0.feed_forward.down": RowwiseParallel,
}
Layout = tuple[str, Sequence[int] | None]
Digests = dict[str, str]
ONE: Layout = ("fsdp", None)


def decoder(layout: Layout) -> nn.Module:
    """A decoder of d 512 and hidden 1024, whose rows and columns can be cut between blocks.

    "fsdp" on a mesh of two sides is HSDP; "tp" cuts the block's matrices over the inner side, and what it leaves over
    the outer one.
    """
    kind, sides = layout
    torch.manual_seed(0)
    model = Decoder(dim=512, layers=1, heads=8, hidden=1024, context=16)
    if sides is not None:
        mesh = mesh_of(sides)
        if kind == "tp":
            parallelize_module(model, mesh["inner"], {name: style() for name, style in TENSOR_PARALLEL.items()})
        fully_shard(model, mesh=mesh["outer"] if kind == "tp" else mesh)
    return model


class Run:
    """A decoder and its optimizer, given the same gradients on any layout."""

    def __init__(self, optimizer: str, layout: Layout) -> None:
        self.model = decoder(layout)
        self.optimizer = OPTIMIZERS[optimizer](self.model, lr=1e-2, weight_decay=0.1)

    def steps(self, first: int, last: int) -> "Run":
        """Take steps `first .. last`."""
        for step in range(first, last + 1):
            give_gradients(self.model, step)
            self.optimizer.step()
        return self

    def digests(self) -> Digests:
        """A hash of each parameter and each tensor of the state, whole."""
        return {name: _digest(x) for name, x in tensors(self.model, self.optimizer).items()}


def _digest(x: Tensor) -> str:
    raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{x.dtype} {tuple(x.shape)} {hashlib.sha256(raw).hexdigest()}"


def digests_after(rank: int, optimizer: str, layout: Layout, *moments: int) -> list[Digests]:
    """What a run that nothing interrupts holds at some of its steps, ascending."""
    run, taken, out = Run(optimizer, layout), 0, []
    for moment in moments:
        out.append(run.steps(taken + 1, moment).digests())
        taken = moment
    return out


def save_at(rank: int, optimizer: str, layout: Layout, last: int, folder: str) -> None:
    """Steps `1 .. last`, then a save."""
    run = Run(optimizer, layout).steps(1, last)
    save(folder, run.model, run.optimizer, step=last)


def resume(rank: int, optimizer: str, layout: Layout, folder: str) -> list[Digests]:
    """What a load gives, and what one more step makes of it."""
    run = Run(optimizer, layout)
    with torch.no_grad():
        for p in run.model.parameters():
            p.zero_()
    step = load(folder, run.model, run.optimizer).extra["step"]
    return [run.digests(), run.steps(step + 1, step + 1).digests()]


def losses(rank: int, optimizer: str, kind: str, steps: int) -> list[float]:
    """Losses of the demo's model on the demo's text, while the rate rises as it does at the start of a training.

    "alone" is one process, "fsdp" and "ddp" all workers, which share out each batch as evenly as it goes.
    """
    rank, world = (0, 1) if kind == "alone" else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model: nn.Module = Decoder()
    net = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "fsdp":
        fully_shard(model, mesh=mesh_of((world,)))
    tx = OPTIMIZERS[optimizer](model, lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(tx, lambda at: (at + 1) / (2 * steps))
    text, out = standard_library_text().train, []
    for step in range(steps):
        batch = batch_at(text, step, seed=0, batch=8, context=64)
        own = batch[rank::world]
        loss = next_byte_loss(net, own) * (len(own) * world / len(batch))  # the mean of these is the batch's
        loss.backward()
        tx.step()
        tx.zero_grad()
        schedule.step()
        out.append(_mean(loss.detach(), world))
    return out


def _mean(x: Tensor, world: int) -> float:
    if world > 1:
        dist.all_reduce(x)
    return x.item() / world
