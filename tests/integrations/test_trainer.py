"""Hugging Face's Trainer: every way to hand it an optimizer, and going on from its checkpoints."""

import pytest
import torch

from gefen_fn import chain, clip_by_global_norm, gefen, inject_hyperparams
from gefen_nn import Gefen, GefenMuon, TransformOptimizer
from tests.integrations import tiny

pytestmark = pytest.mark.slow


def expression(learning_rate):
    return chain(clip_by_global_norm(0.5), gefen(learning_rate))


def with_schedule(model):
    optimizer = Gefen(model.named_parameters(), lr=1e-3)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))}


# How to hand over an optimizer, and whether its parameters have names then.
WAYS = {
    "class": (lambda model: {"optimizer_cls_and_kwargs": (Gefen, {"lr": 1e-3})}, False),
    "class and groups": (
        lambda model: {"optimizer_cls_and_kwargs": (Gefen, {"params": tiny.decay_groups(model, 0.1), "lr": 1e-3})},
        True,
    ),
    "class and model": (
        lambda model: {"optimizer_cls_and_kwargs": (GefenMuon, {"model": model, "lr": 1e-3, "weight_decay": 0.1})},
        True,
    ),
    "factory": (lambda model: {"optimizer_cls_and_kwargs": (lambda: GefenMuon, {"lr": 1e-3})}, True),
    "optimizer": (lambda model: {"optimizers": (GefenMuon(model, lr=1e-3), None)}, True),
    "optimizer and schedule": (with_schedule, True),
    "expression": (
        lambda model: {
            "optimizers": (TransformOptimizer(model.named_parameters(), inject_hyperparams(expression)(1e-3)), None)
        },
        True,
    ),
}


def trainer(folder, way, **changes):
    from transformers import Trainer, TrainingArguments

    model = tiny.llama()
    lengths = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    rule = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    quiet = {"report_to": [], "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(folder), use_cpu=True, **{**lengths, **rule, **quiet, **changes})
    return Trainer(model, arguments, train_dataset=tiny.samples(16), **way(model))


@pytest.mark.parametrize(("way", "named"), WAYS.values(), ids=WAYS)
def test_a_resumed_training_is_the_uninterrupted_one(way, named, tmp_path):
    whole = trainer(tmp_path, way)
    whole.train()
    resumed = trainer(tmp_path, way)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6
    tiny.assert_same(*(tiny.bits(t.model, t.optimizer) for t in (whole, resumed)))
    assert [g["lr"] for g in whole.optimizer.param_groups] == [g["lr"] for g in resumed.optimizer.param_groups]
    tiny.assert_quantized(resumed.optimizer)
    assert all(("param_names" in group) == named for group in resumed.optimizer.param_groups)


def test_the_trainers_own_groups_decay_as_it_says(tmp_path):
    made = trainer(tmp_path, WAYS["class"][0])
    optimizer = made.create_optimizer()
    assert isinstance(optimizer, Gefen)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(p.ndim == 1 for p in optimizer.param_groups[1]["params"])


def test_a_checkpoint_without_names_is_not_taken_for_other_groups(tmp_path):
    trainer(tmp_path, WAYS["class"][0], max_steps=3).train()
    other = trainer(tmp_path, WAYS["class and groups"][0])
    with pytest.raises(ValueError, match="Without names on both sides groups must match"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_the_trainers_groups_have_no_names_for_gefen_muon_to_divide_them_by(tmp_path):
    made = trainer(tmp_path, lambda model: {"optimizer_cls_and_kwargs": (GefenMuon, {"lr": 1e-3})})
    with pytest.raises(TypeError, match=r"Pass the model, or `model\.named_parameters\(\)`"):
        made.create_optimizer()
