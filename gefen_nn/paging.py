"""A step of an optimizer whose state is kept on a host: fetched, stepped and written back page by page.

A page is a few leaves. While one is stepped the next is on its way to the parameters and the last one on its way back,
so three are there at a time. All pages of a step start from the same counts and values that belong to all leaves.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gefen_fn.agree import group_of, total
from gefen_fn.base import GradientTransformation, OptState
from gefen_fn.calibrate import is_to_learn
from gefen_fn.combine import recipe_of
from gefen_fn.describe import quantizing
from gefen_fn.fuse import FusedStep, fuse, squares_of
from gefen_fn.program import begins_with_clip, inner_of
from gefen_fn.quantize import has_codebook
from gefen_fn.shards import is_sharded, local, placements_of
from gefen_fn.tree import tree_leaves, tree_map, tree_structure, tree_unflatten
from gefen_nn.kept import Kept
from gefen_nn.offload import Host

Advance = Callable[[FusedStep | None, Any, OptState, Any, Any], OptState]
_CLIP = "clip_by_global_norm"
_BY_LEAF = {
    *("partition", "masked", "identity", "set_to_zero", "scale", "scale_by_learning_rate", "scale_by_schedule"),
    *("add_decayed_weights", "trace", "ema", "scale_by_adam", "scale_by_lion", "scale_by_gefen", "scale_by_muon"),
    *("scale_by_matrix_shape", "stochastic_rounding", "compensated", "clip", "clip_by_block_rms"),
    *("adaptive_grad_clip", "zero_nans"),
}


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled step leaves its graph for this
def paged_step(
    host: Host,
    kept: Kept,
    tx: GradientTransformation,
    advance: Advance,
    grads: Mapping[str, Tensor | None],
    state: OptState,
    params: Mapping[str, Tensor],
    known: dict[str, Any],
    fused: bool,
) -> OptState:
    """The next state; state on the host is written in place, as parameters are.

    Args:
        host: where the state is kept.
        kept: told of a failure after the first page was stepped, or when one is written back.
        tx: the transform.
        advance: `(step in place, grads, state, params, known) -> state`, with all of it beside the parameters.
        grads: by name.
        state: of `tx`.
        params: by name.
        known: extra arguments, such as the norm of all gradients.
        fused: whether to step in place by a back end.
    """
    pages = list(_pages(host, tx, grads, state, params))
    if len(pages) > 1:
        known = known or _norm(tx, grads)
    leaves, ferry = _Leaves(state, [row.owner for row in host.rows(state, params.keys())]), _Ferry(host)
    shared: dict[int, Any] = {}
    coming = ferry.fetch(leaves, pages[0], params)
    for n, page in enumerate(pages):
        with kept.writing("step") if n else nullcontext():
            here, coming = ferry.arrived(coming), {}
            if n + 1 < len(pages):
                coming = ferry.fetch(leaves, pages[n + 1], params)
            own = {name: grads[name] if name in page else None for name in grads}
            step = fuse(tx) if fused else None  # one for each page, whose tensors its plan holds
            new = tree_leaves(advance(step, own, leaves.with_page(here), params, known))
        with kept.writing("step"):
            ferry.bring_back(here.values(), [(new[i], leaves.values[i]) for i in here])
            shared = {i: new[i] for i, owner in enumerate(leaves.owners) if owner is None}
            leaves.take(new, page, here.keys())
        del here, new, step
    with kept.writing("step"):
        ferry.finish()
    return leaves.tree(shared)


def _pages(
    host: Host, tx: GradientTransformation, grads: Mapping[str, Any], state: OptState, params: Mapping[str, Tensor]
) -> Iterator[Collection[str]]:
    """Names of the leaves that are stepped together: all, if what becomes of one rests on others than itself."""
    if not _by_leaf(tx) or _learns(tx, state):
        yield params.keys()
        return
    page: list[str] = []
    entries = 0
    for name in (name for name, g in grads.items() if g is not None):
        size = _share(params[name])
        if page and entries + size > host.page:
            yield page
            page, entries = [], 0
        page.append(name)
        entries += size
    yield page


def _by_leaf(tx: GradientTransformation) -> bool:
    """Whether a step of one leaf rests on no other, but for the norm that an expression may begin with."""
    names = list(_stages(tx))
    return _BY_LEAF.issuperset({*names} - {_CLIP}) and names.count(_CLIP) == begins_with_clip(tx)


def _stages(tx: GradientTransformation) -> Iterator[str]:
    """Names of the stages from left to right; before those of parts or masks stands what puts them together."""
    recipe = recipe_of(tx)
    inner = [part for _, part in recipe.args] if recipe.name == "named_chain" else inner_of(recipe)
    if not inner or (recipe.name not in ("chain", "named_chain") and recipe.inner is None):
        yield recipe.name
    for part in inner:
        yield from _stages(part)


def _learns(tx: GradientTransformation, state: OptState) -> bool:
    """Whether this step is to learn a codebook."""
    stages: list[Any] = []
    tree_map(lambda x: stages.append(x) if has_codebook(x) else None, state, is_leaf=has_codebook)
    rules = quantizing(tx).values()
    return any(is_to_learn(rule["codebook"], stage) for rule, stage in zip(rules, stages, strict=True))


def _share(p: Tensor) -> int:
    """About how many entries of a parameter each member holds: the same number for all, so that pages are too."""
    if not is_sharded(p):
        return p.numel()
    sides = zip(p.device_mesh.shape, placements_of(p), strict=True)  # type: ignore[attr-defined]  # a DTensor
    return -(-p.numel() // math.prod(int(side) for side, placement in sides if not placement.is_replicate()))


def _norm(tx: GradientTransformation, grads: Any) -> dict[str, Tensor]:
    """The norm of all gradients, if a step asks for it."""
    squares = squares_of(tx)(grads)
    return {} if squares is None else {"global_norm": total(squares, group_of(tree_leaves(grads))).sqrt().float()}


class _Leaves:
    """The leaves of a state in order, and the parameter that each belongs to; None: to all."""

    def __init__(self, state: OptState, owners: Sequence[str | None]) -> None:
        self.owners, self.values, self._spec = owners, tree_leaves(state), tree_structure(state)

    def with_page(self, here: Mapping[int, Tensor]) -> OptState:
        """The state for one page's step; what belongs to all is given as a copy, as each page's step counts it up."""
        rows = enumerate(zip(self.values, self.owners, strict=True))
        values = [here.get(i, x.clone() if owner is None and _is_number(x) else x) for i, (x, owner) in rows]
        return tree_unflatten(self._spec, values)

    def take(self, new: Sequence[Any], page: Collection[str], fetched: Collection[int]) -> None:
        """Take what a page's step made of its leaves, but for what goes back to the host."""
        for i, owner in enumerate(self.owners):
            if owner in page and i not in fetched:
                self.values[i] = new[i]

    def tree(self, shared: Mapping[int, Any]) -> OptState:
        """The state, with these leaves of what belongs to all."""
        return tree_unflatten(self._spec, [shared.get(i, x) for i, x in enumerate(self.values)])


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.ndim


class _Ferry:
    """Copies between a host and the devices of parameters; on a GPU beside its work, by a stream for each way."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
        self._leaving: deque[tuple[list[Tensor], list[torch.cuda.Event]]] = deque()

    def fetch(self, leaves: _Leaves, page: Collection[str], params: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Begin to bring a page's leaves to their parameters; there is room, as all pages but one have left."""
        while len(self._leaving) > 1:
            self._leave()
        found = {}
        for i, (x, owner) in enumerate(zip(leaves.values, leaves.owners, strict=True)):
            if owner is None or owner not in page or not isinstance(x, Tensor) or not x.ndim:
                continue
            home = params[owner].device
            if self._host.apart(home):
                with self._beside(home, inward=True):
                    found[i] = self._host.copy(x, home)
        return found

    def arrived(self, coming: dict[int, Tensor]) -> dict[int, Tensor]:
        """The same, once the devices know to wait for them."""
        for device in _gpus(coming.values()):
            torch.cuda.current_stream(device).wait_stream(self._stream(device, inward=True))
        return coming

    def bring_back(self, here: Collection[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to write what became of a page's leaves, each into its tensor on the host; `here` may be read still."""
        devices = _gpus(x for x, _ in pairs)
        for device in devices:
            self._stream(device, inward=False).wait_stream(torch.cuda.current_stream(device))
        for x, into in pairs:
            with self._beside(local(x).device, inward=False):
                self._host.write(x, into)
        events = [self._stream(device, inward=False).record_event() for device in devices]
        self._leaving.append(([*here, *(x for x, _ in pairs)], events))

    def finish(self) -> None:
        """Wait until all is written; an error among the copies is raised here."""
        while self._leaving:
            self._leave()

    def _leave(self) -> None:
        """Wait until the oldest page is written, which frees the memory that it had on the device."""
        for event in self._leaving.popleft()[1]:
            event.synchronize()

    def _beside(self, device: torch.device, *, inward: bool) -> AbstractContextManager[Any]:
        """Copies inside are begun, if the device is a GPU, beside what it does."""
        return torch.cuda.stream(self._stream(device, inward=inward)) if device.type == "cuda" else nullcontext()

    def _stream(self, device: torch.device, *, inward: bool) -> torch.cuda.Stream:
        if (device, inward) not in self._streams:
            self._streams[device, inward] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device, inward]


def _gpus(tensors: Iterable[Tensor]) -> set[torch.device]:
    return {local(x).device for x in tensors if local(x).is_cuda}
