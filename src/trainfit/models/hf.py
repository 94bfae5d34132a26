"""Build any causal LM of transformers from the mapping of a config.json, without remote code or downloads.

transformers (5.17 and later) initialises on the current ``torch.device``, and skips initialisation on meta.
"""

import difflib
import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainfit.catalog.config_checks import REMOTE_CODE_KEYS, remote_code_keys, remote_code_refused
from trainfit.models.deferred_init import is_deferred
from trainfit.models.few_blocks import outlined
from trainfit.models.hf_attention import NAME, refuse_config, register_attention
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import FLOAT_TAG
from trainfit.virtual.trace.exclusive import replaced

NOT_THE_ARCHITECTURE = (
    *REMOTE_CODE_KEYS, "architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version",
)  # fmt: skip
"""Keys of a config.json about code, storage or versions; the recipe has precision and quantisation."""

LOSS_SET = "_trainfit_set_loss_type"  # Attribute of a model whose loss_type was set here
IMPLEMENTATIONS = {"eager": "eager", "triton": NAME}
"""transformers' names of the recipe's attention values; the others are backends of SDPA."""

NOT_CAUSAL = "each token also sees the ones after it, so it has no next token to learn"
BAD_CONFIG = (
    ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, AssertionError, IndexError,
    OverflowError,
)  # fmt: skip
"""Exceptions of transformers' and PyTorch's constructors on inconsistent values."""


def build_hf(
    config: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str, attention: str = "sdpa"
) -> nn.Module:
    """Build the transformers model of ``config``, randomly initialised and in training mode.

    With ``attention: sdpa`` transformers chooses SDPA, or eager for families that SDPA cannot express (Bloom,
    Gemma 2), for which a named backend is refused.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if config.get("is_causal") is False:
        raise InputError(NOT_CAUSAL, "leave it out", field="model.config.is_causal", value=False)
    hf_config = hf_config_from(config)
    chosen = {} if attention == "sdpa" else {"attn_implementation": IMPLEMENTATIONS.get(attention, "sdpa")}
    if attention == "triton":
        register_attention()
        refuse_config(hf_config)
    # Imports the model's module here: a tensor that a module creates would stay on the device in force.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    try:
        num_layers = int(getattr(hf_config.get_text_config(), "num_hidden_layers", 0) or 0)
        with (
            _initialised_on_meta() if is_deferred() else nullcontext(),
            outlined(_block_class(type(hf_config)), num_layers),
            torch.device(device),
        ):
            options = {"dtype": dtype, "trust_remote_code": False, **chosen}
            model = AutoModelForCausalLM.from_config(hf_config, **options)
    except BAD_CONFIG as error:
        problem = f"transformers cannot build it as a causal language model: {_cause(error)}"
        remedy = "correct the config, or name a causal language model"
        if "attention implementation" in str(error):
            remedy = "use attention: sdpa or eager"
        raise _wrong_type(config.get("model_type"), problem, remedy) from error
    _refuse_encoder(model)
    if getattr(model, "loss_type", None) is None:
        # transformers falls back on this loss as well (GPT2LMHeadModel), with a warning.
        model.loss_type = "ForCausalLM"
        setattr(model, LOSS_SET, True)
    return model.train()


def _block_class(kind: type) -> type[nn.Module] | None:
    """Return the class of the decoder blocks, by a configuration's class; None: not exactly one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    names = getattr(model, "_no_split_modules", None) or ()
    found = [getattr(sys.modules[model.__module__], name, None) for name in names]
    blocks = [one for one in found if isinstance(one, type) and issubclass(one, nn.Module)]
    return blocks[0] if len(blocks) == 1 else None


def _initialised_on_meta() -> AbstractContextManager[None]:
    """Let transformers call its initialisation on meta, where it is recorded."""
    from transformers import modeling_utils

    return replaced(modeling_utils, "get_torch_context_manager_or_global_device", lambda: None)


def sets_loss(model: nn.Module) -> bool:
    """Return whether ``build_hf`` set the loss, because the model's class names none."""
    return any(getattr(module, LOSS_SET, False) for module in model.modules())


def _refuse_encoder(model: Any) -> None:
    """Refuse BERT-like encoders, whose tokens attend to later ones unless ``is_decoder`` is set."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = model.config.model_type
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(model.config, "is_decoder", None) is False:
        remedy = "name a causal language model, or set is_decoder: true in its config"
        raise _wrong_type(kind, f"an encoder: {NOT_CAUSAL}", remedy)


def _wrong_type(model_type: Any, problem: str, remedy: str) -> InputError:
    return InputError(problem, remedy, field="model.config.model_type", value=model_type)


def hf_config_from(config: dict[str, Any]) -> Any:
    """Return the transformers config object of a config.json mapping, with the key-value cache disabled."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        if keys := remote_code_keys(config):
            raise remote_code_refused(config, keys[0])
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        remedy = f"did you mean {', '.join(near)}?"
        if not near:
            remedy = "use a model_type of transformers, such as llama"
        raise _wrong_type(model_type or "(none)", "unknown to transformers", remedy)
    keys = {key: value for key, value in config.items() if key not in (*NOT_THE_ARCHITECTURE, "model_type")}
    keys = _with_constants(keys)  # A copy: the config classes complete nested mappings in place.
    kind = CONFIG_MAPPING[model_type]
    for key in keys:
        _refuse_method(kind, key, keys[key])
    try:
        hf_config = kind(**keys)
        text_config = hf_config.get_text_config()
    except (*BAD_CONFIG, StrictDataclassError) as error:
        problem = f"transformers refuses this {model_type} config: {_cause(error)}"
        raise InputError(problem, "correct that key", field="model.config") from error
    for part in (hf_config, text_config):
        part.use_cache = False
    return hf_config


def _with_constants(value: Any) -> Any:
    """Return a copy in which numbers that JSON lacks stand in place of their tags."""
    if isinstance(value, dict):
        text = value.get(FLOAT_TAG)
        if len(value) == 1 and text in ("Infinity", "-Infinity"):
            return float(text)
        return {key: _with_constants(one) for key, one in value.items()}
    return [_with_constants(one) for one in value] if isinstance(value, list) else value


def _refuse_method(kind: type, key: str, value: Any) -> None:
    """Refuse a key that would overwrite a method or property of the config class."""
    own = inspect.getattr_static(kind, key, None)
    fixed = isinstance(own, property) and own.fset is None
    if key.startswith("__") or fixed or callable(own) or isinstance(own, classmethod):
        problem = "is the config class's own"
        raise InputError(problem, "remove the key", field=f"model.config.{key}", value=value)


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost error, which names the key in strict config classes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{error}".strip().partition("\n")[0].split(" Please request")[0] or type(error).__name__
