"""What saves and loads cost: memory, counted allocation by allocation, and bytes on the disk."""

import tracemalloc
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gefen_fn import gefen, state_bytes
from gefen_nn import Gefen, StateTree, load, save


class Allocations(TorchDispatchMode):
    """The bytes of all new tensors, and the longest of integers wider than a byte."""

    def __init__(self):
        super().__init__()
        self.bytes, self.widest, self.seen = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)} | self.seen
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.seen.add(x.untyped_storage().data_ptr())
                self.bytes += x.untyped_storage().nbytes()
                if x.dtype in (torch.int64, torch.int32):
                    self.widest = max(self.widest, x.numel())
        return out


def test_51_52_53_a_save_copies_nothing_and_a_load_no_more_than_it_must(tmp_path):
    model = nn.Sequential(nn.Linear(5120, 4096, dtype=torch.bfloat16), nn.Conv2d(64, 64, 3, dtype=torch.bfloat16))
    optimizer = Gefen(model.named_parameters(), codebook="fixed")
    count, size = sum(p.numel() for p in model.parameters()), state_bytes(optimizer.state_tree())
    tracemalloc.start()
    with Allocations() as saving:
        save(tmp_path / "a", model, optimizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert saving.bytes <= 0.02 * count and peak <= 0.02 * count + 2**24 < size
    with Allocations() as loading:
        load(tmp_path / "a", model, optimizer)
    # What is read, the file's own tensors, what takes the place of the state, and masks of some leaves.
    assert loading.bytes <= 3.2 * (size + 2 * count) and max(saving.widest, loading.widest) <= 2**20
    leaves = {key: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for key, x in _leaves(optimizer)}
    with Allocations() as plain:
        optimizer.load_state_dict(_with_leaves(optimizer, leaves))
    assert plain.bytes <= 1.1 * size and plain.widest <= 2**20


def _leaves(optimizer):
    return ((f"{i} {key}", x) for i, own in optimizer.state_dict()["state"].items() for key, x in own.items())


def _with_leaves(optimizer, leaves):
    saved = optimizer.state_dict()
    return {**saved, "state": {i: {k: leaves[f"{i} {k}"] for k in own} for i, own in saved["state"].items()}}


def llama(width, inner, vocabulary, layers):
    shapes = {"embed.weight": (vocabulary, width), "norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"layers.{i}.{name}.weight": (inner, width) for name in ("gate", "up")}
        shapes |= {
            f"layers.{i}.down.weight": (width, inner),
            f"layers.{i}.norm1": (width,),
            f"layers.{i}.norm2": (width,),
        }
    return shapes


SIZES = [pytest.param(llama(512, 1408, 2048, 4), id="15M")]
SIZES += [pytest.param(llama(768, 2048, 32000, 12), id="134M", marks=pytest.mark.slow)]


@pytest.mark.parametrize("shapes", SIZES)
def test_a_checkpoint_takes_at_most_1_05_of_the_compact_state_and_its_writing_next_to_no_memory(tmp_path, shapes):
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    state = gefen(1e-3).init(params)
    with Allocations() as saving:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"x": StateTree(state, params)}, checkpoint_id=tmp_path / "a")
    written = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    count = sum(p.numel() for p in params.values())
    assert written <= 1.05 * state_bytes(state) <= 1.05 * 1.07 * count and saving.bytes <= 0.02 * count
