"""Prompt tuning and p-tuning: trainable virtual tokens in front of every sequence; the base is frozen.

``prompt`` trains the virtual tokens' embeddings (Lester et al., arXiv:2104.08691); ``p-tuning`` layers that
produce them (Liu et al., arXiv:2103.10385): three linear layers, or an LSTM of two layers and both directions
with two linear ones, all by PEFT's encoders. Without its layers p-tuning is prompt tuning. Only the virtual
tokens that the layers end with are kept. The last virtual token predicts the first real one. Their FLOPs
count as the model's, but not as tokens per second.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from trainfit.spec.optional import optional
from trainfit.spec.recipe import Adapter, Recipe
from trainfit.techniques.adapter.lora import needs_peft, refused_by_peft
from trainfit.techniques.base import Data, Draw, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from torch import nn

DRAWN_TOKENS = (8, 20, 64)


def check(recipe: Recipe) -> None:
    """Refuse missing PEFT and fields that virtual tokens do not have."""
    assert recipe.adapter is not None
    needs_peft(recipe)
    has_no_matrices(recipe)
    has_its_encoder(recipe, ("none", "mlp", "lstm") if recipe.adapter.kind == "p-tuning" else ("none",))


def has_its_encoder(recipe: Recipe, known: tuple[str, ...]) -> None:
    """Refuse layers that the kind of adapter does not have, and a width without layers."""
    assert recipe.adapter is not None
    adapter = recipe.adapter
    if adapter.encoder not in known:
        problem = f"{adapter.kind} has no such layers"
        others = f"use adapter.reparametrization: {' or '.join(known)}" if len(known) > 1 else "leave it out"
        raise refusal(
            recipe, "adapter.reparametrization", problem, f"{others}, or use adapter.kind: p-tuning"
        )
    if adapter.encoder_hidden_size is not None and adapter.encoder == "none":
        problem = "no layers produce the virtual tokens"
        remedy = "leave it out, or set adapter.reparametrization: mlp"
        raise refusal(recipe, "adapter.encoder_hidden_size", problem, remedy)


def has_no_matrices(recipe: Recipe) -> None:
    """Refuse fields that only LoRA has."""
    assert recipe.adapter is not None
    kind = recipe.adapter.kind
    for field in ("rank", "alpha", "targets", "dropout", "dora", "rslora", "modules_to_save"):
        if getattr(recipe.adapter, field) != getattr(Adapter(kind=kind), field):
            remedy = "leave it out, or use adapter.kind: lora"
            raise refusal(recipe, f"adapter.{field}", f"{kind} has virtual tokens and no {field}", remedy)


def check_positions(recipe: Recipe, model: nn.Module) -> None:
    """Refuse more positions than the model has learned."""
    from trainfit.models.layers import max_positions

    assert recipe.adapter is not None
    positions, tokens = max_positions(model), recipe.adapter.tokens
    if positions is not None and recipe.batch.seq + tokens > positions:
        problem = f"with {tokens} virtual tokens it is over the model's {positions} learned positions"
        most = max(positions - tokens, 0)
        remedy = f"use a sequence of at most {most} tokens, or fewer adapter.tokens"
        raise refusal(recipe, "batch.seq", problem, remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Put the virtual tokens in front of the sequence; refuse more positions than the model has."""
    from trainfit.models.adapted import convert

    adapter = recipe.adapter
    assert adapter is not None
    check_positions(recipe, draft.model)
    dtype = next(draft.model.parameters()).dtype
    if recipe.model.implementation == "native":
        draft.model = _on_native(adapter, draft)
    else:
        base: Any = draft.model
        # PEFT requires heads, which virtual tokens do not need and state-space models do not have, and
        # assumes the layers' width for the tokens: OPT-350M's embeddings are half as wide.
        sizes = {"num_attention_heads": 1, "token_dim": base.get_input_embeddings().embedding_dim}
        draft.model = on_hf(recipe, _config(adapter, **sizes), draft)
    if adapter.dtype == "base":
        convert(draft.model.get_submodule("prompt_encoder"), dtype)


def _config(adapter: Adapter, **sizes: int) -> Any:
    peft: Any = optional("peft", "peft", field="adapter.kind", value=adapter.kind)
    common = {"task_type": "CAUSAL_LM", "num_virtual_tokens": adapter.tokens, **sizes}
    if adapter.encoder == "none":
        return peft.PromptTuningConfig(**common)
    if adapter.encoder_hidden_size is not None:
        common["encoder_hidden_size"] = adapter.encoder_hidden_size
    return peft.PromptEncoderConfig(encoder_reparameterization_type=adapter.encoder.upper(), **common)


def on_hf(recipe: Recipe, config: Any, draft: Draft) -> nn.Module:
    """Return PEFT's model with its encoder on the device."""
    import torch

    from trainfit.models.adapted import wrap

    with refused_by_peft(recipe, "adapter.kind", "use adapter.kind: lora"), torch.device(draft.device):
        return wrap(draft.model, config)


def _on_native(adapter: Adapter, draft: Draft) -> nn.Module:
    import torch

    from trainfit.models.native.virtual_tokens import Prompted

    tuners: Any = optional("peft.tuners", "peft", field="adapter.kind", value=adapter.kind)
    base: Any = draft.model
    size = base.config.hidden_size
    sizes = {"token_dim": size, "num_transformer_submodules": 1}
    with torch.device(draft.device):
        if adapter.encoder == "none":
            encoder: Any = tuners.PromptEmbedding(_config(adapter, **sizes), base.embed)
        else:
            hidden = adapter.encoder_hidden_size or size
            sizes["encoder_hidden_size"] = hidden
            encoder = tuners.PromptEncoder(_config(adapter, **sizes))
    return Prompted(base, encoder, adapter.tokens)


def describe_tokens(recipe: Recipe) -> str:
    """Return the adapter's kind and number of virtual tokens, and layers that are not the kind's own."""
    adapter = recipe.adapter
    if adapter is None:
        return ""
    layers = {"none": " without layers", None: ""}.get(adapter.reparametrization, f" by {adapter.encoder}")
    return f"{adapter.kind} {adapter.tokens}{layers}"


def _draw(chance: random.Random, _: Data) -> Data:
    kind = chance.choice(("prompt", "p-tuning"))
    return {"adapter": {"kind": kind, "tokens": chance.choice(DRAWN_TOKENS)}}


TECHNIQUE = Technique(
    name="soft_prompts",
    order=40,
    title="Prompt tuning and p-tuning",
    fields=("adapter",),
    covers={"adapter.kind": ("prompt", "p-tuning")},
    check=check,
    apply=apply,
    describe=describe_tokens,
    variants=(
        {"adapter": {"kind": "p-tuning"}},
        {"adapter": {"kind": "p-tuning", "reparametrization": "lstm"}},
        {"adapter": {"kind": "p-tuning", "reparametrization": "none"}},
        {"adapter": {"kind": "prompt", "dtype": "base"}},
    ),
    draw=Draw(alone=_draw),
)
