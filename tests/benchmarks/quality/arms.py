"""What the laboratory compares: AdamW, Gefen with every second moment, Muon, and other packages as black boxes.

Arms are functions of the decay `b2` of the second moment, which all of them share in one comparison.
"""

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from gefen_fn import (
    Block,
    Dense,
    Factored,
    GradientTransformation,
    find_blocks,
    flatten_state,
    gefen,
    gradient_histogram,
    inject_hyperparams,
    learn_codebook,
    partition,
    unflatten_state,
)
from gefen_kernels import reference
from gefen_nn import GefenMuon, TransformOptimizer
from gefen_nn.task import Build
from tests.benchmarks.muon_step import torch_hybrid

Optimizer = torch.optim.Optimizer
_DECAY = 0.1
_WARM = 0.9


def _adamw(model: nn.Module, lr: float, *, b2: float, fused: bool = True) -> Optimizer:
    """Not fused it rounds otherwise, and tells how far AdamW differs from itself under one seed."""
    return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, b2), weight_decay=_DECAY, fused=fused)


def _gefen(model: nn.Module, lr: float, *, b2: float, **options: Any) -> Optimizer:
    tx = inject_hyperparams(gefen)(lr, b1=0.9, b2=b2, weight_decay=_DECAY, **options)
    return TransformOptimizer(model.named_parameters(), tx)


def _muon(model: nn.Module, lr: float, *, b2: float, **options: Any) -> Optimizer:
    return GefenMuon(model, lr, betas=(0.9, b2), weight_decay=_DECAY, **options)


def _found_blocks(model: nn.Module, lr: float, *, b2: float) -> Optimizer:
    """Blocks as the paper finds them in the first gradient, which is there when the optimizer is made."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    return _gefen(model, lr, b2=b2, second_moment=Block(), b2_warmup=None, block=find_blocks(grads))


def _rows(model: nn.Module, lr: float, *, b2: float) -> Optimizer:
    """One second moment for each output neuron, as Adam-mini (arXiv 2406.16793) has it for most matrices."""
    blocks = {name: p[0].numel() if p.dim() > 1 else 256 for name, p in model.named_parameters()}
    return _gefen(model, lr, b2=b2, second_moment=Block(), b2_warmup=None, block=blocks)


@cache
def _scaled(block: int) -> Tensor:
    """Counts of Gaussian entries by the largest of their block, in bins on [-1, 1]."""
    drawn = torch.randn(1 << 14, block, generator=torch.Generator().manual_seed(0))
    return gradient_histogram({"x": drawn}, block=block)


@cache
def _relative_book(level: float = 0.05) -> Tensor:
    """A codebook for small relative errors: bins count by 1 / (c^2 + level^2)."""
    counts = _scaled(256)
    centres = (torch.arange(len(counts), dtype=torch.float64) + 0.5) * 2 / len(counts) - 1
    return learn_codebook((counts * (level**2 / (centres**2 + level**2)) * 1000).round().long())


@cache
def _four_bit_book(block: int = 64) -> Tensor:
    """Fifteen levels: what 4-bit codes would hold, in 8-bit codes, whose bytes the table tells."""
    levels = learn_codebook(_scaled(block), levels=16)
    return torch.cat([levels[:7], torch.zeros(242), levels[9:]])


def _four_bits(model: nn.Module, lr: float, *, b2: float, block: int = 64, **options: Any) -> Optimizer:
    return _gefen(model, lr, b2=b2, codebook=_four_bit_book(block), block=block, **options)


def _relative(model: nn.Module, lr: float, *, b2: float) -> Optimizer:
    return _gefen(model, lr, b2=b2, codebook=_relative_book())


def _split(model: nn.Module, lr: float, *, b2: float) -> Optimizer:
    """One tile for each matrix, and one for each of the three that a fused QKV holds, where a model has one."""
    labels = {name: "fused" if p.dim() > 1 and len(p) == 3 * p.shape[1] else "rest" for name, p in _named(model)}
    rows = next((p.shape[1] for name, p in _named(model) if labels[name] == "fused"), None)

    def factory(learning_rate: Any) -> GradientTransformation:
        made = partial(gefen, learning_rate, b2=b2, weight_decay=_DECAY)
        parts = {"fused": made(second_moment=Factored(tile=(rows, None))), "rest": made(second_moment=Factored())}
        return partition(parts, labels)

    return TransformOptimizer(_named(model), inject_hyperparams(factory)(lr))


def _bf16_statistics(model: nn.Module, lr: float, *, b2: float) -> Optimizer:
    """Factored statistics that bf16 could hold, rounded at random: in fp32, whose bytes the table tells."""

    def factory(learning_rate: Any) -> GradientTransformation:
        tx = gefen(learning_rate, b2=b2, weight_decay=_DECAY)

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params, **extra)
            flat = flatten_state(state)
            flat |= {key: _as_bf16(x) for key, x in flat.items() if ".nu." in key and key.endswith((".row", ".col"))}
            return updates, unflatten_state(flat, state)

        return GradientTransformation(tx.init, update)

    return TransformOptimizer(_named(model), inject_hyperparams(factory)(lr))


def _as_bf16(x: Tensor) -> Tensor:
    return reference.round_to_bf16(x, torch.randint(1 << 32, x.shape))


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


class _TorchHybrid(Optimizer):
    """Torch's own Muon and AdamW as one optimizer, as far as `compare` needs it."""

    def __init__(self, model: nn.Module, lr: float, *, b2: float) -> None:
        self._parts = torch_hybrid(model, lr, betas=(0.9, b2))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()
            self.state.update(part.state)


def _rival(model: nn.Module, lr: float, *, b2: float, module: str, name: str, named: bool = False) -> Optimizer:
    """Another package's optimizer; what it prints when imported goes to the error stream."""
    with contextlib.redirect_stdout(sys.stderr):
        kind = getattr(importlib.import_module(module), name)
        params = list(model.named_parameters()) if named else list(model.parameters())
        options = {"fused": False} if named else {}
        return kind(params, lr=lr, betas=(0.9, b2), eps=1e-8, weight_decay=_DECAY, **options)


def _second_moments() -> dict[str, Callable[..., Optimizer]]:
    """Gefen by second moment, each with a constant `b2` and with one that is warmed up."""
    policies = {"block": Block(), "whole": Factored()}
    policies |= {f"rows {rows}": Factored(tile=(rows, None)) for rows in (16, 32, 64, 128, 256)}
    policies |= {f"{rows}x256": Factored(tile=(rows, 256)) for rows in (128, 256)}
    warm = {f"{name} warm": partial(_gefen, second_moment=policy, b2_warmup=_WARM) for name, policy in policies.items()}
    return warm | {name: partial(_gefen, second_moment=p, b2_warmup=None) for name, p in policies.items()}


OURS: dict[str, Callable[..., Optimizer]] = {
    "adamw": _adamw,
    "adamw unfused": partial(_adamw, fused=False),
    **_second_moments(),
    "dense": partial(_gefen, second_moment=Dense(), b2_warmup=None),
    "found blocks": _found_blocks,
    "adam-mini": _rows,
    "128x256 warm m_hat": partial(_gefen, drive="m_hat"),
    "128x256 warm stochastic": partial(_gefen, rounding="stochastic"),
    "128x256 warm fixed book": partial(_gefen, codebook="fixed"),
    "128x256 warm relative book": _relative,
    "128x256 warm 4-bit": _four_bits,
    "128x256 warm 4-bit stochastic": partial(_four_bits, rounding="stochastic"),
    "128x256 warm 4-bit 32": partial(_four_bits, block=32),
    "128x256 warm bf16 statistics": _bf16_statistics,
    "whole warm split qkv": _split,
    "torch muon": _TorchHybrid,
    "muon": partial(_muon, quantize=False, backup="adamw"),
    "gefen_muon": _muon,
}
# Distribution, module, class, and whether it is given names.
_RIVALS = {
    "gefen-x": ("gefen-x", "gefen", "Gefen", True),
    "torchao 8-bit": ("torchao", "torchao.optim", "AdamW8bit", False),
    "torchao 4-bit": ("torchao", "torchao.optim", "AdamW4bit", False),
}
SETS = {
    "core": [
        "adamw",
        "adamw unfused",
        "128x256 warm",
        "block",
        "dense",
        "128x256",
        "rows 128 warm",
        "whole",
        "whole warm",
    ],
    "moments": list(_second_moments()),
    "tries": ["found blocks", "adam-mini", *(name for name in OURS if name.startswith("128x256 warm "))],
    "muon": ["muon", "gefen_muon"],
    "rivals": list(_RIVALS),
    "all": [*OURS, *_RIVALS],
}


def arms(names: list[str], b2: float) -> dict[str, Build]:
    """The arms of some names, or of the sets that stand among them.

    Args:
        names: keys of `OURS`, rivals, or keys of `SETS`.
        b2: decay of every second moment.

    Returns:
        Builds by name, rivals with their version; AdamW, with which all are compared, comes first.

    Raises:
        ValueError: for another name, or a rival that is not installed.
    """
    single = [one for name in ("adamw", *names) for one in SETS.get(name, [name])]
    return dict(_arm(name, b2) for name in dict.fromkeys(single))


def _arm(name: str, b2: float) -> tuple[str, Build]:
    if name in OURS:
        return name, partial(OURS[name], b2=b2)
    if name not in _RIVALS:
        raise ValueError(f"An arm must be of {', '.join([*SETS, *OURS, *_RIVALS])}: got {name!r}. Correct the name.")
    package, module, kind, named = _RIVALS[name]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"{name} needs {package}: got none here. Run `make bench-peers` and use its Python."
        ) from error
    return f"{name} {version}", partial(_rival, b2=b2, module=module, name=kind, named=named)
