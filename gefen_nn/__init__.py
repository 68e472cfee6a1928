"""The torch world: optimizers with state dicts, groups and hooks over the functional transforms of `gefen_fn`.

    >>> from gefen_fn import gefen, inject_hyperparams
    >>> optimizer = Gefen(model.named_parameters(), lr=1e-3, weight_decay=0.1)
    >>> optimizer = GefenMuon(model, lr=1e-3)
    >>> optimizer = TransformOptimizer(model.named_parameters(), inject_hyperparams(gefen)(1e-3))

- `Gefen` stands where `torch.optim.AdamW` stood, `Muon` where `torch.optim.Muon` stood; `GefenMuon` takes whole models,
  and `TransformOptimizer` runs any transform.
- Each of these is a `torch.optim.Optimizer`, and has `describe()` (what is kept for each parameter, as a table),
  `state_tree()` (the transform's state), `step_was_skipped`, and `load_state_dict(saved, strict=False)`, which returns
  a `LoadReport`.
- `route` says which parameters of a model `GefenMuon` gives to Muon and why: a `Routing` of `RoutedLeaf` rows, with a
  `Choice` for each parameter, which may be given back as `rules`.
- `save`, `save_async` and `load` keep a whole run in a folder, on one process or many, and move it to another number;
  `OptimizerState` and, for users of `gefen_fn`, `StateTree` are what torch.distributed.checkpoint takes.
- `convert_state` makes state of what torch's AdamW and Muon or Gefen-X saved; `adamw_state` makes AdamW's of ours, and
  `inspect_checkpoint` says what is in a file or folder, and whether it is sound.
- `lr_find` finds a learning rate by short runs: a function of a seed makes each `Run`.
- `offload` keeps the state in host memory while something else needs the GPU, or all the time, and `restore` brings it
  back.
- A state that does not fit raises `CheckpointError`, and nothing is changed; `GroupFailure` is raised where another
  process of the group failed.
- `gefen` is the command line: `gefen --help` lists demo, compare, lr-find, memory, inspect, convert and bench.
"""

import gefen_fn
from gefen_fn.agree import GroupFailure
from gefen_nn.checkpoint import LoadReport
from gefen_nn.convert import convert_state
from gefen_nn.dcp import OptimizerState, StateTree
from gefen_nn.dense_moments import adamw_state
from gefen_nn.errors import CheckpointError
from gefen_nn.inspecting import inspect_checkpoint
from gefen_nn.lr_finder import lr_find
from gefen_nn.muon import GefenMuon, Muon
from gefen_nn.offload import offload, restore
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.presets import Gefen
from gefen_nn.route import Choice, RoutedLeaf, Routing, route
from gefen_nn.saves import load, save, save_async
from gefen_nn.task import Run

__version__ = gefen_fn.__version__

__all__ = [
    "CheckpointError",
    "Choice",
    "Gefen",
    "GefenMuon",
    "GroupFailure",
    "LoadReport",
    "Muon",
    "OptimizerState",
    "RoutedLeaf",
    "Routing",
    "Run",
    "StateTree",
    "TransformOptimizer",
    "adamw_state",
    "convert_state",
    "inspect_checkpoint",
    "load",
    "lr_find",
    "offload",
    "restore",
    "route",
    "save",
    "save_async",
]
