"""Check, before a run, that the weights that a recipe names fit its model; only headers are read."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from trainfit.catalog.load import model_config
from trainfit.models.weights.adapter import check_adapter
from trainfit.models.weights.folder import adapter_base, located, open_folder, own_config
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe

NOT_COMPARED = frozenset(
    """
    _name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id initializer_range
    pad_token_id quantization_config torch_dtype transformers_version use_cache
    """.split()
)
"""Keys of a config.json that do not change what the weights compute."""
KEYS_SHOWN = 3


def check_weights(recipe: Recipe, *, fetch: bool) -> tuple[str, ...]:
    """Return a line for each thing about ``model.weights`` to know before a run.

    Args:
        fetch: fetch a repository that is not cached; False: it is not checked.

    Raises:
        InputError: no such folder or repository, or its tensors are not those of the model.
    """
    named = recipe.model.weights
    path = located(named, fetch=fetch)
    if path is not None and (base := adapter_base(path)) is not None:
        check_adapter(path, recipe)
        named, path = base, located(base, fetch=fetch)
    if path is None:
        unread = f"model.weights: {named} is not in the local cache"
        return (f"{unread}, so its files are not checked; train fetches them",)
    folder = open_folder(path, named)  # Refuses an adapter of an adapter.
    import torch

    from trainfit.models.build import build_model
    from trainfit.models.weights.match import matched

    matched(build_model(recipe.model, dtype=torch.float32, device="meta"), folder)
    return _other_config(recipe, path)


def _other_config(recipe: Recipe, path: Path) -> tuple[str, ...]:
    """Return a note where the weights' own config.json computes something else."""
    own: dict[str, Any] = {}
    with suppress(InputError):  # Of a model that is code of its repository
        own = model_config(own_config(path))
    given = model_config(recipe.model.config)
    differing = [
        f"{key} {own[key]} (the recipe: {given[key]})"
        for key in own
        if key in given and key not in NOT_COMPARED and own[key] != given[key]
    ]
    if not differing:
        return ()
    more = f" and {len(differing) - KEYS_SHOWN} more keys" if len(differing) > KEYS_SHOWN else ""
    shown = ", ".join(differing[:KEYS_SHOWN])
    return (f"model.weights were saved with another config than the recipe's model: {shown}{more}",)
