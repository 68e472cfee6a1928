"""What the server of workers does before it forks them: all is imported, and what was compiled earlier is loaded."""

import torch

import tests.distributed.faults
import tests.distributed.saving  # noqa: F401
from gefen_kernels import ops

torch.set_num_threads(1)  # a thread of the server's would be missing in what it forks
ops.warm_up()
