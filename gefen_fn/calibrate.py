"""Learning codebooks now, so that compiled, vmapped and captured steps need not."""

from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, OptState, Params, Updates
from gefen_fn.blocks import Blocks
from gefen_fn.quantize import gradient_histogram
from gefen_kernels.codebook import learn_codebook

_UNLEARNED = (
    "The codebook must be learned on the host: got a first `update` under a transform of torch.func, "
    "torch.compile or graph capture. "
    'Use codebook="fixed", or `state = calibrate(tx, grads, state)` before.'
)


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


def learn_once(updates: Updates, codebook: Tensor, learned: Tensor, block: Blocks) -> tuple[Tensor, Tensor]:
    """The codebook and `learned` after these gradients; zero gradients and overflows leave them as they are.

    Args:
        updates: the gradients of this update.
        codebook: fp32 `[256]`.
        learned: bool scalar, read on the host; a learned codebook is frozen.
        block: entries per block.

    Raises:
        RuntimeError: if the codebook is still to be learned where the host cannot read, also when a compiled step runs.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(learned, _UNLEARNED.replace('"', "'"))  # Inductor writes it into C++ as it is
        return codebook, learned
    if bool(torch.func.debug_unwrap(learned, recurse=True).all()):
        return codebook, learned
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(_UNLEARNED)
    try:
        counts = gradient_histogram(updates, block=block)
        if not counts.any():
            return codebook, learned
        return learn_codebook(counts.cpu()).to(codebook.device), torch.ones_like(learned)
    except RuntimeError as error:
        raise RuntimeError(_UNLEARNED) from error
