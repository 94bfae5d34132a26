"""Meters in other trainers' loops: their values reach those trainers' own loggers."""

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trainfit.integrations.lightning import MeterCallback
from trainfit.integrations.trainer import MeterCallback as TrainerMeter
from trainfit.integrations.trainer import add_to
from trainfit.records import read

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
)
OPTIONS: dict[str, Any] = {"peak_flops": 1e12}
VALUES = {"speed/step_s", "speed/tokens_per_s", "speed/mfu", "speed/hfu", "device/busy"}
B, S, ACCUMULATE, STEPS = 2, 16, 3, 4


def sequences() -> list[dict[str, torch.Tensor]]:
    rows = torch.arange(B * ACCUMULATE * STEPS * S).reshape(-1, S) % 100
    return [{"input_ids": row, "labels": row} for row in rows]


def tags(folder: Path) -> dict[str, int]:
    """Return the scalars of the event files under a folder, and how many steps each has."""
    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    return {tag: len(events.Scalars(tag)) for tag in events.Tags()["scalars"]}


def trainer(folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=B, gradient_accumulation_steps=ACCUMULATE, max_steps=STEPS,
        logging_steps=2, report_to=["tensorboard"], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return Trainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=sequences(), **options)  # type: ignore[arg-type]


def test_trainers_loggers_get_the_values(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run")
    meter = add_to(made, record=tmp_path / "runs.sqlite", **OPTIONS)
    made.train()
    found = tags(tmp_path)
    assert {f"train/{name}" for name in VALUES} <= set(found)
    assert found["train/speed/mfu"] == 2
    assert set(made.state.log_history[0]) >= VALUES
    (record,) = read(tmp_path / "runs.sqlite")
    assert record.train is not None
    assert meter.watch is not None
    assert meter.watch.summary is not None
    assert (record.train["steps"], record.train["tokens"]) == (STEPS, B * ACCUMULATE * STEPS * S)
    assert record.train["mfu"] == meter.watch.summary.mfu


def test_a_trainers_ordinary_callback_adds_them_to_its_history(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", callbacks=[TrainerMeter(**OPTIONS)])
    made.train()
    assert set(made.state.log_history[0]) >= VALUES


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = LlamaForCausalLM(CONFIG)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.network(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("module", [None, "network"])
def test_lightnings_loggers_get_the_values(module: str | None, tmp_path: Path) -> None:
    meter = MeterCallback(module, **OPTIONS)
    loader = torch.utils.data.DataLoader(sequences(), batch_size=B)  # type: ignore[arg-type]
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, accumulate_grad_batches=ACCUMULATE, callbacks=[meter],
        logger=TensorBoardLogger(str(tmp_path)), log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), loader)  # fmt: skip
    assert set(tags(tmp_path)) >= VALUES
    assert meter.watch is not None
    assert meter.watch.summary is not None
    assert (meter.watch.summary.steps, meter.watch.summary.tokens) == (STEPS, B * ACCUMULATE * STEPS * S)
