"""The whole Gefen step on a GPU, in place, in a few launches whatever the number of leaves.

A leaf's entries and codes are read once, but for gradients that its policy has to see whole: `triton_update` has the
kernels, `triton_stats` those for tiles that no program holds.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from gefen_kernels.reference import Ties
from gefen_kernels.step import Leaf
from gefen_kernels.triton_codec import Search, histogram, launch, search_of, sum_of_squares, widen
from gefen_kernels.triton_plan import KINDS, LONGEST, Plan, moved, plan_step

__all__ = ["gefen_step", "histogram", "plan_step", "run_step", "sum_of_squares", "supports"]


def supports(leaf: Leaf) -> bool:
    """Whether the kernels can take this leaf: plain tensors of known dtypes on one GPU, blocks of at most 65,536."""
    state = (leaf.mu, *leaf.nu) if leaf.absmax is None else (leaf.mu, leaf.absmax, *leaf.nu)
    tensors = (leaf.grad, leaf.param, *state)
    there = leaf.param.is_cuda or not isinstance(widen, triton.JITFunction)
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device == leaf.param.device for t in tensors)
    known = leaf.grad.dtype in KINDS and leaf.param.dtype in KINDS and all(t.is_contiguous() for t in state)
    return there and plain and known and leaf.block <= LONGEST


def gefen_step(
    leaves: Sequence[Leaf],
    scalars: Tensor,
    codebook: Tensor,
    *,
    drive: str = "m",
    ties: Ties = "zero",
    negate: bool = False,
    scaled: bool = False,
) -> None:
    """Step all leaves in place: moments, second moments and parameters.

    Args:
        leaves: what to step, on one GPU; see `gefen_kernels.step.Leaf`.
        scalars: fp32 `[leaves, 10]`, columns as `gefen_kernels.step.SCALARS`; moved there if they are elsewhere.
        codebook: fp32 `[256]`, likewise.
        drive: "m" steps along the moment before it is stored, "m_hat" along what is stored.
        ties: as in `reference.nearest`.
        negate: ascend.
        scaled: multiply each gradient by its `grad_scale`, rounded to its dtype.

    Raises:
        ValueError: if a dtype is none of fp32, bf16 and fp16, or a block longer than 65,536.
    """
    plan = plan_step(leaves)
    if plan.launches:
        device = plan.launches[0].table.device
        scalars, codebook = moved(scalars.contiguous(), device), moved(codebook.contiguous(), device)
        search = search_of(codebook, ties)
        run_step(plan, scalars, codebook, search, drive=drive, negate=negate, scaled=scaled)


def run_step(
    plan: Plan,
    scalars: Tensor,
    codebook: Tensor,
    search: Search,
    *,
    drive: str = "m",
    negate: bool = False,
    scaled: bool = False,
) -> None:
    """Launch a plan: work for the GPU alone, which may be captured.

    Args:
        plan: of the leaves; its gradients are read where they were.
        scalars: fp32 `[leaves, 10]` on the GPU, where only the kernels read them: a captured step uses its new values.
        codebook: fp32 `[256]` on the GPU.
        search: `triton_codec.search_of` the codebook.
        drive: as in `gefen_step`, and so the others.
        negate: ascend.
        scaled: multiply each gradient by its `grad_scale`.
    """
    for tensor, copy in (*plan.gradients, *plan.params):
        copy.copy_(tensor)
    options = {"NEGATE": negate, "SCALED": scaled, "MHAT": drive == "m_hat"}
    for step in plan.launches:
        tools = (codebook, search) if step.quantized else ()
        scratch = () if step.scratch is None else (step.scratch,)
        constants = step.constants | {name: options[name] for name in step.options}
        args = (step.table, step.owner, scalars, *tools, *scratch)
        launch(step.kernel, step.programs, *args, warps=step.warps, **constants)
    for tensor, copy in plan.params:
        tensor.copy_(copy)
