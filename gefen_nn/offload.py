"""An optimizer's state away from its parameters: moved there at one time, fetched from there by each step.

`offload(optimizer)` before a rollout and `restore(optimizer)` after it free a GPU of the state for that time. A step in
between works too: state stays on the host, and is fetched for a few leaves at a time, the next ones while these are
stepped and the last ones are written back. All of this keeps every bit.
"""

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gefen_fn.base import OptState
from gefen_fn.move import begin_move, finish_moves
from gefen_fn.shards import local, placements_of
from gefen_fn.tree import StructureError, tree_leaves, tree_structure
from gefen_nn import state_view
from gefen_nn.kept import Kept
from gefen_nn.state_view import Slot

if TYPE_CHECKING:
    from gefen_nn.optimizer import TransformOptimizer

_SCALES = ("absmax", "nu", "row", "col")
_FEW = 16  # scales are looked at before each step if they stand for so many entries each


def offload(optimizer: "TransformOptimizer", device: str | torch.device = "cpu") -> None:
    """Keep an optimizer's state on another device than its parameters, until `restore`.

    Everything goes on as before, to the bit: steps fetch the state of some leaves at a time and write it back,
    `state_dict` and saves take it from where it is, and a load leaves it there. The codebook, 1 KB, and the counts,
    which are read on the host anyway, stay where they are. The step that learns the codebook, and every step of
    MultiSteps, of `apply_if_finite`, of a clip by norm behind other stages or of a transform of one's own, fetch the
    state of all leaves at once.

    Where the parameters are on that device themselves, as those of FSDP2's `CPUOffloadPolicy` are, nothing is moved:
    they are stepped there. On shards all members call this.

    Args:
        optimizer: one without `capturable=True`.
        device: where to keep the state; from a GPU to the CPU it goes into pinned memory.

    Raises:
        TypeError: for a wrapper of the optimizer.
        ValueError: for a device that holds no data, or an optimizer whose captured steps rest on the state.
        RuntimeError: if the copies fail, which changes nothing; if a step failed half-way before.
        GroupFailure: if another member of the group fails.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = Gefen(model.named_parameters())
        >>> offload(optimizer, "cpu")  # before something else needs the GPU
        >>> restore(optimizer)
    """
    _check_own(optimizer)
    optimizer.keep_state(Host(device))


def restore(optimizer: "TransformOptimizer") -> None:
    """Bring an optimizer's state back beside its parameters; on shards all members call this.

    Raises:
        TypeError: for a wrapper of the optimizer.
        RuntimeError: if the copies fail, which changes nothing; if a step failed half-way before.
        GroupFailure: if another member of the group fails.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = Gefen(model.named_parameters())
        >>> offload(optimizer)
        >>> restore(optimizer)
        >>> optimizer.describe().kept_on
        ''
    """
    _check_own(optimizer)
    optimizer.keep_state(None)


def _check_own(optimizer: Any) -> None:
    """Refuse what passes reads on to an optimizer, as Accelerate's and Lightning's wrappers do: writes stay with it."""
    if "param_groups" not in vars(optimizer):
        raise TypeError(
            f"The optimizer must be the one that steps: got {type(optimizer).__name__}, a wrapper of it. "
            "Pass its `optimizer`."
        )


class Host:
    """Where state is kept away from the parameters, and how it is copied.

    Args:
        device: one that holds data.

    Attributes:
        device: the same, with an index if it has one.
        page: entries of the parameters whose state is fetched at one time; a larger leaf is fetched alone.
    """

    page: int = 1 << 28

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.empty(0, device=device).device
        self._forms: dict[str, tuple[Any, ...]] = {}
        self._rows: tuple[Any, list[Slot]] = None, []
        if self.device.type == "meta":
            raise ValueError("State must be kept where it holds data: got the device `meta`. Use `cpu`.")

    def apart(self, home: torch.device) -> bool:
        """Whether a parameter on the device `home` has its state elsewhere."""
        return home != self.device

    def copy(self, x: Tensor, device: torch.device) -> Tensor:
        """A copy on a device, begun if not done."""
        return begin_move(x, device)

    def write(self, x: Tensor, into: Tensor) -> None:
        """Copy into a tensor of the state; begun if not done."""
        local(into).copy_(local(x), non_blocking=True)

    def take(self, x: Tensor, home: torch.device) -> Tensor:
        """A leaf of the state of a parameter on `home`, on its way to where it is kept."""
        return self.copy(x, self.device if self.apart(home) else home)

    def forget(self) -> None:
        """Take the next state as it comes, because it was made anew."""
        self._forms = {}

    def rows(self, state: OptState, names: Collection[str]) -> list[Slot]:
        """Whose each leaf of a state is, and its name, in the order of `tree_leaves`; kept while the structure is.

        Values are left out, which would be kept alive.
        """
        structure = tree_structure(state), set(names)
        if self._rows[0] != structure:
            slots = state_view.slots(state, names)
            order = tree_leaves(state_view.refill(state, names, range(len(slots))))
            self._rows = structure, [slots[n]._replace(value=None) for n in order]
        return self._rows[1]

    def check(self, state: OptState, params: Mapping[str, Tensor]) -> None:
        """Refuse a state that is not as the last step or load left it, before any of it is fetched.

        Args:
            state: over `params`.
            params: by name.

        Raises:
            StructureError: naming the leaf that has another shape, dtype, device or placement, or damaged scales.
        """
        for row, x in zip(self.rows(state, params.keys()), tree_leaves(state), strict=True):
            if row.owner is not None and x is not None and x.ndim:
                self._check_form(row.path, x)
                if row.key.rsplit(".", 1)[-1] in _SCALES:
                    _check_scales(row.path, local(x), local(params[row.owner]))

    def _check_form(self, path: str, x: Tensor) -> None:
        part = local(x)
        form = (tuple(x.shape), tuple(part.shape), x.dtype, placements_of(x), part.device)
        known = self._forms.setdefault(path, form)
        if form != known:
            raise StructureError(
                f"State must be as the last step left it: got `{path}` as {form[2:]} {form[0]} for {known[2:]} "
                f"{known[0]}. Load a checkpoint; move state by `offload` and `restore` alone."
            )


def _check_scales(path: str, x: Tensor, p: Tensor) -> None:
    """Refuse damaged scales, if there are few of them for the entries that they scale."""
    if x.is_meta or not x.numel() or x.numel() * _FEW > p.numel():
        return
    low, high = (float(bound) for bound in x.aminmax())
    if not (low >= 0 and high < math.inf):
        raise StructureError(
            f"Scales must be finite and >= 0: got `{path}` with values from {low} to {high}. Load a checkpoint."
        )


def away(host: Host | None, params: Mapping[str, Tensor]) -> Host | None:
    """The host, if the state of any parameter is kept elsewhere than the parameter."""
    return host if host is not None and any(host.apart(p.device) for p in params.values()) else None


def stowed(state: OptState, params: Mapping[str, Tensor], capturable: bool, host: Host | None) -> OptState:
    """The state where it is to be kept: beside the parameters, or what is one parameter's own on a host."""
    if host is None:
        return state_view.place(state, params, capturable)
    host.forget()
    return _waited(state, state_view.place(state, params, capturable, host.take))


def moved(
    kept: Kept, params: Mapping[str, Tensor], before: Host | None, after: Host | None, capturable: bool
) -> OptState:
    """The state as it is to be kept; what is kept now stays as it is.

    Args:
        kept: with the state.
        params: what it was made for.
        before: where it is; None for beside the parameters.
        after: where it is to be; likewise.
        capturable: whether captured steps may rest on it, which is refused.
    """
    kept.check_whole()
    if capturable and after is not None:
        raise ValueError(
            "State may be moved if no captured step rests on it: got an optimizer with capturable=True. Build it "
            "without."
        )
    if after is not None:
        return stowed(kept.state, params, False, after)
    put = None if before is None else before.copy
    return _waited(kept.state, state_view.place(kept.state, params, False, put))


def _waited(old: OptState, new: OptState) -> OptState:
    finish_moves([*tree_leaves(old), *tree_leaves(new)])
    return new
