"""Record trajectories of the published hybrid (gefen-x 0.5.0: Muon and a backup) on the CPU, for tests to compare with.

Needs torch and gefen-x only; nothing of this repository. README.md beside it says how to run it and what the keys mean.
"""

import argparse
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from record_gefen_x import PARAMETER_STEP, SHAPES, STEPS, gradient, noise, silenced

MUON = (0, 1, 2)  # numbers of the leaves that are Muon's; the others are the backup's
BACKUPS = ("gefen", "adamw")
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "fused": False}
NAMES = {"m_codebook": "codes", "m_magnitude": "absmax", "normuon_v": "rows"}


def make_optimizer(parameters: list[torch.nn.Parameter], backup: str) -> Any:
    """The published hybrid with its defaults: NorMuon, three tuned iterations, the scale that matches AdamW."""
    from gefen import GefenMuonHybrid

    named = [(f"leaf{i}", p) for i, p in enumerate(parameters)]
    muon, others = [named[i] for i in MUON], [x for i, x in enumerate(named) if i not in MUON]
    return GefenMuonHybrid(muon, others, backup_optimizer=backup, **OPTIONS)


def record(backup: str) -> dict[str, Any]:
    """Run the published hybrid for `STEPS` steps and keep what README.md lists."""
    parameters = [torch.nn.Parameter(noise(i, PARAMETER_STEP)) for i in range(len(SHAPES))]
    optimizer = make_optimizer(parameters, backup)
    for step in range(1, STEPS + 1):
        for i, parameter in enumerate(parameters):
            parameter.grad = gradient(i, step)
        optimizer.step()
    parts = {name: optimizer.state_dict()[name] for name in ("muon", "backup")}
    leaves = [parts["muon"]["state"][i] for i in range(len(MUON))]
    return {
        "version": importlib.metadata.version("gefen-x"),
        "options": {**OPTIONS, "backup_optimizer": backup},
        "parameters": [p.detach().clone() for p in parameters],
        "codebooks": {k: part["gefen_codebook"].clone() for k, part in parts.items() if "gefen_codebook" in part},
        "blocks": {
            k: [int(x["automatic_period"]) for x in part["state"].values()]
            for k, part in parts.items()
            if "gefen_codebook" in part
        },
        "momentum": [{ours: leaf[theirs].clone() for theirs, ours in NAMES.items()} for leaf in leaves],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the .pt files")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for backup in BACKUPS:
        torch.save(silenced(record, backup), out / f"gefen_x_050_muon_{backup}.pt")


if __name__ == "__main__":
    main()
