"""The whole Gefen step on a GPU, in place, in a few launches whatever the number of leaves.

A leaf's entries and codes are read once, but for gradients that its policy has to see whole: `triton_update` has the
kernels, `triton_stats` those for tiles that no program holds.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from gefen_kernels.reference import Ties
from gefen_kernels.step import NO_COUNTS, Leaf
from gefen_kernels.triton_base import launch, widen
from gefen_kernels.triton_block_search import block_means, block_variances
from gefen_kernels.triton_codec import histogram, sum_of_squares
from gefen_kernels.triton_edges import plan_sums, run_sums
from gefen_kernels.triton_gram import symmetric_product
from gefen_kernels.triton_levels import Search, level_search_of, search_of
from gefen_kernels.triton_norm import squares
from gefen_kernels.triton_plan import KINDS, LONGEST, Plan, moved, plan_step

__all__ = [
    "block_means",
    "block_variances",
    "gefen_step",
    "histogram",
    "plan_step",
    "plan_sums",
    "run_step",
    "run_sums",
    "squares",
    "sum_of_squares",
    "supports",
    "symmetric_product",
]


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
    counts: Tensor | None = None,
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
        counts: integers `[leaves, 2]`, the counts that codes and parameters draw with; None where nothing is drawn.

    Raises:
        ValueError: if a dtype is none of fp32, bf16 and fp16, a block longer than 65,536, or there are no counts though
            something is rounded at random.
    """
    grads, plan = [leaf.grad for leaf in leaves], plan_step(leaves)
    run_step(plan, grads, scalars, codebook, drive=drive, ties=ties, negate=negate, scaled=scaled, counts=counts)


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
    counts: Tensor | None = None,
    summed: bool = False,
) -> None:
    """Step the leaves of a plan with these gradients, of the planned shapes and dtypes; see `gefen_step`.

    `summed` goes on from `squares` of them. Row and column means that are taken over whole sides of scaled gradients
    are then those of the unscaled ones times the square of the scale: relative to means of the scaled ones, which are
    rounded to their dtype, they differ by 2^-7 at most in bf16, 2^-10 in fp16 and 2^-20 in fp32; nothing else differs.

    Nothing waits for the GPU. Where scalars, codebook and counts are on it, a second run may be captured: replayed, it
    reads their values and those of the gradients anew, as long as the plan is not run again otherwise.
    """
    if not plan.launches:
        return
    if counts is None and any(
        step.constants["RANDOM_CODES"] or step.constants["RANDOM_PARAM"] for step in plan.launches
    ):
        raise ValueError(NO_COUNTS)
    device = plan.addresses.device
    if not summed:
        plan.point(grads)
    given: dict[str, Any] = {
        "grads": plan.addresses,
        "scalars": moved(scalars.contiguous(), device),
        "counts": None if counts is None else moved(counts.to(torch.int64).contiguous(), device),
        "book": moved(codebook.contiguous(), device),
        "NEGATE": negate,
        "SCALED": scaled,
        "MHAT": drive == "m_hat",
    }
    for param, copy in plan.strided:
        copy.copy_(param)
    for step in plan.launches:
        own = given | step.constants | {"scratch": step.scratch}
        own["SUMMED"] = summed and bool(step.constants.get("SUMS"))
        if "search" in step.kernel.arg_names:
            own["search"] = _searched(plan, codebook, ties, device, random=bool(step.constants["RANDOM_CODES"]))
        taken = {name: own[name] for name in step.kernel.arg_names[2:]}
        launch(step.kernel, step.programs, step.table, step.owner, warps=step.warps, **taken)
    for param, copy in plan.strided:
        param.copy_(copy)
    plan.read = []


def _searched(plan: Plan, codebook: Tensor, ties: Ties, device: torch.device, *, random: bool) -> Search:
    """What kernels search a codebook by, made once for each."""
    version = -1 if codebook.is_inference() else codebook._version
    book = plan.books.get(random)
    if book is None or version < 0 or book[0] is not codebook or book[1:3] != (version, ties):
        levels = moved(codebook, device)
        search = level_search_of(levels) if random else search_of(levels, ties)
        book = plan.books[random] = (codebook, version, ties, search)
    return book[3]
