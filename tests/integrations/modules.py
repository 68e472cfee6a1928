"""Lightning modules around the small Llama, and a fit of one; imported by tests when they run, not when collected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integrations import tiny


class Module(lightning.LightningModule):
    """Lightning steps its optimizer."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.build = tiny.llama(), build

    def training_step(self, batch: tiny.Batch, index: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return self.build(self)


class ByHand(Module):
    """Steps its optimizer itself."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        super().__init__(build)
        self.automatic_optimization = False

    def training_step(self, batch: tiny.Batch, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.model(**batch).loss)
        optimizer.step()


def fit(module: Module, folder: Path, resume: Path | None = None, **options: Any) -> Any:
    """Two epochs of three steps, with a checkpoint after each; returns the optimizer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", callbacks=[keep], **quiet, **options)
    trainer.fit(module, DataLoader(tiny.samples(12), batch_size=4), ckpt_path=resume)
    (optimizer,) = trainer.optimizers
    return optimizer
