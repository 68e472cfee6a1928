"""What workers run with the torch optimizer: FSDP2 models, steps, and stock checkpoints."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gefen_nn import Gefen
from tests.distributed.training import mesh_of, noise, whole


class Net(nn.Module):
    """A few matrices that no power of two divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 300), nn.Linear(300, 64, bias=False), nn.LayerNorm(64)
        self.head = nn.Linear(64, 257, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


def build(sides: Sequence[int] | None, **options: Any) -> tuple[nn.Module, Gefen]:
    """A model of fixed weights, sharded over a mesh, and its optimizer."""
    torch.manual_seed(0)
    model = Net()
    if sides is not None:
        fully_shard(model, mesh=mesh_of(sides))
    return model, Gefen(model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)


def give_gradients(model: nn.Module, step: int) -> None:
    """The same gradients on any mesh."""
    for name, p in model.named_parameters():
        g = noise(name, p.shape, step).to(p.dtype)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g


def tensors(model: nn.Module, optimizer: Gefen) -> dict[str, Tensor]:
    """Parameters and state by name, whole."""
    out = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    names = {p: name for name, p in model.named_parameters()}
    for p, leaves in optimizer.state.items():
        out.update({f"{names[p]}: {key}": whole(x).clone() for key, x in leaves.items()})
    return out


def take_steps(rank: int, sides: Sequence[int] | None, first: int, last: int, **options: Any) -> Any:
    """Parameters and state after steps `first .. last - 1`."""
    model, optimizer = build(sides, **options)
    for step in range(first, last):
        give_gradients(model, step)
        optimizer.step()
    out = tensors(model, optimizer)
    return out if rank == 0 else None


def save(rank: int, sides: Sequence[int], folder: str, flat: bool) -> Any:
    """Two steps, then a stock checkpoint; what it holds."""
    model, optimizer = build(sides)
    for step in (1, 2):
        give_gradients(model, step)
        optimizer.step()
    dcp.save(_stock(model, optimizer, flat), checkpoint_id=folder)
    out = tensors(model, optimizer)
    return out if rank == 0 else None


def load(rank: int, sides: Sequence[int], folder: str, flat: bool) -> Any:
    """What comes out of a stock checkpoint, and what one more step makes of it."""
    model, optimizer = build(sides)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    stock = _stock(model, optimizer, flat)
    dcp.load(stock, checkpoint_id=folder)
    model.load_state_dict(stock["model"])
    set_optimizer_state_dict(model, optimizer, stock["optimizer"], options=_options(flat))
    loaded = tensors(model, optimizer)
    give_gradients(model, 3)
    optimizer.step()
    out = tensors(model, optimizer)
    return (loaded, out) if rank == 0 else None


def _stock(model: nn.Module, optimizer: Gefen, flat: bool) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_options(flat)),
    }


def _options(flat: bool) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=flat)
