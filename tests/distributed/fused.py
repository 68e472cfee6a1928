"""What workers run to step in place, and to ask which leaves went to a back end."""

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from gefen_fn import flatten_state, fuse
from gefen_fn.fuse import Step
from gefen_fn.runs import runs
from tests.distributed.training import TRANSFORMS, dtype_of, noise, spread, whole


def fused_step(
    rank: int,
    tx_name: str,
    shapes: dict[str, Sequence[int]],
    steps: int,
    sides: Sequence[int],
    how: str,
    plain: Sequence[int] = (),
) -> tuple[list[str], str, dict[str, Tensor]]:
    """The leaves that a back end stepped, what `describe` says of that, and parameters and state after steps, whole.

    The members `plain` have no back end.
    """
    tx = TRANSFORMS[tx_name]()
    params = {k: spread(noise(k, shape, 0).to(dtype_of(tx_name)), sides, how) for k, shape in shapes.items()}
    state, step = tx.init(params), fuse(tx)
    assert isinstance(step, Step)
    with mock.patch.dict(os.environ, {"GEFEN_REFERENCE": "1"} if rank in plain else {}):
        (line,) = runs(tx, params)
        for n in range(1, steps + 1):
            grads = {k: spread(noise(k, shape, n), sides, how) for k, shape in shapes.items()}
            state = step(grads, state, params)
    fused = step._plan.fused if step._plan else frozenset()
    named: dict[str, Any] = {**{f"params.{k}": p for k, p in params.items()}, **flatten_state(state)}
    result = {k: whole(x).clone() for k, x in named.items()}
    return [k for i, k in enumerate(sorted(shapes)) if i in fused], line, result if rank == 0 else {}
