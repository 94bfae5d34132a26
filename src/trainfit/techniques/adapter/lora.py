"""LoRA through PEFT: a frozen base with a trainable low-rank product B A next to each targeted layer.

Hu et al., arXiv:2106.09685. Alpha is the rank unless the recipe sets it. ``all-linear`` is PEFT's rule on
``hf`` (every linear layer but the output head), the blocks' linear layers on ``native``. Embeddings are
adapted where ``targets`` names them. With ``dora`` PEFT writes out the adapted weight in every forward, for
its norm (Liu et al., arXiv:2402.09353); a quantised base is dequantised for it once more. ``rslora`` scales
by alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732). Of ``modules_to_save`` a copy trains whole.
"""

from __future__ import annotations

import difflib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainfit.spec.errors import InputError
from trainfit.spec.optional import optional, require
from trainfit.spec.recipe import Adapter, Recipe
from trainfit.techniques.base import Data, Draw, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from torch import nn

# A short pattern can make Python's matcher backtrack for hours, and nothing can interrupt it. So a pattern
# with a repetition is first tried in a process with a time limit.
MAX_PATTERN_CHARS = 10_000
MAX_GROUPS = 100
"""Python's limit of nested groups depends on the depth of the stack; this one does not."""
CPU_SECONDS = 1  # Matching a pattern such as .*_proj against a thousand names takes a millisecond
WALL_SECONDS = 60
CAN_BACKTRACK = re.compile(r"[*+?{|]")
MATCH = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
pattern, names = json.load(sys.stdin)
compiled = re.compile(pattern)
for name in names:
    compiled.fullmatch(name)
"""


def needs_peft(recipe: Recipe) -> None:
    """Refuse any adapter where PEFT is not installed."""
    assert recipe.adapter is not None
    require("peft", "peft", field="adapter.kind", value=recipe.adapter.kind)


def check(recipe: Recipe) -> None:
    """Refuse missing PEFT and fields of virtual tokens."""
    needs_peft(recipe)
    assert recipe.adapter is not None
    for field in ("reparametrization", "encoder_hidden_size"):
        if getattr(recipe.adapter, field) is not None:
            problem, remedy = "LoRA has no virtual tokens", "leave it out, or use adapter.kind: p-tuning"
            raise refusal(recipe, f"adapter.{field}", problem, remedy)


@contextmanager
def refused_by_peft(recipe: Recipe, field: str, remedy: str) -> Iterator[None]:
    """Convert an error that PEFT raises inside to an InputError of the field."""
    try:
        yield
    except (ValueError, TypeError) as error:
        problem = f"PEFT refuses it: {str(error).splitlines()[0][:200]}"
        if "dora" in str(error).lower():
            field, remedy = "adapter.dora", "leave dora out, or leave these modules out of adapter.targets"
        elif "modules_to_save" in str(error):
            field, remedy = "adapter.modules_to_save", "name single layers, outside of adapter.targets"
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
    _check_saved(recipe, model)
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha or adapter.rank,
        lora_dropout=adapter.dropout,
        use_dora=adapter.dora,
        use_rslora=adapter.rslora,
        modules_to_save=list(adapter.modules_to_save) or None,
        target_modules=_targets(adapter, model, is_hf),
        # GPT-2's Conv1D keeps its weight transposed.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type="CAUSAL_LM" if is_hf else None,
    )
    if recipe.base is not None and recipe.base.library == "bitsandbytes":
        from trainfit.models.quantized_libraries import peft_layers

        config._register_custom_module(peft_layers())
    remedy = "use all-linear, or a list of the model's linear layers such as [q_proj, v_proj]"
    with refused_by_peft(recipe, "adapter.targets", remedy):
        draft.model = wrap(model, config, autocast_adapter_dtype=adapter.dtype == "fp32")


def _check_saved(recipe: Recipe, model: nn.Module) -> None:
    """Refuse ``modules_to_save`` that no module is named, which PEFT passes over, or that cannot train."""
    from trainfit.models.layers import num_quantized

    assert recipe.adapter is not None
    for name in recipe.adapter.modules_to_save:
        found = {path: module for path, module in model.named_modules() if name and path.endswith(name)}
        problem = remedy = ""
        if not found:
            known = {path.rpartition(".")[2] for path, _ in model.named_modules()} - {""}
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
            problem = f"the model has no module {name}"
            remedy = f"write one of its names, such as {', '.join(close) or 'lm_head'}"
        elif any(map(num_quantized, found.values())):
            problem = f"{name} holds quantised weights, which do not train"
            remedy = "name modules outside the quantised blocks, or use quantize: null"
        elif not any([*module.parameters()] for module in found.values()):
            problem, remedy = f"{name} has no weights", "leave it out"
        if problem:
            raise refusal(recipe, "adapter.modules_to_save", problem, remedy)


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


def check_pattern(pattern: str, names: Sequence[str]) -> None:
    """Refuse a pattern that is no regular expression, or whose matching against ``names`` takes too long."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _refused(pattern, f"is over {MAX_PATTERN_CHARS:,} characters", "write a list of names")
    if pattern.count("(") > MAX_GROUPS:
        raise _refused(pattern, f"has over {MAX_GROUPS} groups", "write a simpler one, or a list of names")
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refused(pattern, f"not a regular expression: {error}", "correct it, or write a list") from None
    except (RecursionError, OverflowError):
        problem = "not a regular expression that can be compiled"
        raise _refused(pattern, problem, "write a simpler one, or a list of names") from None
    if CAN_BACKTRACK.search(pattern) and not _matches_in_time(pattern, names):
        problem = f"matching it against the model's modules takes over {CPU_SECONDS} s"
        raise _refused(pattern, problem, "avoid nested repetition such as (.*)*, or write a list of names")


def _matches_in_time(pattern: str, names: Sequence[str]) -> bool:
    command, names_json = [sys.executable, "-I", "-S", "-c", MATCH], json.dumps([pattern, list(names)])
    try:
        return not subprocess.run(
            command, input=names_json.encode(), capture_output=True, timeout=WALL_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def _refused(pattern: str, problem: str, remedy: str) -> InputError:
    return InputError(problem, remedy, field="adapter.targets", value=pattern)


def _options(chance: random.Random) -> Data:
    return {"rank": chance.choice((8, 16, 64)), "dtype": chance.choice(("fp32", "base"))}


def _describe(recipe: Recipe) -> str:
    adapter = recipe.adapter
    if adapter is None:
        return ""
    text = f"{'rs' * adapter.rslora}{'dora' if adapter.dora else 'lora'} {adapter.rank}"
    return f"{text} and {', '.join(adapter.modules_to_save)}" if adapter.modules_to_save else text


def _names_layers(recipe: Recipe) -> bool:
    """Return whether modules are named by their layers' numbers, or by a pattern of numbers."""
    if recipe.adapter is None:
        return False
    targets = recipe.adapter.targets
    named = *((targets,) if isinstance(targets, str) else targets), *recipe.adapter.modules_to_save
    # Not a number within a name such as fc1 or dense_4h_to_h.
    return any(re.search(r"(?<![A-Za-z0-9_])\d|\\d|\[\^?\d", target) for target in named)


TECHNIQUE = Technique(
    name="lora",
    order=30,
    title="LoRA",
    fields=("adapter",),
    covers={"adapter.kind": ("lora",)},
    check=check,
    apply=apply,
    describe=_describe,
    variants=(
        {"adapter": {"kind": "lora", "dtype": "base"}},
        {"adapter": {"kind": "lora", "dora": True}},
        {"adapter": {"kind": "lora", "rslora": True, "modules_to_save": ["lm_head"]}},
    ),
    draw=Draw(weights={"adapter.kind": {"lora": 1}}, share=0.15, options=_options),
    trace_whole=_names_layers,
)
