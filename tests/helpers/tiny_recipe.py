"""A recipe that a CPU trains in milliseconds: a Llama of two layers, 26,784 parameters."""

from typing import Any

from trainfit.spec.recipe import Batch, ModelSpec, Recipe

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip

TINY_EXPERTS: dict[str, Any] = {
    "model_type": "olmoe",
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_recipe(implementation: Any = "hf", layers: int = 2, **fields: Any) -> Recipe:
    """fp32, 2 x 16 tokens a micro-batch, unless ``fields`` say otherwise."""
    model = ModelSpec(config=TINY_LLAMA | {"num_hidden_layers": layers}, implementation=implementation)
    return Recipe(model=model, **{"batch": Batch(micro=2, seq=16), "precision": "fp32", **fields})


def tiny_experts(config: dict[str, Any], **fields: Any) -> Recipe:
    """A mixture of eight experts, two a token; ``config``: other keys, such as the family."""
    recipe = tiny_recipe(**fields)
    whole = {**dict(recipe.model.config), **TINY_EXPERTS, **config}  # pyright: ignore
    return recipe.model_copy(update={"model": ModelSpec(config=whole)})


def wide_recipe(layers: int, **fields: Any) -> Recipe:
    """bf16, native, and wide enough that matrices have codes: 96 x 64 is over 4,096 elements."""
    recipe = tiny_recipe("native", layers, **{"precision": "bf16", **fields})
    config = {**dict(recipe.model.config), "hidden_size": 64, "intermediate_size": 96}  # pyright: ignore
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})
