"""What every kernel rests on: how it is made, how it is launched, and entries of any dtype as fp32."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, typed."""
    return triton.jit(function)


@jit
def widen(x: tl.tensor) -> tl.tensor:
    """Entries of fp32, bf16 or fp16 as fp32; bf16 by bits, because triton's interpreter loses its subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """The bits of `|x|` as int32: ordered as the magnitudes are, infinity at 0x7F800000 and NaN above it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


def launch(kernel: Any, programs: int, *args: Any, warps: int = 4, **named: Any) -> None:
    """Run a kernel as `programs` programs, without contraction of a product into a sum.

    Args:
        kernel: made by `jit`; its first argument is a tensor.
        programs: 0 launches nothing.
        args: the kernel's arguments.
        warps: of one program.
        named: the other arguments, `tl.constexpr` ones among them.
    """
    with on_device(args[0]):
        if programs:
            kernel[(programs,)](*args, num_warps=warps, enable_fp_fusion=False, **named)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """In this context kernels run where x is.

    Raises:
        ValueError: if x is not on a GPU and the kernels are not triton's interpreter's.
    """
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if isinstance(widen, triton.JITFunction):
        raise ValueError(
            f"A Triton kernel takes tensors on a GPU: got one on {x.device}. Use `gefen_kernels.reference`, or set "
            "TRITON_INTERPRET=1 before triton is imported."
        )
    return np.errstate(all="ignore")  # the interpreter computes with numpy, which warns of 0 / 0
