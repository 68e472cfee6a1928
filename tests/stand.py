"""A stand-in for a host: its tensors lie beside the parameters, but all that would go elsewhere is copied."""

import weakref

import torch
from torch import Tensor

from gefen_nn.offload import Host


class Stand(Host):
    """Counts copies, and the bytes that were fetched and are still held; the copy or write `fails_at` fails."""

    page = 9_000

    def __init__(self) -> None:
        super().__init__("cpu")
        self.done = {"copy": 0, "write": 0}
        self.fails_at: dict[str, int] = {}
        self.held = self.most = 0

    def apart(self, home: torch.device) -> bool:
        return True

    def count(self, kind: str) -> None:
        self.done[kind] += 1
        if self.done[kind] == self.fails_at.get(kind):
            raise OSError("the bus is gone")

    def take(self, x: Tensor, home: torch.device) -> Tensor:
        self.count("copy")
        return x.clone()

    def copy(self, x: Tensor, device: torch.device) -> Tensor:
        self.count("copy")
        fetched = x.clone()
        self.held += x.nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(fetched, self.leave, x.nbytes)
        return fetched

    def leave(self, size: int) -> None:
        self.held -= size

    def write(self, x: Tensor, into: Tensor) -> None:
        self.count("write")
        super().write(x, into)

    def fail(self, kind: str, after: int) -> None:
        self.done, self.fails_at = {"copy": 0, "write": 0}, {kind: after}
