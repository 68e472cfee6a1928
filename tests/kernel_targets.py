"""Triton kernels without a GPU: run by triton's interpreter, or compiled for a target and asked what they need."""

import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

TARGETS = {
    "cuda 80": GPUTarget("cuda", 80, 32),
    "cuda 90": GPUTarget("cuda", 90, 32),
    "cuda 100": GPUTarget("cuda", 100, 32),
    "hip gfx942": GPUTarget("hip", "gfx942", 64),
}


class Launch(NamedTuple):
    """A kernel with the arguments that its launcher gave it."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    constants: dict[str, Any]


class Usage(NamedTuple):
    """What a compiled kernel needs: registers of a thread, bytes or registers spilled, and its assembly."""

    registers: int
    spills: int
    assembly: str


def interpreted(name: str) -> ModuleType:
    """A module of `gefen_kernels` whose kernels run on CPU tensors, by triton's interpreter.

    Triton decides when a kernel is defined, so the module and the kernels it imports are loaded once more, whatever
    this process has imported before. Such kernels may not call what `triton.language` itself defines as kernels
    (`tl.sum`, `tl.max`, `tl.zeros`, `tl.cdiv`): those are as triton was first imported.
    """
    mine = [key for key in sys.modules if key.startswith("gefen_kernels.triton_")]
    kept = {key: sys.modules.pop(key) for key in mine}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        module = importlib.import_module(name)
    for key in [key for key in sys.modules if key.startswith("gefen_kernels.triton_")]:
        del sys.modules[key]
    sys.modules.update(kept)
    return module


@contextlib.contextmanager
def recorded(module: ModuleType) -> Iterator[list[Launch]]:
    """Collect what the module's launchers would launch, instead of launching it."""
    launches: list[Launch] = []
    original = module.launch

    def record(kernel: Any, programs: int, *args: Any, warps: int = 4, **constants: Any) -> None:
        launches.append(Launch(kernel, args, {"num_warps": warps, "enable_fp_fusion": False}, constants))

    module.launch = record
    try:
        yield launches
    finally:
        module.launch = original


def compiled(launch: Launch, target: GPUTarget) -> Usage:
    """Compile a launch as triton's own launcher would on the target: aligned arguments are known to be so."""
    names = launch.kernel.arg_names[: len(launch.args)]
    given = dict(zip(names, launch.args, strict=True))
    constants = {key: value for key, value in given.items() if value is None} | launch.constants
    signature = {key: "constexpr" if key in constants else mangle_type(given[key]) for key in launch.kernel.arg_names}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, arg in enumerate(launch.args)
        if (arg.data_ptr() if hasattr(arg, "data_ptr") else arg or 1) % 16 == 0
    }
    source = ASTSource(launch.kernel, signature, constants, aligned)
    result = triton.compile(source, target=target, options=launch.options)
    return _cuda_usage(result.asm) if target.backend == "cuda" else _hip_usage(result.asm["amdgcn"])


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
    spills = found["vgpr_spill_count"] + found["sgpr_spill_count"] + found["private_segment_fixed_size"]
    return Usage(found["vgpr_count"], spills, assembly)
