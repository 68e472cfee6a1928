"""The demo's training runs: one model and optimizer per run, stepped, saved, resumed and compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gefen_fn.state_io import state_bytes
from gefen_nn import checkpoint
from gefen_nn.demo_data import Text, batch_at
from gefen_nn.demo_model import Decoder, next_byte_loss
from gefen_nn.errors import CheckpointError
from gefen_nn.muon import GefenMuon
from gefen_nn.presets import Gefen
from gefen_nn.training import lr_factor, take_step

# Each takes the model.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda model, **options: torch.optim.AdamW(model.parameters(), **options),
    "gefen": lambda model, **options: Gefen(model.named_parameters(), **options),
    "gefen_muon": GefenMuon,
}
LABELS = {"adamw": "AdamW", "gefen": "Gefen", "gefen_muon": "GefenMuon"}
# Near the best of a grid for each, as `gefen compare` finds them.
RATES = {"adamw": 2e-3, "gefen": 2e-3, "gefen_muon": 8e-3}
_VALIDATION_BATCHES = 16


class Settings(NamedTuple):
    """What a run depends on besides its optimizer; plain values, so that a checkpoint can carry them."""

    steps: int = 300
    seed: int = 0
    batch: int = 8
    context: int = 128
    # One thread: two gain a model this small little, and wait long for each other on a busy machine.
    threads: int = 1
    weight_decay: float = 0.1


class Run:
    """One model, its optimizer and schedule, with the losses and times of the steps taken.

    Args:
        name: A key of `OPTIMIZERS`.
        settings: Seed and sizes; runs with equal settings start from equal parameters.
        mesh: The processes that share parameters, state and each batch by FSDP2; None if this one is alone.
    """

    def __init__(self, name: str, settings: Settings, mesh: DeviceMesh | None = None) -> None:
        self.name, self.settings, self.step = name, settings, 0
        self._rank, self._world = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.step_seconds: list[float] = []
        self.optimizer_seconds: list[float] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model = Decoder(context=settings.context)
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        options = {"lr": RATES[name], "betas": (0.9, 0.99), "weight_decay": settings.weight_decay}
        self.optimizer = OPTIMIZERS[name](self.model, **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda at: lr_factor(at, settings.steps))

    def train_step(self, text: Text) -> float:
        """Takes one step on the batch of the current step number.

        Args:
            text: What to train on.

        Returns:
            The loss before the step, in nats per byte.
        """
        settings = self.settings
        batch = batch_at(text.train, self.step, seed=settings.seed, batch=settings.batch, context=settings.context)
        started = time.perf_counter()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves `backward` unannotated
        self.optimizer_seconds.append(take_step(self.optimizer, self.scheduler))
        self.step_seconds.append(time.perf_counter() - started)
        self.losses.append(self._mean(loss))
        self.step += 1
        return self.losses[-1]

    def _loss(self, batch: Tensor) -> Tensor:
        """The loss of this process's sequences, of such weight that the mean over processes is that of the batch."""
        own = batch[self._rank :: self._world]
        return next_byte_loss(self.model, own) * (len(own) * self._world / len(batch))

    def _mean(self, loss: Tensor) -> float:
        mean = loss.detach().clone()
        if self._world > 1:
            dist.all_reduce(mean)
        return mean.item() / self._world

    def validate(self, text: Text) -> None:
        """Notes the present step and its validation loss; changes nothing that training depends on.

        Args:
            text: Whose held-out part judges.
        """
        self.validation.append((self.step, self.validation_loss(text)))

    @torch.no_grad()
    def validation_loss(self, text: Text) -> float:
        """Mean loss over fixed batches of the held-out files, in nats per byte."""
        size = {"batch": self.settings.batch, "context": self.settings.context}
        batches = [batch_at(text.validation, index, seed=0, **size) for index in range(_VALIDATION_BATCHES)]
        return sum(next_byte_loss(self.model, batch).item() for batch in batches) / _VALIDATION_BATCHES

    def parameter_count(self) -> int:
        """Trained entries."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def final_tensors(self) -> dict[str, Tensor]:
        """The model's and the optimizer's tensors by name."""
        state = self.optimizer.state_dict()["state"]
        kept = {f"optimizer.{i}.{key}": value for i, entry in state.items() for key, value in entry.items()}
        return {**self.model.state_dict(prefix="model."), **kept}

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, a tensor shared between parameters counted once."""
        return state_bytes([list(entry.values()) for entry in self.optimizer.state.values()])

    def save(self, path: Path) -> None:
        """Writes model, optimizer, schedule and step; the file appears whole or not at all.

        Args:
            path: Where to; an older file there is replaced.
        """
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        facts = {"name": self.name, "settings": self.settings._asdict(), "step": self.step}
        write_atomically(path, {**{key: part.state_dict() for key, part in parts.items()}, **facts})


def load_run(path: Path, mesh: DeviceMesh | None = None) -> Run:
    """Rebuilds a run from `Run.save`'s file, trusting it with no code.

    Args:
        path: The checkpoint of one process.
        mesh: As for `Run`.

    Returns:
        A run at the saved step, with no losses yet.
    """
    with path.open("rb") as stream:
        try:
            checkpoint: dict[str, Any] = torch.load(stream, weights_only=True)
            run = Run(checkpoint["name"], Settings(**checkpoint["settings"]), mesh)
        except Exception as error:  # a pickle that is damaged may raise anything
            raise CheckpointError(
                f"A demo is resumed from a file that `gefen demo` wrote half-way: got {type(error).__name__} of "
                f"{str(path)!r}. Run `gefen demo`."
            ) from error
    set_model_state_dict(run.model, checkpoint["model"], options=StateDictOptions(full_state_dict=True))
    run.optimizer.load_state_dict(checkpoint["optimizer"])
    run.scheduler.load_state_dict(checkpoint["scheduler"])
    run.step = checkpoint["step"]
    return run


def validation_steps(steps: int) -> set[int]:
    """Ten steps spread over the run, fewer in a shorter one, the last of them its end.

    Args:
        steps: Length of the run.
    """
    return {-(-steps * tenth // 10) for tenth in range(1, 11)}


def write_atomically(path: Path, content: object) -> None:
    """Saves with `torch.save` beside `path`, then renames.

    Args:
        path: The final name.
        content: What `torch.load(weights_only=True)` can read back.
    """
    partial = path.with_name(path.name + ".partial")
    torch.save(content, partial)
    os.replace(partial, path)


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two flat dictionaries hold the same names, types, shapes and bytes."""
    if left.keys() != right.keys():
        return False
    pairs = [(tensor, right[name]) for name, tensor in left.items()]
    return all(x.dtype == y.dtype and checkpoint.same_bits(x, y) for x, y in pairs)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Runs torch on `count` threads inside the block: the bits of a sum depend on how many share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
