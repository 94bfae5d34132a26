"""Tiny models of several families, steps of them on the CPU, and the losses of a few steps."""

from typing import Any

import torch

from tiny_recipe import tiny_recipe
from trainfit.models.quantized_linear import QuantizedLinear
from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble

CPU = torch.device("cpu")
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
KINDS = ("nf4", "int8", "fp8")  # Kinds of quantised layers


def step_of(**fields: Any) -> Step:
    """Return a step of the tiny recipe in bf16 with these fields."""
    return assemble(tiny_recipe(**{"precision": "bf16", **fields}), CPU)


def gradients(recipe: Recipe, **how: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one micro-batch and the gradients of the trainable parameters by name, on this CPU."""
    step = assemble(recipe, torch.device("cpu"), **how)
    torch.manual_seed(1)  # of dropout
    (batch,) = step.random_batches()
    loss = step.loss(batch)
    step._backward(loss)
    return loss.item(), {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal, in number too; compiled modules may rename parameters."""
    return len(found) == len(expected) and all(map(torch.equal, found.values(), expected.values()))


def learned(recipe: Recipe, num_steps: int = 6) -> tuple[Step, list[float]]:
    """Return a step of the recipe and its losses on one batch."""
    step = assemble(recipe, CPU)
    batches = step.random_batches()
    return step, [step(batches).item() for _ in range(num_steps)]


def trajectory(recipe: Recipe, num_steps: int = 4, **kwargs: Any) -> tuple[Step, list[float]]:
    """Return a step of the recipe and its losses on batches of their own."""
    step = assemble(recipe, CPU, **kwargs)
    return step, [step(step.random_batches(index)).item() for index in range(num_steps)]


def aot_eager(module: torch.nn.Module) -> None:
    module.compile(backend="aot_eager")


def quantized_layer(
    kind: str, num_in: int, num_out: int, bias: bool = False, dtype: torch.dtype = torch.float32
) -> QuantizedLinear:
    """A quantised layer with weights of N(0, 1), and its bias."""
    torch.manual_seed(num_in)
    made = QuantizedLinear(num_in, num_out, bias, kind, dtype, "cpu")
    made.load(torch.randn(num_out, num_in, dtype=dtype), torch.randn(num_out, dtype=dtype) if bias else None)
    return made
