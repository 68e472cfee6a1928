"""The torch world: optimizers with state dicts, groups and hooks over the functional transforms of `gefen_fn`.

    >>> from gefen_fn import gefen, inject_hyperparams
    >>> optimizer = Gefen(model.named_parameters(), lr=1e-3, weight_decay=0.1)
    >>> optimizer = TransformOptimizer(model.named_parameters(), inject_hyperparams(gefen)(1e-3))

- `Gefen` stands where `torch.optim.AdamW` stood; `TransformOptimizer` runs any transform.
- Both are a `torch.optim.Optimizer`, and have `describe()` (what is kept for each parameter, as a table),
  `state_tree()` (the transform's state), `step_was_skipped`, and `load_state_dict(saved, strict=False)`, which returns
  a `LoadReport`.
- A state that does not fit raises `CheckpointError`, and nothing is changed.
- `gefen` is the command line: `gefen demo`.
"""

import gefen_fn
from gefen_nn.checkpoint import LoadReport
from gefen_nn.errors import CheckpointError
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.presets import Gefen

__version__ = gefen_fn.__version__

__all__ = ["CheckpointError", "Gefen", "LoadReport", "TransformOptimizer"]
