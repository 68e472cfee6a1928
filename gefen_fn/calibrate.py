"""Learning codebooks now, so that compiled, vmapped and captured steps need not."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.accumulate import MultiStepsState
from gefen_fn.base import GradientTransformation, OptState, Params, Updates
from gefen_fn.quantize import has_codebook, requantize
from gefen_fn.scalar import capturing, under_vmap
from gefen_fn.scope import Scope, learns
from gefen_fn.tree import tree_leaves, tree_map
from gefen_kernels.codebook import learn_codebook

_UNLEARNED = (
    "The codebook must be learned on the host: got a first `update` under a transform of torch.func, "
    "torch.compile or graph capture. "
    'Use codebook="fixed", or `state = calibrate(tx, grads, state)` before; '
    "with an optimizer, take one step first that is neither compiled nor captured."
)


def calibrate(tx: GradientTransformation, grads: Updates, state: OptState, params: Params | None = None) -> OptState:
    """Learn every codebook of a transform from one set of gradients.

    Runs one eager update, so each stage learns from the gradients that reach it, and takes only the codebooks from it:
    moments, counts, accumulators and call counters stay as they were. An accumulation is taken as if it ended now. A
    codebook already learned is kept, and one whose stage sees only zeros stays unlearned.

    Args:
        tx: the transform, such as a chain.
        grads: the gradients of a first step.
        state: the state `tx.init` made.
        params: the parameters, if a stage of `tx` needs them.

    Returns:
        The state with its codebooks learned.

    Raises:
        StructureError: if gradients and state do not fit.

    Example:
        >>> tx, grads = gefen(1e-3), {"w": torch.randn(64, 64)}
        >>> state = calibrate(tx, grads, tx.init(grads), grads)
        >>> bool(tree_get(state, "learned")), int(tree_get(state, "count")["w"])
        (True, 0)
    """
    with torch.no_grad():
        stepped = tx.update(grads, _end_accumulation(state), params, max_logits=None)[1]
    return _map_codebooks(_take_codebook, state, stepped)


def refresh(tx: GradientTransformation, grads: Updates, state: OptState, params: Params | None = None) -> OptState:
    """Learn every learned codebook anew, and move the stored codes to it.

    Moments are decoded with the old codebook and encoded with the new one under the same scales; a codebook whose stage
    sees only zeros stays as it is.

    Args:
        tx: the transform, such as a chain.
        grads: the gradients to learn from.
        state: a state of `tx`.
        params: the parameters, if a stage of `tx` needs them.

    Returns:
        The state with new codebooks and codes; counts and second moments as they were.

    Raises:
        StructureError: if gradients and state do not fit.

    Example:
        >>> tx, grads = scale_by_gefen(), torch.randn(64, 64)
        >>> _, state = tx.update(grads, tx.init(grads))
        >>> new = refresh(tx, grads**3, state)  # gradients have become heavier at the ends
        >>> torch.equal(new.codebook, state.codebook), torch.equal(new.mu.absmax, state.mu.absmax)
        (False, True)
    """
    unlearned = _map_codebooks(lambda s, _: s._replace(learned=torch.zeros_like(s.learned)), state, state)
    return _map_codebooks(_move_codes, state, calibrate(tx, grads, unlearned, params))


def _map_codebooks(f: Callable[[Any, Any], Any], old: OptState, new: OptState) -> OptState:
    """`old` with `f(old, new)` for every stage that has a codebook."""
    return tree_map(lambda x, y: f(x, y) if has_codebook(x) else x, old, new, is_leaf=has_codebook)


def _end_accumulation(state: OptState) -> OptState:
    """The state with accumulators empty and full of micro-steps, so that the next update reaches the inner stages."""

    def end(x: Any) -> Any:
        if not _is_accumulating(x):
            return x
        sums, counts = (tree_map(torch.zeros_like, part) for part in (x.acc_grads, x.acc_counts))
        last = torch.full_like(x.mini_step, torch.iinfo(torch.int32).max - 1)
        inner = _end_accumulation(x.inner_opt_state)
        return x._replace(mini_step=last, acc_grads=sums, acc_counts=counts, inner_opt_state=inner)

    return tree_map(end, state, is_leaf=_is_accumulating)


def _is_accumulating(node: Any) -> bool:
    return isinstance(node, MultiStepsState)


def _take_codebook(old: Any, new: Any) -> Any:
    return old._replace(codebook=new.codebook, learned=new.learned)


def _move_codes(old: Any, new: Any) -> Any:
    if not new.learned:
        return old
    moved = requantize(old.mu, old.codebook, new.codebook)
    return old._replace(codebook=new.codebook, learned=new.learned, mu=moved)


def is_to_learn(codebook: Any, stage: Any) -> bool:
    """Whether an update of a stage is to learn its codebook: one is asked for, codes rest on it, and it is not there.

    An update that is being compiled cannot learn: no.

    Args:
        codebook: the transform's argument.
        stage: its state, whose `learned` is read on the host.
    """
    return learns(codebook) and not torch.compiler.is_compiling() and not _is_learned(stage) and _is_coded(stage)


def _is_learned(stage: Any) -> bool:
    return bool(torch.func.debug_unwrap(stage.learned, recurse=True).all())


def _is_coded(stage: Any) -> bool:
    return any(x is not None and x.dtype == torch.uint8 for x in tree_leaves(stage.mu))


def check_learned(codebook: Any, stage: Any) -> None:
    """In an update that is being compiled, raise `RuntimeError` where it runs if the codebook is still to be learned.

    Args:
        codebook: the transform's argument.
        stage: its state.
    """
    if learns(codebook) and _is_coded(stage):
        torch._assert_async(stage.learned, _UNLEARNED.replace('"', "'"))  # Inductor writes it into C++ as it is


def check_can_learn() -> None:
    """Raise `RuntimeError` where the host cannot read gradients, and so cannot learn from them."""
    if under_vmap() or capturing():
        raise RuntimeError(_UNLEARNED)


def learn_from(counts: Tensor, codebook: Tensor, learned: Tensor, group: Any = None) -> tuple[Tensor, Tensor]:
    """The codebook of a histogram, and True; what was there before if nothing was counted.

    Args:
        counts: int64 `[4096]`, the same for all members of the group.
        codebook: fp32 `[256]`.
        learned: bool scalar.
        group: the group or scope that learns with this one; None for none.

    Raises:
        GroupFailure: if another member cannot learn, or learns another one.
    """
    if not counts.any():
        return codebook, learned
    of_whom = zlib.crc32(repr(group).encode()) if isinstance(group, Scope) else 0
    book = agree.together(
        lambda: learn_codebook(counts.cpu()),
        group,
        "learning a codebook",
        lambda book: zlib.crc32(book.numpy().tobytes(), of_whom),
    )
    return book.to(codebook.device), torch.ones_like(learned)
