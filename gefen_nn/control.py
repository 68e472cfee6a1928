"""The control group: who hears, before a step, what each member found."""

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gefen_fn import agree
from gefen_fn.base import GradientTransformation
from gefen_fn.describe import quantizing
from gefen_fn.fuse import squares_of
from gefen_fn.scalar import capturing
from gefen_fn.scope import Scope, back_ends, control_device
from gefen_fn.shards import mesh_group
from gefen_fn.tree import StructureError
from gefen_nn.fingerprint import fingerprint
from gefen_nn.groups import find_injection
from gefen_nn.vote import Gradients, record_bytes

Result = TypeVar("Result")

_VOTING: dict[Any, Scope] = {}  # by default group and members: one group for votes serves all optimizers


class Control:
    """The members that fail together: those of a scope given by hand, else those of every mesh of the parameters.

    They are found at construction by all members, who tell each other what they see, and stay when a parameter is
    replaced: what happens to one member must not change whom it tells.

    Attributes:
        shared: whether there is a scope, or parameters lie on a mesh; a step is not traced by torch.compile then.
        transform: a digest of the transform, and of whether steps are fused, which send other things where they learn;
            all members have it in common; 32 bits.
        parameters: how many the next vote's record has room for.
    """

    def __init__(self, tx: GradientTransformation, fused: bool) -> None:
        scopes = [Scope.of(rule["codebook"]) for rule in quantizing(tx).values()]
        self._given = _widest([scope for scope in scopes if scope is not None])
        self.shared = self._given is not None
        self.transform = zlib.crc32(bytes([fused]), fingerprint(tx, find_injection(tx).tx))
        self.parameters = 0
        self._found: Scope | None = None
        self._seen: frozenset[int] = frozenset()
        self._sums = False
        self._squares = squares_of(tx)

    def of(self, leaves: Sequence[Tensor]) -> Scope | None:
        """The members; None for this process alone, and while a graph is captured.

        Where meshes are new this is a collective, as the making of a process group is.

        Raises:
            StructureError: on every member, if the meshes overlap, or if members see other meshes.
        """
        if capturing():
            return None
        meshes = agree.meshes_of(leaves)
        if meshes and not agree.ranks_of(meshes) <= self._seen:
            members = _agreed_members(meshes)
            self._seen, self.shared = frozenset(members), True
            votes = self._given is None and len(members) > 1 and dist.get_rank() in members
            self._found = _voting(members, agree.group_of(leaves)) if votes else None
            self._sums = self._given is None or self._given.members == members
        scope = self._found if self._given is None else self._given
        return scope if scope is not None and len(scope.members) > 1 else None

    def together(self, attempt: Callable[[], Result], group: Any, call: str) -> Result:
        """`agree.together` of those who vote, in records of a vote's size, so that a member that steps is told."""
        return agree.together(attempt, group, call, size=record_bytes(self.parameters))

    def squares(self, grads: Gradients) -> Tensor | None:
        """A member's squares of a norm, as of `squares_of`; None also if others hold the parameters."""
        return self._squares(grads) if self._sums else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's decorator has no types
def untraced(f: Callable[..., Result], *args: Any) -> Result:
    """`f(*args)`, as it is without torch.compile."""
    return f(*args)


def _widest(scopes: Sequence[Scope]) -> Scope | None:
    """The scope that contains the others; None of none."""
    if not scopes:
        return None
    widest = max(scopes, key=lambda scope: len(scope.members))
    if any(set(scope.members) - set(widest.members) for scope in scopes):
        raise ValueError(
            f"One scope must contain the others, as its members vote before a step: got {list(dict.fromkeys(scopes))}. "
            "Give the parts one scope."
        )
    return widest


def _agreed_members(meshes: Sequence[Any]) -> tuple[int, ...]:
    """The members as all of them see them, whoever sees the most meshes among them.

    Neighbours compare what they see. Refusals are passed on as often as one of them sees meshes, so that those at the
    far end of overlapping meshes hear of it.
    """
    try:
        members, refused = agree.members_of(meshes), None
    except StructureError as error:
        members, refused = (), error
    rank = dist.get_rank()
    ranks = {tuple(sorted(agree.ranks_of((mesh,)))): mesh for mesh in meshes}
    groups = [mesh_group(ranks[key], range(ranks[key].ndim)) for key in sorted(ranks) if rank in key and len(key) > 1]
    own = torch.tensor([zlib.crc32(repr(members).encode()), len(ranks)], dtype=torch.int64, device="cpu")
    heard = [agree.gathered(own, group).cpu() for group in groups]
    differ = any(bool((table[:, 0] != own[0]).any()) for table in heard)
    for sweep in range(1, max((int(table[:, 1].max()) for table in heard), default=0)):
        still = [group for group, table in zip(groups, heard, strict=True) if sweep < table[:, 1].max()]
        failed = torch.tensor([differ or refused is not None], dtype=torch.uint8, device="cpu")
        differ = any([bool(agree.gathered(failed, group).any()) for group in still]) or differ
    if refused is not None:
        raise refused
    if differ:
        raise StructureError(
            f"Meshes must not overlap from one member to the next: got meshes over {sorted(map(list, ranks))} here, "
            "and others elsewhere. Give all members the same parameters, or build the meshes as parts of one "
            "`init_device_mesh`."
        )
    return members


def _voting(members: tuple[int, ...], beside: Any) -> Scope:
    """The members with a process group for votes alone, of the back end and timeout of the one that they have.

    A part of all processes votes in the one that it has: a new one takes all processes to make.
    """
    key = dist.group.WORLD, members
    if key not in _VOTING:
        device = control_device(beside)
        if len(members) == dist.get_world_size():
            kind = back_ends(beside)[device.type]
            beside = dist.new_group(list(members), timeout=timeout_of(beside), backend=kind)
        _VOTING[key] = Scope("votes", members, beside, device)
    return _VOTING[key]


def timeout_of(group: Any) -> timedelta | None:
    """The timeout of a process group, if its back end tells."""
    options = getattr(group._get_backend(control_device(group)), "options", None)
    limit: timedelta | None = getattr(options, "_timeout", None)
    return limit
