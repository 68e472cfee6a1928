"""What every test shares."""

import torch

# The tensors here are small: waiting for a second thread costs more than it brings, most of all on a busy machine.
torch.set_num_threads(1)

# Fresh memory is NaN (the largest number, for integers), so that an entry nobody writes shows in what is made of it.
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
