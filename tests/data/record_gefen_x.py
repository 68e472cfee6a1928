"""Record trajectories of the published optimizer (gefen-x 0.5.0) on the CPU, for tests to compare with.

Needs torch and gefen-x only; nothing of this repository. README.md beside it says how to run it and what the keys mean.
"""

import argparse
import contextlib
import importlib.metadata
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES = ((128, 256), (64, 300), (96, 64), (32, 16, 3, 3), (2, 64, 64))
STEPS = 30
KEPT_STEPS = (1, 2, 10, 30)
PARAMETER_STEP, DRIFT_STEP = 0, 999
MODES = {"block": False, "factored": True}
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "fused": False}
NAMES = {"m_codebook": "codes", "m_magnitude": "absmax", "vmean": "nu", "v_row": "row", "v_col": "col"}


def noise(leaf: int, step: int) -> torch.Tensor:
    """Nearly normal numbers (deviation 0.14), exact multiples of 2**-20, so that every machine draws the same bits."""
    generator = torch.Generator().manual_seed(1000 * (leaf + 1) + step)
    draws = torch.randint(-(2**17), 2**17, (4, *SHAPES[leaf]), generator=generator)
    return draws.sum(0).to(torch.float32) * 2.0**-20


def gradient(leaf: int, step: int) -> torch.Tensor:
    """Gradient of one step (1-based): a constant drift plus noise, row i scaled by 2**-(i % 4); exact in fp32."""
    rows = 2.0 ** -(torch.arange(SHAPES[leaf][0]) % 4).to(torch.float32)
    drawn = noise(leaf, step) + 0.5 * noise(leaf, DRIFT_STEP)
    return drawn * rows.reshape(-1, *[1] * (drawn.dim() - 1))


def leaf_state(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of one leaf's published state under this repository's words."""
    return {ours: state[theirs].clone() for theirs, ours in NAMES.items() if theirs in state}


def snapshot(parameters: list[torch.nn.Parameter], state: dict[int, Any]) -> list[dict[str, torch.Tensor]]:
    """Parameter and state of every leaf as they stand now."""
    return [{"parameter": p.detach().clone(), **leaf_state(state[i])} for i, p in enumerate(parameters)]


def make_optimizer(parameters: list[torch.nn.Parameter], mode: str) -> torch.optim.Optimizer:
    """The published optimizer in one second-moment mode."""
    from gefen import Gefen

    named = [(f"leaf{i}", p) for i, p in enumerate(parameters)]
    optimizer: torch.optim.Optimizer = Gefen(named, factored_v_2d=MODES[mode], **OPTIONS)
    return optimizer


def record(mode: str) -> dict[str, Any]:
    """Run the published optimizer for `STEPS` steps and keep what README.md lists."""
    parameters = [torch.nn.Parameter(noise(i, PARAMETER_STEP)) for i in range(len(SHAPES))]
    optimizer = make_optimizer(parameters, mode)
    kept: dict[int, list[dict[str, torch.Tensor]]] = {}
    for step in range(1, STEPS + 1):
        for i, parameter in enumerate(parameters):
            parameter.grad = gradient(i, step)
        optimizer.step()
        if step in KEPT_STEPS:
            kept[step] = snapshot(parameters, optimizer.state_dict()["state"])
    return {"mode": mode, "options": {**OPTIONS, "factored_v_2d": MODES[mode]}, **constants(optimizer), "steps": kept}


def constants(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What does not change from step to step: codebook, block lengths, shapes, version."""
    state = optimizer.state_dict()
    return {
        "version": importlib.metadata.version("gefen-x"),
        "shapes": [list(shape) for shape in SHAPES],
        "codebook": state["gefen_codebook"].clone(),
        "blocks": [int(state["state"][i]["automatic_period"]) for i in range(len(SHAPES))],
    }


def silenced(run: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """`run(name)` without what the package prints and warns at import and while it learns its codebook."""
    silence = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        warnings.simplefilter("ignore")
        return run(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the .pt files")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for mode in MODES:
        torch.save(silenced(record, mode), out / f"gefen_x_050_{mode}.pt")


if __name__ == "__main__":
    main()
