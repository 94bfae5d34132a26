"""Lightning's Trainer as it is under ``trainfit.trace``: one GPU and DDP, with validation and checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainfit

WIDTH = 256


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 10))

    def training_step(self, batch: Any, index: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(folder: Path, devices: int, strategy: str) -> None:
    data = TensorDataset(torch.randn(64, WIDTH), torch.randint(0, 10, (64,)))
    trainer = lightning.Trainer(
        accelerator="gpu", devices=devices, strategy=strategy, precision="bf16-mixed", max_epochs=9,
        accumulate_grad_batches=2, gradient_clip_val=1.0, default_root_dir=folder, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(data, 16, num_workers=2), DataLoader(data, 16))


@pytest.mark.parametrize(("ranks", "strategy"), [(None, "auto"), (2, "ddp")])
def test_the_trainer_fits(tmp_path: Path, ranks: int | None, strategy: str) -> None:
    found = trainfit.trace(partial(fit, tmp_path, ranks or 1, strategy), world_size=ranks)
    assert found.code is not None
    assert found.code.num_steps == 3
    weights = WIDTH * 4 * WIDTH + 4 * WIDTH + 4 * WIDTH * 10 + 10
    assert found.params == weights
    # Two micro-batches of 16 rows: forward, and both gradients but for the first layer's input.
    assert found.model_flops == 2 * 2 * 16 * (2 * WIDTH * 4 * WIDTH + 3 * 4 * WIDTH * 10)
    assert bool(found.traffic) == (strategy == "ddp")
