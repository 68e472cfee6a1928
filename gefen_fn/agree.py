"""What all members that hold parts of a tree find out together: sums, each entry counted once, and yes or no.

Collectives are issued in the order of the calls, which is the same for every member; without shards there are none.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gefen_fn.scope import Scope, control_device
from gefen_fn.shards import is_sharded, mesh_group, parts_of, piece_of
from gefen_fn.tree import StructureError
from gefen_kernels import reference

Result = TypeVar("Result")

RECORD = struct.Struct("<24sB")  # of every record: what is called, and how it failed; what follows is the call's own
RECORD_BYTES = 64  # or gloo ends the process where members that call different things meet
_DIGEST = struct.Struct("<q")

_COUNTED: dict[Any, bool] = {}  # what `counted` was answered: an eviction on one member alone would ask alone


class GroupFailure(RuntimeError):
    """Another member of the process group failed, so that this one stopped before it changed anything."""


def make_groups(leaves: Sequence[Tensor | None]) -> None:
    """Make the groups that these leaves may need, which is a collective: called by `init`, as all members call that.

    Raises:
        StructureError: if a mesh cannot have one.
    """
    for mesh in meshes_of(leaves):
        if mesh.ndim > 1 and mesh.size() < dist.get_world_size():
            if not mesh.mesh_dim_names:
                raise StructureError(
                    f"A mesh of several axes over some of the processes must name its axes: got {mesh}. "
                    "Give `mesh_dim_names` to `init_device_mesh`."
                )
            mesh_group(mesh, range(mesh.ndim))


def group_of(leaves: Sequence[Tensor | None], scope: Scope | None = None) -> Any:
    """Who acts together: a scope given by hand, else the smallest process group that contains every mesh of the leaves.

    Args:
        leaves: DTensors and plain tensors.
        scope: that replaces what the meshes say.

    Returns:
        The scope, or a process group; None without shards, or where this process is alone.

    Raises:
        StructureError: if no mesh contains the others and together they are not the default group, or if the members of
            the scope hold a part of a leaf only.
    """
    if scope is not None:
        for x in leaves:
            if is_sharded(x):
                _check_covered(scope, tuple(x.shape), x.device_mesh, tuple(x.placements))  # type: ignore[union-attr]  # a DTensor
        return scope if len(scope.members) > 1 else None
    meshes = meshes_of(leaves)
    return _group_of(dist.group.WORLD, meshes) if meshes else None


def meshes_of(leaves: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The meshes that the leaves live on, each once."""
    return tuple(dict.fromkeys(x.device_mesh for x in leaves if is_sharded(x)))  # type: ignore[union-attr]  # DTensors


@functools.lru_cache(maxsize=256)
def ranks_of(meshes: tuple[Any, ...]) -> frozenset[int]:
    """All processes of some meshes."""
    return frozenset(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist())


def members_of(meshes: Sequence[Any]) -> tuple[int, ...]:
    """The ranks of the processes of one mesh that contains the others, or of the whole world.

    Raises:
        StructureError: if they are neither.
    """
    members, union = [ranks_of((mesh,)) for mesh in meshes], ranks_of(tuple(meshes))
    if union not in members and len(union) < dist.get_world_size():
        raise StructureError(
            f"One mesh must contain the others, or all be the whole world: got meshes over {list(map(sorted, members))}"
            f" of {dist.get_world_size()} processes. Build the meshes as parts of one `init_device_mesh`."
        )
    return tuple(sorted(union))


@functools.lru_cache(maxsize=256)
def _group_of(world: Any, meshes: tuple[Any, ...]) -> Any:
    """The group of the members; `world` is the default group, which may be another one later."""
    members = members_of(meshes)
    if len(members) == 1:
        return None
    if len(members) == dist.get_world_size():
        return world
    widest = max(meshes, key=lambda mesh: mesh.size())
    return mesh_group(widest, range(widest.ndim))


@functools.lru_cache(maxsize=4096)
def _check_covered(scope: Scope, whole: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> None:
    """Raise `StructureError` unless the members of a scope hold all of a leaf between them."""
    parts = parts_of(whole, mesh, placements)
    lacking = set(parts.values()) - {parts[rank] for rank in scope.members if rank in parts}
    if lacking:
        raise StructureError(
            f"The members of a scope must hold every entry of a leaf: got {scope!r} without those that hold "
            f"{len(lacking)} parts of a leaf of shape {whole} on a mesh over {sorted(parts)}. Name whole replicas."
        )


def counted(leaves: Sequence[Tensor | None], group: Any) -> list[bool]:
    """Whether this member's part of each leaf is its to count: of equal parts the first member's is.

    Asks the other members once for each way in which a leaf lies, all together; the question depends on what all
    members have in common, so that all ask it or none. In a scope given by hand plain tensors differ, and each member
    counts its own.
    """
    if group is None:
        return [True] * len(leaves)
    ways = [None if x is None else (group, *_way(x)) for x in leaves]
    own_ways = {way for way, x in zip(ways, leaves, strict=True) if isinstance(group, Scope) and not is_sharded(x)}
    _COUNTED.update(dict.fromkeys(own_ways - {None}, True))
    new = {way: _mark(x) for way, x in zip(ways, leaves, strict=True) if x is not None and way not in _COUNTED}
    if new:
        processes, device = _channel(group)
        own = torch.tensor(list(new.values()), dtype=torch.int64, device=device)
        seen = (gathered(own, group)[: dist.get_rank(processes)] == own).any(0)
        _COUNTED.update(zip(new, (~seen & (own != 0)).tolist(), strict=True))
    return [way is not None and _COUNTED[way] for way in ways]


def knows(leaves: Sequence[Tensor | None], group: Any) -> bool:
    """Whether `counted` would answer without asking."""
    return group is None or all(x is None or (group, *_way(x)) in _COUNTED for x in leaves)


def _way(x: Tensor) -> tuple[Any, ...]:
    """How a leaf lies, in words that are the same for all members."""
    piece = piece_of(x)
    return piece.whole, piece.mesh, piece.placements


def _mark(x: Tensor) -> int:
    """Where the first entry of a part lies in the leaf, from 1, which equal parts alone have in common; 0 if empty."""
    piece, place = piece_of(x), 0
    for size, offset in zip(piece.whole, piece.offset, strict=True):
        place = place * size + offset
    return place + 1 if min(piece.shape, default=1) else 0


def _channel(group: Any) -> tuple[Any, torch.device]:
    """The process group of a group or scope, and where its small tensors travel."""
    return (group.group, group.device) if isinstance(group, Scope) else (group, control_device(group))


def answered(send: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`send(*args, **kwargs)`, a collective, whose failure says what became of the others.

    Raises:
        GroupFailure: if some member does not take part.
    """
    try:
        send(*args, **kwargs)
    except RuntimeError as lost:
        raise GroupFailure(
            "All members must take part in what one of them sends: got no answer from some, which are gone, stopped at "
            f"an error of their own, or do something else ({lost}). Look at what they say, and start all of them again "
            "from the last checkpoint."
        ) from lost


def gathered(x: Tensor, group: Any) -> Tensor:
    """`x` of every member, `[members, *x.shape]`.

    Raises:
        GroupFailure: if some member does not take part.
    """
    processes, device = _channel(group)
    x = x.to(device).contiguous()
    out = x.new_empty((dist.get_world_size(processes), *x.shape))
    answered(dist.all_gather, list(out.unbind()), x, group=processes)
    return out


def total(x: Tensor, group: Any) -> Tensor:
    """The sum of `x` over the members, on the device of `x`; of floating numbers in the order of the members."""
    if group is None:
        return x
    if x.is_floating_point():
        return reference.tree_sum(gathered(x, group), 0).to(x.device)
    processes, device = _channel(group)
    out = x.to(device, copy=True)
    answered(dist.all_reduce, out, group=processes)
    return out.to(x.device)


def any_member(x: Tensor, group: Any) -> Tensor:
    """Whether bools hold for any member, entry by entry, on the device of `x`."""
    return x if group is None else gathered(x.to(torch.uint8), group).bool().any(0).to(x.device)


def check_calls(records: Tensor) -> None:
    """Refuse records, uint8 `[members, size]` on the CPU, of members that do not call the same.

    Raises:
        GroupFailure: naming the calls.
    """
    names = records[:, : RECORD.size - 1]
    if bool((names == names[0]).all()):
        return
    calls = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in names.tolist()]
    camps = [f"`{call}` on members {[m for m, x in enumerate(calls) if x == call]}" for call in dict.fromkeys(calls)]
    raise GroupFailure(
        f"All members must make the same call: got {' against '.join(camps)}; nothing was changed. Make each call on "
        "all of them, and never under `if rank == 0`."
    )


def _lonely(phase: str, lost: Exception) -> Exception:
    """What a member raises whose call was not answered, with the likeliest reason."""
    unanswered = isinstance(lost, GroupFailure) and lost.__cause__ is not None
    return GroupFailure(f"{lost} Do all of them call `{phase}`, and not under `if rank == 0`?") if unanswered else lost


def together(
    attempt: Callable[[], Result],
    group: Any,
    phase: str,
    digest: Callable[[Result], int] = lambda _: 0,
    size: int = RECORD_BYTES,
) -> Result:
    """What `attempt` returns, if no member's attempt fails; it must change nothing and send nothing.

    Args:
        attempt: what each member does for itself.
        group: the process group or scope whose members call this, all of them; None for this process alone.
        phase: what is attempted, for the others' error; the first 24 bytes of it.
        digest: a number that all members' results must have in common.
        size: of a member's record in bytes, where the group's other calls send longer ones.

    Raises:
        GroupFailure: if it failed on other members only, if results differ, or if others call something else, or
            nothing; a member on which it failed raises its own error.
    """
    if group is None:
        return attempt()
    result, error = None, None
    try:
        result = attempt()
    except Exception as raised:  # whatever it is, the others have to hear of it before it goes its way
        error = raised
    own = 0 if error is not None else digest(result)  # type: ignore[arg-type]  # it has succeeded
    record = bytearray((RECORD.pack(phase.encode(), error is not None) + _DIGEST.pack(own)).ljust(size, b"\0"))
    try:
        records = gathered(torch.frombuffer(record, dtype=torch.uint8), group).cpu()
        check_calls(records)
    except Exception as lost:  # the others wait elsewhere, or are gone: of two errors the first says why
        raise (error or _lonely(phase, lost)) from (error or lost).__cause__
    failed, digests = records[:, RECORD.size - 1], records[:, RECORD.size : RECORD.size + _DIGEST.size]
    members = failed.nonzero().flatten().tolist()
    if error is not None:
        raise error
    if members:
        raise GroupFailure(
            f"What fails on one member fails on all: `{phase}` failed on members {members} of {len(failed)}, and "
            "nothing was changed here. Their own errors say why."
        )
    if bool((digests != digests[0]).any()):
        raise GroupFailure(
            f"All members must come to one result: `{phase}` had another one on members "
            f"{(digests != digests[0]).any(1).nonzero().flatten().tolist()} than on member 0, and nothing was changed. "
            "Give all members the same scope and the same build."
        )
    return result  # type: ignore[return-value]  # it is None only if `attempt` returned that
