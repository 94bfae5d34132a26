"""A run's adapter in PEFT's layout, for transformers' model.

The native decoder's fused projections are several modules of transformers. An adapter of one becomes an
adapter of each: the input matrix A is the same for all, the rows of B are shared out.
"""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainfit.models.adapted import wrap
from trainfit.models.weights.layout import layout
from trainfit.spec.recipe import ModelSpec
from trainfit.training.export.hub_config import hub_config
from trainfit.training.export.safetensors_file import Entry
from trainfit.training.export.trained_model import TrainedWeights, adapted, build_on_meta
from trainfit.training.export.whole_model import PEFT_PREFIX

CONFIG, STEM = "adapter_config.json", "adapter_model"
"""Names of PEFT's files; ``STEM.safetensors`` has the weights."""
VIRTUAL = ("prompt", "prefix", "p-tuning")
"""Kinds of adapters that are inputs, or keys and values, and change no weight."""
SHARED = ("lora_A", "lora_embedding_A")
"""Parts of an adapter that all modules of a fused projection share."""


class Place(NamedTuple):
    """A module or tensor of the run's model, and its rows (None: all)."""

    name: str
    rows: slice | None = None


class PeftLayout:
    """The adapter that a run trained, as PEFT saves it."""

    def __init__(self, weights: TrainedWeights):
        recipe = weights.recipe
        assert recipe.adapter is not None
        self._weights, self._kind = weights, recipe.adapter.kind
        self._modules: dict[str, Place] | None = None
        """transformers' module -> the native decoder's; None: the run's model is transformers'."""
        self._peft: Any = weights.model
        if recipe.model.implementation == "native":
            self._modules = _modules(build_on_meta(recipe))
            self._peft = self._on_transformers()

    def entries(self, dtype: torch.dtype | None) -> dict[str, Entry]:
        """Return the tensors by PEFT's names, in ``dtype``; None: in the checkpoint's."""
        if self._kind in VIRTUAL:
            virtual = self._virtual_tokens()
            return {"prompt_embeddings": Entry(virtual.shape, dtype or virtual.dtype, lambda: virtual)}
        from peft import get_peft_model_state_dict

        state = self._peft.state_dict()
        names = {id(tensor): name for name, tensor in state.items()}
        with warnings.catch_warnings(action="ignore"):  # A remark that it saves embeddings too.
            chosen = get_peft_model_state_dict(self._peft, state_dict=state)
        found: dict[str, Entry] = {}
        for key, tensor in chosen.items():
            place = self._place(names[id(tensor)])
            own = self._weights.form(place.name).dtype
            found[key] = Entry(tensor.shape, dtype or own, partial(self._read, place))
        return found

    def config(self, base: str | None) -> Any:
        """Return PEFT's config of the adapter for inference.

        Args:
            base: the base's weights, as ``model.weights`` names them; None: random ones, which have no name.
        """
        config = copy.deepcopy(self._peft.peft_config["default"])
        if base is not None:
            is_folder = Path(base).is_dir()
            name, _, revision = (base, "", "") if is_folder else base.partition("@")
            config.base_model_name_or_path, config.revision = name, revision or None
        config.inference_mode = True
        return config

    def _read(self, place: Place) -> Tensor:
        whole = self._weights.read(place.name)
        return whole if place.rows is None else whole[place.rows]

    def _place(self, name: str) -> Place:
        """Return the place of a tensor of PEFT's model."""
        if self._modules is None:
            return Place(name)
        inner = module = name.removeprefix(PEFT_PREFIX)
        while module not in self._modules:
            module = module.rpartition(".")[0]
            assert module, f"{name}: no module of a native decoder"
        rest = inner.removeprefix(module)
        ours, rows = self._modules[module]
        is_shared = any(part in rest.split(".") for part in SHARED)
        return Place(f"{PEFT_PREFIX}{ours}{rest}", None if is_shared else rows)

    def _on_transformers(self) -> Any:
        """Return transformers' model on meta with the native decoder's adapter, as PEFT would make it."""
        recipe = self._weights.recipe
        spec = ModelSpec(config=hub_config(recipe.model), implementation="hf")
        as_hf = recipe.model_copy(update={"model": spec, "attention": "sdpa"})
        base = build_on_meta(as_hf)
        if self._kind in VIRTUAL:
            return adapted(as_hf, base)
        config = copy.deepcopy(self._peft.peft_config["default"])
        assert self._modules is not None
        for field, chosen in _adapted_modules(self._peft).items():
            theirs = {name for name, place in self._modules.items() if place.name in chosen}
            setattr(config, field, short_names(base, theirs) or None)
        config.task_type = "CAUSAL_LM"
        return wrap(base, config)

    @torch.no_grad()
    def _virtual_tokens(self) -> Tensor:
        """Return the virtual tokens as PEFT saves them, [t, ...]: embeddings, or keys and values."""
        model: Any = self._weights.model
        if not hasattr(model, "prompt_encoder"):
            return self._prefixes()
        path = "prompt_encoder"
        if isinstance(model.prompt_encoder, nn.ModuleDict):
            path = f"{path}.default"
        encoder: Any = model.get_submodule(path)
        own = {name: self._weights.read(f"{path}.{name}") for name in encoder.state_dict()}
        encoder.load_state_dict(own, assign=True)
        # PEFT saves the result of p-tuning's layers, not the layers.
        return encoder.eval()(torch.arange(encoder.embedding.num_embeddings)[None])[0]

    def _prefixes(self) -> Tensor:
        """Return a native decoder's prefixes as PEFT lays them out, [t, layers * 2 * k * d].

        Each block has [2, t, k, d]: keys and values of t virtual tokens in k heads of d elements.
        """
        names = [name for name in self._weights.model.state_dict() if name.endswith(".attention.prefix")]
        blocks = torch.stack([self._weights.read(name) for name in names])
        return blocks.permute(2, 0, 1, 3, 4).flatten(1)


def _modules(decoder: nn.Module) -> dict[str, Place]:
    """Return transformers' modules with weights, and each one's place in a bare native decoder."""
    state = decoder.state_dict()
    found = {
        stored.name.rpartition(".")[0]: Place(
            stored.parameter.rpartition(".")[0], stored.rows_of(state[stored.parameter])
        )
        for stored in layout(decoder)
    }
    return {"lm_head": Place("lm_head"), **found}  # A tied one is no tensor of the layout.


def _adapted_modules(model: Any) -> dict[str, set[str]]:
    """Return the decoder's modules by the field of PEFT's config that chose them."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    named = [*model.base_model.model.named_modules()]
    kinds = {"target_modules": BaseTunerLayer, "modules_to_save": ModulesToSaveWrapper}
    return {field: {name for name, one in named if isinstance(one, kind)} for field, kind in kinds.items()}


def short_names(model: nn.Module, chosen: set[str]) -> list[str]:
    """Return the last parts of the chosen modules' names if they name no other module, else the names."""
    last: dict[str, set[str]] = {}
    for name, _ in model.named_modules():
        last.setdefault(name.rpartition(".")[2], set()).add(name)
    short = {name.rpartition(".")[2] for name in chosen}
    return sorted(short if set().union(*(last[one] for one in short)) == chosen else chosen)
