"""What is compared: one row per optimizer. Peers are black boxes, built as their documentation says."""

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
REFERENCE = "adamw-fused"  # ratios are to this arm
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# gefen and gefen-x both call their package `gefen`, so one of them lives in a folder of its own.
ORIGINAL = Path(sys.prefix) / "gefen-original"


class Arm(NamedTuple):
    """One optimizer.

    Attributes:
        label: its name in table and plot.
        family: "ours", "torch" or "peer".
        package: the distribution it comes from.
        build: makes the optimizer from `(name, parameter)` pairs.
        folder: where the package lies if not with the others.
        scales: where it is measured.
    """

    label: str
    family: str
    package: str
    build: Callable[[list[tuple[str, Parameter]]], torch.optim.Optimizer]
    folder: Path | None = None
    scales: tuple[str, ...] = ("small", "33m")

    def version(self) -> str | None:
        """The package's version; None where it is not installed."""
        path = sys.path if self.folder is None else [str(self.folder)]
        found = list(importlib.metadata.distributions(name=self.package, path=path))
        return found[0].version if found else None

    def refusal(self, scale: str) -> str | None:
        """Why it is not measured here, if so."""
        if scale not in self.scales:
            return f"measured at scale {' and '.join(self.scales)} only"
        if self.version() is None and self.family != "ours":  # ours may lie on the path, not installed
            return f"{self.package} is not installed here; `make bench-peers` makes an environment that has it"
        return None


def _ours(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    def build(named: list[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        from gefen_fn import Block
        from gefen_nn import Gefen

        policies = {"second_moment": Block()} if options.get("block") else {}
        return Gefen(named, **OPTIONS, **policies, fused=options.get("fused"))

    return build


def _drawn(named: list[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    """Codes, and bf16 parameters, rounded at random."""
    from gefen_fn import chain, gefen, stochastic_rounding
    from gefen_nn import TransformOptimizer

    b1, b2 = OPTIONS["betas"]
    options = {"b1": b1, "b2": b2, "eps": OPTIONS["eps"], "weight_decay": OPTIONS["weight_decay"]}
    return TransformOptimizer(
        named, chain(gefen(OPTIONS["lr"], rounding="stochastic", **options), stochastic_rounding())
    )


def _adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda named: torch.optim.AdamW(tensors(named), **OPTIONS, **options)


def _peer(module: str, name: str, *, by_name: bool = False, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    def build(named: list[tuple[str, Parameter]]) -> torch.optim.Optimizer:
        optimizer = getattr(importlib.import_module(module), name)
        return optimizer(named if by_name else tensors(named), **OPTIONS, **options)

    return build


def tensors(named: Sequence[tuple[str, Parameter]]) -> list[Parameter]:
    """The parameters without their names."""
    return [p for _, p in named]


ARMS = {
    "ours": Arm("ours", "ours", "gefen-fn", _ours()),
    "ours-block": Arm("ours, Block", "ours", "gefen-fn", _ours(block=True)),
    "ours-random": Arm("ours, at random", "ours", "gefen-fn", _drawn, scales=("small",)),
    "ours-unfused": Arm("ours, unfused", "ours", "gefen-fn", _ours(fused=False), scales=("small",)),
    "adamw-fused": Arm("AdamW fused", "torch", "torch", _adamw(fused=True)),
    "adamw-foreach": Arm("AdamW foreach", "torch", "torch", _adamw(foreach=True)),
    "gefen-x": Arm("gefen-x", "peer", "gefen-x", _peer("gefen", "Gefen", by_name=True, fused=False)),
    "gefen": Arm("gefen", "peer", "gefen", _peer("gefen", "Gefen", fused=False), ORIGINAL),
    "torchao-8bit": Arm("torchao AdamW8bit", "peer", "torchao", _peer("torchao.optim", "AdamW8bit")),
    "torchao-4bit": Arm("torchao AdamW4bit", "peer", "torchao", _peer("torchao.optim", "AdamW4bit")),
    "bnb-8bit": Arm("bitsandbytes AdamW8bit", "peer", "bitsandbytes", _peer("bitsandbytes.optim", "AdamW8bit")),
}

Shapes = list[tuple[int, ...]]


def _llama(vocabulary: int, width: int, key_value: int, hidden: int, layers: int, small: int) -> Shapes:
    attention = [(width, width), (key_value, width), (key_value, width), (width, width)]
    feed_forward = [(hidden, width), (hidden, width), (width, hidden)]
    return [(vocabulary, width), *(attention + feed_forward) * layers, *[(1024,)] * small]


SHAPES: dict[str, Shapes] = {
    "small": _llama(1024, 128, 64, 352, 1, 10),
    "33m": _llama(9216, 1024, 512, 2816, 2, 300),
}
# The tied embedding that memory is measured with; the next one where an arm does not fit into the machine's memory.
EMBEDDINGS: dict[str, Shapes] = {"small": [(4096, 256)], "33m": [(128 * 1024, 2048), (32 * 1024, 2048)]}


def parameters(shapes: Shapes, dtype: torch.dtype) -> list[tuple[str, Parameter]]:
    """Named parameters with gradients, the same numbers for every arm."""
    source = torch.Generator().manual_seed(0)
    out = []
    for n, shape in enumerate(shapes):
        p = Parameter(torch.empty(shape, dtype=dtype).normal_(0, 0.02, generator=source))
        p.grad = torch.empty(shape, dtype=dtype).normal_(0, 1e-3, generator=source)
        out.append((f"p{n}", p))
    return out
