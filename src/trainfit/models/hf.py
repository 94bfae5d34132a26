"""Any causal LM that transformers ships, built from the mapping of a config.json. No remote code, no downloads.

transformers (5.17 and later) initialises on the device that is in force, so ``with torch.device(...)`` is all that
meta, fake and CUDA need; on meta it skips the initialisation by itself.
"""

import copy
import difflib
import inspect
from typing import Any

import torch
from torch import nn

from trainfit.catalog.config_checks import REMOTE_CODE_KEYS, remote_code_keys, remote_code_refused
from trainfit.models.hf_attention import NAME, refuse_config, register_attention
from trainfit.spec.errors import InputError

NOT_THE_ARCHITECTURE = (
    "architectures",
    *REMOTE_CODE_KEYS,
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
)
"""Keys of a config.json that name code, storage or versions. The recipe says precision and quantisation."""

LOSS_SET = "_trainfit_set_loss_type"
"""Attribute of a model whose ``loss_type`` was set here."""
IMPLEMENTATIONS = {"eager": "eager", "triton": NAME}
"""The recipe's word -> transformers' name of an attention implementation; the others are backends of SDPA."""

BAD_CONFIG = (
    ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, AssertionError, IndexError, OverflowError,
)  # fmt: skip
"""What the constructors of transformers and torch raise on values that do not fit together."""


def build_hf(
    config: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str, attention: str = "sdpa"
) -> nn.Module:
    """The transformers model of ``config``, randomly initialised on ``device`` in ``dtype``, in training mode.

    ``attention: sdpa`` leaves the choice to transformers: SDPA, or eager for the few families whose attention SDPA
    cannot express (Bloom, Gemma 2). A named backend is refused for those.

    Raises:
        InputError: a ``model_type`` that transformers does not know or that is no causal LM, a value its config
            class refuses, or an attention implementation the model lacks.
    """
    from transformers import AutoModelForCausalLM

    if config.get("is_causal") is False:
        raise InputError(
            "each token also sees the ones after it, so it has no next token to learn",
            "leave it out",
            field="model.config.is_causal",
            value=False,
        )
    hf_config = hf_config_from(config)
    chosen = {} if attention == "sdpa" else {"attn_implementation": IMPLEMENTATIONS.get(attention, "sdpa")}
    if attention == "triton":
        register_attention()
        refuse_config(hf_config)
    _import_model(hf_config)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, trust_remote_code=False, **chosen
            )
    except BAD_CONFIG as error:
        by_attention = "attention implementation" in str(error)
        raise InputError(
            f"transformers cannot build it as a causal language model: {_cause(error)}",
            "use attention: sdpa or eager"
            if by_attention
            else "correct the config, or name a causal language model",
            field="model.config.model_type",
            value=config.get("model_type"),
        ) from error
    _refuse_encoder(model)
    if getattr(model, "loss_type", None) is None:
        # Classes whose name does not say it (GPT2LMHeadModel) fall back on this loss too, with a warning.
        model.loss_type = "ForCausalLM"
        setattr(model, LOSS_SET, True)
    return model.train()


def sets_loss(model: nn.Module) -> bool:
    """Return whether ``build_hf`` set the loss of this model, or of the one within, because its class names none."""
    return any(getattr(module, LOSS_SET, False) for module in model.modules())


def _import_model(hf_config: Any) -> None:
    """Import the model's module, which transformers would do inside ``with torch.device(...)``: tensors that modules make
    when they are imported (torchaudio has one) would then stay on the GPU, 512 bytes that no prediction knows.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)


def _refuse_encoder(model: Any) -> None:
    """Refuse BERT and its kin, whose tokens see the ones after them unless ``is_decoder`` says otherwise."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = model.config
    if (
        config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and getattr(config, "is_decoder", None) is False
    ):
        raise InputError(
            "an encoder: each token also sees the ones after it, so it has no next token to learn",
            "name a causal language model, or set is_decoder: true in its config",
            field="model.config.model_type",
            value=config.model_type,
        )


def hf_config_from(config: dict[str, Any]) -> Any:
    """The transformers config object of a config.json mapping, the key-value cache off.

    Raises:
        InputError: unknown ``model_type`` (with near names, or because its code is in a repository), or a value that its
            config class refuses.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        if keys := remote_code_keys(config):
            raise remote_code_refused(config, keys[0])
        known = list(CONFIG_MAPPING.keys())
        near = difflib.get_close_matches(str(model_type), known, n=3)
        remedy = (
            f"did you mean {', '.join(near)}?" if near else "use a model_type of transformers, such as llama"
        )
        raise InputError(
            "unknown to transformers", remedy, field="model.config.model_type", value=model_type or "(none)"
        )
    keys = {key: value for key, value in config.items() if key not in (*NOT_THE_ARCHITECTURE, "model_type")}
    keys = copy.deepcopy(keys)  # The config classes complete nested mappings in place.
    kind = CONFIG_MAPPING[model_type]
    for key in keys:
        _refuse_method(kind, key, keys[key])
    try:
        hf_config = kind(**keys)
        text_config = hf_config.get_text_config()
    except (*BAD_CONFIG, StrictDataclassError) as error:
        raise InputError(
            f"transformers refuses this {model_type} config: {_cause(error)}",
            "correct that key",
            field="model.config",
        ) from error
    for part in (hf_config, text_config):
        part.use_cache = False
    return hf_config


def _refuse_method(kind: type, key: str, value: Any) -> None:
    """Refuse a key that would take the place of the config class's own code."""
    own = inspect.getattr_static(kind, key, None)
    fixed = isinstance(own, property) and own.fset is None
    if key.startswith("__") or fixed or callable(own) or isinstance(own, classmethod):
        raise InputError(
            "is the config class's own", "remove the key", field=f"model.config.{key}", value=value
        )


def _cause(error: BaseException) -> str:
    """The innermost error's first line: strict config classes wrap the sentence that names the key."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{error}".strip().partition("\n")[0].split(" Please request")[0] or type(error).__name__
