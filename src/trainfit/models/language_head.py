"""Split a causal LM into its body and output layer, for losses that never hold all logits.

Families differ in what they do to logits; those listed were compared with the model's own logits
(tests/kernels/cross_entropy/test_losses.py), and others are refused.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from trainfit.models.hf_text import TextWithHead
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.errors import InputError

PLAIN = frozenset(
    """
    bloom codegen deepseek_v2 deepseek_v3 exaone4 falcon gemma glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_oss gptj helium llama mistral mixtral nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe
    qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
    """.split()
)
"""Model types of transformers whose logits are the output layer's result."""
SCALED = {
    **dict.fromkeys(("cohere", "cohere2"), ("logit_scale", 1)),
    **dict.fromkeys(("granite", "granitemoe"), ("logits_scaling", -1)),
}
"""Model types that multiply (1) logits by a value of the config, or divide (-1) by it."""
SOFT_CAPPED = frozenset({"gemma2", "gemma3_text"})
"""Model types that cap logits at ``final_logit_softcapping`` if the config has it."""


class LanguageHead(NamedTuple):
    """Body and output layer; logits are ``softcap * tanh(scale * layer(body(ids)) / softcap)``."""

    body: nn.Module  # Module that takes input_ids [b, s]
    layer: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def hidden(self, input_ids: Tensor, **positions: Tensor) -> Tensor:
        """Return the input of ``layer``, [b, s, e]; ``positions``: position_ids [1, s] if not 0 to s - 1."""
        out: Any = self.body(input_ids=input_ids, **positions)
        return out if isinstance(out, Tensor) else out.last_hidden_state


class NativeBody(nn.Module):
    """The native decoder up to its hidden states, as a module for hooks and compilers."""

    def __init__(self, decoder: NativeDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.decoder.hidden(input_ids, position_ids=position_ids)


def language_head(model: nn.Module, loss: str) -> LanguageHead:
    """Return the body and output layer of a model of ``build_model``, also wrapped by PEFT.

    Raises:
        InputError: Unknown family, output layer that is not linear, or router term in the model's loss.
    """
    if hasattr(model, "get_base_model"):  # PEFT puts adapters inside the model's modules.
        model = model.get_base_model()  # pyright: ignore[reportCallIssue]
    if isinstance(model, NativeDecoder):
        return LanguageHead(NativeBody(model), _linear(model.lm_head, loss))
    hf: Any = model
    config = hf.config.get_text_config()
    refuse_router_loss(hf, "loss", loss)
    made_here = issubclass(type(hf), TextWithHead)
    scale, softcap = (1.0, None) if made_here else _scale_and_softcap(config, loss)
    return LanguageHead(hf.base_model, _linear(hf.get_output_embeddings(), loss), scale, softcap)


def refuse_router_loss(model: nn.Module, field: str, value: Any) -> None:
    """Refuse a model whose loss also balances experts, where ``field: value`` of the recipe replaces it."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        problem = "this model's own loss also balances its experts (output_router_logits)"
        remedy = "use loss: standard without loss_terms, or set output_router_logits: false in the config"
        raise InputError(problem, remedy, field=field, value=value)


def _scale_and_softcap(config: Any, loss: str) -> tuple[float, float | None]:
    """Return scale and soft cap of a transformers family's logits."""
    family = config.model_type
    if family in PLAIN:
        return 1.0, None
    if family in SCALED:
        name, power = SCALED[family]
        return getattr(config, name) ** power, None
    if family in SOFT_CAPPED:
        return 1.0, config.final_logit_softcapping
    problem = f"it is unknown how {family} computes logits from hidden states"
    raise InputError(problem, "use loss: standard", field="loss", value=loss)


def _linear(layer: Any, loss: str) -> nn.Linear:
    if isinstance(layer, nn.Linear):
        return layer
    problem = f"the model's output layer is a {type(layer).__name__}, not a plain linear layer"
    remedy = "use loss: standard, or leave the output layer out of adapter.targets"
    raise InputError(problem, remedy, field="loss", value=loss)
