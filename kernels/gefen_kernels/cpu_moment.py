"""One step of a quantized moment on the CPU, as a pure operation: each gradient is read from memory once.

It gives the bits of `gefen_kernels.moment.moment`, NaNs' payloads aside, whatever the number of threads.
"""

import numpy as np
import torch
from torch import Tensor

from gefen_kernels import reference
from gefen_kernels.cpu_book import nearest_table
from gefen_kernels.cpu_loops import F32, FP32, KINDS, book_at, compiled, decode, encode, kept, load
from gefen_kernels.cpu_loops import moment as moment_of_block
from gefen_kernels.cpu_threads import Ints, share
from gefen_kernels.cpu_vectors import after, codes_at, floats, integers

_DRIVES = {"m": 0, "m_hat": 1, "ahead": 2}
_BLOCKS = 512  # blocks of a task: small enough to share out, large enough to be worth the call


def supports(*tensors: Tensor) -> bool:
    """Whether the loops can read these: plain CPU tensors that neither torch.func nor autograd follows."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" and not wrapped(t) for t in tensors)
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return plain and not followed and tensors[0].dtype in KINDS


def moment(
    g: Tensor,
    codes: Tensor,
    absmax: Tensor,
    codebook: Tensor,
    decay: float | Tensor,
    rest: float | Tensor,
    *,
    block: int,
    start: int = 1,
    ties: reference.Ties = "zero",
    drive: str = "m",
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `gefen_kernels.moment.moment`; takes what `supports` says, and for `out` contiguous tensors."""
    g, codes, absmax = g.resolve_neg().contiguous(), codes.contiguous(), absmax.contiguous()
    new = out or (torch.empty_like(g, dtype=torch.float32), torch.empty_like(codes), torch.empty_like(absmax))
    columns = int(np.prod(g.shape[start:], dtype=np.int64))
    addresses = np.array([x.data_ptr() for x in (g, codes, absmax, *new)], np.int64)
    numbers, code = (F32(decay), F32(rest)), tuple(nearest_table(codebook, ties))
    lie = (KINDS[g.dtype], columns, min(block, max(columns, 1)), _DRIVES[drive])

    def work(part: Ints) -> None:
        step(addresses, lie, numbers, code, part[0, 0], part[-1, 1], np.empty(3 * lie[2], np.float32))

    total = absmax.numel()
    tasks = np.array([(first, min(first + _BLOCKS, total)) for first in range(0, total, _BLOCKS)], np.int64)
    if total:
        share(work, tasks, (tasks[:, 1] - tasks[:, 0]) * lie[2] // 4)  # a whole step takes some four times as long
    return new


@compiled
def _block(kind, addresses, first, index, count, drive, numbers, book, own, ratios, limits):
    """Block number `index`, entries `first..first + count` of the leaf."""
    decay, rest = numbers
    if kind == FP32:
        g = floats(addresses[0] + 4 * first)
    else:
        load(kind, addresses[0], first, count, own)
        g = own
    old, new = codes_at(addresses[1] + first), codes_at(addresses[4] + first)
    top, d = floats(addresses[2] + 4 * index)[0], floats(addresses[3] + 4 * first)
    scale = floats(addresses[5] + 4 * index)
    scale[0] = moment_of_block(book, old, top, decay, rest, count, g, d)
    encode(d, count, scale[0], book, new, ratios, limits)
    if drive == 0:
        return
    decode(book, new, count, d)
    if drive == 1:
        for j in range(count):
            d[j] = d[j] * scale[0]
    else:
        for j in range(count):
            d[j] = d[j] * scale[0] * decay + g[j] * rest


@kept
def step(source):
    """Blocks `first..last` of a leaf.

    Args:
        source: the checksum that `kept` gives; the others are those of the step.
        addresses: int64 `[6]`: gradient, codes, scales; then d, codes and scales to write.
        lie: `(kind of the gradient, columns, block, drive)`.
        numbers: `(decay, rest)`, fp32.
        code: the codebook, see `cpu_book.Codebook`.
        first: the first block.
        last: one past the last.
        scratch: fp32 `[3 * block]`.
    """

    def run(addresses, lie, numbers, code, first, last, scratch):
        if source < 0:  # never: it makes the checksum a constant of this function
            return
        kind, columns, block, drive = lie
        book, where, own = book_at(code), integers(addresses.ctypes.data), floats(scratch.ctypes.data)
        blocks = -(-columns // block)
        for index in range(first, last):
            left = index % blocks * block
            begin, count = index // blocks * columns + left, min(block, columns - left)
            _block(
                kind, where, begin, index, count, drive, numbers, book, own, after(own, block), after(own, 2 * block)
            )

    return run
