"""What all members that hold parts of a tree find out together: sums, each entry counted once, and yes or no.

Collectives are issued in the order of the calls, which is the same for every member; without shards there are none.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gefen_fn.shards import is_sharded, mesh_group, piece_of
from gefen_fn.tree import StructureError
from gefen_kernels import reference

Result = TypeVar("Result")

_COUNTED: dict[Any, bool] = {}  # what `counted` was answered: an eviction on one member alone would ask alone


class GroupFailure(RuntimeError):
    """Another member of the process group failed, so that this one stopped before it changed anything."""


def group_of(leaves: Sequence[Tensor | None]) -> Any:
    """The smallest process group that contains every mesh the leaves live on; None without shards.

    Raises:
        StructureError: if no mesh contains the others and together they are not the default group.
    """
    sharded = [x for x in leaves if is_sharded(x)]
    return _group_of(tuple(dict.fromkeys(x.device_mesh for x in sharded))) if sharded else None  # type: ignore[union-attr]  # DTensors


@functools.lru_cache(maxsize=256)
def _group_of(meshes: tuple[Any, ...]) -> Any:
    members = [frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes]
    union = frozenset().union(*members)
    widest = max(range(len(meshes)), key=lambda n: len(members[n]))
    if len(union) == dist.get_world_size():
        return dist.group.WORLD
    if members[widest] != union:
        raise StructureError(
            f"One mesh must contain the others, or all be the whole world: got meshes over {list(map(sorted, members))}"
            f" of {dist.get_world_size()} processes. Build the meshes as parts of one `init_device_mesh`."
        )
    return mesh_group(meshes[widest], range(meshes[widest].ndim))


def counted(leaves: Sequence[Tensor | None], group: Any) -> list[bool]:
    """Whether this member's part of each leaf is its to count: of equal parts the first member's is.

    Asks the other members once for each way in which a leaf lies, all together; the question depends on what all
    members have in common, so that all ask it or none.
    """
    if group is None:
        return [True] * len(leaves)
    ways = [None if x is None else (group, *_way(x)) for x in leaves]
    new = {way: _mark(x) for way, x in zip(ways, leaves, strict=True) if x is not None and way not in _COUNTED}
    if new:
        own = torch.tensor(list(new.values()), dtype=torch.int64, device=control_device(group))
        seen = (gathered(own, group)[: dist.get_rank(group)] == own).any(0)
        _COUNTED.update(zip(new, (~seen & (own != 0)).tolist(), strict=True))
    return [way is not None and _COUNTED[way] for way in ways]


def _way(x: Tensor) -> tuple[Any, ...]:
    """How a leaf lies, in words that are the same for all members."""
    piece = piece_of(x)
    return piece.whole, piece.mesh, piece.placements


def _mark(x: Tensor) -> int:
    """A number that equal parts have in common; 0 for an empty one."""
    piece = piece_of(x)
    return zlib.crc32(repr((piece.offset, piece.shape)).encode()) if min(piece.shape, default=1) else 0


def control_device(group: Any) -> torch.device:
    """Where a group's small tensors travel: the CPU if a back end serves it, so that no device waits."""
    kinds = dict(part.split(":") for part in dist.distributed_c10d.get_backend_config(group).split(","))
    return torch.device("cpu" if "cpu" in kinds else next(iter(kinds)))


def gathered(x: Tensor, group: Any) -> Tensor:
    """`x` of every member, `[members, *x.shape]`."""
    x = x.to(control_device(group)).contiguous()
    out = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(out.unbind()), x, group=group)
    return out


def total(x: Tensor, group: Any) -> Tensor:
    """The sum of `x` over the members, on the device of `x`; of floating numbers in the order of the members."""
    if group is None:
        return x
    if x.is_floating_point():
        return reference.tree_sum(gathered(x, group), 0).to(x.device)
    out = x.to(control_device(group), copy=True)
    dist.all_reduce(out, group=group)
    return out.to(x.device)


def any_member(x: Tensor, group: Any) -> Tensor:
    """Whether bools hold for any member, entry by entry, on the device of `x`."""
    return x if group is None else gathered(x.to(torch.uint8), group).bool().any(0).to(x.device)


def together(attempt: Callable[[], Result], group: Any, phase: str) -> Result:
    """What `attempt` returns, if no member's attempt fails; it must change nothing and send nothing.

    Args:
        attempt: what each member does for itself.
        group: the process group whose members call this, all of them; None for this process alone.
        phase: what is attempted, for the others' error.

    Raises:
        GroupFailure: if it failed on other members only; a member on which it failed raises its own error.
    """
    if group is None:
        return attempt()
    result, error = None, None
    try:
        result = attempt()
    except Exception as raised:  # whatever it is, the others have to hear of it before it goes its way
        error = raised
    failed = gathered(torch.tensor([error is not None], dtype=torch.uint8, device="cpu"), group)
    members = failed.flatten().nonzero().flatten().tolist()
    if error is not None:
        raise error
    if members:
        raise GroupFailure(
            f"What fails on one member fails on all: `{phase}` failed on members {members} of {len(failed)}, and "
            "nothing was changed here. Their own errors say why."
        )
    return result  # type: ignore[return-value]  # it is None only if `attempt` returned that
