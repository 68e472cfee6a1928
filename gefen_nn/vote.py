"""The vote before a step: each member says in one record what it found, and all draw the same conclusion.

A record is 64 bytes, which begin with the name of the call, and two bits for each parameter. Decisions are ORs,
assertions are equalities, and an error names the members. Records are of one size, or gloo ends the process: it is that
of the last vote, and a second one follows where all members have another number of parameters. Without a group each
phase fails for itself, and nothing is sent.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.agree import GroupFailure
from gefen_fn.quantize import has_codebook
from gefen_fn.shards import local, placements_of
from gefen_fn.tree import tree_leaves, tree_map
from gefen_kernels import reference
from gefen_nn.extras import digest

Result = TypeVar("Result")
Table = npt.NDArray[Any]

PHASES = ("", "pre-hooks", "closure", "structure", "gradients", "scaler", "extra arguments")
_HEAD = np.dtype(
    [
        ("call", f"S{agree.RECORD.size - 1}"),
        ("failed", "u1"),
        ("scaler", "u1"),
        ("scaled", "u1"),
        ("overflow", "u1"),
        ("transform", "u4"),
        ("parameters", "u4"),
        ("structure", "u4"),
        ("state", "u4"),
        ("scale", "f8"),
        ("squares", "f8"),
        ("clips", "u1"),
        ("spare", "V3"),
    ]
)


def record_bytes(parameters: int) -> int:
    """The size of one member's record."""
    return _HEAD.itemsize + 2 * -(-parameters // 8)


class Scaler(NamedTuple):
    """What a gradient scaler left on the optimizer, as torch.amp.GradScaler leaves `grad_scale` and `found_inf`.

    Attributes:
        scale: what the gradients were multiplied by; None if they are unscaled already.
        overflow: whether one of them is not finite.
    """

    scale: float | None
    overflow: bool

    @classmethod
    def of(cls, optimizer: Any) -> "Scaler | None":
        """What is there; None without a scaler.

        Raises:
            ValueError: if it is no scalar, or the scale no positive number.
        """
        scale, found = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if scale is None and found is None:
            return None
        value = None if scale is None else _scalar("grad_scale", scale)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`grad_scale` must be a positive number: got {value}. Let torch.amp.GradScaler set it.")
        return cls(value, found is not None and _scalar("found_inf", found) != 0)

    def unscale(self, grads: Iterable[Tensor | None]) -> None:
        """Divide gradients in place by the scale, as torch.amp.GradScaler does."""
        if self.scale is not None:
            inverse = float(torch.tensor(1.0 / self.scale, dtype=torch.float64, device="cpu").float())
            for g in grads:
                if g is not None:
                    local(g).mul_(inverse)


def _scalar(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"`{name}` must be one number: got {value!r}. Let torch.amp.GradScaler set it.")
    return float(value)


class Ballot(NamedTuple):
    """What a member brings to the vote.

    Attributes:
        names: the parameters, in order.
        given: whether each has a gradient here.
        filled: whether each has entries here.
        transform: a digest of its text, 32 bits.
        structure: a digest of names, shapes, dtypes and placements, 32 bits.
        state: a digest of counters, codebooks and extra arguments, 32 bits.
        scaler: what a gradient scaler left; None without one.
        squares: the sum of squares of what this member counts of a norm; None if the step needs none, or if who counts
            what is still to be asked, which may be done after the vote alone.
    """

    names: Sequence[str]
    given: Sequence[bool]
    filled: Sequence[bool]
    transform: int
    structure: int
    state: int
    scaler: Scaler | None
    squares: float | None


class Outcome(NamedTuple):
    """What all members concluded.

    Attributes:
        present: whether each parameter has a gradient anywhere.
        overflow: whether all leave this step out.
        squares: 0-dim float64, the sum over all members; None unless all gave theirs.
    """

    present: Sequence[bool]
    overflow: bool
    squares: Tensor | None


def structure_digest(params: Mapping[str, Tensor]) -> int:
    """32 bits that members with the same names, shapes, dtypes and placements have in common."""
    return _digest(tuple((name, tuple(p.shape), p.dtype, placements_of(p)) for name, p in params.items()))


@functools.lru_cache(maxsize=16)
def _digest(rows: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(rows).encode())


def state_digest(state: Any) -> int:
    """32 bits of the counters, hyperparameters and codebooks that lie on the CPU, where nothing waits for them."""
    books: list[Tensor] = []
    tree_map(lambda x: books.append(x.codebook) if has_codebook(x) else None, state, is_leaf=has_codebook)
    counts = [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.dim() == 0]
    digest = 0
    for x in (*counts, *books):
        digest = zlib.crc32(x.numpy().tobytes(), digest) if x.device.type == "cpu" else digest
    return digest


Gradients = dict[str, Tensor | None]


class Voter(Protocol):
    """What an optimizer keeps from vote to vote.

    Attributes:
        transform: a digest of its text, 32 bits.
        parameters: how many the next record has room for: what all members had at the last vote, 0 before the first.
    """

    transform: int
    parameters: int

    def squares(self, grads: Gradients) -> Tensor | None:
        """What this member counts of a norm's squares; None if the step needs no norm."""


class Agreement(NamedTuple):
    """What a step is to do, the same for all members.

    Attributes:
        grads: the gradients, with empty ones where this member holds no entries of a parameter that others have one of.
        overflow: whether to leave the step out.
        known: what stages need not find out again: the `global_norm` of all gradients, 0-dim fp32, if it was asked for.
    """

    grads: Gradients
    overflow: bool
    known: dict[str, Tensor]


def agreed(
    phases: "Phases",
    named: Mapping[str, Tensor],
    grads: Gradients | None,
    scaler: Scaler | None,
    state: Callable[[], Any],
    voter: Voter,
    extra: Mapping[str, Any],
) -> Agreement:
    """Hear all members before a step.

    Args:
        phases: what was attempted.
        named: all parameters.
        grads: the gradients here; None if an attempt failed.
        scaler: what a gradient scaler left.
        state: of the optimizer, whose counters, hyperparameters and codebooks must be the same everywhere.
        voter: of the optimizer.
        extra: arguments of the step, which must be the same everywhere too.

    Raises:
        GroupFailure: as of `Phases.vote`.
    """
    if phases.group is None:
        return Agreement(grads or {}, scaler is not None and scaler.overflow, {})
    ballot = phases.attempt("gradients", lambda: _ballot(named, grads or {}, scaler, state, voter, extra))
    outcome = phases.vote(voter.parameters, ballot)
    voter.parameters = len(named)
    present = dict(zip(named, outcome.present, strict=True))
    whole = {k: torch.zeros_like(named[k]) if g is None and present[k] else g for k, g in (grads or {}).items()}
    known = {} if outcome.squares is None else {"global_norm": outcome.squares.sqrt().float()}
    return Agreement(whole, outcome.overflow, known)


def _ballot(
    named: Mapping[str, Tensor],
    grads: Gradients,
    scaler: Scaler | None,
    state: Callable[[], Any],
    voter: Voter,
    extra: Mapping[str, Any],
) -> Ballot:
    given = [grads.get(name) is not None for name in named]
    filled = [local(p).numel() > 0 for p in named.values()]
    here, group = list(grads.values()), agree.group_of(list(named.values()))
    asked = agree.group_of(here) is group and agree.knows(here, group)
    own = voter.squares(grads) if asked and scaler is None else None  # scaled gradients have another norm
    digests = voter.transform, structure_digest(named), digest(extra, state_digest(state()))
    return Ballot(list(named), given, filled, *digests, scaler, None if own is None else float(own))


class Phases:
    """Attempts whose failure is kept until the vote; without a group it is raised at once.

    Attributes:
        group: the members that vote; None for this process alone.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._failed = 0
        self._error: Exception | None = None

    def attempt(self, phase: str, f: Callable[[], Result]) -> Result | None:
        """What `f` returns; None if it failed, or an attempt before it."""
        if self.group is None:
            return f()
        if self._error is not None:
            return None
        try:
            return f()
        except Exception as error:  # kept, as the others have to hear of it first
            self._failed, self._error = PHASES.index(phase), error
            return None

    def vote(self, room: int, ballot: Ballot | None) -> Outcome:
        """Hear all members, and conclude.

        Args:
            room: for how many parameters the record has bits, the same on all members.
            ballot: None if an attempt failed.

        Raises:
            GroupFailure: if an attempt failed on any member, chained to its cause on that one, or if members differ.
        """
        table = self._heard(torch.from_numpy(_record(self._failed, room, ballot))).numpy()
        heads = table[:, : _HEAD.itemsize].copy().view(_HEAD)[:, 0]
        self._check_failures(heads["failed"])
        assert ballot is not None  # else this member's own failure was just raised
        _check_equal("transform", heads["transform"], "Build the optimizer with the same arguments on all members.")
        _check_equal("structure", heads["structure"], "Give all members the same parameters, gradients and order.")
        fix = "Load one checkpoint on all members, and give their groups and steps the same values."
        _check_equal("set of counters, group values, codebooks and extra arguments", heads["state"], fix)
        _check_scalers(heads)
        if len(ballot.names) != room:
            return self.vote(len(ballot.names), ballot)
        given, lacking = _bits(table, room)
        _check_gradients(ballot.names, given, lacking)
        squares = torch.from_numpy(heads["squares"].astype(np.float64)) if heads["clips"].all() else None
        norm = None if squares is None else reference.tree_sum(squares, 0)
        return Outcome(np.any(given, axis=0).tolist(), bool(heads["overflow"].any()), norm)

    def _heard(self, record: Tensor) -> Tensor:
        """The records of all members; this member's own failure is not lost where the others do not answer."""
        try:
            records = agree.gathered(record, self.group)
            agree.check_calls(records.cpu())
            return records
        except Exception as lost:
            if self._error is None:
                raise
            raise GroupFailure(
                f"What fails on one member fails on all: got a failure in {PHASES[self._failed]} here, and members "
                f"that could not be told, as they wait elsewhere or are gone ({lost.__cause__ or lost}). Nothing was "
                "changed here."
            ) from self._error

    def _check_failures(self, failed: Table) -> None:
        if failed.any():
            where = ", ".join(f"{PHASES[failed[m]]} on member {m}" for m in np.flatnonzero(failed))
            raise GroupFailure(
                f"What fails on one member fails on all: got a failure in {where} of {len(failed)}, and nothing was "
                "changed. On that member it is chained to its cause."
            ) from self._error


def _record(failed: int, room: int, ballot: Ballot | None) -> Table:
    """One member's record, uint8; without the bits of its parameters if they are not as many as it has room for."""
    head, bits = np.zeros((), _HEAD), np.zeros((2, room), np.bool_)
    head["call"], head["failed"] = "step", failed
    if ballot is not None:
        given, filled = np.asarray(ballot.given, np.bool_), np.asarray(ballot.filled, np.bool_)
        head["parameters"] = len(given)
        if len(given) == room:
            bits[:] = given, filled & ~given
        for field in ("transform", "structure", "state"):
            head[field] = getattr(ballot, field)
        head["clips"], head["squares"] = ballot.squares is not None, ballot.squares or 0.0
        if ballot.scaler is not None:
            head["scaler"], head["scaled"] = True, ballot.scaler.scale is not None
            head["scale"], head["overflow"] = ballot.scaler.scale or 0.0, ballot.scaler.overflow
    return np.concatenate([head.reshape(1).view(np.uint8), np.packbits(bits, axis=1).reshape(-1)])


def _bits(table: Table, parameters: int) -> tuple[Table, Table]:
    """`[members, parameters]` each: who has a gradient, and who has entries but none."""
    packed = table[:, _HEAD.itemsize :].reshape(len(table), 2, -1)
    bits = np.unpackbits(packed, axis=2, count=parameters).astype(np.bool_)
    return bits[:, 0], bits[:, 1]


def _check_equal(what: str, values: Table, fix: str) -> None:
    if len(set(values.tolist())) > 1:
        raise GroupFailure(f"All members must have one {what}: got {_camps(values)}; nothing was changed. {fix}")


def _camps(values: Table) -> str:
    """Which members have the same value."""
    camps = [np.flatnonzero(values == value).tolist() for value in dict.fromkeys(values.tolist())]
    return " against ".join(f"members {camp}" for camp in camps)


def _check_scalers(heads: Table) -> None:
    fix = "Use one scaler that knows the group, such as torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler."
    for what, field in (("gradient scaler", "scaler"), ("state of unscaling", "scaled"), ("scale", "scale")):
        _check_equal(what, heads[field], fix)
    _check_equal("answer to whether a gradient overflowed", heads["overflow"], fix)


def _check_gradients(names: Sequence[str], given: Table, lacking: Table) -> None:
    for n in np.flatnonzero(given.any(0) & lacking.any(0)).tolist():
        raise GroupFailure(
            f"A gradient must be there on all members that hold entries of its parameter, or on none: got {names[n]!r} "
            f"without one on members {np.flatnonzero(lacking[:, n]).tolist()}; nothing was changed. Run the same "
            "backward on all members, or fill with zeros."
        )
