"""What steps each leaf where it lies: a back end's loops or kernels, or plain torch, and why."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, Params
from gefen_fn.blocks import FlatBlocks, layout_list
from gefen_fn.combine import choices_of
from gefen_fn.cut_step import is_one_run
from gefen_fn.fuse import FusedStep, Step, fuse
from gefen_fn.program import Part, Program, unread
from gefen_fn.second_moment import Factored, policy_for
from gefen_fn.shards import local, piece_of
from gefen_fn.tree import readable, tree_leaves, tree_paths
from gefen_kernels import ops

_BACK_ENDS = {"cpu": "numba loops", "cuda": "Triton kernels"}
_KNOWN = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST = 65_536  # entries of a block that the Triton kernels take
_SHOWN = 3


def runs(tx: GradientTransformation, params: Params, *, fused: bool = True) -> tuple[str, ...]:
    """One line for each device that parameters are on, in the order in which they come; none for meta.

    Of leaves on meshes of several axes all processes call this together, as they do `init`, which makes their groups.

    Args:
        tx: the transform.
        params: the parameters, with gradients of dtypes that the back ends know.
        fused: whether steps in place are asked for.
    """
    step = fuse(tx)
    common = "" if step is not None and fused else "fused=False" if step is not None else _unfused(tx)
    paths, leaves = tree_paths(params), tree_leaves(params)
    program = None if step is None else _program(step)
    reasons = [common] * len(leaves) if program is None or common else _reasons(program, params, leaves)
    triples = zip(paths, leaves, reasons, strict=True)
    rows = [(readable(at) or ".", p.device, why) for at, p, why in triples if p is not None]
    devices = dict.fromkeys(device for _, device, _ in rows if device.type != "meta")
    return tuple(_line(device, [(at, why) for at, where, why in rows if where == device]) for device in devices)


def _unfused(tx: GradientTransformation) -> str:
    return "the expression is not fused" + (f": {why}" if (why := unread(tx)) else "")


def _program(step: FusedStep) -> Program:
    return step.program if isinstance(step, Step) else _program(step.inner)


def _line(device: torch.device, rows: Sequence[tuple[str, str]]) -> str:
    """What runs on a device, the exceptions with their reasons."""
    name = _BACK_ENDS.get(device.type, "")
    left: dict[str, list[str]] = {}
    for at, why in rows:
        if why:
            left.setdefault(why, []).append(at)
    count = sum(map(len, left.values()))
    if not count:
        return f"{device}: {name}"
    told = [f"{why}: {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}" for why, names in left.items()]
    reasons = next(iter(left)) if count == len(rows) and len(left) == 1 else "; ".join(told)
    some = f"{name} for {len(rows) - count} of {len(rows)} leaves, " if count < len(rows) else ""
    return f"{device}: {some}plain torch{' for the others' if some else ''} ({reasons})"


def _reasons(program: Program, params: Params, leaves: Sequence[Any]) -> list[str]:
    """Why each leaf takes plain torch; empty where a back end steps it."""
    labels = [None] * len(leaves) if program.labels is None else choices_of(program.labels, params, params)
    parts = {part.label: (part, _layouts(part, params)) for part in program.parts}
    return [
        "" if p is None else _reason(*parts[label], n, p) if label in parts else "its stages are not fused"
        for n, (p, label) in enumerate(zip(leaves, labels, strict=True))
    ]


def _layouts(part: Part, params: Params) -> list[Any]:
    return [] if part.is_muon else layout_list(part.core.recipe.kwargs["block"], params)


def _reason(part: Part, layouts: Sequence[Any], n: int, p: Tensor) -> str:
    if p.device.type != "meta" and ops.back_end(p.device) is None:
        needs = ops.missing(p.device)
        return f"{needs} is not installed" if needs else f"no back end for {p.device.type}, or GEFEN_REFERENCE=1"
    if p.dtype not in _KNOWN:
        return str(p.dtype).removeprefix("torch.")
    if part.is_muon:
        cut = bool(piece_of(p).axes)
        return "Muon's steps are fused on CPUs alone" * (p.device.type != "cpu") or "cut by shards" * cut
    return _gefen_reason(part, layouts[n], p)


def _gefen_reason(part: Part, layout: Any, p: Tensor) -> str:
    given, policy = part.core.recipe.kwargs, policy_for(part.core.recipe.kwargs["second_moment"], layout)
    codes = given["rounding"] == "stochastic" and not layout.dense
    param = part.rounding is not None and p.dtype == torch.bfloat16
    if isinstance(policy, Factored) and isinstance(given["block"], FlatBlocks):
        return "tiles beside blocks of a flattened leaf"
    cut = isinstance(policy, Factored) and policy.tiles(layout).peers is not None
    if (codes or param) and not is_one_run(layout.piece, layout.start, cut=cut):
        return f"{'codes' if codes else 'bf16 parameters'} rounded at random, cut by shards beyond the first axis"
    if cut and not local(p).is_contiguous():
        return "tiles cut by shards, not contiguous"
    return "blocks of more than 65,536" if p.device.type == "cuda" and layout.block > _LONGEST else ""
