"""What every test shares."""

import torch

# The tensors here are small: waiting for a second thread costs more than it brings, most of all on a busy machine.
torch.set_num_threads(1)
