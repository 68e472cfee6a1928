"""Scopes: processes named by hand that learn a codebook together, or vote together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Scope:
    """Processes that learn one codebook together, whatever their tensors say; given as `codebook=Scope(...)`.

    Without one the members are those of the meshes that the leaves live on, and a process whose tensors are plain
    learns for itself. Plain tensors whose gradients differ between processes, such as those of replicas that are
    averaged now and then, need a scope to learn the same codebook. In a scope each member's gradient of a plain tensor
    counts, of a sharded one each entry once. A torch optimizer's members vote in the scope before each step, so that
    what fails on one of them fails on all.

    Every member builds the scope, with the same name and members.

    Attributes:
        name: the same on all members.
        members: their ranks, in the order of the group.
        group: their process group, such as `torch.distributed.new_group((0, 1))`; its timeout is the scope's.
        device: where small tensors travel; the CPU if the group has a back end for it, so that no device waits.

    Raises:
        TypeError: naming the field, for a value of another type.
        ValueError: naming the field, for an empty name, ranks that are not the group's, or a device it cannot serve.
    """

    name: str
    members: tuple[int, ...]
    group: Any
    device: torch.device = None  # type: ignore[assignment]  # filled in from the group

    def __post_init__(self) -> None:
        """Refuse what is no scope, where it is written."""
        object.__setattr__(self, "members", _ranks(self.members))
        if type(self.name) is not str or not self.name:
            kind = ValueError if self.name == "" else TypeError
            raise kind(f"`name` must be a text that is not empty: got {self.name!r}. Name the scope.")
        if not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(
                f"`group` must be a process group that this process is a member of: got {self.group!r}. "
                "Call torch.distributed.init_process_group and new_group, and build the scope on members alone."
            )
        ranks = tuple(dist.get_process_group_ranks(self.group))
        if ranks != self.members:
            raise ValueError(f"`members` must be the ranks of the group in its order: got {self.members} of {ranks}.")
        object.__setattr__(self, "device", _device(self.device, self.group))

    @classmethod
    def of(cls, codebook: Any) -> "Scope | None":
        """The scope that an argument `codebook` is, if it is one."""
        return codebook if isinstance(codebook, cls) else None

    def __repr__(self) -> str:
        """Without the group, which says nothing."""
        return f"Scope({self.name!r}, members={self.members})"

    def __copy__(self) -> "Scope":
        """Itself: no process group is copied."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scope":
        """Itself: no process group is copied."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: a process group belongs to this run."""
        raise TypeError(f"A scope cannot be pickled: got {self!r}, of a process group. Save `state_dict()` instead.")


def learns(codebook: Any) -> bool:
    """Whether an argument `codebook` asks for one that is learned."""
    return isinstance(codebook, Scope) or (isinstance(codebook, str) and codebook == "learned")


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where a group's small tensors travel: the CPU if a back end serves it, so that no device waits."""
    kinds = back_ends(group)
    return torch.device("cpu" if "cpu" in kinds else next(iter(kinds)))


def back_ends(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of the back end that serves each type of device."""
    return dict(part.split(":") for part in dist.distributed_c10d.get_backend_config(group).split(","))


def _ranks(members: Any) -> tuple[int, ...]:
    """A copy of the members."""
    if isinstance(members, str) or not isinstance(members, Iterable):
        raise TypeError(f"`members` must be a tuple of ranks: got {members!r}. Write (0, 1).")
    ranks = tuple(members)
    if any(type(rank) is not int for rank in ranks):
        raise TypeError(f"`members` must hold whole numbers: got {ranks}. Write (0, 1).")
    if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ValueError(f"`members` must be ranks, each once, and at least one: got {ranks}. Write (0, 1).")
    return ranks


def _device(device: Any, group: dist.ProcessGroup) -> torch.device:
    if device is None:
        return control_device(group)
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"`device` must be a torch.device or its name: got {device!r}. Leave it out.")
    wanted, served = torch.device(device), back_ends(group)
    if wanted.type not in served:
        raise ValueError(f"`device` must be one that the group serves: got {wanted} of {sorted(served)}. Leave it out.")
    return wanted
