"""Triton kernels without a GPU: run by triton's interpreter, or compiled for a target and asked what they need."""

import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

import gefen_kernels

TARGETS = {
    "cuda 80": GPUTarget("cuda", 80, 32),
    "cuda 90": GPUTarget("cuda", 90, 32),
    "cuda 100": GPUTarget("cuda", 100, 32),
    "hip gfx942": GPUTarget("hip", "gfx942", 64),
}


class Launch(NamedTuple):
    """A kernel with the arguments and options that its launcher gave it."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


# Older compilers spill some hundred bytes in a few kernels: slower there, with the same bits.
SPILLS_ALLOWED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 1024


class Usage(NamedTuple):
    """What a compiled kernel needs: registers of a thread, what it spills of them to memory, and its assembly.

    AMD's scalar registers go to lanes of vector registers before they go to memory: so many are `parked`.
    """

    registers: int
    spills: int
    assembly: str
    parked: int = 0


class _Driver:
    """Stands for a GPU when triton asks what to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: target  # under this key a kernel keeps what it has compiled
        self.get_current_stream = lambda device: 0


def interpreted_kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` for triton's interpreter, which runs kernels on CPU tensors."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        return triton.jit(function)


def interpreted(name: str) -> ModuleType:
    """A module of `gefen_kernels` whose kernels run on CPU tensors, by triton's interpreter.

    Triton decides when a kernel is defined, so the module and the kernels it imports are loaded once more, whatever
    this process has imported before. Such kernels may not call what `triton.language` itself defines as kernels
    (`tl.sum`, `tl.max`, `tl.zeros`, `tl.cdiv`): those are as triton was first imported.
    """
    compiled_ones = _take_modules()
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        module = importlib.import_module(name)
    _take_modules()
    for key, kept in compiled_ones.items():
        sys.modules[key] = kept
        setattr(gefen_kernels, key.rpartition(".")[2], kept)
    return module


def _take_modules() -> dict[str, ModuleType]:
    """Forget the modules of kernels, and return them."""
    taken = {key: sys.modules.pop(key) for key in list(sys.modules) if key.startswith("gefen_kernels.triton_")}
    for key in taken:
        vars(gefen_kernels).pop(key.rpartition(".")[2], None)
    return taken


def rounded_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts fp32 to bf16, where every GPU rounds to the nearest: let it round too."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounding(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        entries = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(entries.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)


def recorded(call: Callable[[], object]) -> list[Launch]:
    """What `call` would launch on a GPU; nothing is launched."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, args, options))

    anywhere = mock.patch("gefen_kernels.triton_base.on_device", lambda x: contextlib.nullcontext())
    with anywhere, mock.patch.object(triton.JITFunction, "run", record):
        call()
    return launches


def compiled(launch: Launch, target: GPUTarget) -> Usage:
    """Compile a launch as triton would on the target: for these dtypes, alignments, numbers equal to 1 and options."""
    with mock.patch.object(triton.runtime.driver, "_active", _Driver(target)):
        kernel = launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)
    return _cuda_usage(kernel.asm) if target.backend == "cuda" else _hip_usage(kernel.asm["amdgcn"])


def _cuda_usage(asm: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], asm["ptx"])


def _hip_usage(assembly: str) -> Usage:
    found = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\n", assembly)}
    spills = found["vgpr_spill_count"] + found["private_segment_fixed_size"]
    return Usage(found["vgpr_count"], spills, assembly, found["sgpr_spill_count"])
