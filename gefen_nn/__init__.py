"""The torch world: optimizers with state dicts, groups and hooks over the functional transforms."""

from gefen_nn.checkpoint import LoadReport
from gefen_nn.errors import CheckpointError
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.presets import Gefen

__all__ = ["CheckpointError", "Gefen", "LoadReport", "TransformOptimizer"]
