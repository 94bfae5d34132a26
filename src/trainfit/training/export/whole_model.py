"""A run's whole model in the layout of the Hub, with an adapter merged into its weights."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainfit.catalog.load import model_config
from trainfit.models.weights.layout import Stored, layout, tied
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.training.export.safetensors_file import Entry
from trainfit.training.export.trained_model import TrainedWeights, build_on_meta

PEFT_PREFIX = "base_model.model."
SAVED = ".modules_to_save.default"
"""Where PEFT keeps a retrained copy of a module, within the module that wraps it."""


class WholeModel:
    """The tensors of a run's model by their names in files.

    Attributes:
        is_untied: the adapter changed one of two tied weights, so that they are two now.
    """

    def __init__(self, weights: TrainedWeights):
        self._weights = weights
        self._merge = None if weights.recipe.adapter is None else Merge(weights)
        bare = build_on_meta(weights.recipe)
        self.is_untied = self._merge is not None and any(
            self._merge.changes(name) for pair in tied(bare).items() for name in pair
        )
        if self.is_untied:
            bare = build_on_meta(_untied(weights.recipe))
        self._layout = layout(bare)

    def entries(self, dtype: torch.dtype | None) -> dict[str, Entry]:
        """Return the tensors to write, of floating-point ones in ``dtype``; None: in the checkpoint's."""
        found: dict[str, Entry] = {}
        for stored in self._layout:
            own = self._dtype(stored.parameter)
            to = dtype if dtype is not None and own.is_floating_point else own
            found[stored.name] = Entry(torch.Size(stored.shape), to, partial(self._read, stored, to))
        return found

    def _dtype(self, name: str) -> torch.dtype:
        return self._weights.form(name if self._merge is None else self._merge.base_name(name)).dtype

    def _read(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        name = stored.parameter
        whole = self._weights.read(name, dtype) if self._merge is None else self._merge.read(name)
        return stored.of(whole.contiguous())


def _untied(recipe: Recipe) -> Recipe:
    """Return the recipe of a model whose output layer has weights of its own."""
    config = {**model_config(recipe.model.config), "tie_word_embeddings": False}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})


class Merge:
    """The weights of a base with its LoRA, DoRA or retrained modules in them, in fp32 where they changed."""

    def __init__(self, weights: TrainedWeights):
        self._weights = weights
        self._model: Any = weights.model
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def changes(self, name: str) -> bool:
        """Return whether the adapter changes a tensor of the bare model."""
        return self._layer(name) is not None

    def base_name(self, name: str) -> str:
        """Return the name in the run's model of a tensor of the bare one, of a retrained one its copy's."""
        path = self._layer(name)
        if path is None:
            return PEFT_PREFIX + name
        return (
            f"{PEFT_PREFIX}{path}{SAVED if self._is_saved(path) else '.base_layer'}{name.removeprefix(path)}"
        )

    def read(self, name: str) -> Tensor:
        """Return a tensor of the bare model with the adapter in it."""
        path = self._layer(name)
        if path is None or self._is_saved(path):
            return self._weights.read(self.base_name(name))
        if self._last is None or self._last[0] != path:
            self._last = None
            self._last = path, self._merged(path)
        return self._last[1][name.removeprefix(f"{path}.")]

    def _at(self, path: str) -> Any:
        return self._model.get_submodule(PEFT_PREFIX + path)

    def _is_saved(self, path: str) -> bool:
        return hasattr(self._at(path), "modules_to_save")

    def _layer(self, name: str) -> str | None:
        """Return the module that PEFT wraps and that has the tensor; None: no such one."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        parts = name.split(".")
        for end in range(1, len(parts)):
            path = ".".join(parts[:end])
            if isinstance(self._at(path), BaseTunerLayer | ModulesToSaveWrapper):
                return path
        return None

    def _merged(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of one layer after PEFT's own merge, computed in fp32."""
        layer = self._at(path)
        names = list(layer.state_dict())
        own = {name: self._weights.read(f"{PEFT_PREFIX}{path}.{name}").float() for name in names}
        layer.load_state_dict(own, assign=True)
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                layer.merge(safe_merge=True)
        except ValueError as error:
            problem = f"PEFT cannot merge {path}: {str(error).splitlines()[0]}"
            raise InputError(problem, "export the adapter alone, without --merge", field="merge") from error
        merged = layer.get_base_layer().state_dict()
        layer.merged_adapters.clear()
        layer.to("meta")
        return merged
