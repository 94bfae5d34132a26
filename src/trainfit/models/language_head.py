"""Split a causal LM into its body and output layer, for losses that never hold all logits.

Families differ in what they do to logits; those listed were compared with the model's own logits
(tests/kernels/cross_entropy/test_losses.py), and others are refused.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from trainfit.catalog.model_types import model_type
from trainfit.models.hf_text import TextWithHead
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.errors import InputError


class LanguageHead(NamedTuple):
    """Body and output layer; logits are ``softcap * tanh(scale * layer(body(ids)) / softcap)``."""

    body: nn.Module  # Module that takes input_ids [b, s]
    layer: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    def hidden(self, input_ids: Tensor, **positions: Tensor) -> Tensor:
        """Return the input of ``layer``, [b, s, e]; ``positions``: position_ids if not 0 to s - 1."""
        out: Any = self.body(input_ids=input_ids, **positions)
        return out if isinstance(out, Tensor) else out.last_hidden_state


class NativeBody(nn.Module):
    """The native decoder up to its hidden states, as a module for hooks and compilers."""

    def __init__(self, decoder: NativeDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.decoder.hidden(input_ids, position_ids=position_ids)


class Setting(NamedTuple):
    """Field of the recipe that needs the parts, for refusals."""

    field: str
    value: Any
    instead: str  # What to write where the parts cannot be had


def language_head(model: nn.Module, setting: Setting) -> LanguageHead:
    """Return the body and output layer of a model of ``build_model``, also wrapped by PEFT.

    Raises:
        InputError: Unknown family, output layer that is not linear, or router term in the model's loss.
    """
    if hasattr(model, "get_base_model"):  # PEFT puts adapters inside the model's modules.
        model = model.get_base_model()  # pyright: ignore[reportCallIssue]
    if isinstance(model, NativeDecoder):
        return LanguageHead(NativeBody(model), _linear(model.lm_head, setting))
    hf: Any = model
    config = hf.config.get_text_config()
    refuse_router_loss(hf, setting)
    made_here = issubclass(type(hf), TextWithHead)
    scale, softcap = (1.0, None) if made_here else _scale_and_softcap(config, setting)
    return LanguageHead(hf.base_model, _linear(hf.get_output_embeddings(), setting), scale, softcap)


def refuse_router_loss(model: nn.Module, setting: Setting) -> None:
    """Refuse a model whose loss also balances experts, where the setting replaces it."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        problem = "this model's own loss also balances its experts (output_router_logits)"
        remedy = f"{setting.instead}, or set output_router_logits: false in the config"
        raise InputError(problem, remedy, field=setting.field, value=setting.value)


def _scale_and_softcap(config: Any, setting: Setting) -> tuple[float, float | None]:
    """Return scale and soft cap of a transformers family's logits."""
    row = model_type(config.model_type)
    if row.logits == "plain":
        return 1.0, None
    if row.logits == "multiplied":
        return getattr(config, row.logits_key), None
    if row.logits == "divided":
        return 1 / getattr(config, row.logits_key), None
    if row.logits == "capped":
        return 1.0, getattr(config, row.logits_key)
    problem = f"it is unknown how {config.model_type} computes logits from hidden states"
    raise InputError(problem, setting.instead, field=setting.field, value=setting.value)


def _linear(layer: Any, setting: Setting) -> nn.Linear:
    if hasattr(layer, "modules_to_save"):  # PEFT's wrapper: the copy trains.
        (layer,) = layer.modules_to_save.values()
    if isinstance(layer, nn.Linear):
        return layer
    problem = f"the model's output layer is a {type(layer).__name__}, not a plain linear layer"
    remedy = f"{setting.instead}, or leave the output layer out of adapter.targets"
    raise InputError(problem, remedy, field=setting.field, value=setting.value)
