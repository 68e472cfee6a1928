"""The loops that normalise matrices give torch's bits, in the layout they find, on any number of threads."""

import pytest
import torch

from gefen_kernels import cpu_normalize, newton_schulz, ops

SHAPES = [(3, 64, 72), (1, 33, 70), (2, 128, 1500), (4, 1, 5), (1, 700, 900), (5, 3, 1)]


def drawn(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_torch(x, eps):
    cast = x.to(torch.bfloat16)
    return (cast / newton_schulz.frobenius_norm(cast).clamp(min=eps)).to(torch.bfloat16)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrices_are_divided_by_their_norms_as_by_torch(shape, dtype, transposed):
    x = drawn(shape, dtype)
    x = x.mT.contiguous().mT if transposed else x
    kept = x.clone()
    assert ops.loops("normalize", x) is cpu_normalize
    for eps in (1e-7, 30.0):
        got = cpu_normalize.normalized(x, eps)
        assert torch.equal(got, by_torch(x, eps)) and torch.equal(x, kept)
        assert torch.equal(newton_schulz.normalized(x, eps, torch.bfloat16), got)


def test_zeros_stay_and_what_is_not_finite_makes_its_own_matrix_nan():
    x = drawn((4, 5, 6))
    x[0], x[1, 2, 3], x[2, 1, 1] = 0, float("nan"), float("-inf")
    got = cpu_normalize.normalized(x, 1e-7)
    assert not got[0].any() and got[1].isnan().all() and got[2, 1, 1].isnan() and got[3].isfinite().all()


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    x, outs = drawn((3, 300, 700)), []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outs.append(cpu_normalize.normalized(x, 1e-7))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_what_is_not_theirs_is_left_to_torch(monkeypatch):
    x = drawn((2, 5, 6))
    followed, seen = x.clone().requires_grad_(), []
    torch.vmap(lambda y: seen.append(ops.loops("normalize", y)) or y)(x[None])
    assert ops.loops("normalize", followed) is None and seen == [None] and ops.loops("normalize", x[:0]) is None
    monkeypatch.setenv("GEFEN_REFERENCE", "1")
    assert ops.loops("normalize", x) is None
