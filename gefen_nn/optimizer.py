"""A `torch.optim.Optimizer` over any transform: steps, loads and copies, each one assignment of the state."""

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import OptState, updated, write_updates
from gefen_fn.describe import Report, describe
from gefen_fn.fuse import FusedStep, fuse, write_state
from gefen_fn.runs import runs
from gefen_fn.scalar import capturing
from gefen_nn import checkpoint, groups
from gefen_nn.checks import check_gradients
from gefen_nn.control import untraced
from gefen_nn.grouped import GroupedOptimizer
from gefen_nn.hooks import Call, call, run_post_hooks, run_pre_hooks
from gefen_nn.offload import Host, away, moved
from gefen_nn.paging import paged_step
from gefen_nn.vote import Gradients, Phases, Scaler, agreed


class TransformOptimizer(GroupedOptimizer):
    """Runs a transform as a torch optimizer.

    There is one state tree for all groups, over `{name: parameter}`, so a clip norm or a codebook is the whole model's
    whatever the grouping. State exists from construction for every parameter that requires a gradient, and is made when
    one starts to. Names are those given (`model.named_parameters()`), else positions "0", "1", ...

    If `tx` is an `inject_hyperparams`, or holds exactly one inside of `chain`, `named_chain`, `MultiSteps` or
    `apply_if_finite`, its hyperparameters are group keys (`learning_rate` as `lr`), read at each step. Otherwise groups
    carry none, and a scheduler's access raises and names the fix: to inject around the whole, as in
    `inject_hyperparams(lambda learning_rate: chain(clip_by_global_norm(1.0), gefen(learning_rate)))(1e-3)`.

    Extra arguments of `step` are those of `tx.update`: with `clip_by_qk` in `tx` call `step(max_logits=logits)`.

    Args:
        params: parameters, `(name, parameter)` pairs or groups, as torch takes them.
        tx: the transform.
        fused: step in place on a back end where the expression and the device allow (see `gefen_fn.fuse`), which
            changes no bit on a CPU; False never does.
        capturable: keep counters and hyperparameters beside the parameters, and step without a look at them, so that
            `step` may be captured in a CUDA graph, after one that is not. Groups then hold tensors, which schedulers
            and loads fill in place, as `group["lr"].fill_(x)` does. Load before the capture, if the codebook is
            another one.

    Raises:
        TypeError: if `tx` is not a transform, or `params` is a module.
        ValueError: for a parameter or name given twice, a group key that no step would read, or a value out of range.
        StructureError: for a parameter that is not a dense floating-point tensor.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = TransformOptimizer(model.named_parameters(), inject_hyperparams(lion)(1e-4, weight_decay=0.1))
        >>> sorted(key for key in optimizer.param_groups[0] if key in ("lr", "b1", "b2", "weight_decay"))
        ['b1', 'b2', 'lr', 'weight_decay']
    """

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step found no gradient, or an overflow that a scaler reported."""
        return self._kept.skipped

    def describe(self) -> Report:
        """What is kept for each parameter that has state, and why; print it for a table."""
        host = away(self._host, params := self._sync())
        lines = runs(self._tx, params, fused=self._fused is not None)
        return describe(self._tx, params)._replace(kept_on="" if host is None else str(host.device), runs=lines)

    def _checked_sync(self) -> dict[str, Tensor]:
        self._kept.check_whole()
        params = self._sync()
        host = away(self._host, params)
        if host is not None:
            host.check(self._kept.state, params)
        return params

    def keep_state(self, host: Host | None) -> None:
        """Keep state on a host, from where each step fetches it, or beside the parameters if None, all or nothing.

        This is what `gefen_nn.offload` and `restore` do, and raises what they do.
        """

        def attempt() -> OptState:
            return moved(self._kept, self._sync(), self._host, host, self._capturable)

        call = "restore" if host is None else "offload"
        self._kept.state, self._host = self._control.together(attempt, self._group(), call), host
        self._fused = None if self._fused is None else fuse(self._tx)  # the old one's plan holds what was moved

    def step(self, closure: Callable[[], Any] | None = None, **extra: Any) -> Any:
        """Update every parameter that has a gradient, each rounded once to its own dtype.

        Everything that may be refused is refused before anything changes.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with gradients enabled.
            **extra: passed to the transform, the same on all members: `max_logits` of `clip_by_qk`, and what stages of
                your own read. A closure may fill a dict that is given here.

        Returns:
            What `closure` returned, or None.

        Raises:
            StructureError: for a gradient that is sparse, complex or of another shape.
            ValueError: for a group's value that is no number or out of range; tensors are not read, and a compiled step
                does not check; if an extra argument is missing that a stage needs.
            TypeError: for a closure that is none, or an extra argument that no stage reads; a stage of your own may
                read any.
            RuntimeError: for a non-finite gradient, if `error_if_nonfinite`; for a captured step that cannot be one; if
                a step or a load failed while it wrote.
            GroupFailure: for any of these on a member of the group, or if members differ.
        """
        with torch.no_grad():  # as a decorator it would hide the step from torch.compile
            return untraced(self._step, closure, extra) if self._control.shared else self._step(closure, extra)

    step.hooked = True  # type: ignore[attr-defined]  # torch runs the hooks itself unless it finds this

    def _step(self, closure: Callable[[], Any] | None, extra: dict[str, Any]) -> Any:
        phases, hooked = Phases(self._group()), type(self).step is TransformOptimizer.step  # else torch ran them
        given = Call.of(self, closure, extra)
        if hooked:
            given = phases.attempt("pre-hooks", lambda: run_pre_hooks(self, given)) or given
            closure, extra = phases.attempt("pre-hooks", given.bound) or (closure, extra)
        loss = phases.attempt("closure", lambda: call(closure))
        phases.attempt("extra arguments", lambda: self._extras.check(extra))
        params = phases.attempt("structure", self._checked_sync)
        grads = phases.attempt("gradients", lambda: self._gradients(params or {}))
        scaler = phases.attempt("scaler", lambda: Scaler.of(self))
        named = phases.attempt("structure", self._named) or {}
        agreement = agreed(phases, named, grads, scaler, self._live_state, self._control, extra)
        grads = agreement.grads
        self._kept.skipped = agreement.overflow or all(g is None for g in grads.values())
        if not self._kept.skipped:
            if scaler is not None:
                scaler.unscale(grads.values())
            self._kept.state = self._stepped(grads, self._live_state(), params or {}, {**extra, **agreement.known})
        if hooked:
            run_post_hooks(self, given)
        return loss

    def _live_state(self) -> OptState:
        return self._with_hyperparams(self._kept.state)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling and skipping to `step`: where several members must agree."""
        return self._group() is not None

    def _gradients(self, params: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """The gradients by name, checked."""
        grads = {name: p.grad for name, p in params.items()}
        check_gradients(grads, params, self.error_if_nonfinite)
        if not torch.compiler.is_compiling():
            self._check_changes()
            if capturing():
                groups.check_capture(self.param_groups, self._keys, self._device())
        return grads

    def _stepped(self, grads: Gradients, state: OptState, params: dict[str, Tensor], known: dict[str, Any]) -> OptState:
        """The next state; parameters, and the state's tensors where fused or capturable, are written in place."""
        host, fused = away(self._host, params), self._fused is not None
        if host is None:
            return self._advanced(self._fused, grads, state, params, known)
        return paged_step(host, self._kept, self._tx, self._advanced, grads, state, params, known, fused=fused)

    def _advanced(self, step: FusedStep | None, grads: Any, state: OptState, params: Any, known: Any) -> OptState:
        """The next state, all of it beside the parameters."""
        if step is not None and not torch.compiler.is_compiling():
            with self._kept.stepping(step):
                return step(grads, state, params, **known)
        updates, new = updated(self._tx, grads, state, params, **known)
        with self._kept.writing("step"):
            write_updates(params, updates)
            return write_state(state, new) if self._capturable and not torch.compiler.is_compiling() else new

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> checkpoint.LoadReport:  # type: ignore[override]  # torch's returns None
        """Restore state and hyperparameters to the bit, matched by parameter name where both sides have names.

        All or nothing: everything is validated before the one assignment.

        Args:
            state_dict: what `state_dict` returned; safe to read with `torch.load(..., weights_only=True)`.
            strict: refuse a file that lacks a leaf or has one too many; else the optimizer keeps its own where one is
                missing, and leaves out what it has no place for. What does not fit in shape or dtype is refused anyway.

        Returns:
            What was missing and unexpected; nothing of either if `strict`.

        Raises:
            CheckpointError: naming the key that is missing, extra, misshapen or damaged.
            GroupFailure: if it fails on another member of the group: on shards this is a collective, called by all.
        """
        report = self._restore(state_dict, strict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
        return report

    def _restore(self, state_dict: dict[str, Any], strict: bool) -> checkpoint.LoadReport:
        loaded = self._control.together(lambda: self._loaded(state_dict, strict), self._group(), "load_state_dict")
        with self._kept.writing("load_state_dict"):
            for target, given in zip(self.param_groups, loaded.values, strict=True):
                checkpoint.fill_group(target, given)
            state = write_state(loaded.before, loaded.after) if self._capturable else loaded.after
            self._kept.seen = loaded.seen
            self._kept.state = self._with_hyperparams(state)
            if self._kept.along is not None:
                self._kept.along()
        self._kept.half_done = ""
        return loaded.report

    def _loaded(self, state_dict: dict[str, Any], strict: bool) -> checkpoint.Loaded:
        state_dict = copy(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        frozen = {name for name, p in self._named().items() if not p.requires_grad}
        saved = checkpoint.read(state_dict, self.param_groups, self._members(), frozen, strict)
        own, seen = self._grown(self._tracked([name for name, leaves in saved.leaves.items() if leaves]))
        state = checkpoint.restore(self._shown(own), seen.keys(), saved.leaves, frozen, strict)
        values = checkpoint.group_values(saved.values, self.param_groups, self._members(), self._check_group, strict)
        report = checkpoint.report(self._shown(own), seen.keys(), saved.leaves, values, self._keys)
        if self._keys:
            values_here = groups.values_in(own, self._path) | groups.values_in(state, self._path)
            state = groups.with_values(state, self._path, values_here)
        return checkpoint.Loaded(seen, own, state, values, report)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TransformOptimizer":
        """A copy with its own parameters and state, without hooks or a scheduler's wrapper of `step`, as in torch."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        left = ("_tx", "_fused", "step")
        own = {k: v for k, v in self.__dict__.items() if k not in left and not k.startswith("_optimizer_")}
        new.__dict__.update(deepcopy(own, memo), _tx=self._tx, _fused=None if self._fused is None else fuse(self._tx))
        new.__setstate__({})
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: a transform is made of closures."""
        raise TypeError(
            f"Only presets can be pickled: got a {type(self).__name__} over {self._tx!r}, which holds closures. "
            "Save `optimizer.state_dict()` and rebuild the optimizer from its expression."
        )
