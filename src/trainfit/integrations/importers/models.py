"""Find the model that a configuration names: a folder, a name of the catalog or the Hub, or a near name."""

import re
from pathlib import Path
from typing import NamedTuple

from trainfit.catalog.hub import HUB_NAME, cached_config
from trainfit.catalog.load import model_names, names_like
from trainfit.catalog.names import find_model
from trainfit.spec.errors import InputError

FORMATS = re.compile(
    r"(-|_)(bnb-4bit|unsloth-bnb-4bit|4bit|fp16|bf16|f16|hf|instruct|chat|base|it|pt|sharded|dequantized)$"
)
"""Endings of a repository's name that change no shape of the model."""
TUNED = re.compile(r"-(instruct|chat|base|thinking|reasoning)(?=-|$)(-[0-9]{4}$)?")
"""Marks of a model's tuning, and the date after it, which change no shape either."""
QUANTIZED = re.compile(r"(?i)(gptq|awq|aqlm|fp8|int4|int8|nvfp4|mxfp4|w4a16|exl2|gguf)")
SAME_SHAPE = {
    "qwen2-0.5b": "qwen2.5-0.5b", "qwen2-1.5b": "qwen2.5-1.5b", "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b", "mistral-7b": "mistral-7b-v0.1", "mistral-7b-v0.2": "mistral-7b-v0.1",
    "phi3-mini": "phi-3-mini-4k", "phi4-14b": "phi-4",
}  # fmt: skip
"""Models that have the shape of one in the catalog."""
REMEDY = "name it with --model: a catalog name (trainfit models) or the path of its config.json"


class FoundModel(NamedTuple):
    """A model as a recipe's ``model.config``, and a note where it is not the very name."""

    config: str
    note: str = ""


def find(text: str, folder: Path) -> FoundModel | None:
    """Return the model that ``text`` names; None: it is not known here.

    Args:
        folder: of the file that names it, to which a path may be relative.
    """
    if "\0" in text:
        return None
    for base in (Path(), folder):
        path = base / text
        config = path / "config.json" if path.is_dir() else path
        if config.is_file() and config.suffix == ".json":
            return FoundModel(str(config.absolute()))
    if (name := find_model(text)) is not None:
        return FoundModel(name)
    if (cached := cached_config(text)) is not None:
        return FoundModel(str(cached), "config.json of the Hub's cache")
    return _by_ending(text)


def weights_of(text: str, folder: Path) -> str | None:
    """Return what a recipe's ``model.weights`` is for a folder with safetensors or a name on the Hub."""
    for base in (Path(), folder):
        path = base / text
        if path.is_dir():
            return str(path.absolute()) if any(path.glob("*.safetensors")) else None
    return text if HUB_NAME.fullmatch(text) else None


def unknown(text: str, field: str, file: str) -> InputError:
    """Return the refusal of a model that is not known."""
    near = names_like(text.rpartition("/")[2].lower(), model_names())
    remedy = f"{REMEDY}; near names: {', '.join(near)}" if near else REMEDY
    problem = "not in the catalog, and no folder with a config.json"
    return InputError(problem, remedy, field=field, value=text, file=file)


def _by_ending(text: str) -> FoundModel | None:
    """Return the model of the repository's name without its owner and the endings of its format."""
    name = text.rstrip("/").rpartition("/")[2]
    if QUANTIZED.search(name):
        return None
    plain = TUNED.sub("", name.lower())
    tried = [name, plain] if plain != name.lower() else [name]
    while (shorter := FORMATS.sub("", tried[-1].lower())) != tried[-1].lower():
        tried.append(shorter)
    for one in tried:
        if (found := find_model(SAME_SHAPE.get(one.lower(), one))) is not None:
            return FoundModel(found, f"by its name; {text} was not read")
    return None


def by_letters(text: str) -> str | None:
    """Return the catalog's model whose name has the same letters and digits: ``llama3_2_1b``."""

    def letters(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    spelled = {letters(name): name for name in (*SAME_SHAPE, *model_names())}
    found = spelled.get(letters(text))
    return None if found is None else SAME_SHAPE.get(found, found)
