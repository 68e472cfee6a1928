"""State as torch.distributed.checkpoint takes it: every leaf once, under its name, on any number of processes.

A checkpoint is the flattened state tree and an index of it. Sharded leaves are DTensors, of which each process writes
and reads its own part; so a checkpoint moves to another number of processes by stock means, to the bit.
"""

import sys
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.agree import together
from gefen_fn.base import OptState, Params
from gefen_fn.state_io import flatten_state, unflatten_state
from gefen_fn.tree import check_tensors, readable, tree_leaves, tree_paths
from gefen_nn import groups
from gefen_nn.checkpoint import LoadReport, checked_codebooks
from gefen_nn.errors import CheckpointError
from gefen_nn.leaves import check_leaf
from gefen_nn.meaning import check_kept_as
from gefen_nn.optimizer import TransformOptimizer
from gefen_nn.saved_index import Index, IndexedLeaf, check_leaves, check_params, read_index
from gefen_nn.state_view import Slot

_LOADER = "torch.distributed.checkpoint.state_dict_loader"


def check_ours(optimizer: Any) -> None:
    """Raise `TypeError` for another package's optimizer, or what is none."""
    if not isinstance(optimizer, TransformOptimizer):
        raise TypeError(
            f"The optimizer must be one of gefen_nn: got {type(optimizer).__module__}.{type(optimizer).__name__}. "
            "A wrapper may hold yours as its `optimizer`, or have built another in its place: pass your own, and "
            "see that it is the one that steps."
        )


class OptimizerState:
    """An optimizer's state and group values, for `dcp.save`, `dcp.async_save` and `dcp.load`.

    `dcp.save({"optimizer": OptimizerState(optimizer)}, checkpoint_id=path)` on one process or many; then
    `dcp.load` of the same on any other number. A load is refused by all processes, or changes all of them at once: DCP
    writes into fresh tensors, and not into the state itself, as it does where it gets `optimizer.state_dict()`, of
    which a load that is refused may have overwritten a part. DCP keeps no checksums: a damaged byte of codes is a
    valid code, and only `gefen_nn.save` and `load` notice it.

    Args:
        optimizer: one whose parameters have names.

    Raises:
        TypeError: for another package's optimizer, such as one that a wrapper built in place of the one given to it.
        ValueError: if they have none, so that no other optimizer's could be told to be the same.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = Gefen(model.named_parameters())
        >>> written = OptimizerState(optimizer).state_dict()  # what `dcp.save` asks for
        >>> [name for name in written["state"] if "weight" in name][:2]
        ['scale_by_gefen.count.weight', 'scale_by_gefen.mu.weight.codes']
    """

    def __init__(self, optimizer: TransformOptimizer) -> None:
        check_ours(optimizer)
        if not all("param_names" in group for group in optimizer.param_groups):
            raise ValueError(
                f"A checkpoint knows parameters by name: got a {type(optimizer).__name__} built without. "
                "Build it with `model.named_parameters()`."
            )
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The state's own tensors, or for `dcp.load` fresh ones of the same form; nothing is sent.

        Raises:
            RuntimeError: for a save, if a step or a load failed while it wrote.
        """
        slots = own_slots(self._optimizer)
        tensors = {path: slot.value for path, slot in slots.items() if slot.value is not None}
        if not _a_load_asks():
            self._optimizer.kept.check_whole()
        return _handed_out(index_of(self._optimizer, slots).text(), tensors)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what was loaded, all or nothing; with sharded parameters all processes call this together.

        Raises:
            CheckpointError: naming what does not fit or is damaged.
            GroupFailure: if another process refuses its part.
        """
        optimizer = self._optimizer

        def checked() -> Index:
            index = read_index(state_dict.get("index"))
            fits(optimizer, own_slots(optimizer), index)
            return index

        index = together(checked, _group(optimizer), "load_state_dict")
        put_back(optimizer, index, state_dict.get("state", {}))


class StateTree:
    """A transform's state for `dcp.save`, `dcp.async_save` and `dcp.load`; `state` holds what was loaded last.

    `dcp.save({"optimizer": StateTree(state, params)}, checkpoint_id=path)`; then, on any number of processes,
    `tree = StateTree(tx.init(params), params)`, `dcp.load({"optimizer": tree}, checkpoint_id=path)`, `tree.state`.

    Args:
        state: of any transform; a load leaves its tensors as they are.
        params: what it was made for; the paths of its leaves are the names that a load goes by.

    Attributes:
        state: the same until something is loaded.

    Raises:
        TypeError: if the state holds something else than tensors.
        StructureError: if a leaf of the params is no tensor, as a module is none.

    Example:
        >>> tx, params = trace(0.9), {"w": torch.ones(2)}
        >>> _, state = tx.update(params, tx.init(params))
        >>> tree = StateTree(tx.init(params), params)
        >>> tree.load_state_dict(StateTree(state, params).state_dict())  # as `dcp.load` does
        >>> tree.state
        TraceState(trace={'w': tensor([1., 1.])})
    """

    def __init__(self, state: OptState, params: Params) -> None:
        flatten_state(state)  # refuses what is none
        check_tensors(params)
        self.state = state
        self._params = dict(zip(map(readable, tree_paths(params)), tree_leaves(params), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The state's own tensors, or for `dcp.load` fresh ones of the same form; nothing is sent."""
        return _handed_out(self._index().text(), flatten_state(self.state))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what was loaded as `state`, all or nothing; with sharded parameters all processes call this together.

        Raises:
            CheckpointError: naming what does not fit or is damaged.
            GroupFailure: if another process refuses its part.
        """
        group = agree.group_of(list(self._params.values()))
        self.state = together(lambda: self._loaded(state_dict), group, "load_state_dict")

    def _index(self) -> Index:
        shapes = {name: tuple(p.shape) for name, p in self._params.items() if p is not None}
        return Index(shapes, {key: IndexedLeaf.of(x) for key, x in flatten_state(self.state).items()}, [])

    def _loaded(self, state_dict: Mapping[str, Any]) -> OptState:
        saved, own, tensors = read_index(state_dict.get("index")), self._index(), state_dict.get("state", {})
        check_params(saved, own.params)
        check_leaves(saved, {key: leaf._replace(owner=None) for key, leaf in own.leaves.items()})
        for key, leaf in flatten_state(self.state).items():
            check_leaf(key, leaf, tensors.get(key))
        state = unflatten_state({key: tensors[key] for key in flatten_state(self.state)}, self.state)
        return checked_codebooks(self.state, state)


def _handed_out(index: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a save reads, or what a load may write into before anybody can look at it."""
    given = {path: torch.empty_like(x) for path, x in tensors.items()} if _a_load_asks() else dict(tensors)
    return {"index": index, "state": given}


def _a_load_asks() -> bool:
    """Whether the caller is DCP's loader, which asks an object for its state in the same words as its saver does.

    Anybody else gets the state itself: a saver that is not known must not write fresh tensors down.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _LOADER:
        frame = frame.f_back
    return frame is not None


def own_slots(optimizer: TransformOptimizer, also: Collection[str] = ()) -> dict[str, Slot]:
    """The leaves of an optimizer's state by path, with those that the parameters `also` would have."""
    return {slot.path: slot for slot in optimizer.slots(also) if slot.value is not None}


def _group(optimizer: TransformOptimizer) -> Any:
    return agree.group_of(list(_named(optimizer).values()))


def _named(optimizer: TransformOptimizer) -> dict[str, Tensor]:
    rows = zip(optimizer.param_groups, groups.members(optimizer.param_groups), strict=True)
    return {name: p for group, names in rows for name, p in zip(names, group["params"], strict=True)}


def index_of(optimizer: TransformOptimizer, slots: Mapping[str, Slot]) -> Index:
    """What a checkpoint of these leaves says about itself."""
    rows = zip(optimizer.param_groups, groups.members(optimizer.param_groups), strict=True)
    values = [{**{k: v for k, v in group.items() if k != "param_names"}, "params": names} for group, names in rows]
    shapes = {name: tuple(p.shape) for name, p in _named(optimizer).items()}
    leaves = {path: IndexedLeaf.of(slot.value, slot.owner) for path, slot in slots.items() if slot.value is not None}
    return Index(shapes, leaves, values)


def fits(optimizer: TransformOptimizer, slots: Mapping[str, Slot], index: Index, strict: bool = True) -> None:
    """Refuse an index of another structure than the optimizer's; the outcome is the same on every process.

    Raises:
        CheckpointError: naming what differs.
    """
    if not index.groups:
        raise CheckpointError("An optimizer's checkpoint has groups: got one of a `StateTree`. Load it by that.")
    own = index_of(optimizer, slots)
    frozen = {name for name, p in _named(optimizer).items() if not p.requires_grad}
    check_params(index, own.params, frozen | (index.params.keys() - index.owners()), strict)
    for group in index.groups:
        check_kept_as(group, optimizer.param_groups[0])
    check_leaves(index, own.leaves, frozen, strict)


def put_back(
    optimizer: TransformOptimizer, index: Index, tensors: Mapping[str, Tensor], strict: bool = True
) -> LoadReport:
    """Load the leaves that an optimizer and an index have in common, and the values of the groups.

    Raises:
        CheckpointError: naming what does not fit or is damaged.
        GroupFailure: if another process refuses its part.
    """
    given, unused = together(lambda: _given(optimizer, index, tensors), _group(optimizer), "load_state_dict")
    report = optimizer.load_state_dict(given, strict)
    return report._replace(unexpected=(*report.unexpected, *unused))


def _given(
    optimizer: TransformOptimizer, index: Index, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """What `load_state_dict` takes, and the leaves of the index that find no place."""
    named, owners = _named(optimizer), index.owners()
    holders = [name for name, p in named.items() if name in owners or (name in index.params and p.requires_grad)]
    state: dict[str, dict[str, Tensor]] = {name: {} for name in holders}
    slots, found = own_slots(optimizer, owners & named.keys()), index.leaves.keys() & tensors.keys()
    for path, slot in slots.items():
        for name in holders if slot.owner is None else [slot.owner]:
            if path in found:
                state[name][slot.key] = tensors[path]
    values = [_as_torch_has_it(group, named) for group in index.groups]
    return {"state": state, "param_groups": values}, sorted(index.leaves.keys() - slots.keys())


def _as_torch_has_it(group: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    names = [name for name in group["params"] if name in named]
    return {**group, "params": names, "param_names": names}
