"""The fused Triton step, run by triton's interpreter, against the pure path bit for bit; its bytes, launches, spills."""

import contextlib
import re
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from gefen_fn import (
    Block,
    Dense,
    Factored,
    FlatBlocks,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    decay_mask,
    default_codebook,
    flatten_state,
    fuse,
    gefen,
    learn_codebook,
    scale,
    scale_by_gefen,
    scale_by_learning_rate,
)
from gefen_fn.blocks import leaf_layout
from gefen_fn.quantize import quantized_zeros
from gefen_fn.second_moment import policy_for
from gefen_kernels import ops, triton_step
from gefen_kernels.step import SCALARS, Leaf
from tests.kernel_targets import TARGETS, compiled, interpreted, recorded

run = interpreted("gefen_kernels.triton_step")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BOOK = default_codebook()
PUBLISHED = learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False)
Builder = interpreter.InterpreterBuilder


@pytest.fixture(autouse=True)
def rounded_as_on_a_gpu(monkeypatch):
    """The interpreter cuts fp32 to bf16, where every GPU rounds to the nearest."""
    cast = Builder.cast_impl

    def rounding(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        entries = torch.from_numpy(np.ascontiguousarray(source.data)).to(BF16)
        return interpreter.TensorHandle(entries.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(Builder, "cast_impl", rounding)


def noise(shape, seed, dtype=FP32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 3).to(dtype)


def assert_same_bits(expected, got):
    """Same names, dtypes and bits, but for those of a NaN."""
    assert expected.keys() == got.keys()
    differing = [
        name
        for name, x in expected.items()
        if x.dtype != got[name].dtype or not torch.equal(x.nan_to_num(7.0), got[name].nan_to_num(7.0))
    ]
    assert differing == []


def assert_fused_is_plain(tx, shapes, dtypes=(FP32, FP32), steps=2, change=lambda g: g, view=lambda x: x):
    """Take steps with the kernels and without; every leaf must have gone to the kernels."""
    step, taken = fuse(tx), []
    plain = {str(i): noise(s, 1000 + i, dtypes[1]) for i, s in enumerate(shapes)}
    fused = {k: view(p.clone()) for k, p in plain.items()}
    state, other = tx.init(plain), tx.init(plain)

    def stepped(leaves, *args, **options):
        taken.extend(leaves)
        run.gefen_step(leaves, *args, **options)

    back_end = mock.Mock(wraps=run, gefen_step=stepped)
    with mock.patch.object(ops, "back_end", lambda device: back_end):
        for t in range(steps):
            grads = {str(i): change(noise(s, 10 * t + i, dtypes[0])) for i, s in enumerate(shapes)}
            updates, state = tx.update(grads, state, plain)
            plain = apply_updates(plain, updates)
            other = step({k: view(g) for k, g in grads.items()}, other, fused)
    assert len(taken) == steps * len(shapes)
    assert_same_bits(plain, fused)
    assert_same_bits(flatten_state(state), flatten_state(other))


ROWS = {
    "default": (Factored((128, 256)), 256, [(40, 256), (300, 300), (2, 33, 150), (16, 300), (7,), (3, 5)]),
    "small tiles": (Factored((32, 64)), 64, [(32, 128), (70, 150), (127, 65)]),
    "tiles of several blocks": (Factored((32, 128)), 32, [(40, 300), (33, 140)]),
    "blocks longer than rows": (Factored((16, 256)), 4096, [(40, 160)]),
    "tiles of one row": (Factored((1, None)), 256, [(33, 140)]),
    "blocks across tiles": (Factored((16, 96)), 100, [(64, 100), (45, 300)]),
    "one tile": (Factored(), 256, [(40, 128), (150, 520), (2, 33, 150)]),
    "rows of tiles": (Factored((64, None)), 128, [(140, 1100)]),
    "columns of tiles": (Factored((None, 8)), 256, [(130, 40)]),
    "blocks": (Block(), 256, [(16, 512), (9, 700), (64, 16, 3, 3), ()]),
    "odd blocks": (Block(), 100, [(16, 512), (64, 64)]),
    "blocks of one": (Block(), 1, [(64, 65)]),
    "dense": (Dense(), 256, [(16, 512), (9, 700), (0, 4), (1025,)]),
}


@pytest.mark.parametrize(("policy", "block", "shapes"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32)], ids=["bf16", "fp32"])
def test_steps_have_the_pure_path_bits(policy, block, shapes, dtypes):
    tx = gefen(1e-2, weight_decay=0.1, second_moment=policy, block=block, codebook="fixed")
    assert_fused_is_plain(tx, shapes, dtypes)
