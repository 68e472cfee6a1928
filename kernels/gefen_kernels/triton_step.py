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
    grads, options = [leaf.grad for leaf in leaves], {"drive": drive, "ties": ties, "negate": negate, "scaled": scaled}
    run_step(plan_step(leaves), grads, scalars, codebook, **options)  # type: ignore[arg-type]  # of mixed kinds


def run_step(
    plan: Plan,
    grads: Sequence[Tensor],
    scalars: Tensor,
    codebook: Tensor,
    *,
    drive: str = "m",
    ties: Ties = "zero",
    negate: bool = False,
    scaled: bool = False,
) -> None:
    """Step the leaves of a plan with these gradients, of the planned shapes and dtypes; see `gefen_step`.

    Nothing waits for the GPU. Where scalars and codebook are on it, a second run may be captured: replayed, it reads
    their values and those of the gradients anew, as long as the plan is not run again otherwise.
    """
    if not plan.launches:
        return
    device = plan.addresses.device
    kept = _pointed(plan, grads)
    tools = (moved(codebook.contiguous(), device), _searched(plan, codebook, ties, device))
    numbers = moved(scalars.contiguous(), device)
    for param, copy in plan.strided:
        copy.copy_(param)
    options = {"NEGATE": negate, "SCALED": scaled, "MHAT": drive == "m_hat"}
    for step in plan.launches:
        read = (plan.addresses,) if step.reads else ()
        scratch = () if step.scratch is None else (step.scratch,)
        args = (step.table, step.owner, *read, numbers, *(tools if step.quantized else ()), *scratch)
        constants = step.constants | {name: options[name] for name in step.options}
        launch(step.kernel, step.programs, *args, warps=step.warps, **constants)
    for param, copy in plan.strided:
        param.copy_(copy)
    del kept


def _pointed(plan: Plan, grads: Sequence[Tensor]) -> list[Tensor]:
    """Point the plan at gradients; return those that kernels read, some of them copies, to be kept till then."""
    read = []
    for g, aligned in zip(grads, plan.aligned, strict=True):
        g = g.contiguous()
        read.append(g.clone() if aligned and g.data_ptr() % 16 else g)
    addresses = torch.tensor([g.data_ptr() for g in read], dtype=torch.int64)
    if not torch.equal(addresses, plan.staged):
        # Not in the old staging memory, which the GPU may still have to read.
        plan.staged = addresses.pin_memory() if plan.addresses.is_cuda else addresses
        plan.addresses.copy_(plan.staged, non_blocking=True)
    return read


def _searched(plan: Plan, codebook: Tensor, ties: Ties, device: torch.device) -> Search:
    """What kernels search a codebook by, made once for each."""
    version = -1 if codebook.is_inference() else codebook._version
    book = plan.book
    if book is None or version < 0 or book[0] is not codebook or book[1:3] != (version, ties):
        book = plan.book = (codebook, version, ties, search_of(moved(codebook, device), ties))
    return book[3]
