"""What DeepSpeed's ZeRO does to an optimizer, without the package: flat partitions in place of the parameters."""

import pytest
import torch
from torch import nn

from gefen_fn import StructureError
from gefen_nn import Gefen, GefenMuon

OPTIMIZERS = {
    "gefen": lambda model: Gefen(model.named_parameters()),
    "positions": lambda model: Gefen(model.parameters()),
    "gefen_muon": lambda model: GefenMuon(model, require_muon=False),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_flat_partitions_put_in_place_of_parameters_are_refused_before_anything_changes_i3(build):
    optimizer = build(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)))
    for group in optimizer.param_groups:
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]))
        flat.grad = torch.ones_like(flat)
        group["params"] = [flat]
    before = [group["params"][0].detach().clone() for group in optimizer.param_groups]
    with pytest.raises(StructureError, match=r"(name each parameter of its group|keep its shape).*FSDP2"):
        optimizer.step()
    assert all(torch.equal(x, g["params"][0]) for x, g in zip(before, optimizer.param_groups, strict=True))
