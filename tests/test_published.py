"""Our published form learns the codebook of the published package and follows its 30 recorded steps."""

import importlib.util
from pathlib import Path

import pytest
import torch

from gefen_fn import Block, Factored, FlatBlocks, apply_updates, gefen, learn_codebook

DATA = Path(__file__).parent / "data"
POLICIES = {"block": Block(), "factored": Factored()}


def recorder():
    spec = importlib.util.spec_from_file_location("record_gefen_x", DATA / "record_gefen_x.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def follow(mode, leaves):
    """Yield `(recorded leaf, our parameter, our codes, our scales)` at every kept step, for the given leaves."""
    source, saved = recorder(), torch.load(DATA / f"gefen_x_050_{mode}.pt", weights_only=True)
    tx = gefen(
        1e-3,
        weight_decay=0.1,
        second_moment=POLICIES[mode],
        b2_warmup=None,
        block=FlatBlocks({str(i): saved["blocks"][i] for i in leaves}),
        codebook=saved["codebook"],
        drive="m_hat",
    )
    params = {str(i): source.noise(i, source.PARAMETER_STEP) for i in leaves}
    state = tx.init(params)
    for step in range(1, source.STEPS + 1):
        updates, state = tx.update({str(i): source.gradient(i, step) for i in leaves}, state, params)
        params = apply_updates(params, updates)
        if step in source.KEPT_STEPS:
            for i in leaves:
                yield saved["steps"][step][i], params[str(i)], *state[0].mu[str(i)]


CASES = [("block", (0, 1, 2, 3, 4)), ("factored", (0, 1, 2))]


@pytest.mark.parametrize(("mode", "leaves"), CASES)
def test_the_published_form_follows_the_published_package(mode, leaves):
    for theirs, parameter, codes, absmax in follow(mode, leaves):
        apart = (codes.reshape(-1).int() - theirs["codes"].reshape(-1).int()).abs()
        assert apart.max() <= 1 and (apart > 0).double().mean() <= 1e-3
        torch.testing.assert_close(absmax.reshape(-1), theirs["absmax"].reshape(-1), rtol=2e-6, atol=0)
        off = (parameter - theirs["parameter"]).abs() > 1e-6
        assert off.double().mean() <= 1e-3


def first_histogram(blocks):
    """Counts of the first gradients in equal bins on [-1, 1], binned in fp32 as the published package does."""
    source, counts = recorder(), torch.zeros(4096, dtype=torch.int64)
    for leaf, block in enumerate(blocks):
        g = source.gradient(leaf, 1).reshape(-1, block)
        bins = ((g / g.abs().amax(1, keepdim=True) + 1) * 2048).floor().long().clamp(0, 4095)
        counts += torch.bincount(bins.reshape(-1), minlength=4096)
    return counts


@pytest.mark.parametrize("mode", POLICIES)
def test_the_published_book_of_the_first_gradients_is_the_published_packages_to_the_bit(mode):
    saved = torch.load(DATA / f"gefen_x_050_{mode}.pt", weights_only=True)
    book = learn_codebook(first_histogram(saved["blocks"]), zero=False, symmetric=False)
    assert torch.equal(book, saved["codebook"])
