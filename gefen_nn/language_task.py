"""The task that the tools train where none is named: the demo's decoder on the standard library's sources."""

from __future__ import annotations

from functools import cache
from itertools import count
from statistics import fmean

from torch import Tensor

from gefen_nn.demo_data import Text, batch_at, standard_library_text
from gefen_nn.demo_model import Decoder, next_byte_loss
from gefen_nn.task import Run

_SIZE = {"batch": 8, "context": 64}
_HELD_OUT_BATCHES = 32


def language(seed: int) -> Run:
    """A decoder of 0.93M parameters with 512 bytes a step; 300 steps take some 12 s on one core.

    Args:
        seed: Of the parameters, from torch's global generator, and of the batches.

    Returns:
        A run whose losses are nats per byte; the held-out files are the same for all seeds.
    """
    return run_on(standard_text(), seed)


@cache
def standard_text() -> Text:
    """The standard library's sources, read once."""
    return standard_library_text()


def run_on(text: Text, seed: int) -> Run:
    """The language task on some text.

    Args:
        text: To train on and to be judged on.
        seed: As for `language`.

    Returns:
        A run before its first step.
    """
    model, steps = Decoder(context=_SIZE["context"]), count()

    def loss() -> Tensor:
        return next_byte_loss(model, batch_at(text.train, next(steps), seed=seed, **_SIZE))

    def held_out() -> float:
        batches = [batch_at(text.validation, index, seed=0, **_SIZE) for index in range(_HELD_OUT_BATCHES)]
        return fmean(next_byte_loss(model, batch).item() for batch in batches)

    return Run(model, loss, held_out)
