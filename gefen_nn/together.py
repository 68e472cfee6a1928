"""What fails on one member of a group fails on all of them, before anything changes."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gefen_fn import agree
from gefen_nn.errors import GroupFailure

Result = TypeVar("Result")


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
    failed = agree.gathered(torch.tensor([error is not None], dtype=torch.uint8), group)
    members = failed.flatten().nonzero().flatten().tolist()
    if error is not None:
        raise error
    if members:
        raise GroupFailure(
            f"What fails on one member fails on all: `{phase}` failed on members {members} of {len(failed)}, and "
            "nothing was changed here. Their own errors say why."
        )
    return result  # type: ignore[return-value]  # it is None only if `attempt` returned that
