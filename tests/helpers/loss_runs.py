"""What the tests of the losses from hidden states share: inputs, models of every family, and a step's loss
and gradients."""

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from trainfit.spec.recipe import Adapter, Batch, ModelSpec, Recipe
from trainfit.step import Step

LORA = Adapter(kind="lora", rank=4)
WIDE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2000, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip


def inputs(dtype: torch.dtype, bias: bool = False, n: int = 37, e: int = 16, v: int = 50) -> Any:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, offset = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((n, e), (v, e), (v,))
    )
    targets = torch.randint(v, (n,), generator=generator)
    targets[[3, n - 1]] = -100
    return hidden, weight, offset if bias else None, targets


SMALL = {
    "hidden_size": 32, "n_embd": 32, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "ffn_dim": 64,
    "n_inner": 64,
    "vocab_size": 97, "head_dim": 8, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 16},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
}


def family_recipe(family: str, loss: Any) -> Recipe:
    known = CONFIG_MAPPING[family]()
    config = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    if family == "falcon":
        del config["head_dim"]
    config |= {"model_type": family, **OF_FAMILY.get(family, {})}
    return Recipe(
        model=ModelSpec(config=config), batch=Batch(micro=2, seq=16), precision="fp32", loss=loss,
        attention="eager",
    )  # fmt: skip


def gradients(step: Step) -> tuple[float, dict[str, Tensor]]:
    step.model.eval()  # no dropout
    layer = next(m for n, m in step.model.named_modules() if n in ("lm_head", "embed_out"))
    torch.nn.init.normal_(layer.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    (batch,) = step.random_batches()
    batch["labels"][0, :5] = -100
    loss = step.loss(batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}
