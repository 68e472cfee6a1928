"""Sums of squares over strips of rows on a GPU: what a shard tells the other holders of a tile that an edge cuts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from gefen_kernels.reference import block_count
from gefen_kernels.triton_base import jit, launch
from gefen_kernels.triton_parts import pointer
from gefen_kernels.triton_plan import KINDS, Gradients, Launch, moved, owners, unknown, warps_for
from gefen_kernels.triton_stats import SPAN, STRIP, column_squares

_ROWS = 16  # of a program at one time
_SPAN = int(SPAN.value)


@jit
def strip_kernel(
    table: tl.tensor,
    owner: tl.tensor,
    grads: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A strip of rows and a span of columns.

    `table` is int64 `[strips, 5]`: the place of its leaf among the gradients, its first row, its rows, its columns, and
    where its sums begin.
    """
    owned = owner + tl.program_id(0).to(tl.int64) * 2
    at = table + tl.load(owned).to(tl.int64) * 5
    grad = pointer(tl.load(grads + tl.load(at)), GRAD, ALIGN)
    first, count, columns = tl.load(at + 1), tl.load(at + 2), tl.multiple_of(tl.load(at + 3), ALIGN)
    column = tl.load(owned + 1).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    live = column < columns
    factor = tl.load(scale)
    sums = column_squares(columns, factor, grad, first, count, column, live, out, 0, STRIP, ROWS, False, SCALED, False)
    tl.store(out + tl.load(at + 4) + column, sums, mask=live)


@dataclass
class SumPlan(Gradients):
    """What does not change from step to step.

    Attributes:
        shapes: of each gradient's sums.
        launches: one for the gradients of each dtype and alignment.
    """

    shapes: list[tuple[int, int]]
    launches: list[Launch]


def plan_sums(grads: Sequence[Tensor], strips: Sequence[Sequence[tuple[int, int]]]) -> SumPlan:
    """Lay out strips of gradients `[R, C]`, each with its first row and its rows: a power of two, `STRIP` at most."""
    device = grads[0].device if grads else torch.device("cpu")
    groups: dict[tuple[str, int], list[tuple[int, int, int, int, int]]] = {}
    aligned, out = [], 0
    for n, (g, own) in enumerate(zip(grads, strips, strict=True)):
        columns = g.shape[1]
        aligned.append(columns % 16 == 0)
        for first, rows in own:
            groups.setdefault((KINDS[g.dtype], 16 if aligned[-1] else 1), []).append((n, first, rows, columns, out))
            out += columns
    shapes = [(len(own), g.shape[1]) for g, own in zip(grads, strips, strict=True)]
    launches = [_launch(rows, *kind, device) for kind, rows in groups.items()]
    return SumPlan(tuple(aligned), *unknown(len(grads), device), shapes, launches)


def _launch(rows: list[tuple[int, int, int, int, int]], grad: str, align: int, device: torch.device) -> Launch:
    owner = owners([block_count(columns, _SPAN) for _, _, _, columns, _ in rows])
    count = _ROWS if align == 16 else _ROWS // 2
    return Launch(
        strip_kernel,
        len(owner),
        moved(torch.tensor(rows, dtype=torch.int64, device="cpu"), device),
        moved(owner, device),
        None,
        warps_for(count * _SPAN, align),
        {"GRAD": grad, "ALIGN": align, "ROWS": count},
    )


def run_sums(plan: SumPlan, grads: Sequence[Tensor], scale: Tensor | None = None) -> list[Tensor]:
    """`reference.strip_sums` of each gradient of a plan, of the planned shapes and dtypes; nothing waits for the GPU.

    Args:
        plan: made by `plan_sums`.
        grads: as planned.
        scale: 0-dim fp32: each gradient is multiplied by it first, and rounded to its dtype; None for 1.

    Returns:
        fp32 `[strips, C]` for each.
    """
    addresses = plan.point(grads)
    sizes = [rows * columns for rows, columns in plan.shapes]
    out = torch.empty(sum(sizes), dtype=torch.float32, device=addresses.device)
    factor = out if scale is None else moved(scale, addresses.device)
    for step in plan.launches:
        given = {"grads": addresses, "scale": factor, "out": out, "SCALED": scale is not None, **step.constants}
        launch(step.kernel, step.programs, step.table, step.owner, warps=step.warps, **given)
    return [part.view(shape) for part, shape in zip(torch.split(out, sizes), plan.shapes, strict=True)]
