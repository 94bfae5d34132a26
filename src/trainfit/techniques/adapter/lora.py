"""LoRA through PEFT: a frozen base with a trainable low-rank product B A next to each targeted linear layer.

Hu et al., arXiv:2106.09685. Alpha is the rank unless the recipe sets it. ``all-linear`` is PEFT's rule on
``hf`` (every linear layer but the output head), the blocks' linear layers on ``native``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainfit.spec.optional import optional, require
from trainfit.spec.recipe import Adapter, Recipe
from trainfit.techniques.adapter._target_pattern import check_pattern
from trainfit.techniques.base import Data, Draw, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from torch import nn


def needs_peft(recipe: Recipe) -> None:
    """Refuse any adapter where PEFT is not installed."""
    assert recipe.adapter is not None
    require("peft", "peft", field="adapter.kind", value=recipe.adapter.kind)


@contextmanager
def refused_by_peft(recipe: Recipe, field: str, remedy: str) -> Iterator[None]:
    """Report an error that PEFT raises inside as a refusal of the field."""
    try:
        yield
    except ValueError as error:
        problem = f"PEFT refuses it: {str(error).splitlines()[0][:200]}"
        raise refusal(recipe, field, problem, remedy) from error


def apply(recipe: Recipe, draft: Draft) -> None:
    """Wrap the model with PEFT's LoRA; refuse a target that the model does not have."""
    from trainfit.models.adapted import wrap

    adapter = recipe.adapter
    assert adapter is not None
    peft: Any = optional("peft", "peft", field="adapter.kind", value=adapter.kind)
    model: Any = draft.model
    is_hf = recipe.model.implementation == "hf"
    if not is_hf:
        # Without this attribute PEFT assumes checkpointing and makes the embedding require a gradient.
        model.is_gradient_checkpointing = False
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha or adapter.rank,
        lora_dropout=adapter.dropout,
        target_modules=_targets(adapter, model, is_hf),
        # GPT-2's Conv1D keeps its weight transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type="CAUSAL_LM" if is_hf else None,
    )
    remedy = "use all-linear, or a list of the model's linear layers such as [q_proj, v_proj]"
    with refused_by_peft(recipe, "adapter.targets", remedy):
        draft.model = wrap(model, config, autocast_adapter_dtype=adapter.dtype == "fp32")


def _targets(adapter: Adapter, model: nn.Module, is_hf: bool) -> str | list[str]:
    """Return PEFT's target_modules; for ``all-linear`` on native models the blocks' linear layers."""
    if not isinstance(adapter.targets, str):
        return list(adapter.targets)
    if adapter.targets != "all-linear":
        check_pattern(adapter.targets, [name for name, _ in model.named_modules()])
    if is_hf or adapter.targets != "all-linear":
        return adapter.targets
    from torch import nn

    from trainfit.models.layers import layer_lists

    return [
        f"{list_name}.{name}"
        for list_name, blocks in layer_lists(model)
        for name, module in blocks.named_modules()
        if isinstance(module, nn.Linear)
    ]


def _options(chance: random.Random) -> Data:
    return {"rank": chance.choice((8, 16, 64)), "dtype": chance.choice(("fp32", "base"))}


def _names_layers(recipe: Recipe) -> bool:
    """Return whether ``targets`` names layers by their numbers, or by a pattern of numbers."""
    targets = recipe.adapter.targets if recipe.adapter is not None else ()
    named = (targets,) if isinstance(targets, str) else targets
    # Not a number within a name such as fc1 or dense_4h_to_h.
    return any(re.search(r"(?<![A-Za-z0-9_])\d|\\d|\[\^?\d", target) for target in named)


TECHNIQUE = Technique(
    name="lora",
    order=30,
    title="LoRA",
    fields=("adapter",),
    covers={"adapter.kind": ("lora",)},
    check=needs_peft,
    apply=apply,
    describe=lambda recipe: f"lora {recipe.adapter.rank if recipe.adapter else 0}",
    variants=({"adapter": {"kind": "lora", "dtype": "base"}},),
    draw=Draw(weights={"adapter.kind": {"lora": 1}}, share=0.15, options=_options),
    trace_whole=_names_layers,
)
