"""Prefix tuning: trainable keys and values that every layer's attention reads, equal for all sequences.

Li and Liang, arXiv:2101.00190, by default without their reparametrization, as PEFT. On ``hf`` PEFT passes
them as a cache of past tokens, which two linear layers may produce while they train (``reparametrization:
mlp``); on ``native`` they are parameters of each block's attention. Positions of the sequence begin after the
prefix.
"""

import inspect
from typing import Any

from trainfit.spec.optional import optional
from trainfit.spec.recipe import Recipe
from trainfit.techniques.adapter.lora import needs_peft
from trainfit.techniques.adapter.prompt import (
    DRAWN_TOKENS,
    check_positions,
    describe_tokens,
    has_its_encoder,
    has_no_matrices,
    on_hf,
)
from trainfit.techniques.base import Draw, Technique, refusal
from trainfit.techniques.draft import Draft


def check(recipe: Recipe) -> None:
    """Refuse kernels without masks and, on ``hf``, fields that a cache of past tokens excludes."""
    has_no_matrices(recipe)
    has_its_encoder(recipe, ("none", "mlp"))
    assert recipe.adapter is not None
    if recipe.adapter.encoder != "none" and recipe.model.implementation == "native":
        problem = "the native decoder's prefixes are parameters of its blocks"
        remedy = "use model.implementation: hf, or adapter.reparametrization: none"
        raise refusal(recipe, "adapter.reparametrization", problem, remedy)
    if recipe.attention in ("flash", "triton"):
        remedy = "use attention: sdpa, cudnn, efficient or eager"
        raise refusal(
            recipe, "attention", "a prefix needs a mask, which this kernel does not support", remedy
        )
    if recipe.model.implementation == "native":
        return
    needs_peft(recipe)
    if recipe.recompute != "none":
        problem = "a block that runs twice would put its keys into PEFT's cache twice"
        remedy = "use recompute: none, or model.implementation: native"
        raise refusal(recipe, "recompute", problem, remedy)
    if recipe.compile == "block":
        problem = "each block indexes PEFT's cache by its own number, so no two share a graph"
        remedy = "use compile: model, or model.implementation: native"
        raise refusal(recipe, "compile", problem, remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Give every layer its prefix; refuse too many positions, and layers that cannot read a prefix."""
    import torch

    from trainfit.models.adapted import convert

    adapter = recipe.adapter
    assert adapter is not None
    check_positions(recipe, draft.model)
    model: Any = draft.model
    base = next(model.parameters()).dtype
    dtype = base if adapter.dtype == "base" else torch.float32
    if recipe.model.implementation == "native":
        from trainfit.models.native.virtual_tokens import add_prefix

        add_prefix(model, adapter.tokens, dtype)
        return
    config = model.config.get_text_config()
    shared = getattr(config, "multi_query", False) or getattr(config, "kv_lora_rank", None) is not None
    if shared or "past_key_values" not in inspect.signature(model.forward).parameters:
        problem = "this model's layers do not take keys and values in the form of PEFT's prefixes"
        raise refusal(recipe, "adapter.kind", problem, "use adapter.kind: lora or prompt")
    peft: Any = optional("peft", "peft", field="adapter.kind", value=adapter.kind)
    config = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=adapter.tokens,
        prefix_projection=adapter.encoder == "mlp",
        encoder_hidden_size=adapter.encoder_hidden_size,
    )
    draft.model = on_hf(recipe, config, draft)
    convert(draft.model.get_submodule("prompt_encoder"), dtype)


TECHNIQUE = Technique(
    name="prefix_tuning",
    order=50,
    title="Prefix tuning",
    fields=("adapter",),
    covers={"adapter.kind": ("prefix",)},
    check=check,
    apply=apply,
    describe=describe_tokens,
    variants=(
        {"adapter": {"kind": "prefix", "dtype": "base"}},
        {"adapter": {"kind": "prefix", "reparametrization": "mlp"}},
    ),
    draw=Draw(alone=lambda chance, _: {"adapter": {"kind": "prefix", "tokens": chance.choice(DRAWN_TOKENS)}}),
    # On hf the prefix is one tensor for all layers.
    trace_whole=lambda recipe: recipe.model.implementation == "hf",
    may_shorten=True,  # A few layers are predicted 2 % faster.
)
