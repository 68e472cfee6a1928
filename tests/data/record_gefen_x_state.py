"""Record a state dict of the published optimizer (gefen-x 0.5.0) and the steps after it, for the reader's tests.

Needs torch, gefen-x and `record_gefen_x` beside it; README.md says how to run it and what the keys mean.
"""

import argparse
import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch

SHAPES = {"matrix": (64, 96), "conv": (32, 16, 3, 3), "bias": (96,)}
MODES = {"block": False, "factored": True}
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "fused": False}
SAVED_AT, LAST = 10, 15


def gradient(name: str, step: int) -> torch.Tensor:
    """A constant drift and noise in exact multiples of 2**-20; step 0 gives the parameter, as noise alone."""

    def noise(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * (1 + list(SHAPES).index(name)) + seed)
        return torch.randint(-(2**17), 2**17, (4, *SHAPES[name]), generator=generator).sum(0) * 2.0**-20

    return noise(step) + 0.5 * noise(999) if step else noise(0)


def record(factored: bool) -> dict[str, Any]:
    """The state dict after `SAVED_AT` steps, and the parameters then and after `LAST`."""
    from gefen import Gefen

    parameters = {name: torch.nn.Parameter(gradient(name, 0)) for name in SHAPES}
    optimizer = Gefen(list(parameters.items()), factored_v_2d=factored, **OPTIONS)
    kept: dict[str, Any] = {}
    for step in range(1, LAST + 1):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, step)
        optimizer.step()
        if step in (SAVED_AT, LAST):
            kept[f"parameters {step}"] = {name: p.detach().clone() for name, p in parameters.items()}
        if step == SAVED_AT:
            held = io.BytesIO()
            torch.save(optimizer.state_dict(), held)
            kept["state_dict"] = torch.load(io.BytesIO(held.getvalue()), weights_only=True)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the .pt file")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    silence = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        warnings.simplefilter("ignore")
        torch.save({mode: record(factored) for mode, factored in MODES.items()}, out / "gefen_x_050_state.pt")


if __name__ == "__main__":
    main()
