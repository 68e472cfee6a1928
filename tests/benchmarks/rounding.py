"""Fine-tuning at a small rate with bf16 parameters, by what becomes of the bits: `python -m tests.benchmarks.rounding`.

A decoder is trained on the standard library's text, rounded to bf16, and tuned at lr 1e-5 on the same text with upper
and lower case exchanged. All arms begin with the same weights, see the same batches and compute in fp32; they differ in
how a step is written into the parameters.
"""

import argparse
import statistics

import torch
from torch import Tensor
from torch.func import functional_call

from gefen_fn import chain, compensated, gefen, identity, stochastic_rounding
from gefen_fn.base import write_updates
from gefen_nn import Gefen
from gefen_nn.demo_data import batch_at, standard_library_text
from gefen_nn.demo_model import Decoder, next_byte_loss
from gefen_nn.demo_train import torch_threads

ARMS = {
    "fp32": identity,
    "bf16": identity,
    "bf16, stochastic_rounding()": stochastic_rounding,
    "bf16, compensated()": compensated,
    "bf16, compensated(16)": lambda: compensated(16),
}
_LENGTH = {"batch": 16, "context": 64}
Weights = dict[str, Tensor]


def tuned(name: str, start: Weights, model: Decoder, text: Tensor, steps: int, seed: int, lr: float) -> Weights:
    """The weights after tuning from `start`, in fp32."""
    params = {k: x.clone() if name == "fp32" else x.bfloat16() for k, x in start.items()}
    tx = chain(gefen(lr), ARMS[name]())
    state = tx.init(params)
    for step in range(steps):
        shown = {k: p.detach().float().requires_grad_() for k, p in params.items()}
        loss_of(model, shown, batch_at(text, step, seed=seed, **_LENGTH)).backward()
        with torch.no_grad():
            updates, state = tx.update({k: x.grad for k, x in shown.items()}, state, params)
            write_updates(params, updates)
    return {k: p.float() for k, p in params.items()}


def loss_of(model: Decoder, weights: Weights, tokens: Tensor) -> Tensor:
    """Of the model with other weights."""
    return next_byte_loss(lambda x: functional_call(model, weights, (x,)), tokens)  # type: ignore[arg-type]


def trained(text: Tensor, steps: int, seed: int) -> tuple[Decoder, Weights]:
    """A decoder, and its weights as bf16 numbers in fp32."""
    torch.manual_seed(seed)
    model = Decoder(dim=64, layers=2, heads=4, hidden=192, context=64)
    optimizer = Gefen(model.named_parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        next_byte_loss(model, batch_at(text, step, seed=seed, **_LENGTH)).backward()
        optimizer.step()
    return model, {k: p.detach().bfloat16().float() for k, p in model.named_parameters()}


def exchanged(text: Tensor) -> Tensor:
    """Upper case for lower and lower for upper."""
    letters = ((text | 32) >= ord("a")) & ((text | 32) <= ord("z"))
    return torch.where(letters, text ^ 32, text)


def losses(steps: tuple[int, int], seed: int, lr: float) -> dict[str, float]:
    """The held-out loss before tuning, and after it by arm."""
    text = standard_library_text()
    model, start = trained(text.train, steps[0], seed)
    train, held_out = exchanged(text.train), batch_at(exchanged(text.validation), 0, seed=0, batch=256, context=64)
    found = {"before": start}
    found.update({name: tuned(name, start, model, train, steps[1], seed, lr) for name in ARMS})
    found["fp32, rounded to bf16 at the end"] = {k: w.bfloat16().float() for k, w in found["fp32"].items()}
    with torch.no_grad():
        return {name: loss_of(model, weights, held_out).item() for name, weights in found.items()}


def main() -> None:
    """Measure, and print a table: means over seeds, with the share of what fp32 gains."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.rounding", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (3)")
    parser.add_argument("--steps", type=int, nargs=2, default=(400, 400), help="of training and of tuning (400 400)")
    parser.add_argument("--lr", type=float, default=1e-5, help="of tuning (1e-5)")
    given = parser.parse_args()
    with torch_threads(1):
        rows = [losses(tuple(given.steps), seed, given.lr) for seed in range(given.seeds)]
    print("| parameters | held-out loss | share of what fp32 gains |\n|---|---|---|")
    for name in rows[0]:
        values = [row[name] for row in rows]
        shares = [(row["before"] - row[name]) / (row["before"] - row["fp32"]) for row in rows]
        spread = f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        print(f"| {name} | {spread} | {statistics.mean(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}) |")


if __name__ == "__main__":
    main()
