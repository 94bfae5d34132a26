"""TRL's trainers as they are under ``trainfit.trace``, on tiny models and data made here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
import trainfit
from trainfit.spec.result import Estimate

COMMON: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no", "bf16": True,
    "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip


def traced(train: Callable[[], Any], steps: int = 2) -> Estimate:
    estimate = trainfit.trace(train, gpu="h200", steps=steps)
    assert estimate.code is not None
    assert estimate.code.num_steps == steps
    assert estimate.fits
    return estimate


def kernels(estimate: Estimate) -> str:
    """Return what the estimate says about Triton kernels."""
    return next((line for line in estimate.assumptions if line.startswith("Triton kernels")), "")


def sft(folder: Path, data: Any, kind: str = "llama", **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(str(folder), max_length=64, **{**COMMON, **options})
    return SFTTrainer(
        tiny_models.model(kind), args=arguments, train_dataset=data, processing_class=tiny_models.tokenizer()
    )


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"gradient_checkpointing": False}], ids=str)
def test_sft(options: dict[str, Any], tmp_path: Path) -> None:
    """Its default loss is computed in chunks by Triton kernels."""
    estimate = traced(lambda: sft(tmp_path, tiny_models.texts(), **options).train())
    assert "_forward_kernel" in kernels(estimate)


def test_sft_of_the_assistants_turns(tmp_path: Path) -> None:
    traced(lambda: sft(tmp_path, tiny_models.chats(), assistant_only_loss=True).train())


def test_sft_with_liger(tmp_path: Path) -> None:
    estimate = traced(lambda: sft(tmp_path, tiny_models.texts(), "mistral", use_liger_kernel=True).train())
    assert "_rms_norm_forward_kernel" in kernels(estimate)


@pytest.mark.parametrize("options", [{}, {"use_liger_kernel": True}], ids=str)
def test_dpo(options: dict[str, Any], tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    tiny_models.model("qwen2").save_pretrained(tmp_path / "model")

    def train() -> None:
        trainer = DPOTrainer(
            str(tmp_path / "model"), args=DPOConfig(str(tmp_path), **COMMON, **options),
            train_dataset=tiny_models.preferences(), processing_class=tiny_models.tokenizer(),
        )  # fmt: skip
        trainer.train()

    traced(train)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_our_dpo_is_theirs(loss: str, tmp_path: Path) -> None:
    """On TRL's own batch, after the weights have left the reference: loss, rewards and every gradient."""
    from trl import DPOConfig, DPOTrainer

    from trainfit.spec.parsing.recipe_file import recipe_from
    from trainfit.step import assemble

    tiny_models.model("llama").float().save_pretrained(tmp_path / "model")
    own = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    trainer = DPOTrainer(
        str(tmp_path / "model"), processing_class=tiny_models.tokenizer(),
        train_dataset=tiny_models.preferences(),
        args=DPOConfig(
            str(tmp_path), loss_type=loss, model_init_kwargs={"dtype": "float32"}, **{**COMMON, **own}
        ),
    )  # fmt: skip
    theirs: Any = trainer.model.train()
    recipe = recipe_from({
        "model": {"config": theirs.config.to_dict(), "weights": str(tmp_path / "model")}, "precision": "fp32",
        "objective": {"name": "dpo", "loss": loss}, "batch": {"micro": 2, "seq": 128},
        "attention": "eager", "hardware": {"gpu": "cpu"}, "optimizer": {"implementation": "foreach"},
    })  # fmt: skip
    step = assemble(recipe, torch.device("cpu"))
    ours = dict(step.model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
            ours[name].copy_(weight)
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(theirs, batch)
    expected.backward()
    # Theirs holds the chosen answers, then the rejected ones.
    order = torch.arange(4).view(2, 2).t().flatten()
    ids = batch["input_ids"][order]
    labels = ids.masked_fill(batch["completion_mask"][order] == 0, -100)
    (mine,) = step.with_reference([{"input_ids": ids, "labels": labels}])
    found = step.loss(mine)
    found.backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(ours[name].grad, weight.grad, atol=2e-5, rtol=1e-3)
    rewards = [
        trainer._metrics["train"][f"rewards/{name}"][-1] for name in ("chosen", "rejected", "accuracies")
    ]
    assert step.preferences(mine)[1:].tolist() == pytest.approx(rewards, abs=1e-4)


def test_grpo(tmp_path: Path) -> None:
    """Rollouts end at their length: the keys and values of 16 + 64 positions are held at most."""
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[int] = []

    def reward(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [float(len(each)) for each in completion_ids]

    def train() -> None:
        arguments = GRPOConfig(
            str(tmp_path), **{**COMMON, "per_device_train_batch_size": 4}, num_generations=4,
            max_completion_length=12, num_iterations=1,
        )  # fmt: skip
        trainer = GRPOTrainer(
            tiny_models.model(), reward_funcs=reward, args=arguments, train_dataset=tiny_models.prompts(),
            processing_class=tiny_models.tokenizer(),
        )  # fmt: skip
        trainer.train()

    estimate = traced(train)
    assert set(lengths) == {12}
    assert estimate.code is not None
    phases = {one.name: one for one in estimate.code.other_phases}
    assert phases["generation"].num_forwards == 12
    assert "A policy's loop" in str(estimate)


def test_reward_model(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    def train() -> None:
        config = AutoConfig.for_model("llama", **tiny_models.SIZES, num_labels=1)
        trainer = RewardTrainer(
            AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16),
            args=RewardConfig(str(tmp_path), **COMMON), train_dataset=tiny_models.preferences(),
            processing_class=tiny_models.tokenizer(),
        )  # fmt: skip
        trainer.train()

    traced(train)


def test_qlora(tmp_path: Path) -> None:
    """A 4-bit model from a checkpoint, prepared and trained with LoRA by peft, with a paged optimizer."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    tiny_models.model().save_pretrained(tmp_path / "model")

    def train() -> None:
        quantized = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        base = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", quantization_config=quantized, dtype=torch.bfloat16, device_map={"": 0}
        )
        trainer = SFTTrainer(
            base, args=SFTConfig(str(tmp_path), max_length=64, optim="paged_adamw_8bit", **COMMON),
            train_dataset=tiny_models.texts(), processing_class=tiny_models.tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.train()

    estimate = traced(train)
    assert 0 < estimate.trainable_params < estimate.params


def test_resume(tmp_path: Path) -> None:
    trainer = sft(tmp_path, tiny_models.texts(), max_steps=2, save_strategy="steps", save_steps=2, bf16=False)
    trainer.train()
    traced(
        lambda: sft(tmp_path, tiny_models.texts(), bf16=False, max_steps=6).train(resume_from_checkpoint=True)
    )
