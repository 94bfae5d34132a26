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

from trainfit.catalog.config_checks import REMOTE_CODE_KEYS, WIDTH_KEYS, remote_code_keys
from trainfit.catalog.text_model import LAYER_KEYS, LAYERS_ELSEWHERE
from trainfit.models.deferred_init import is_deferred
from trainfit.models.few_blocks import outlined
from trainfit.models.hf_attention import NAME, refuse_config, register_attention
from trainfit.models.hf_text import text_class
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import FLOAT_TAG
from trainfit.virtual.quiet_imports import quiet_imports
from trainfit.virtual.trace.exclusive import replaced

NOT_THE_ARCHITECTURE = (
    *REMOTE_CODE_KEYS, "architectures", "dtype", "torch_dtype", "quantization_config", "transformers_version",
)  # fmt: skip
"""Keys of a config.json about code, storage or versions; the recipe has precision and quantisation."""

LOSS_SET = "_trainfit_set_loss_type"  # Attribute of a model whose loss_type was set here
IMPLEMENTATIONS = {"eager": "eager", "triton": NAME}
"""transformers' names of the recipe's attention values; the others are backends of SDPA."""

NOT_CAUSAL = "each token also sees the ones after it, so it has no next token to learn"
OTHER_MODEL = "name a causal language model, or trace a script that trains this one (trainfit trace)"
BAD_CONFIG = (
    ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, AssertionError, IndexError,
    OverflowError,
)  # fmt: skip
"""Exceptions of transformers' and PyTorch's constructors on inconsistent values."""


def build_hf(
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str = "sdpa",
    is_random: bool = True,
) -> nn.Module:
    """Build the transformers model of ``config``, in training mode.

    Its weights are random, or as allocated where they are read later (``is_random`` False).
    With ``attention: sdpa`` transformers chooses SDPA, or eager for families that SDPA cannot express (Bloom,
    Gemma 2), for which a named backend is refused.
    """
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if config.get("is_causal") is False:
        raise InputError(NOT_CAUSAL, OTHER_MODEL, field="model.config.is_causal", value=False)
    hf_config = hf_config_from(config)
    model_class = causal_model_class(hf_config)
    from_config: Any = model_class._from_config  # Of a class that transformers' factory does not know
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        from_config = AutoModelForCausalLM.from_config
    chosen = {} if attention == "sdpa" else {"attn_implementation": IMPLEMENTATIONS.get(attention, "sdpa")}
    if attention == "triton":
        register_attention()
        refuse_config(hf_config)
    try:
        num_layers = int(getattr(hf_config, "num_hidden_layers", 0) or 0)
        with (
            _initialised_on_meta() if is_deferred() else nullcontext(),
            nullcontext() if is_random else no_init_weights(),
            outlined(_block_class(model_class), num_layers),
            torch.device(device),
        ):
            model = from_config(hf_config, dtype=dtype, **chosen)
    except ImportError as error:
        missing = f"{error}".strip().partition("\n")[0]
        raise _wrong_type(config.get("model_type"), missing, "install that library") from error
    except BAD_CONFIG as error:
        problem = f"transformers cannot build it as a causal language model: {_cause(error)}"
        remedy = "correct the config, or name a causal language model"
        if "attention implementation" in str(error):
            remedy = "use attention: sdpa or eager"
        raise _wrong_type(config.get("model_type"), problem, remedy) from error
    if not is_random:
        model.tie_weights()  # A part of the initialisation, which was left out.
    if getattr(model, "loss_type", None) is None:
        # transformers falls back on this loss as well (GPT2LMHeadModel), with a warning.
        model.loss_type = "ForCausalLM"
        setattr(model, LOSS_SET, True)
    return model.train()


def causal_model_class(hf_config: Any) -> type[Any]:
    """Return transformers' causal language model of a config; imports its module.

    The import is here, outside the device in force: a tensor that a module creates would stay on that.

    Raises:
        InputError: transformers has none.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = hf_config.model_type
    if getattr(hf_config, "is_encoder_decoder", False):
        problem = "an encoder-decoder, which is more than a causal language model"
        raise _wrong_type(kind, problem, OTHER_MODEL)
    # BERT-like types, whose tokens attend to later ones unless is_decoder is set.
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(hf_config, "is_decoder", None) is False:
        raise _wrong_type(kind, f"an encoder: {NOT_CAUSAL}", OTHER_MODEL)
    with quiet_imports():  # Both import the model's module.
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None) or text_class(type(hf_config))
    if found is None:
        problem = "transformers has no causal language model of this type"
        raise _wrong_type(kind, problem, OTHER_MODEL)
    return found


def _block_class(model_class: type[Any]) -> type[nn.Module] | None:
    """Return the class of a model's decoder blocks; None: not exactly one."""
    names = getattr(model_class, "_no_split_modules", None) or ()
    found = [getattr(sys.modules[model_class.__module__], name, None) for name in names]
    blocks = [one for one in found if isinstance(one, type) and issubclass(one, nn.Module)]
    return blocks[0] if len(blocks) == 1 else None


def _initialised_on_meta() -> AbstractContextManager[None]:
    """Let transformers call its initialisation on meta, where it is recorded."""
    from transformers import modeling_utils

    return replaced(modeling_utils, "get_torch_context_manager_or_global_device", lambda: None)


def sets_loss(model: nn.Module) -> bool:
    """Return whether ``build_hf`` set the loss, because the model's class names none."""
    return any(getattr(module, LOSS_SET, False) for module in model.modules())


def _wrong_type(model_type: Any, problem: str, remedy: str) -> InputError:
    return InputError(problem, remedy, field="model.config.model_type", value=model_type)


def hf_config_from(config: dict[str, Any]) -> Any:
    """Return the transformers config object of a text model's mapping, with the key-value cache disabled.

    Raises:
        InputError: transformers has no such type, refuses the config, or would build other sizes than stated.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise _unknown_type(config)
    keys = {key: value for key, value in config.items() if key not in (*NOT_THE_ARCHITECTURE, "model_type")}
    keys = _with_constants(keys)  # A copy: the config classes complete nested mappings in place.
    kind = CONFIG_MAPPING[model_type]
    for key in keys:
        _refuse_method(kind, key, keys[key])
    hf_config = _constructed(kind, keys)
    _refuse_other_sizes(config, hf_config)
    hf_config.use_cache = False
    return hf_config


def _constructed(kind: Any, keys: dict[str, Any]) -> Any:
    """Return an instance of the config class; a key that the class derives must agree with that."""
    from huggingface_hub.errors import StrictDataclassError

    derived = [key for key in keys if _is_derived(kind, key)]
    given = {**keys}
    for without in ((), derived) if derived else ((),):
        given = {key: value for key, value in keys.items() if key not in without}
        try:
            found = kind(**given)
            break
        except (*BAD_CONFIG, StrictDataclassError) as error:
            if without == derived or not (derived and isinstance(error, AttributeError)):
                problem = f"transformers refuses this {kind.model_type} config: {_cause(error)}"
                raise InputError(problem, "correct that key", field="model.config") from error
    for key in derived:
        value = getattr(found, key)
        if key not in given and value != keys[key]:
            problem = f"transformers derives it from other keys, as {value!r}"
            raise InputError(problem, "correct one of them", field=f"model.config.{key}", value=keys[key])
    return found


def _unknown_type(config: dict[str, Any]) -> InputError:
    """Return the refusal of a model type that transformers lacks; a remedy that was tried, if one holds."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    kinds = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == named]
    for kind in sorted(kinds, key=len):  # Some types share a class with the one that it is named after.
        if _builds_as_stated({**config, "model_type": kind}):
            remedy = f"write model_type: {kind}, whose {named} its architectures name"
            return _wrong_type(model_type, "unknown to transformers", remedy)
    if remote_code_keys(config):
        problem = (
            "code of its repository, which is never run, and no type of transformers is known to be the same"
        )
        return _wrong_type(model_type, problem, OTHER_MODEL)
    near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3, cutoff=0.75)
    remedy = f"did you mean {', '.join(near)}?" if near else "use a model_type of transformers, such as llama"
    return _wrong_type(model_type or "(none)", "unknown to transformers", remedy)


def _builds_as_stated(config: dict[str, Any]) -> bool:
    """Return whether transformers builds a config with the sizes that it states, and states some."""
    try:
        hf_config_from(config)
    except InputError:
        return False
    return any(type(config.get(key)) is int for key in LAYER_KEYS)


STATED = {"num_hidden_layers": LAYER_KEYS, "hidden_size": WIDTH_KEYS, "vocab_size": ("vocab_size",)}
"""Attribute of transformers' config classes -> keys by which a config.json may state it."""


def _refuse_other_sizes(config: dict[str, Any], hf_config: Any) -> None:
    """Refuse a config whose type ignores a size that it states, and takes another."""
    own = set(getattr(hf_config, "__dataclass_fields__", ()))
    for attribute, names in STATED.items():
        stated = {key: config[key] for key in names if type(config.get(key)) is int}
        built = getattr(hf_config, attribute, None)
        if not stated or type(built) is not int or built in stated.values():
            continue
        if not stated.keys() - own:
            continue  # LongCat's num_layers are pairs of num_hidden_layers
        key, value = next(iter(stated.items()))
        problem = f"transformers' {hf_config.model_type} would be built with {built:,}"
        deciding = [name for name in LAYERS_ELSEWHERE if attribute in LAYER_KEYS and name in config]
        remedy = f"correct it, or {', '.join(deciding)}" if deciding else f"write {attribute}"
        if key == attribute and not deciding:
            remedy = "add the keys by which this type decides it, such as layer_types"
        raise InputError(problem, remedy, field=f"model.config.{key}", value=value)


def _with_constants(value: Any) -> Any:
    """Return a copy in which numbers that JSON lacks stand in place of their tags."""
    if isinstance(value, dict):
        text = value.get(FLOAT_TAG)
        if len(value) == 1 and text in ("Infinity", "-Infinity"):
            return float(text)
        return {key: _with_constants(one) for key, one in value.items()}
    return [_with_constants(one) for one in value] if isinstance(value, list) else value


def _is_derived(kind: type, key: str) -> bool:
    """Return whether a key is a property of the config class that cannot be set."""
    own = inspect.getattr_static(kind, key, None)
    return isinstance(own, property) and own.fset is None


def _refuse_method(kind: type, key: str, value: Any) -> None:
    """Refuse a key that would overwrite a method of the config class."""
    own = inspect.getattr_static(kind, key, None)
    if key.startswith("__") or (callable(own) and not isinstance(own, type)) or isinstance(own, classmethod):
        problem = "is the name of a method of transformers' config class, and no size"
        raise InputError(problem, "remove the key", field=f"model.config.{key}", value=value)


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost error, which names the key in strict config classes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{error}".strip().partition("\n")[0].split(" Please request")[0] or type(error).__name__
