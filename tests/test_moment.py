"""The loops of a quantized moment give the reference's bits, on any thread count, and know what is not theirs."""

import pytest
import torch

from gefen_kernels import default_codebook, learn_codebook, ops, reference
from gefen_kernels import moment as plain

BOOKS = {
    "zero": default_codebook(),
    "published": learn_codebook(torch.arange(1, 4097), zero=False, symmetric=False),
}
# Ragged rows, short ones, a flattened leaf, experts, blocks of one entry, and more blocks than one task holds.
LEAVES = {
    "ragged": ((17, 300), 256, 1),
    "short rows": ((63, 5), 256, 1),
    "flattened": ((70_001,), 256, 0),
    "experts": ((3, 10, 130), 64, 2),
    "convolution": ((8, 4, 3, 3), 5, 1),
    "single entries": ((9, 7), 1, 1),
    "many rows": ((1200, 70), 32, 1),
    "empty": ((0, 5), 256, 1),
}


def same(a, b):
    return a.dtype == b.dtype and torch.equal(
        torch.nan_to_num(a.float(), 7, 8, 9), torch.nan_to_num(b.float(), 7, 8, 9)
    )


def given(shape, block, start, book, dtype=torch.float32):
    draws = torch.Generator().manual_seed(0)
    old, g = torch.randn(shape, generator=draws), torch.randn(shape, generator=draws)
    g.reshape(-1)[1:12:5] = torch.tensor([0.0, float("inf"), float("nan")][: len(g.reshape(-1)[1:12:5])])
    old[..., :1] = 0
    return g.to(dtype), *reference.encode(old, book, block=block, start=start), book, 0.95, 0.05


@pytest.mark.parametrize("ties", BOOKS)
@pytest.mark.parametrize(("shape", "block", "start"), LEAVES.values(), ids=LEAVES)
def test_loops_give_the_references_bits(shape, block, start, ties):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arguments = given(shape, block, start, BOOKS[ties], dtype)
        kept = [x.clone() for x in arguments[:3]]
        for drive in ("m", "m_hat", "ahead"):
            lie = {"block": block, "start": start, "ties": ties, "drive": drive}
            pairs = zip(ops.moment(*arguments, **lie), plain.moment(*arguments, **lie), strict=True)
            assert all(same(a, b) for a, b in pairs)
        assert all(same(a, b) for a, b in zip(arguments[:3], kept, strict=True))


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    arguments, lie = given((1200, 300), 256, 1, BOOKS["zero"]), {"block": 256, "drive": "ahead"}
    outs = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        p = torch.ones(1100, 1000)
        ops.descend(p, torch.linspace(0, 1, 1_100_000).reshape(1100, 1000), 1.7, -0.3, 0.1)
        outs.append((*ops.moment(*arguments, **lie), p))
    assert all(same(a, b) for out in outs[1:] for a, b in zip(outs[0], out, strict=True))


def test_a_tensor_for_a_weight_and_a_strided_gradient_give_the_same_bits():
    g, codes, absmax, book, decay, rest = given((40, 300), 256, 1, BOOKS["zero"])
    strided, weights = g.T.contiguous().T, (torch.tensor(decay), torch.tensor(rest))
    one = ops.moment(g, codes, absmax, book, decay, rest, block=256)
    two = ops.moment(strided, codes, absmax, book, *weights, block=256)
    assert all(same(a, b) for a, b in zip(one, two, strict=True))


def test_what_autograd_or_torch_func_follows_takes_the_reference(monkeypatch):
    g, *rest = given((40, 300), 256, 1, BOOKS["zero"])
    followed = g.nan_to_num(posinf=0).requires_grad_()
    d, _, _ = ops.moment(followed, *rest, block=256)
    assert torch.autograd.grad(d.sum(), followed)[0].eq(0.05).all()
    stacked = torch.stack([g, 2 * g])
    many = torch.vmap(lambda x: ops.moment(x, *rest, block=256)[0])(stacked)
    assert same(many[1], ops.moment(2 * g, *rest, block=256)[0])
    monkeypatch.setenv("GEFEN_REFERENCE", "1")
    assert same(many[0], ops.moment(g, *rest, block=256)[0])


def test_codes_and_scales_may_be_written_where_they_were_read():
    g, codes, absmax, *rest = given((1200, 300), 256, 1, BOOKS["zero"])
    expected = ops.moment(g, codes, absmax, *rest, block=256)
    for module in (ops, plain):
        place = torch.empty_like(g), codes.clone(), absmax.clone()
        got = module.moment(g, *place[1:], *rest, block=256, out=place)
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
        assert all(a is b for a, b in zip(got, place, strict=True))


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("decay", [None, 0.1, 0.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(70, 2000), (3, 5), (0, 4)], ids=str)
def test_a_descent_in_loops_gives_the_references_bits(shape, dtype, decay):
    for other in FLOATS:
        draws = torch.Generator().manual_seed(1)
        p, d = torch.randn(shape, generator=draws).to(dtype), torch.randn(shape[::-1], generator=draws).to(other).T
        one, two = p.clone(), p.clone()
        ops.descend(one, d, 1.7, -0.3, decay)
        plain.descend(two, d, 1.7, -0.3, decay)
        assert torch.equal(one, two) and (torch.equal(one, p) == (not p.numel()))
        assert one._version == 1
