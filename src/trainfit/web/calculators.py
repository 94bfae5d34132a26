"""Answers of the page that need no ledger: the Ultrascale calculator, and an OutOfMemoryError's message."""

from typing import Any

from pydantic import Field, JsonValue

from trainfit.api.explanation_text import message_advice, message_sizes
from trainfit.explanation.oom_text import read_message
from trainfit.flops.calculators import ultrascale
from trainfit.flops.calculators.ultrascale import WidgetSpec
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.units import format_bytes, format_count
from trainfit.spec.value import Value

REAL_MODELS = {
    "Llama 3 8B": "llama-3-8b", "Llama 3 70B": "llama-3-70b", "Llama 3 405B": "llama-3.1-405b",
}  # fmt: skip
"""The calculator's presets, and the catalog's model of that name."""
STRATEGIES: dict[int, dict[str, Any]] = {
    0: {"strategy": "ddp"}, 1: {"strategy": "zero1"},
    2: {"strategy": "fsdp", "reshard_after_forward": False}, 3: {"strategy": "fsdp"},
}  # fmt: skip
"""ZeRO's stages as data parallelism here. FSDP2 that keeps gathered weights stands for stage 2."""


class WidgetRequest(Value):
    """Inputs as ``WidgetSpec`` has them, a preset's name, and the GPU of the recipes."""

    inputs: dict[str, JsonValue] = Field(default_factory=dict)
    preset: str | None = None
    gpu: str = "h100-sxm"


def out_of_memory(text: str) -> dict[str, Any]:
    """Return what the last OutOfMemoryError of a text says, and what would help."""
    found = read_message(text)
    return {
        "message": found.model_dump(mode="json"),
        "sizes": [{"title": title, "bytes": size} for title, size in message_sizes(found)],
        "advice": list(message_advice(found)),
    }


def widget(content: Any) -> dict[str, Any]:
    """Return the Ultrascale calculator's numbers, the recipes to compare them with, and why they differ.

    Args:
        content: a ``WidgetRequest``; the inputs are laid on the preset's.
    """
    request = parse(WidgetRequest, content)
    preset = request.preset
    if preset is not None and preset not in ultrascale.PRESETS:
        known = ", ".join(map(repr, ultrascale.PRESETS))
        raise InputError("no preset of the page", f"send one of {known}", field="preset", value=preset)
    start = ultrascale.OPENED if preset is None else ultrascale.PRESETS[preset]
    spec = parse(WidgetSpec, {**start.model_dump(), **request.inputs})
    memory = ultrascale.memory(spec)
    parts = {**memory.model_dump(), "total": memory.total}
    gpu = request.gpu
    recipes = [{"label": "the same shape", "recipe": same_shape(spec, gpu)}]
    if preset in REAL_MODELS:
        recipe = {**same_shape(spec, gpu), "model": {"config": REAL_MODELS[preset]}}
        recipes.append({"label": REAL_MODELS[preset], "recipe": recipe})
    return {
        "inputs": spec.model_dump(),
        "numbers": [
            {"name": name, "bytes": size, "text": format_bytes(size)} for name, size in parts.items()
        ],
        "parameters": ultrascale.parameters(spec),
        "parameters_text": format_count(ultrascale.parameters(spec)),
        "recipes": recipes,
        "reasons": reasons(spec),
    }


def same_shape(spec: WidgetSpec, gpu: str) -> dict[str, Any]:
    """Return the recipe of the calculator's inputs: a Llama for SwiGLU or tensor parallelism, else OPT."""
    shared = {"vocab_size": padded_vocabulary(spec), "hidden_size": spec.h, "num_hidden_layers": spec.layers,
              "num_attention_heads": spec.a, "max_position_embeddings": max(spec.s, 2)}  # fmt: skip
    if spec.ff_activation == "swiglu" or spec.t > 1:
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shared,
                  "num_key_value_heads": spec.a, "intermediate_size": spec.h_ff}  # fmt: skip
    else:
        config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], **shared, "ffn_dim": spec.h_ff,
                  "word_embed_proj_dim": spec.h, "dropout": 0.1, "attention_dropout": 0.1,
                  "activation_function": spec.ff_activation, "pad_token_id": 1}  # fmt: skip
    recipe: dict[str, Any] = {
        "model": {"config": config, "name": "same shape"},
        "batch": {"micro": spec.b, "seq": spec.s},
        "precision": "bf16-master" if spec.mixed else "fp32",
        "recompute": spec.recomputation,
        "hardware": {"gpu": gpu, "count": spec.t * spec.d},
    }
    return {**recipe, "parallel": parallel} if (parallel := _parallel(spec)) else recipe


def padded_vocabulary(spec: WidgetSpec) -> int:
    """Return the vocabulary, padded so that tensor-parallel ranks share it equally."""
    return -(-spec.v // spec.t) * spec.t


def _parallel(spec: WidgetSpec) -> dict[str, Any]:
    if spec.t > 1:
        # Strategies that keep whole weights have no tensor parallelism beside them.
        return {"tensor": spec.t, **(STRATEGIES[max(2, spec.zero)] if spec.d > 1 else {})}
    return STRATEGIES[spec.zero] if spec.d > 1 else {}


def reasons(spec: WidgetSpec) -> list[str]:
    """Return why the calculator's numbers differ from a step's, with bytes where it counts them."""
    value = 2 if spec.mixed else 4
    found: list[str] = []
    if spec.recomputation == "none":
        split = 1 if spec.sequence_parallel else spec.t
        scores = spec.layers * (2 * value + 1) * spec.a * spec.s**2 * spec.b / split
        found.append(
            f"It keeps attention scores, their softmax and its mask: {format_bytes(scores)}. Fused attention "
            "(PyTorch's SDPA, FlashAttention) keeps none of them."
        )
    count = format_count(ultrascale.parameters(spec))
    found.append(
        f"It counts {count} parameters as GPT-2 has them: feed-forward blocks of 4 h with two matrices "
        "whatever h_ff and the activation say, learned positions, no grouped queries, one matrix for "
        "embedding and head."
    )
    found.append(
        "It adds all activations to all gradients. In a step, activations are freed while gradients grow: "
        "when all activations are there, no gradient is yet."
    )
    found.append(
        "It has no gradient buffers in other dtypes, no memory that is freed within the step, no rounding by "
        "the caching allocator, no CUDA context: these are the last lines of the table."
    )
    if spec.mixed:
        found.append(
            f"Mixed precision is 16-bit weights with fp32 copies and k = {spec.k} bytes of optimizer state a "
            "parameter. AdamW's two moments in fp32 are 8."
        )
    if spec.t > 1:
        found.append("It divides activations by t, but neither weights, gradients nor optimizer state.")
        if (padded := padded_vocabulary(spec)) != spec.v:
            found.append(
                f"Ranks share the vocabulary equally: the traced step has {padded:,} entries, not {spec.v:,}."
            )
        if spec.ff_activation != "swiglu":
            found.append(
                "The traced step is of a gated block of h_ff, as the models here are that t divides."
            )
    if spec.d > 1 and (spec.zero == 2 or (spec.t > 1 and spec.zero < 2)):
        found.append(
            f"For ZeRO {spec.zero} the traced step has FSDP2 that keeps gathered weights after the forward."
        )
    logits = 4.0 * spec.s * spec.b * spec.v
    found.append(
        f"It counts the logits once, in fp32: {format_bytes(logits)}. PyTorch's loss holds them in the "
        "model's dtype, in fp32, their log-softmax and their gradient; loss: fused holds none of these whole."
    )
    return found
