"""What workers run to fail: one member of the group does something wrong, and all report what became of them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from gefen_fn import Block, Factored, HeadRows, QKHeads, chain, clip_by_global_norm, clip_by_qk, gefen
from gefen_nn import Gefen, GefenMuon, GroupFailure, TransformOptimizer, offload, restore
from tests.distributed.adapter import build, give_gradients
from tests.distributed.scoped import scope_of
from tests.distributed.training import whole

BAD = 1  # the member that fails
PLAIN = {"scoped": Gefen, "scoped hybrid": GefenMuon}
"""Optimizers of plain tensors, whose members are those of a scope."""


def _raise() -> None:
    raise OSError("the disk is full")


class Scene:
    """A model and its optimizer after one step; with a clip before the first, which learns and asks most."""

    def __init__(self, rank: int, sides: tuple[int, ...], kind: str) -> None:
        self.rank = rank
        self.model, self.optimizer = build(None if kind in PLAIN else sides)
        if kind in PLAIN:
            self.optimizer = PLAIN[kind](list(self.model.named_parameters()), codebook=scope_of((0, 1)))
        if kind == "hybrid":
            self.optimizer = GefenMuon(self.model, lr=1e-2)
        if kind == "finite":
            self.optimizer = Gefen(self.model.named_parameters(), error_if_nonfinite=True)
        if kind == "clip":
            clipped = chain(clip_by_global_norm(1.0), gefen(1e-2))
            self.optimizer = TransformOptimizer(self.model.named_parameters(), clipped)
        else:
            give_gradients(self.model, self._number(1, kind))
            self.optimizer.step()
        give_gradients(self.model, self._number(2, kind))

    def _number(self, step: int, kind: str) -> int:
        """What a step's gradients are made from: plain ones differ between the members."""
        return 10 * self.rank * (kind in PLAIN) + step

    def bits(self) -> list[bytes]:
        """The raw bytes of every parameter and every tensor of the state."""
        state = [x for leaves in self.optimizer.state.values() for x in leaves.values()]
        return [raw(x) for x in (*self.model.parameters(), *state)]


def raw(x: torch.Tensor) -> bytes:
    part = x.to_local() if isinstance(x, DTensor) else x
    return part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def closure_before_its_first_collective(scene: Scene) -> None:
    scene.optimizer.step(_raise if scene.rank == BAD else lambda: None)


def closure_after_its_last_collective(scene: Scene) -> None:
    def closure() -> None:
        dist.all_reduce(torch.ones(1))
        if scene.rank == BAD:
            _raise()

    scene.optimizer.step(closure)


def parameter_of_another_shape(scene: Scene) -> None:
    def closure() -> None:
        if scene.rank == BAD:
            scene.optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(5, 5))

    scene.optimizer.step(closure)


def parameter_swapped_before(scene: Scene) -> None:
    if scene.rank == BAD:
        params = scene.optimizer.param_groups[0]["params"]
        params[0] = torch.nn.Parameter(torch.zeros(params[0].shape, dtype=torch.float64))
        params[0].grad = torch.ones_like(params[0])
    scene.optimizer.step()


def parameter_without_a_name(scene: Scene) -> None:
    if scene.rank == BAD:
        scene.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))
    scene.optimizer.step()


def pre_hook(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        if scene.rank == BAD:
            handle = scene.optimizer.register_step_pre_hook(lambda *_: _raise())
            stack.callback(handle.remove)
        scene.optimizer.step()


def gradient_placed_differently(scene: Scene) -> None:
    if scene.rank == BAD:
        p = next(p for p in scene.model.parameters() if p.ndim == 2)
        if not isinstance(p, DTensor):
            p.grad = torch.eye(p.shape[0], p.shape[1]).to_sparse()
            return scene.optimizer.step()
        p.grad = DTensor.from_local(torch.ones(p.shape), p.device_mesh, [Replicate()] * p.device_mesh.ndim)
    scene.optimizer.step()


def missing_gradient(scene: Scene) -> None:
    if scene.rank == BAD:
        next(scene.model.parameters()).grad = None
    scene.optimizer.step()


def overflow_on_one(scene: Scene) -> None:
    _scaled(scene, 8.0, scene.rank == BAD)


def scaler_on_one(scene: Scene) -> None:
    if scene.rank == BAD:
        _scaled(scene, 8.0, False)
    else:
        scene.optimizer.step()


def scales_that_differ(scene: Scene) -> None:
    _scaled(scene, 8.0 if scene.rank == BAD else 4.0, False)


def _scaled(scene: Scene, scale: float, overflow: bool) -> None:
    scene.optimizer.grad_scale, scene.optimizer.found_inf = torch.tensor(scale), torch.tensor(float(overflow))
    try:
        scene.optimizer.step()
    finally:
        del scene.optimizer.grad_scale, scene.optimizer.found_inf


FAULTS = {
    "18 closure before its first collective": closure_before_its_first_collective,
    "18 closure after its last collective": closure_after_its_last_collective,
    "19 closure changes a parameter": parameter_of_another_shape,
    "20 parameter swapped before": parameter_swapped_before,
    "20 parameter without a name": parameter_without_a_name,
    "21 pre-hook": pre_hook,
    "22 gradient sparse or placed differently": gradient_placed_differently,
    "23 gradient missing": missing_gradient,
    "24 overflow on one": overflow_on_one,
    "25 scaler on one": scaler_on_one,
    "26 scales differ": scales_that_differ,
}


def fail(rank: int, fault: str, sides: tuple[int, ...], kind: str) -> tuple[str, str, str, bool]:
    """The error that a fault on one member makes here, its text, its cause, and whether nothing changed."""
    scene = Scene(rank, sides, kind)
    kept = list(scene.optimizer.param_groups[0]["params"])
    before = scene.bits()
    try:
        FAULTS[fault](scene)
    except Exception as error:
        scene.optimizer.param_groups[0]["params"][:] = kept
        return type(error).__name__, str(error), repr(error.__cause__), scene.bits() == before
    return "none", "", "", scene.bits() == before


def _more(made: Callable[..., Any]) -> Callable[[nn.Module, bool], Any]:
    """One member adds parameters; there are eight before, whose bits fill a byte."""

    def build(model: nn.Module, bad: bool) -> Any:
        params = list(model.named_parameters())
        extra = [(f"x{i}", nn.Parameter(params[0][1].detach().clone())) for i in range(8 - len(params) + bad)]
        return made([*params, *extra])

    return build


BUILT: dict[str, Callable[[nn.Module, bool], Any]] = {
    "the rate of an expression": lambda model, bad: TransformOptimizer(
        model.named_parameters(), gefen(1e-2 if bad else 1e-3)
    ),
    "the warm-up": lambda model, bad: Gefen(model.named_parameters(), b2_warmup=None if bad else 0.9),
    "the second moment": lambda model, bad: Gefen(
        model.named_parameters(), second_moment=Block() if bad else Factored()
    ),
    "the codebook": lambda model, bad: Gefen(model.named_parameters(), codebook="fixed" if bad else "learned"),
    "the direction": lambda model, bad: Gefen(model.named_parameters(), maximize=bad),
    "steps in place": lambda model, bad: Gefen(model.named_parameters(), fused=False if bad else None),
    "the number of parameters": _more(Gefen),
}


def build_differently(rank: int, what: str, sides: tuple[int, ...]) -> tuple[str, bool]:
    """The error of the first step where one member built another optimizer, and whether nothing changed."""
    model = build(sides)[0]
    optimizer = BUILT[what](model, rank == BAD)
    give_gradients(model, 1)
    before = [raw(p) for p in model.parameters()]
    try:
        optimizer.step()
    except GroupFailure as error:
        return str(error), before == [raw(p) for p in model.parameters()]
    return "none", False


def step_at_another_rate(rank: int, sides: tuple[int, ...]) -> tuple[str, bool]:
    """The error where one member has another learning rate, and whether nothing changed."""
    scene = Scene(rank, sides, "gefen")
    scene.optimizer.param_groups[0]["lr"] = 0.5 if rank == BAD else 0.02
    before = scene.bits()
    try:
        scene.optimizer.step()
    except GroupFailure as error:
        return str(error), scene.bits() == before
    return "none", False


LOGITS = {"up": torch.tensor([0.5, 4.0, 1.0, 8.0, float("nan")])}
OTHERS: dict[str, dict[str, Any]] = {
    "missing": {},
    "misspelt": {"max_logit": LOGITS},
    "one too many": {"max_logits": LOGITS, "loss": 1.0},
    "nothing measured": {"max_logits": None},
    "other values": {"max_logits": {"up": 2 * LOGITS["up"]}},
    "another form": {"max_logits": LOGITS["up"]},
}


def step_with_extras(rank: int, sides: tuple[int, ...]) -> tuple[list[tuple[str, str, bool]], bool]:
    """What comes of other extra arguments on one member, and whether the same ones step as one process does."""
    stepped = []
    told: list[tuple[str, str, bool]] = []
    for mesh in (sides, None):
        model = build(mesh)[0]
        heads = {name: None for name, _ in model.named_parameters()}
        tx = chain(gefen(1e-2), clip_by_qk(1.0, {**heads, "up.weight": QKHeads("up", query=HeadRows(60))}))
        optimizer = TransformOptimizer(model.named_parameters(), tx)
        give_gradients(model, 1)
        before = [raw(p) for p in model.parameters()]
        for name, extra in {} if mesh is None else OTHERS.items():
            try:
                optimizer.step(**(extra if rank == BAD else {"max_logits": LOGITS}))
            except GroupFailure as error:
                told.append((name, str(error), before == [raw(p) for p in model.parameters()]))
        optimizer.step(max_logits=LOGITS)
        stepped.append([whole(p.detach()) for p in model.parameters()])
    return told, all(torch.equal(x, y) for x, y in zip(*stepped, strict=True))


CALLS: dict[str, Callable[[Scene], None]] = {
    "offload": lambda scene: offload(scene.optimizer),
    "restore": lambda scene: restore(scene.optimizer),
    "load_state_dict": lambda scene: scene.optimizer.load_state_dict(scene.optimizer.state_dict()) and None,
}


def call_alone(rank: int, call: str, sides: tuple[int, ...]) -> tuple[str, bool]:
    """The error where one member calls something and the others step, and whether nothing changed."""
    scene = Scene(rank, sides, "gefen")
    before = scene.bits()
    try:
        CALLS[call](scene) if rank == BAD else scene.optimizer.step()
    except GroupFailure as error:
        return str(error), scene.bits() == before
    return "none", False


def scaled_together(rank: int, sides: tuple[int, ...], overflow: bool) -> tuple[bool, bool, int]:
    """Whether a step with scale 8 changed nothing, whether it has the bits of one without, and hooks that ran."""
    plain, scaled = Scene(rank, sides, "gefen"), Scene(rank, sides, "gefen")
    before, ran = scaled.bits(), []
    scaled.optimizer.register_step_post_hook(lambda *_: ran.append(1))
    for p in scaled.model.parameters():
        p.grad = p.grad * 8.0
    _scaled(scaled, 8.0, overflow)
    plain.optimizer.step()
    return scaled.bits() == before, scaled.bits() == plain.bits(), len(ran)
