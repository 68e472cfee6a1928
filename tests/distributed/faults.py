"""Seeded faults: what a seed stands for, and what workers run to commit one and to go on after it."""

import contextlib
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

from gefen_nn import (
    CheckpointError,
    Gefen,
    GefenMuon,
    GroupFailure,
    Muon,
    OptimizerState,
    TransformOptimizer,
    convert_state,
    folders,
    load,
    save,
    save_async,
)
from tests.distributed.adapter import Net, give_gradients, tensors
from tests.distributed.training import mesh_of

# (kind, phase): every seed modulo their number is one of them.
PAIRS = [
    *(("raise", phase) for phase in ("step", "learn", "closure", "hooks", "save", "save stock", "save async", "load")),
    *(("raise", phase) for phase in ("load stock", "convert")),
    *(("kill", phase) for phase in ("step", "learn", "save", "save stock", "save async", "load")),
    *(("damage", how) for how in ("flip", "cut", "delete", "flip stock")),
]
OPTIMIZERS = ("gefen", "hybrid", "whole tiles", "muon")
SIDES = ((2,), (2,), (2,), (3,), (2, 2))
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, OSError, MemoryError, ValueError, KeyboardInterrupt)
OURS = ("gefen_fn", "gefen_nn", "gefen_kernels")
WRITERS = ("write_updates", "run", "run_step")  # where a step begins to write


class Fault(NamedTuple):
    """What goes wrong.

    Attributes:
        kind: "raise", "kill" or "damage".
        phase: what is going on, or how a checkpoint is damaged.
        optimizer: whose.
        sides: of the mesh.
        victim: the worker that it happens to.
        at: how far into the phase, or into a file, as a share of it.
        timed: whether a share of its time is meant; else of the calls that the library makes.
        early: whether before a collective of the closure, or from the start of a step; else after it, or in the write.
        error: what is raised.
    """

    kind: str
    phase: str
    optimizer: str
    sides: tuple[int, ...]
    victim: int
    at: float
    timed: bool
    early: bool
    error: type[BaseException]

    @property
    def world(self) -> int:
        return self.sides[0] * (self.sides[1] if len(self.sides) > 1 else 1)

    @property
    def late(self) -> bool:
        """Whether only calls count that a step makes once it writes."""
        return self.phase in ("step", "learn") and not self.early


def fault_of(seed: int) -> Fault:
    """The fault of a seed."""
    draw = random.Random(seed)
    kind, phase = PAIRS[seed % len(PAIRS)]
    optimizer, sides = draw.choice(OPTIMIZERS), draw.choice(SIDES)
    if phase == "convert" and optimizer == "muon":  # there is no other's state to convert
        optimizer = "hybrid"
    world = sides[0] * (sides[1] if len(sides) > 1 else 1)
    victim, at, timed, early = draw.randrange(world), draw.random(), draw.random() < 0.5, draw.random() < 0.5
    return Fault(kind, phase, optimizer, sides, victim, at, timed and kind == "kill", early, draw.choice(ERRORS))


class Wide(nn.Module):
    """Two matrices, of which two processes cut no tile."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)


def _model(optimizer: str) -> nn.Module:
    torch.manual_seed(0)
    return Net() if optimizer in ("gefen", "hybrid") else Wide()


def made(optimizer: str, sides: tuple[int, ...] | None) -> tuple[nn.Module, TransformOptimizer]:
    """A model of fixed weights and its optimizer."""
    model = _model(optimizer)
    if sides is not None:
        fully_shard(model, mesh=mesh_of(sides))
    if optimizer == "hybrid":
        return model, GefenMuon(model, lr=1e-2, weight_decay=0.1)
    kind = Muon if optimizer == "muon" else Gefen
    return model, kind(model.named_parameters(), lr=1e-2, weight_decay=0.1)


class Scene:
    """A model and its optimizer before the phase of a fault, and what may happen on the way.

    Attributes:
        trap: called where a closure or a hook may fail.
    """

    def __init__(self, fault: Fault) -> None:
        self.fault, self.trap = fault, _nothing
        self.model, self.optimizer = made(fault.optimizer, fault.sides)
        self.taken = 0
        for _ in range({"learn": 0, "step": 1, "closure": 1, "hooks": 1, "convert": 1}.get(fault.phase, 2)):
            self.step()  # saves are of step 2, and the good checkpoint of step 1

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        give_gradients(self.model, self.taken + 1)
        self.optimizer.step(closure)
        self.taken += 1

    def bits(self) -> str:
        """A digest of every parameter, every tensor of the state and every group's values."""
        digest = hashlib.sha256()
        for group in self.optimizer.param_groups:
            digest.update(repr({k: v for k, v in group.items() if k != "params"}).encode())
        for x in (*self.model.parameters(), *(x for own in self.optimizer.state.values() for x in own.values())):
            digest.update(_local(x).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _nothing() -> None:
    pass


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _step(scene: Scene, folder: Path) -> None:
    scene.step()


def _closure(scene: Scene, folder: Path) -> None:
    def closure() -> None:
        for early in (True, False):
            if scene.fault.early == early:
                scene.trap()
            if early and scene.fault.at < 0.5:
                dist.all_reduce(torch.ones(1))

    scene.step(closure)


def _hooks(scene: Scene, folder: Path) -> None:
    register = scene.optimizer.register_step_pre_hook if scene.fault.early else scene.optimizer.register_step_post_hook
    handle = register(lambda *_: scene.trap())
    try:
        scene.step()
    finally:
        handle.remove()


def _save(scene: Scene, folder: Path) -> None:
    save(folder / "run", scene.model, scene.optimizer, step=scene.taken)


def _save_stock(scene: Scene, folder: Path) -> None:
    held = {"optimizer": OptimizerState(scene.optimizer), "model": scene.model.state_dict()}
    dcp.save(held, checkpoint_id=folder / "new")


def _save_async(scene: Scene, folder: Path) -> None:
    saved = save_async(folder / "run", scene.model, scene.optimizer, step=scene.taken)
    try:
        scene.step()
    finally:
        saved.result()


def _load(scene: Scene, folder: Path) -> None:
    scene.taken = load(folder / "run", scene.model, scene.optimizer).extra["step"]


def _load_stock(scene: Scene, folder: Path) -> None:
    dcp.load({"optimizer": OptimizerState(scene.optimizer)}, checkpoint_id=folder / "stock")


def _convert(scene: Scene, folder: Path) -> None:
    other = _model(scene.fault.optimizer)
    source = torch.optim.AdamW(other.named_parameters())
    give_gradients(other, 1)
    source.step()
    scene.optimizer.load_state_dict(convert_state(source.state_dict(), scene.optimizer))


PHASES = {
    "step": _step,
    "learn": _step,
    "closure": _closure,
    "hooks": _hooks,
    "save": _save,
    "save stock": _save_stock,
    "save async": _save_async,
    "load": _load,
    "load stock": _load_stock,
    "convert": _convert,
    "flip": _load,
    "cut": _load,
    "delete": _load,
    "flip stock": _load_stock,
}


class Wire:
    """Counts the calls that the library makes, of its own functions and of others', and acts at one of them."""

    def __init__(self, late: bool, act: Callable[[], None] = _nothing, at: int = -1) -> None:
        self.seen, self._act, self._at, self._counts = 0, act, at, not late
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        caller = frame if event == "c_call" else frame.f_back
        if event not in ("call", "c_call") or not (_is_ours(frame) or _is_ours(caller)):
            return
        self._counts = self._counts or (event == "call" and frame.f_code.co_name in WRITERS)
        if self._counts:
            with self._lock:
                self.seen += 1
                hit = self.seen == self._at
            if hit:
                self._act()

    @contextmanager
    def strung(self) -> Iterator[None]:
        """Inside of it calls are counted, also those of the thread that writes."""
        beside = folders.beside

        def first_call_of_a_writer(*args: Any) -> Path:
            if threading.current_thread() is not threading.main_thread():
                sys.setprofile(self)
            return beside(*args)

        folders.beside = first_call_of_a_writer
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            folders.beside = beside
            self._at = -1


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in OURS


class Outcome(NamedTuple):
    """What a worker says of itself after a fault.

    Attributes:
        error: the type's name, the text, and the cause's type; empty without one.
        told: whether the error is one that members agree on, so that the group is in order.
        state: "before", "after" or "between", as of the phase that nothing disturbed.
        half_done: what the optimizer says of itself.
        seconds: what it took.
    """

    error: tuple[str, str, str] | None
    told: bool
    state: str
    half_done: str
    seconds: float


SCENES: list[Scene] = []  # of the last fault: the one it happened to, and one that nothing happened to


def play(rank: int, fault: Fault, folder: str) -> Outcome:
    """Go through the phase undisturbed, then with the fault in it."""
    twin, scene = Scene(fault), Scene(fault)
    act, acted = PHASES[fault.phase], fault.kind != "damage"
    count = Wire(fault.late)
    began = time.monotonic()
    with count.strung():
        act(twin, Path(folder, "twin"))
    took, before = time.monotonic() - began, scene.bits()
    SCENES[:] = scene, twin
    began, error = time.monotonic(), None
    try:
        with _committed(scene, fault, count.seen, took) if acted and rank == fault.victim else contextlib.nullcontext():
            act(scene, Path(folder, "main"))
    except BaseException as raised:  # what it is, the test judges
        error = raised
    took = time.monotonic() - began
    if error is not None and not _told(error) and rank != fault.victim:
        threading.Timer(0.2, os._exit, [1]).start()  # as an error does that nobody expects
    after = scene.bits()
    state = "before" if after == before else "after" if after == twin.bits() else "between"
    said = None if error is None else (type(error).__name__, str(error), type(error.__cause__).__name__)
    return Outcome(said, error is None or _told(error), state, scene.optimizer.kept.half_done, took)


def _told(error: BaseException) -> bool:
    """Whether members agree on an error; one whose cause lies in a collective has broken the group."""
    causes = (repr(error), repr(error.__cause__))
    lost = any(word in cause for word in ("gloo", "pair closure") for cause in causes)
    return isinstance(error, (GroupFailure, CheckpointError, CheckpointException)) and not lost


@contextmanager
def _committed(scene: Scene, fault: Fault, calls: int, seconds: float) -> Iterator[None]:
    """Inside of it the fault happens."""

    def fail() -> None:
        raise fault.error("a seeded fault")

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    act = fail if fault.kind == "raise" else end
    timer = threading.Timer(0.6 * fault.at * seconds, end)  # the count of calls took time too
    if fault.timed:
        timer.start()
    elif fault.phase in ("closure", "hooks"):
        scene.trap = act
    wire = Wire(fault.late, act, -1 if fault.timed or scene.trap is act else 1 + int(fault.at * calls))
    try:
        with wire.strung():
            yield
    finally:
        timer.cancel()
        scene.trap = _nothing


class Later(NamedTuple):
    """What a worker says of one more step.

    Attributes:
        error: its text; empty without one.
        unchanged: whether that step left everything as it was.
        as_twin: whether everything is as without a fault.
    """

    error: str
    unchanged: bool
    as_twin: bool


def go_on(rank: int, done: bool) -> Later:
    """One more step after a fault; `done`: the phase was done, and not undone."""
    scene, twin = SCENES
    fresh = twin if done else Scene(scene.fault)
    before, error = scene.bits(), ""
    scene.taken = fresh.taken
    try:
        scene.step()
    except (GroupFailure, RuntimeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    if not error:
        fresh.step()
    return Later(error, scene.bits() == before, scene.bits() == fresh.bits())


def come_back(rank: int, folder: str) -> bool:
    """Load the last good checkpoint and step; whether all is as in a run that never saw a fault."""
    scene, _ = SCENES
    good = made(scene.fault.optimizer, scene.fault.sides)
    last = load(folder, scene.model, scene.optimizer).extra["step"]
    for step in range(1, last + 1):
        give_gradients(good[0], step)
        good[1].step()
    scene.taken = last
    fresh = Scene.__new__(Scene)
    fresh.model, fresh.optimizer = good
    same = scene.bits() == fresh.bits()
    scene.step()
    give_gradients(good[0], last + 1)
    good[1].step()
    return same and scene.bits() == fresh.bits()


def save_good(rank: int, optimizer: str, sides: tuple[int, ...] | None, folder: str) -> None:
    """Checkpoints after one step, ours and stock."""
    model, own = made(optimizer, sides)
    give_gradients(model, 1)
    own.step()
    save(Path(folder, "run"), model, own, step=1)
    dcp.save({"optimizer": OptimizerState(own), "model": model.state_dict()}, checkpoint_id=Path(folder, "stock"))


def loaded(rank: int, optimizer: str, sides: tuple[int, ...] | None, folder: str) -> Any:
    """What a checkpoint gives to new processes: its step, and tensors."""
    model, own = made(optimizer, sides)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    step = load(folder, model, own).extra["step"]
    out = step, tensors(model, own)
    return out if rank == 0 else None


def after(optimizer: str, last: int) -> dict[str, Tensor]:
    """The tensors of one process after some steps."""
    model, own = made(optimizer, None)
    for step in range(1, last + 1):
        give_gradients(model, step)
        own.step()
    return tensors(model, own)
