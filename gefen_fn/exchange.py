"""Exchanges between the members of process groups, all leaves together.

A program is a generator: it yields a `Parcel` and is sent what came for it. `run_together` runs the programs of all
leaves to their next parcel and answers them by one all-to-all for each group.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Parcel:
    """What one leaf sends to the other members of a group, and what it expects of them, in order.

    Attributes:
        group: the process group.
        device: where the tensors are.
        send: tensors for each member.
        expect: shapes and dtypes of the tensors that each member sends.
    """

    group: Any
    device: torch.device
    send: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    expect: defaultdict[int, list[Form]] = field(default_factory=lambda: defaultdict(list))

    def bytes_for(self, member: int) -> Tensor:
        """All that goes to a member."""
        # A single entry counts as contiguous with any stride, but is seen as bytes with stride 1 only.
        parts = [x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8) for x in self.send[member]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self.device)

    def bytes_from(self, member: int) -> int:
        """The size of all that comes from a member."""
        return sum(map(_size, self.expect[member]))

    def opened(self, came: Mapping[int, Tensor]) -> "Answer":
        """What came from each member, in the forms announced."""
        return {m: iter(_split(self.expect[m], raw)) for m, raw in came.items()}


Answer = dict[int, Iterator[Tensor]]
Program = Generator[Parcel, Answer, Result]


def _size(form: Form) -> int:
    shape, dtype = form
    return torch.Size(shape).numel() * dtype.itemsize


def _split(forms: Sequence[Form], raw: Tensor) -> list[Tensor]:
    # Copied, because a tensor need not begin at a multiple of its own entries.
    parts = torch.split(raw, [_size(form) for form in forms])
    return [x.clone().view(dtype).reshape(shape) for x, (shape, dtype) in zip(parts, forms, strict=True)]


def run_together(programs: Sequence[Program[Result] | None]) -> list[Result | None]:
    """Run programs side by side; each round of parcels costs one all-to-all per group.

    Args:
        programs: in an order that is the same for every member; None for none.

    Returns:
        What each program returns.
    """
    results: list[Result | None] = [None] * len(programs)
    answers: dict[int, Answer | None] = {i: None for i, program in enumerate(programs) if program is not None}
    while answers:
        waiting: dict[int, Parcel] = {}
        for i, answer in answers.items():
            try:
                waiting[i] = programs[i].send(answer)  # type: ignore[union-attr, arg-type]  # None starts a generator
            except StopIteration as end:
                results[i] = end.value
        answers = {i: answer for numbers in _by_group(waiting) for i, answer in _swap(numbers).items()}
    return results


def _by_group(waiting: Mapping[int, Parcel]) -> list[dict[int, Parcel]]:
    groups: defaultdict[Any, dict[int, Parcel]] = defaultdict(dict)
    for i, parcel in waiting.items():
        groups[parcel.group][i] = parcel
    return list(groups.values())


def _swap(parcels: Mapping[int, Parcel]) -> dict[int, Answer]:
    """One all-to-all of bytes between the members of one group."""
    group = next(iter(parcels.values())).group
    members = range(dist.get_world_size(group))
    out = [torch.cat([p.bytes_for(m) for p in parcels.values()]) for m in members]
    sizes = [[p.bytes_from(m) for p in parcels.values()] for m in members]
    came = out[0].new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(came, torch.cat(out), [sum(s) for s in sizes], [len(x) for x in out], group=group)
    pieces = torch.split(came, [sum(s) for s in sizes])
    parts = [torch.split(x, s) for x, s in zip(pieces, sizes, strict=True)]
    return {i: p.opened({m: parts[m][n] for m in members}) for n, (i, p) in enumerate(parcels.items())}
