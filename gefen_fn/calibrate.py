"""Learning codebooks now, so that compiled, vmapped and captured steps need not."""

from typing import Any

import torch

from gefen_fn.base import GradientTransformation, OptState, Params, Updates


def calibrate(tx: GradientTransformation, grads: Updates, state: OptState, params: Params | None = None) -> OptState:
    """Learn every codebook of a transform from one set of gradients.

    Runs one eager update, so each stage learns from the gradients that reach it, and takes only the codebooks from it:
    moments, counts and call counters stay as they were. A codebook already learned is kept, and one whose stage sees
    only zeros stays unlearned.

    Args:
        tx: the transform, such as a chain.
        grads: the gradients of a first step.
        state: the state `tx.init` made.
        params: the parameters, if a stage of `tx` needs them.

    Returns:
        The state with its codebooks learned.

    Raises:
        StructureError: if gradients and state do not fit.
    """
    with torch.no_grad():
        stepped = tx.update(grads, state, params)[1]
    return _take_codebooks(state, stepped)


def _take_codebooks(old: Any, new: Any) -> Any:
    if isinstance(old, dict):
        return {k: _take_codebooks(v, new[k]) for k, v in old.items()}
    if not isinstance(old, (tuple, list)):
        return old
    fields = getattr(old, "_fields", ())
    if "codebook" in fields and "learned" in fields:
        return old._replace(codebook=new.codebook, learned=new.learned)  # type: ignore[union-attr]
    parts = [_take_codebooks(a, b) for a, b in zip(old, new, strict=True)]
    return type(old)(*parts) if hasattr(old, "_fields") else type(old)(parts)
