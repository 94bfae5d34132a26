"""Notes on a model's config: what is left out, translated or not applied. No torch here."""

from typing import Any

from trainfit.catalog.config_checks import remote_code_keys
from trainfit.catalog.text_model import (
    BUILT_WHOLE,
    LAYER_KEYS,
    LAYERS_ELSEWHERE,
    TextModel,
    text_model,
    translations,
)
from trainfit.spec.recipe import RANDOM, Recipe

QUANTIZED = "quantization_config"
AS_HERE = {"bitsandbytes": {4: "nf4", 8: "int8"}, "fp8": {8: "fp8"}, "fbgemm_fp8": {8: "fp8"}}
"""Method of a ``quantization_config`` and its bits -> the value of ``quantize`` that is the same."""


def config_notes(recipe: Recipe) -> tuple[str, ...]:
    """Return a line for each thing of the model's config that is built otherwise than it is written."""
    config = recipe.model.config
    if not isinstance(config, dict):
        return ()
    found = text_model(config)
    notes = [
        f"model.config.{key} is ignored: the code that it names is never run"
        for key in remote_code_keys(config)
        if not found.written_type
    ]
    if found.written_type:
        here = translations()[found.written_type]["is"]
        notes.append(
            f"model_type {found.written_type} is code of its repository, which is never run: transformers' "
            f"{here}, which has the same layers, is built"
        )
    if found.path or found.left_out:
        notes.append(_of_parts(config, found))
    if config.get("model_type") in BUILT_WHOLE:
        notes.append("its towers of images or sound are built, and get none")
    if not any(found.config.get(key) is not None for key in (*LAYER_KEYS, *LAYERS_ELSEWHERE)):
        kind = found.config["model_type"]
        notes.append(f"the config names no number of layers: transformers' default for {kind} is built")
    for part in (config, found.config):
        if quantized := part.get(QUANTIZED):
            quantized = quantized if isinstance(quantized, dict) else {"quant_method": quantized}
            notes.append(_of_quantization(quantized, found.config, recipe))
            break
    return tuple(notes)


def random_base_note(recipe: Recipe) -> tuple[str, ...]:
    """Return a warning where an adapter would be trained on random weights."""
    if recipe.model.weights != RANDOM or recipe.adapter is None:
        return ()
    base = f"{recipe.base} base" if recipe.base else "base"
    return (
        f"model.weights is random: an adapter ({recipe.adapter.kind}) learns nothing of use on a random "
        f"{base}; to train it, name trained weights: --weights FOLDER",
    )


def _of_parts(config: dict[str, Any], found: TextModel) -> str:
    outer = config.get("model_type") or "multimodal"
    left_out = f"{', '.join(found.left_out)} left out" if found.left_out else "nothing else"
    return (
        f"of this {outer} model the text model ({found.config['model_type']}) alone is built, {left_out}: no "
        "weights of towers, no images or sound; trainfit trace runs a script that has them"
    )


def _of_quantization(quantized: dict[str, Any], config: dict[str, Any], recipe: Recipe) -> str:
    method, bits = str(quantized.get("quant_method") or "unknown method"), _bits(quantized)
    name = f"model.config.{QUANTIZED} ({f'{method}, {bits} bits' if bits else method})"
    if recipe.quantize is not None:
        return f"{name} is not applied: quantize: {recipe.quantize} is"
    note = f"{name} is not applied: weights are built as precision: {recipe.precision} has them"
    here = AS_HERE.get(method, {}).get(bits or 0) or {4: "nf4", 8: "int8"}.get(bits or 0)
    has_experts = any("experts" in key and value for key, value in config.items())
    if here is None or recipe.adapter is not None or has_experts:  # Experts are not quantised here.
        return note
    return (
        f"{note}; --set quantize={here} --set adapter=lora trains an adapter on a frozen base of {bits} bits"
    )


def _bits(config: dict[str, Any]) -> int | None:
    """Return the bits of a weight, where the method or its keys say them."""
    method = str(config.get("quant_method"))
    for key in ("bits", "w_bit", "nbits", "weight_bits"):
        if type(config.get(key)) is int:
            return config[key]
    if config.get("load_in_4bit") or method == "mxfp4" or "nvfp4" in method:
        return 4
    if config.get("load_in_8bit") or "fp8" in method:
        return 8
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and type(weights.get("num_bits")) is int:
            return weights["num_bits"]
    return None
