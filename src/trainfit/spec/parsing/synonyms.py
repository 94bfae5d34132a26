"""Other spellings of a recipe's fields and values.

Short forms (``batch: 4``, ``precision: BF16``) are written out before a recipe is checked, so files merge key
by key and ids do not depend on the form. Names of other tools (synonyms.toml) are answered in the refusal.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import names

LEAST_LIKE = 0.7  # Share of the letters in common (difflib) from which a word is a slip of another
MAIN_KEYS: dict[str, tuple[str, tuple[type, ...]]] = {
    "model": ("config", (str,)),
    "batch": ("micro", (int, float)),
    "optimizer": ("name", (str,)),
    "adapter": ("kind", (str,)),
    "hardware": ("gpu", (str,)),
    "data": ("train", (str,)),
}
"""Field that holds a mapping -> the key that a bare value of these types stands for."""
LORA_KINDS: dict[str, dict[str, bool]] = {
    "qlora": {}, "dora": {"dora": True}, "qdora": {"dora": True}, "rslora": {"rslora": True},
}  # fmt: skip
"""Words for ``adapter.kind`` -> the fields of LoRA that they stand for; q: with a 4-bit base."""
SAME_KEYS = {"use_dora": "dora", "use_rslora": "rslora"}
"""PEFT's names of an adapter's fields, which are taken as well."""
NULLABLE = ("adapter", "quantize")
"""Fields whose word none means null."""


def main_key(field: str, value: Any) -> str | None:
    """Return the key that a bare ``value`` of the field stands for, or None: ``micro`` of ``batch: 4``."""
    key, kinds = MAIN_KEYS.get(field, ("", ()))
    is_bare = isinstance(value, kinds) and not isinstance(value, bool)
    return key if is_bare and not _is_null(field, value) else None


OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw_torch": {"name": "adamw", "implementation": "foreach"},
    "adamw_torch_fused": {"name": "adamw", "implementation": "fused"},
    "adamw_8bit": {"name": "bnb-adamw8bit"},
    "adamw_bnb_8bit": {"name": "bnb-adamw8bit"},
    "paged_adamw_8bit": {"name": "paged-adamw8bit"},
    "paged_adamw_32bit": {"name": "paged-adamw"},
    "adamw_torch_8bit": {"name": "torchao-adamw8bit"},
    "adamw_torch_4bit": {"name": "torchao-adamw4bit"},
}
"""The Trainer's words (``OptimizerNames`` of transformers) for optimizers that recipes have -> the recipe's.

``adamw_torch`` is PyTorch's default on CUDA, which is ``foreach``."""
THOUSANDS = re.compile(r"(\d+)k", re.IGNORECASE)
"""Tokens of a sequence in units of 1,024: ``8k``."""


def written_out(data: dict[str, Any], *, replaces_count: bool = False) -> dict[str, Any]:
    """Return a recipe's ``data`` with every short form of a whole field as its mapping.

    Args:
        replaces_count: a count on the GPU's name (4xH100) replaces hardware.count, which else must agree.
    """
    whole = {field: _field(field, value) for field, value in data.items()}
    batch, adapter, hardware = (whole.get(field) for field in ("batch", "adapter", "hardware"))
    if isinstance(optimizer := whole.get("optimizer"), dict) and isinstance(optimizer.get("name"), str):
        word = optimizer["name"].lower().replace("-", "_")
        known = OPTIMIZERS.get(word, {})
        whole["optimizer"] = {**known, **optimizer, "name": known.get("name", optimizer["name"])}
    if isinstance(batch, dict) and "seq" in batch:
        whole["batch"] = {**batch, "seq": tokens_of(batch["seq"])}
    if isinstance(adapter, dict):
        whole["adapter"] = {SAME_KEYS.get(key, key): value for key, value in adapter.items()}
        if str(adapter.get("kind")).lower() in LORA_KINDS:
            options = LORA_KINDS[adapter["kind"].lower()]
            whole["adapter"] = {**whole["adapter"], "kind": "lora", **options}
            if adapter["kind"].lower().startswith("q"):
                whole["quantize"] = whole.get("quantize") or "nf4"
    if isinstance(hardware, dict):
        whole["hardware"] = _with_count(hardware, replaces_count=replaces_count)
    return whole


def tokens_of(length: Any) -> Any:
    """Return 8192 for ``8k``; anything else as it is."""
    found = THOUSANDS.fullmatch(length.strip()) if isinstance(length, str) else None
    return length if found is None else int(found[1]) * 1024


def _with_count(hardware: dict[str, Any], *, replaces_count: bool) -> dict[str, Any]:
    """Return the mapping of ``hardware`` with the count that stands on the GPU's name in its own key."""
    text = hardware.get("gpu")
    gpu, count = names().counted(text) if isinstance(text, str) else (text, None)
    if count is None:
        return hardware
    if not replaces_count and hardware.get("count", count) != count:
        problem = f"hardware.count is {hardware['count']}"
        raise InputError(problem, "keep one of the two counts", field="hardware.gpu", value=text)
    return {**hardware, "gpu": gpu, "count": count}


def _is_null(field: str, value: Any) -> bool:
    return field in NULLABLE and isinstance(value, str) and value.lower() in ("none", "null")


def _field(field: str, value: Any) -> Any:
    if _is_null(field, value):
        return None
    key = main_key(field, value)
    return value if key is None else {key: value}


def with_exact_choices(kind: type[BaseModel], data: Any) -> Any:
    """Return ``data`` with the schema's spelling of words that differ in case, or in ``_`` for ``-``."""
    if not isinstance(data, dict):
        return data
    changed = dict(data)
    for name, field in kind.model_fields.items():
        value = data.get(name)
        if isinstance(value, str):
            choices = set(_choices(field.annotation))
            folded = value.lower().replace("_", "-")
            changed.update({name: folded} if value not in choices and folded in choices else {})
        elif isinstance(value, dict):
            inner = [one for one in _kinds(field.annotation) if set(value) <= set(one.model_fields)]
            changed[name] = with_exact_choices(inner[0], value) if inner else value
    return changed


def _choices(annotation: Any) -> Iterator[str]:
    """Words that the annotation takes, through unions and Annotated."""
    if get_origin(annotation) is Literal:
        for value in get_args(annotation):
            yield from (value,) if isinstance(value, str) else _choices(value)
        return
    for part in get_args(annotation):
        yield from _choices(part)


def _kinds(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


@functools.cache
def synonyms() -> dict[str, Any]:
    """Return the tables of synonyms.toml: ``verbs``, ``fields``, and ``values`` by field."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def near(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that ``word`` is a slip of, or None: ``bacth`` of ``batch``."""
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=LEAST_LIKE)
    return found[0] if found else None


def field_here(path: str) -> str | None:
    """Return the recipe's name of another tool's key, or None: ``batch_size`` is ``batch.micro``."""
    known = {key: here for here, keys in synonyms()["fields"].items() for key in keys}
    folded = path.lower().replace("-", "_")
    return known.get(folded) or known.get(folded.rpartition(".")[2])


def verb_here(word: str) -> str | None:
    """Return the command here for another tool's, or None: ``estimate`` is ``predict``."""
    known = {other: here for here, others in synonyms()["verbs"].items() for other in others}
    return known.get(word.lower().replace("_", "-"))


def value_here(field: str, value: object) -> str | None:
    """Return the recipe's word for another tool's value of the field, or None."""
    if not isinstance(value, str | bool | int):
        return None
    word = str(value).lower().replace("-", "_").replace(" ", "_")
    return next((here for here, words in synonyms()["values"].get(field, {}).items() if word in words), None)
