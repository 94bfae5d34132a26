"""Tiny models of several families, and the losses of a few steps."""

from typing import Any

import torch

from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble

CPU = torch.device("cpu")


def trajectory(recipe: Recipe, num_steps: int = 4, **kwargs: Any) -> tuple[Step, list[float]]:
    step = assemble(recipe, CPU, **kwargs)
    return step, [step(step.random_batches(index)).item() for index in range(num_steps)]


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
BASE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": BASE | {"model_type": "gpt_neox", "intermediate_size": 64},
    "opt": BASE | {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gemma2": BASE
    | {"model_type": "gemma2", "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2},
    "qwen3": BASE | {"model_type": "qwen3", "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2},
    "mixtral": BASE | {"model_type": "mixtral", "intermediate_size": 64, "num_key_value_heads": 2},
}


def aot_eager(module: torch.nn.Module) -> None:
    module.compile(backend="aot_eager")
