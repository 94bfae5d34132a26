"""Folders of weights that transformers wrote, of tiny models with random norms and biases."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainfit.spec.recipe import Recipe

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def saved_weights(
    folder: Path,
    kind: str,
    config: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Any:
    """Save a model by transformers; return it as transformers reads it: in fp32, without dropout."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **(config or {})}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.tie_weights()
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.json that was saved with the weights."""
    return json.loads((folder / "config.json").read_text())


def recipe_for(folder: Path, implementation: str = "hf", **fields: Any) -> Recipe:
    """Return a recipe in fp32 that starts from the folder's weights, 2 x 16 tokens a micro-batch."""
    model = {"config": config_of(folder), "implementation": implementation, "weights": str(folder)}
    data = {"precision": "fp32", "batch": {"micro": 2, "seq": 16}, "hardware": {"gpu": "cpu"}, **fields}
    return Recipe.model_validate({"model": model, **data})


def batch_of(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a micro-batch of random tokens, labels included."""
    ids = torch.randint(3, SIZES["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    """Return transformers' loss of ``batch_of()``."""
    return model(**batch_of()).loss.item()
