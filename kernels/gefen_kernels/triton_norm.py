"""The sum of squares of all gradients of a step, in launches whose number does not grow with the leaves.

Gradients that a policy has to see whole are read by the first launch of their step, which leaves what that needs.
"""

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from gefen_kernels.reference import block_count
from gefen_kernels.triton_base import jit, launch, widen
from gefen_kernels.triton_codec import Blocks, place, tree_sum_last
from gefen_kernels.triton_parts import pointer
from gefen_kernels.triton_plan import KINDS, Launch, Plan, moved, owners, warps_for

_RUN = 256  # columns whose squares are added in fp32, as in `reference.sum_of_squares`
_ENTRIES = 4096  # of a program


@jit
def square_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    grads: tl.tensor,
    scratch: tl.tensor,
    GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """`COUNT` runs of `WIDTH` columns: trees of squares in fp32, added in float64.

    `table` is int64 `[leaves, 4]`: a leaf's place among the gradients, its runs in all and in a row, and its columns.
    """
    owned = owner + tl.program_id(0).to(tl.int64) * 2
    at = table + tl.load(owned).to(tl.int64) * 4
    grad = pointer(tl.load(grads + tl.load(at)), GRAD, ALIGN)
    runs = Blocks(tl.load(at + 1), tl.load(at + 2), tl.multiple_of(tl.load(at + 3), ALIGN), WIDTH)
    offset, mask, _, _ = place(tl.load(owned + 1), runs, COUNT, WIDTH, False)
    g = widen(tl.load(grad + offset, mask=mask, other=0.0))
    sums = tl.reshape(tree_sum_last(g * g).to(tl.float64), [1, COUNT])
    tl.store(scratch + tl.program_id(0) + tl.arange(0, 1), tree_sum_last(sums))


def squares(plan: Plan, grads: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """The sum of squares of all gradients as a 0-dim float64 tensor, as `reference.sum_of_squares` adds each leaf's.

    Only the float64 additions may be in another order. `run_step(..., summed=True)` of the same plan and gradients,
    right after this, does not read gradients once more that this has read for it.

    Args:
        plan: made by `plan_step`.
        grads: of the planned shapes and dtypes.
        starts: of each gradient, first of the axes that are merged into columns.
    """
    addresses = plan.point(grads)
    if plan.norm is None:
        plan.norm = (*_plan_norm(plan, grads, starts), *(step for step in plan.launches if step.runs))
    sums = [torch.zeros(1, dtype=torch.float64, device=addresses.device)]
    for step in plan.norm:
        given = step.constants | {"grads": addresses, "scratch": step.scratch, "scalars": step.scratch}
        given |= {"NEGATE": False, "SCALED": False, "SUMMED": False}
        taken = {name: given[name] for name in step.kernel.arg_names[2:]}
        launch(step.kernel, step.programs, step.table, step.owner, warps=step.warps, **taken)
        assert step.scratch is not None
        sums.append(step.scratch[: step.runs or step.programs].sum(dtype=torch.float64).reshape(1))
    return torch.cat(sums).sum()


def _plan_norm(plan: Plan, grads: Sequence[Tensor], starts: Sequence[int]) -> list[Launch]:
    """A launch for the gradients of each dtype and alignment, one more for those with one column."""
    groups: dict[tuple[str, int, int], list[tuple[int, int, int, int]]] = {}
    for index, (g, start) in enumerate(zip(grads, starts, strict=True)):
        if g.numel() and index not in plan.summed:
            columns = math.prod(g.shape[start:])
            width = _RUN if columns > 1 else 1
            align = 16 if plan.aligned[index] and columns % 16 == 0 else 1
            row = (index, g.numel() // columns * block_count(columns, width), block_count(columns, width), columns)
            groups.setdefault((KINDS[g.dtype], align, width), []).append(row)
    return [_launch(rows, *kind, plan.addresses.device) for kind, rows in groups.items()]


def _launch(rows: list[tuple[int, int, int, int]], grad: str, align: int, width: int, device: torch.device) -> Launch:
    entries = _ENTRIES if align == 16 else _ENTRIES // 2
    owner = owners([block_count(runs, entries // width) for _, runs, _, _ in rows])
    return Launch(
        square_kernel,
        len(owner),
        moved(torch.tensor(rows, dtype=torch.int64, device="cpu"), device),
        moved(owner, device),
        torch.empty(len(owner), dtype=torch.float64, device=device),
        warps_for(entries, align),
        {"GRAD": grad, "ALIGN": align, "COUNT": entries // width, "WIDTH": width},
    )
