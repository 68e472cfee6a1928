"""Our published forms learn the codebook of the published package and follow its 30 recorded steps."""

import importlib.util
from pathlib import Path

import pytest
import torch

from gefen_fn import (
    Block,
    Factored,
    FlatBlocks,
    adamw,
    apply_updates,
    gefen,
    gefen_muon,
    learn_codebook,
    muon,
    partition,
)

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


MUON = ("0", "1", "2")


def published_hybrid(saved, backup):
    """Each part with the codebook that its published twin learned."""
    names = {"muon": MUON, "backup": ("3", "4")}
    given = {
        part: {
            "block": FlatBlocks({**dict.fromkeys("01234", 256), **dict(zip(names[part], blocks, strict=True))}),
            "codebook": saved["codebooks"][part],
        }
        for part, blocks in saved["blocks"].items()
    }
    own = muon(1e-3, adjust="match_rms_adamw", coeffs="tuned3", normuon="norm_kept", **given["muon"])
    if backup == "adamw":
        other = adamw(1e-3, weight_decay=0.1)
    else:
        form = {"second_moment": Block(), "b2_warmup": None, "drive": "m_hat"}
        other = gefen(1e-3, weight_decay=0.1, **form, **given["backup"])
    return partition({"muon": own, "backup": other}, {i: "muon" if i in MUON else "backup" for i in "01234"})


def our_hybrid(saved, backup):
    """The alias with the published options, and what is ours: blocks in rows, one form of codebook, learned anew."""
    labels = {i: "muon" if i in MUON else backup for i in "01234"}
    published = {
        "coeffs": "tuned3",
        "normuon": "norm_kept",
        "second_moment": Block(),
        "b2_warmup": None,
        "drive": "m_hat",
    }
    return gefen_muon(1e-3, backup=backup, weight_decay=0.1, param_labels=labels, **published)


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
@pytest.mark.parametrize(
    ("make", "muon_apart", "backup_apart"), [(published_hybrid, 3e-3, 1e-4), (our_hybrid, 0.03, 0.05)]
)
def test_the_hybrid_follows_the_published_one_with_either_backup(make, muon_apart, backup_apart, backup):
    source, saved = recorder(), torch.load(DATA / f"gefen_x_050_muon_{backup}.pt", weights_only=True)
    tx, first = make(saved, backup), {i: source.noise(int(i), source.PARAMETER_STEP) for i in "01234"}
    params, state = first, tx.init(first)
    for step in range(1, source.STEPS + 1):
        updates, state = tx.update({i: source.gradient(int(i), step) for i in params}, state, params)
        params = apply_updates(params, updates)
    for i, theirs in zip("01234", saved["parameters"], strict=True):
        apart = (params[i] - theirs).norm() / (theirs - first[i]).norm()
        assert apart < (muon_apart if i in MUON else backup_apart)


def test_the_published_momentum_and_row_averages_are_followed():
    source, saved = recorder(), torch.load(DATA / "gefen_x_050_muon_gefen.pt", weights_only=True)
    tx, params = published_hybrid(saved, "gefen"), {i: source.noise(int(i), 0) for i in "01234"}
    state = tx.init(params)
    for step in range(1, source.STEPS + 1):
        _, state = tx.update({i: source.gradient(int(i), step) for i in params}, state, params)
    own = state.inner_states["muon"][0]
    for i, theirs in zip(MUON, saved["momentum"], strict=True):
        apart = (own.mu[i].codes.reshape(-1).int() - theirs["codes"].reshape(-1).int()).abs()
        assert apart.max() <= 1 and (apart > 0).double().mean() <= 1e-3
        torch.testing.assert_close(own.mu[i].absmax.reshape(-1), theirs["absmax"].reshape(-1), rtol=2e-6, atol=0)
        torch.testing.assert_close(own.nu[i], theirs["rows"], rtol=0.02, atol=0)
