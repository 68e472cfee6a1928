"""Exchanges between the members of process groups, all leaves together.

A program is a generator: it yields a `Parcel` and is sent what came for it. `run_together` runs the programs of all
leaves to their next parcel and answers them by one all-to-all for each group.
"""

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class Parcel(NamedTuple):
    """What one leaf sends to the other members of a group, and what it expects of them.

    Attributes:
        group: the process group.
        send: a tensor for each member of the group.
        expect: the number of entries that each member sends.
        dtype: of the entries, both ways.
    """

    group: Any
    send: Mapping[int, Tensor]
    expect: Mapping[int, int]
    dtype: torch.dtype = torch.float32


Program = Generator[Parcel, dict[int, Tensor], Result]


def run_together(programs: Sequence[Program[Result] | None]) -> list[Result | None]:
    """Run programs side by side; each round of parcels costs one all-to-all per group.

    Args:
        programs: in an order that is the same for every member; None for none.

    Returns:
        What each program returns.
    """
    results: list[Result | None] = [None] * len(programs)
    waiting: dict[int, Parcel] = {}
    answers: dict[int, dict[int, Tensor] | None] = {i: None for i, p in enumerate(programs) if p is not None}
    while answers:
        waiting = {}
        for i, answer in answers.items():
            program = programs[i]
            assert program is not None  # only programs have answers
            try:
                waiting[i] = program.send(answer) if answer is not None else next(program)
            except StopIteration as end:
                results[i] = end.value
        answers = {}
        for numbers in _by_group(waiting):
            received = _swap([waiting[i] for i in numbers])
            answers.update(zip(numbers, received, strict=True))
    return results


def _by_group(waiting: Mapping[int, Parcel]) -> list[list[int]]:
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for i, parcel in waiting.items():
        groups[parcel.group].append(i)
    return list(groups.values())


def _swap(parcels: Sequence[Parcel]) -> list[dict[int, Tensor]]:
    """One all-to-all of bytes: what each member sends for each parcel."""
    group = parcels[0].group
    members = range(dist.get_world_size(group))
    out = [[_bytes(p.send[m], p.dtype) for p in parcels if m in p.send] for m in members]
    sizes = [[p.expect.get(m, 0) * p.dtype.itemsize for p in parcels] for m in members]
    device = next((x.device for x in sum(out, [])), _device(group))
    sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *sum(out, [])])
    came = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=device)
    dist.all_to_all_single(came, sent, [sum(s) for s in sizes], [sum(len(x) for x in o) for o in out], group=group)
    pieces = iter(came.split(sum(sizes, [])))
    answers: list[dict[int, Tensor]] = [{} for _ in parcels]
    for m in members:
        for answer, parcel in zip(answers, parcels, strict=True):
            piece = next(pieces)
            if m in parcel.expect:
                # Entries of unlike sizes follow each other, so that a piece need not begin at a multiple of its own.
                answer[m] = piece.clone().view(parcel.dtype)
    return answers


def _bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous().reshape(-1).view(torch.uint8)


def _device(group: Any) -> torch.device:
    """A device that the group can serve."""
    return torch.device(
        "cpu" if "gloo" in dist.get_backend(group) else torch.accelerator.current_accelerator() or "cpu"
    )
