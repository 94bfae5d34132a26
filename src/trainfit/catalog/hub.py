"""A model's config.json in this machine's cache of the Hugging Face Hub, as data. Nothing is fetched."""

import re
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import read_config

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A repository's name, ``owner/name``."""


def cached_config(text: str) -> Path | None:
    """Return the path of a repository's config.json in the Hub's cache; None: it is not there."""
    if not HUB_NAME.fullmatch(text):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(text, "config.json")
    except (HFValidationError, OSError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None


def cached_model(text: str) -> dict[str, Any] | None:
    """Return a recipe's ``model`` for a repository in the Hub's cache; None: it is not there.

    Raises:
        InputError: its config.json is too large, or no mapping.
    """
    path = cached_config(text)
    if path is None:
        return None
    config = read_config(path)
    if not isinstance(config, dict):
        remedy = "fetch it again"
        raise InputError("its config.json is no mapping", remedy, field="model.config", value=text)
    return {"config": config, "name": text.partition("/")[2]}


def how_to_fetch(text: str) -> str:
    """Return how a repository's config.json comes into the cache; empty: ``text`` names none."""
    return f"fetch it once: hf download {text} config.json" if HUB_NAME.fullmatch(text) else ""
