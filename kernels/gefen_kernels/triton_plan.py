"""What a fused step launches: leaves sorted into kinds, and the tables that tell programs of their leaves.

Leaves with one policy, one pair of dtypes and one set of options share a launch: one if they are dense, in blocks, or
factored in tiles that a program holds, else three.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gefen_kernels.reference import Ties, block_count
from gefen_kernels.step import Leaf
from gefen_kernels.triton_levels import Search
from gefen_kernels.triton_parts import Row
from gefen_kernels.triton_stats import SPAN, STRIP, mean_kernel, sum_kernel
from gefen_kernels.triton_update import block_kernel, dense_kernel, tile_kernel, update_kernel

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LONGEST = 1 << 16  # block
_ENTRIES = 4096  # of a program at one time, 8 of a thread; half of both where 16 bytes cannot be read at once
_FLAT = 1024  # of a program of dense leaves
_TILE = 1 << 16  # most entries of a tile that stays in the cache between two sweeps
_WIDEST = 1024  # columns of such a tile
_HEIGHT = 32  # rows of a program whose columns' means are given
_STRIP, _SPAN = int(STRIP.value), int(SPAN.value)

Constants = dict[str, bool | int | str]


class Launch(NamedTuple):
    """One launch of a plan.

    Attributes:
        kernel: takes `table`, `owner`, and by name what `triton_step.run_step` has for it.
        programs: how many.
        table: int64 `[leaves, fields]`, see `triton_parts.Row`.
        owner: int32 `[programs, 2]`, each program's leaf and its number among that leaf's programs.
        scratch: fp32, sums that one launch leaves for the next.
        warps: of a program.
        constants: what is constant while the plan holds.
        runs: how many of the scratch, from its first, are a gradient's squares added by runs of 256 columns.
    """

    kernel: Any
    programs: int
    table: Tensor
    owner: Tensor
    scratch: Tensor | None
    warps: int
    constants: Constants
    runs: int = 0


@dataclass
class Gradients:
    """Where kernels find the gradients of a step.

    Attributes:
        aligned: for each leaf, whether its gradient is read by 16 bytes.
        addresses: of the gradients on the GPU, int64 `[leaves]`.
        staged: the same on the host.
        read: the gradients that kernels read, some of them copies, from the first launch of a step to its last.
    """

    aligned: tuple[bool, ...]
    addresses: Tensor
    staged: Tensor
    read: list[Tensor] = field(default_factory=list, init=False)

    def point(self, grads: Sequence[Tensor]) -> Tensor:
        """Point kernels at gradients; return the addresses."""
        contiguous = [g.contiguous() for g in grads]
        pairs = zip(contiguous, self.aligned, strict=True)
        self.read = [g.clone() if aligned and g.data_ptr() % 16 else g for g, aligned in pairs]
        addresses = torch.tensor([g.data_ptr() for g in self.read], dtype=torch.int64, device="cpu")
        if not torch.equal(addresses, self.staged):
            # Not in the old staging memory, which the GPU may still have to read.
            self.staged = addresses.pin_memory() if self.addresses.is_cuda else addresses
            self.addresses.copy_(self.staged, non_blocking=True)
        return self.addresses


@dataclass
class Plan(Gradients):
    """What a step of some leaves launches; it holds while parameters and state stay where they are.

    Attributes:
        launches: in order.
        strided: parameters that are not contiguous, each with the copy that kernels step.
        summed: the leaves whose squares are added in the first of their launches as for a norm.
        books: the codebook of the last step, with its tie rule and what kernels search it by; for codes that are
            rounded at random under True, for the nearest under False.
        norm: what `triton_norm.squares` launches.
    """

    launches: tuple[Launch, ...]
    strided: tuple[tuple[Tensor, Tensor], ...]
    summed: frozenset[int]
    books: dict[bool, tuple[Tensor, int, Ties, Search]] = field(default_factory=dict, init=False)
    norm: tuple[Launch, ...] | None = field(default=None, init=False)


class _Kind(NamedTuple):
    """What leaves must have in common to share their launches."""

    plan: "Callable[[_Group], list[Launch]]"
    grad: str
    param: str
    align: int
    constants: tuple[tuple[str, bool | int], ...]


class _Form(NamedTuple):
    """What follows from a leaf's shape and options: most of its entry, and its kernel's constants.

    Attributes:
        row: with zeros where its leaf's tensors and flags belong.
        plan: who plans the launches.
        constants: where 16 bytes may be read at once.
        fewer: where not.
    """

    row: Row
    plan: "Callable[[_Group], list[Launch]]"
    constants: tuple[tuple[str, bool | int], ...]
    fewer: tuple[tuple[str, bool | int], ...]


class _Group(NamedTuple):
    """The leaves of one kind, as rows of a table."""

    rows: list[Row]
    device: torch.device
    types: Constants
    constants: dict[str, Any]


def plan_step(leaves: Sequence[Leaf]) -> Plan:
    """Sort leaves into launches and write their tables, which are copied to the GPU: plan before a capture.

    Raises:
        ValueError: if a dtype is none of fp32, bf16 and fp16, or a block longer than 65,536.
    """
    strided: list[tuple[Tensor, Tensor]] = []
    groups: dict[_Kind, list[Row]] = {}
    aligned = [False] * len(leaves)
    for index, leaf in enumerate(leaves):
        if leaf.param.numel():
            kind, row = _kind_and_row(leaf, _contiguous(leaf.param, strided), index)
            groups.setdefault(kind, []).append(row)
            aligned[index] = kind.align == 16
    device = leaves[0].param.device if leaves else torch.device("cpu")
    launches = [step for kind, rows in groups.items() for step in kind.plan(_group(kind, rows, device))]
    summed = frozenset(row.index for kind, rows in groups.items() if dict(kind.constants).get("SUMS") for row in rows)
    return Plan(tuple(aligned), *unknown(len(leaves), device), tuple(launches), tuple(strided), summed)


def unknown(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for so many addresses on the device and on the host."""
    staged = torch.zeros(count, dtype=torch.int64, device="cpu")
    return staged.to(device), staged


def _contiguous(p: Tensor, strided: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The parameter, or a contiguous tensor of its shape, which is noted."""
    if p.is_contiguous():
        return p
    copy = torch.empty_like(p, memory_format=torch.contiguous_format)
    strided.append((p, copy))
    return copy


# ---- what leaves share


def _kind_and_row(leaf: Leaf, param: Tensor, index: int) -> tuple[_Kind, Row]:
    """A leaf's kind and entry, with `param` as its parameter."""
    dtypes = (leaf.grad.dtype, param.dtype)
    if not set(dtypes) <= KINDS.keys():
        raise ValueError(f"Kernels take fp32, bf16 and fp16: got {dtypes}. Use `gefen_kernels.reference`.")
    policy = "none" if leaf.absmax is None else leaf.policy
    form = _form(tuple(param.shape), leaf.start, leaf.block, leaf.tile, policy)
    at, mu, nu = param.data_ptr(), leaf.mu.data_ptr(), leaf.nu[0].data_ptr()
    scale = 0 if leaf.absmax is None else leaf.absmax.data_ptr()
    own = (
        at,
        mu,
        scale,
        nu,
        leaf.nu[-1].data_ptr(),
        int(leaf.decays),
        int(leaf.corrects),
        index,
        leaf.seed,
        leaf.first,
    )
    grad = leaf.grad.data_ptr() if leaf.grad.is_contiguous() else 0
    lie = form.row
    even = not any(x % 16 for x in (grad, at, mu, nu, 4 * leaf.first, lie.columns, lie.width, lie.block))
    constants, align = (form.constants, 16) if even else (form.fewer, 1)
    drawn = leaf.random_codes, leaf.random_param and dtypes[1] == torch.bfloat16
    constants += tuple(zip(("RANDOM_CODES", "RANDOM_PARAM"), drawn, strict=True))
    return _Kind(form.plan, KINDS[dtypes[0]], KINDS[dtypes[1]], align, constants), Row(*own, *form.row[len(own) :])


@functools.lru_cache(maxsize=4096)
def _form(shape: tuple[int, ...], start: int, block: int, tile: tuple[int | None, int | None], policy: str) -> _Form:
    """The form of a leaf; its policy is "none" if the leaf is dense."""
    if policy == "none":
        width: dict[str, bool | int] = {"WIDTH": _FLAT}
        return _Form(_sizes((math.prod(shape),), 0, 1, (None, None), policy), _plan_dense, *(tuple(width.items()),) * 2)
    row = _sizes(shape, start, block, tile, policy)
    made = [_constants(row, block, tile, policy, entries) for entries in (_ENTRIES, _ENTRIES // 2)]
    return _Form(row, made[0][0], *(tuple(constants.items()) for _, constants in made))


def _constants(
    row: Row, block: int, tile: tuple[int | None, int | None], policy: str, entries: int
) -> "tuple[Callable[[_Group], list[Launch]], dict[str, bool | int]]":
    """Who plans a quantized leaf, and the constants of its kernel for so many entries at one time."""
    factored, given = policy in ("factored", "given"), policy == "given"
    if factored and (held := _tile(row, block, _HEIGHT if given else tile[0], tile[1], entries)):
        return _plan_tiles, {"GIVEN": given, **held}
    width = _padded(row.block)
    count = max(1, entries // width)
    if factored:
        straddles = row.across > 1 and row.width % row.block != 0
        sums = row.across == 1 or row.width % _SPAN == 0
        return _plan_strips, {
            "ROWS": min(_STRIP, count),
            "WIDTH": width,
            "STRADDLES": straddles,
            "SUMS": sums,
            "GIVEN": given,
        }
    whole = width == row.block and row.columns % width == 0
    return _plan_blocks, {"DENSE": policy == "dense", "COUNT": count, "WIDTH": width, "WHOLE": whole}


def _tile(row: Row, block: int, height: int | None, side: int | None, entries: int) -> dict[str, bool | int] | None:
    """The constants of `tile_kernel`; None where no program holds a tile or a block crosses its edge."""
    width = triton.next_power_of_2(min(side or row.columns, max(row.columns, 256)))
    block = width if block >= row.columns else block
    edges = width % block == 0 and (row.across == 1 or row.width % block == 0)
    if height is None or not edges or width > _WIDEST or height * width > _TILE:
        return None
    return {"HEIGHT": height, "ROWS": min(height, entries // width), "WIDTH": width, "BLOCK": block}


def _padded(block: int) -> int:
    """The power of two that a block is padded to."""
    if block > LONGEST:
        raise ValueError(f"`block` may be {LONGEST:,} at most: got {block:,}. Use 256, or `gefen_kernels.reference`.")
    return int(triton.next_power_of_2(block))


def _sizes(shape: tuple[int, ...], start: int, block: int, tile: tuple[int | None, int | None], policy: str) -> Row:
    """A leaf's entry in a table, but for its tensors, its flags and its place in the scratch."""
    columns, rows = math.prod(shape[start:]), shape[start - 1] if start else 1
    height, width = tile[0] or rows, min(tile[1] or columns, columns)
    down, across, blocks = max(1, rows // height), block_count(columns, width), block_count(columns, block)
    lines, strips, spans = math.prod(shape[:start]), block_count(height, _STRIP), block_count(width, _SPAN)
    return Row(
        *(0,) * 10,
        total=lines if policy in ("factored", "given") else lines * blocks,
        rows=rows,
        columns=columns,
        block=0 if policy == "none" else min(block, columns),
        blocks=blocks,
        height=height,
        down=down,
        width=width,
        across=across,
        packed=1 if policy == "given" else rows if tile[0] is None else 1 << (min(height, rows).bit_length() - 1),
        strips=strips,
        all_strips=(down - 1) * strips + block_count(rows - (down - 1) * height, _STRIP),
        spans=spans,
        all_spans=(across - 1) * spans + block_count(columns - (across - 1) * width, _SPAN),
        row_sums=0,
        column_sums=0,
        norms=0,
    )


def _group(kind: _Kind, rows: list[Row], device: torch.device) -> _Group:
    types: Constants = {"GRAD": kind.grad, "PARAM": kind.param, "ALIGN": kind.align}
    return _Group(rows, device, types, dict(kind.constants))


# ---- the launches of one kind


def _plan_dense(group: _Group) -> list[Launch]:
    return [_launch(group, dense_kernel, [block_count(row.columns, _FLAT) for row in group.rows], _FLAT)]


def _plan_blocks(group: _Group) -> list[Launch]:
    count, width = group.constants["COUNT"], group.constants["WIDTH"]
    return [_launch(group, block_kernel, [block_count(row.total, count) for row in group.rows], count * width)]


def _plan_tiles(group: _Group) -> list[Launch]:
    down = [block_count(row.rows, _HEIGHT) if group.constants["GIVEN"] else row.down for row in group.rows]
    counts = [row.total // row.rows * tiles * row.across for row, tiles in zip(group.rows, down, strict=True)]
    return [_launch(group, tile_kernel, counts, group.constants["ROWS"] * group.constants["WIDTH"])]


def _plan_strips(group: _Group) -> list[Launch]:
    """Sums of squares; their averages; the step."""
    rows, size = _with_scratch(group.rows)
    group = group._replace(rows=rows)
    scratch = torch.empty(size, dtype=torch.float32, device=group.device)
    spans = triton.next_power_of_2(max(row.spans for row in rows))
    strips = triton.next_power_of_2(max(max(row.strips, row.all_strips - (row.down - 1) * row.strips) for row in rows))
    lines = min(_STRIP, max(1, _ENTRIES // spans))
    pieces = [row.total // row.rows * row.all_strips * row.all_spans for row in rows]
    means = [
        block_count(row.total, lines) * row.across + row.total // row.rows * row.down * row.all_spans for row in rows
    ]
    steps = [row.total // row.rows * row.all_strips * row.blocks for row in rows]
    whole = {"LINES": lines, "SPANS": spans, "STRIPS": strips}
    group = group._replace(constants=group.constants | whole)
    parts = [
        _launch(group, sum_kernel, pieces, 16 * _SPAN),
        _launch(group, mean_kernel, means, _ENTRIES),
        _launch(group, update_kernel, steps, group.constants["ROWS"] * group.constants["WIDTH"]),
    ]
    runs = rows[0].column_sums if group.constants["SUMS"] else 0
    first, *others = (part._replace(scratch=scratch) for part in parts)
    return [first._replace(runs=runs), *others]


def _with_scratch(rows: list[Row]) -> tuple[list[Row], int]:
    """The rows with their places in the scratch, the sums of all rows first, and its size."""
    size, placed = 0, []
    for row in rows:
        placed.append(row._replace(row_sums=size))
        size += row.total * row.all_spans
    for i, row in enumerate(placed):
        norms = size + row.total // row.rows * row.all_strips * row.columns
        placed[i] = row._replace(column_sums=size, norms=norms)
        size = norms + row.total // row.rows * row.down * row.all_spans
    return placed, size


def _launch(group: _Group, kernel: Any, counts: list[int], entries: int) -> Launch:
    """A launch with so many programs for each leaf, each of so many entries at one time."""
    return Launch(
        kernel,
        sum(counts),
        moved(torch.tensor(group.rows, dtype=torch.int64, device="cpu"), group.device),
        moved(owners(counts), group.device),
        None,
        warps_for(entries, int(group.types["ALIGN"])),
        group.types | group.constants,
    )


def owners(counts: list[int]) -> Tensor:
    """Each program's leaf and its number among that leaf's: int32 `[programs, 2]`, for so many programs of each."""
    number = torch.tensor(counts, device="cpu")
    leaf = torch.repeat_interleave(number)
    inside = torch.arange(len(leaf), device="cpu") - (number.cumsum(0) - number)[leaf]
    return torch.stack([leaf, inside], 1).to(torch.int32)


def warps_for(entries: int, align: int) -> int:
    """The warps of a program of so many entries at one time: 8 of a thread, 4 where 16 bytes are not read at once."""
    return min(16, max(1, entries // (256 if align == 16 else 128)))


def moved(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    if device.type == x.device.type or device.type != "cuda":
        return x
    return x.pin_memory().to(device, non_blocking=True)
