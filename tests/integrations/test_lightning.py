"""Lightning: `configure_optimizers`, checkpoints of its callback, clipping, precisions and loops by hand."""

import pytest
import torch

from gefen_nn import Gefen, GefenMuon, load, offload, restore, save
from tests.integrations import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def gefen(module):
    return Gefen(module.named_parameters(), lr=1e-3, weight_decay=0.1)


def gefen_muon(module):
    optimizer = GefenMuon(module, lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


WAYS = {
    "gefen": ("Module", gefen, {}),
    "gefen_muon with a schedule": ("Module", gefen_muon, {}),
    "clipped": ("Module", gefen_muon, {"gradient_clip_val": 0.5}),
    "clipped by value": ("Module", gefen, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated": ("Module", gefen, {"accumulate_grad_batches": 3}),
    "mixed bf16": ("Module", gefen_muon, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    "all bf16": ("Module", gefen_muon, {"precision": "bf16-true"}),
    "by hand": ("ByHand", gefen, {}),
}


@pytest.mark.parametrize(("kind", "build", "options"), WAYS.values(), ids=WAYS)
def test_a_resumed_fit_is_the_uninterrupted_one(kind, build, options, tmp_path):
    from tests.integrations import modules

    whole, resumed = (getattr(modules, kind)(build) for _ in range(2))
    first = modules.fit(whole, tmp_path, **options)
    second = modules.fit(resumed, tmp_path / "more", resume=tmp_path / "epoch=0.ckpt", **options)
    tiny.assert_same(tiny.bits(whole, first), tiny.bits(resumed, second))
    assert [g["lr"] for g in first.param_groups] == [g["lr"] for g in second.param_groups]
    tiny.assert_quantized(second)


def test_lightning_clips_before_the_step(tmp_path):
    from tests.integrations import modules

    free, clipped = modules.Module(gefen), modules.Module(gefen)
    modules.fit(free, tmp_path)
    modules.fit(clipped, tmp_path / "clipped", gradient_clip_val=0.01)
    assert any(not torch.equal(x, y) for x, y in zip(free.parameters(), clipped.parameters(), strict=True))


def test_the_wrapper_that_a_module_sees_does_as_the_optimizer_itself(tmp_path):
    from tests.integrations import modules

    module, other = modules.ByHand(gefen), modules.ByHand(gefen)
    inner, target = modules.fit(module, tmp_path), modules.fit(other, tmp_path / "other")
    seen = module.optimizers()
    assert type(seen) is not Gefen and isinstance(seen, Gefen) and seen.optimizer is inner
    assert str(seen.describe()) == str(inner.describe()) and not seen.step_was_skipped
    save(tmp_path / "run", module, seen)
    load(tmp_path / "run", other, target)
    tiny.assert_same(tiny.bits(module, seen), tiny.bits(other, target))


def test_state_is_kept_away_by_the_optimizer_and_not_by_the_wrapper(tmp_path):
    from tests.integrations import modules

    module = modules.ByHand(gefen)
    modules.fit(module, tmp_path)
    for move in (offload, restore):
        with pytest.raises(TypeError, match="Pass its `optimizer`"):
            move(module.optimizers())
        move(module.optimizers().optimizer)
