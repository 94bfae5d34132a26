"""Where a causal LM's hidden states end and its logits begin: for losses that never hold all logits.

Enters: a model that ``build_model`` made, or the same wrapped by PEFT. Leaves: the part that gives hidden states, the
linear layer that makes logits of them, and what the family does to logits afterwards. Only families for which this was
compared with the model's own logits (tests/kernels/test_chunked_loss.py) are known; a guess would train another model.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.errors import InputError

PLAIN = frozenset(
    """
    bloom codegen deepseek_v2 deepseek_v3 exaone4 falcon gemma glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj
    helium llama mistral mixtral nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_moe seed_oss smollm3 stablelm starcoder2
    """.split()
)
"""Model types of transformers whose logits are the output layer's, as they are."""
SCALED = {
    "cohere": ("logit_scale", 1),
    "cohere2": ("logit_scale", 1),
    "granite": ("logits_scaling", -1),
    "granitemoe": ("logits_scaling", -1),
}
"""Those that multiply (1) logits by a number of the config, or divide (-1) by it."""
SOFT_CAPPED = frozenset({"gemma2", "gemma3_text"})
"""Those that squash logits into +- ``final_logit_softcapping``, where the config has it."""


class LanguageHead(NamedTuple):
    """``softcap * tanh(scale * layer(body(ids)) / softcap)`` are the logits; no softcap: without it."""

    body: nn.Module
    """Called with ``input_ids`` ([b, s]); ``hidden_of`` reads its result."""
    layer: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def hidden(self, input_ids: Tensor) -> Tensor:
        """What ``layer`` reads, [b, s, e]."""
        out: Any = self.body(input_ids=input_ids)
        return out if isinstance(out, Tensor) else out.last_hidden_state


class NativeBody(nn.Module):
    """The native decoder up to its hidden states, as a module: what hooks and compilers take."""

    def __init__(self, decoder: NativeDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder.hidden(input_ids)


def language_head(model: nn.Module, loss: str) -> LanguageHead:
    """The parts of a model, for the loss that a recipe calls ``loss``.

    Raises:
        InputError: a family that is not known here, an output layer that is no plain linear one, or a loss that has
            more in it than the next token's.
    """
    if hasattr(model, "get_base_model"):  # PEFT's; its adapters stand inside the model's own modules.
        model = model.get_base_model()  # pyright: ignore[reportCallIssue]
    if isinstance(model, NativeDecoder):
        return LanguageHead(NativeBody(model), _linear(model.lm_head, loss))
    hf: Any = model
    config = hf.config.get_text_config()
    refuse_router_loss(hf, "loss", loss)
    scale, softcap = _after_the_head(config, loss)
    return LanguageHead(hf.base_model, _linear(hf.get_output_embeddings(), loss), scale, softcap)


def refuse_router_loss(model: nn.Module, field: str, value: Any) -> None:
    """Nothing, if the model's own loss is the next token's alone.

    Raises:
        InputError: it also balances experts; ``field`` and ``value`` of the recipe asked for another loss.
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        raise InputError(
            "this model's own loss also balances its experts (output_router_logits)",
            "use loss: standard without loss_terms, or set output_router_logits: false in the config",
            field=field,
            value=value,
        )


def _after_the_head(config: Any, loss: str) -> tuple[float, float | None]:
    """Scale and soft cap of a transformers family's logits."""
    family = config.model_type
    if family in PLAIN:
        return 1.0, None
    if family in SCALED:
        name, power = SCALED[family]
        return getattr(config, name) ** power, None
    if family in SOFT_CAPPED:
        return 1.0, config.final_logit_softcapping
    raise InputError(
        f"how {family} makes logits of hidden states is not known here",
        "use loss: standard",
        field="loss",
        value=loss,
    )


def _linear(layer: Any, loss: str) -> nn.Linear:
    if isinstance(layer, nn.Linear):
        return layer
    raise InputError(
        f"the model's output layer is a {type(layer).__name__}, not a plain linear layer",
        "use loss: standard, or leave the output layer out of adapter.targets",
        field="loss",
        value=loss,
    )
