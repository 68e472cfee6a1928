"""Groups of named parameters, and one state tree over all of them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from gefen_fn.base import GradientTransformation, OptState
from gefen_fn.fuse import fuse
from gefen_fn.shards import placements_of
from gefen_fn.tree import check_floating
from gefen_nn import groups, state_view
from gefen_nn.checks import check_flags, warn_if_slow
from gefen_nn.control import Control
from gefen_nn.extras import Extras
from gefen_nn.kept import Kept
from gefen_nn.meaning import kept_as
from gefen_nn.offload import Host, stowed


class GroupedOptimizer(torch.optim.Optimizer):
    """What a `TransformOptimizer` keeps from step to step; its arguments are described there."""

    keys: ClassVar[groups.Keys] = {}
    block: int = 0
    error_if_nonfinite: bool = False
    _start: Mapping[str, Any] = {}
    _settled: Mapping[str, tuple[Any, ...]] = {}
    _host: Host | None

    def __init__(
        self,
        params: Iterable[Any],
        tx: GradientTransformation,
        *,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        self._kept, self._host = Kept(), None
        groups.check_arguments(params, tx)
        check_flags(fused=fused, capturable=capturable)
        self._tx, self._capturable = tx, capturable
        self._fused = None if fused is False else fuse(tx)
        injection = groups.find_injection(tx)
        self._path = injection.path
        self._keys = self.keys or groups.group_keys(injection.tx)
        self._rebuild = getattr(injection.tx.update, "rebuild", dict)
        self._checked: list[dict[str, Any]] = []
        self._control, self._extras = Control(tx, self._fused is not None), Extras.of(tx)
        self._ready = False
        defaults = groups.group_defaults(injection.tx, self._keys, self.block)
        super().__init__(params, {**defaults, "kept_as": kept_as(tx), **self._start})
        self._accept()
        self._ready = True
        if self._fused is not None:
            warn_if_slow({p.device for p in self._tracked().values()})

    def __repr__(self) -> str:
        """Torch's form without the keys that never change, with the expression."""
        lines = super().__repr__().splitlines()
        shown = [line for line in lines if line.split(":")[0].strip() not in groups.FIXED_KEYS]
        return "\n".join([*shown, repr(self._tx)])

    # Torch assigns `state` once while constructing; afterwards it is a view of the tree.
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state per parameter, a view: `{parameter: {"<stage>.<field>[.<subfield>]": tensor}}`."""
        self._sync()
        by_name = self._named()
        shown = state_view.view(self._shown(self._kept.state), self._kept.seen)
        return defaultdict(dict, {by_name[name]: leaves for name, leaves in shown.items()})

    @state.setter
    def state(self, value: Any) -> None:
        if self._ready:
            raise AttributeError("`state` is a view: got an assignment. Use `load_state_dict`.")

    @property
    def kept(self) -> Kept:
        """What steps and loads replace, and whether one of them failed half-way."""
        return self._kept

    def slots(self, also: Collection[str] = ()) -> list[state_view.Slot]:
        """Every tensor of the state but what groups carry, with what the parameters `also` would have."""
        state, seen = self._grown(self._tracked(also))
        return state_view.slots(self._shown(state), seen.keys())

    @property
    def transform(self) -> GradientTransformation:
        """What makes the steps."""
        return self._tx

    def state_tree(self) -> OptState:
        """The transform's state, over `{name: parameter}`; its tensors are the optimizer's own."""
        self._sync()
        return self._kept.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get fresh state, all others keep theirs.

        Raises:
            ValueError: for a parameter or name given twice, a key that no step would read, or a value out of range.
        """
        super().add_param_group(param_group)
        try:
            self._accept_group()
            if self._ready:
                self._accept()
        except BaseException:  # whatever it was, a label function's error among them, the group is not there
            self.param_groups.pop()
            raise

    def _accept_group(self) -> None:
        """Refuse the last group for its own sake; a group of an expression says so itself."""
        for p in self.param_groups[-1]["params"]:
            check_floating(p)
        self._check_group(self.param_groups[-1])
        if not self._keys:
            self.param_groups[-1] = groups.ExpressionGroup(self.param_groups[-1])
        if self._capturable:
            groups.make_live(self.param_groups[-1], self._keys)

    def _accept(self) -> None:
        """Refuse names or parameters that stand twice; make state for those that are new."""
        names = [name for member in self._members() for name in member]
        params = [p for group in self.param_groups for p in group["params"]]
        if len(set(names)) != len(names) or len(set(params)) != len(params):
            repeated = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"Each parameter and name appears once: got {repeated or 'a tensor'} twice. Drop one.")
        self._group()
        self._sync()

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse a group, or a saved group's values; tensors are read."""
        groups.check_keys(group, self.defaults, self._settled, type(self).__name__ if self.keys else "")
        groups.check_values(self._rebuild, group, self._keys, read=True)

    def check_settled(self, told: Mapping[str, Any]) -> None:
        """Raise `ValueError` for what another optimizer's group says otherwise of an argument that is one for all."""
        own = {key: value for key, value in told.items() if key in self._settled}
        groups.check_keys(own, self.defaults, self._settled, type(self).__name__)

    def _check_changes(self) -> None:
        """Refuse what was written into a group since the last step; tensors are not read."""
        known = self._checked + [{}] * len(self.param_groups)
        pairs = zip(self.param_groups, known, strict=False)
        self._checked = [groups.check_changes(self._rebuild, group, self._keys, seen) for group, seen in pairs]

    def _members(self) -> list[list[str]]:
        return groups.members(self.param_groups)

    def _named(self) -> dict[str, Tensor]:
        params = (p for group in self.param_groups for p in group["params"])
        return dict(zip((name for member in self._members() for name in member), params, strict=True))

    def _tracked(self, also: Collection[str] = ()) -> dict[str, Tensor]:
        """Parameters that have state: those that require a gradient, or once did, or are asked for."""
        known = self._kept.seen.keys() | set(also)
        return {name: p for name, p in self._named().items() if p.requires_grad or name in known}

    def _grown(self, params: Mapping[str, Tensor]) -> tuple[OptState, dict[str, tuple[Any, ...]]]:
        """The state and its signature, with state for parameters that are new, thawed, moved or no longer meta."""
        signature = {name: (p.device, p.shape, placements_of(p)) for name, p in params.items()}
        if self._ready and signature == self._kept.seen:
            return self._kept.state, self._kept.seen
        state_view.check_shapes(params, {name: shape for name, (_, shape, *_) in self._kept.seen.items()})
        fresh = self._tx.init(params)
        merged = (
            state_view.merge(fresh, params.keys(), self._kept.state, self._kept.seen.keys()) if self._ready else fresh
        )
        return stowed(merged, params, self._capturable, self._host), signature

    def _sync(self) -> dict[str, Tensor]:
        """Make state for whatever needs some; return the parameters that have state."""
        params = self._tracked()
        self._kept.state, self._kept.seen = self._grown(params)
        return params

    def _shown(self, state: OptState) -> OptState:
        """The state without the hyperparameters that groups carry: those have one truth, the group's."""
        return groups.without_values(state, self._path, self._keys)

    def _with_hyperparams(self, state: OptState) -> OptState:
        if not self._keys:
            return state
        members = [[name for name in member if name in self._kept.seen] for member in self._members()]
        values = groups.group_hyperparams(self.param_groups, members, self._keys, self._device())
        return groups.with_values(state, self._path, values)

    def _device(self) -> torch.device | None:
        """Where a step without host reads looks for its hyperparameters; None if it may read."""
        if not self._capturable:
            return None
        return next((device for device, *_ in self._kept.seen.values() if device.type != "meta"), torch.device("cpu"))

    def _group(self) -> Any:
        """Who votes before a step; None for this process alone."""
        return self._control.of([p for group in self.param_groups for p in group["params"]])
