"""The weights that a run trained, by the names of the run's own model; quantised ones dequantised."""

from pathlib import Path

import torch
from torch import Tensor, nn

from trainfit.models.build import build_model
from trainfit.models.quantized import replace_linears
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques import registry
from trainfit.techniques.draft import Draft, weight_dtype
from trainfit.training.export.saved_run import SavedRun
from trainfit.training.export.tensors import CheckpointTensors, Form

META = torch.device("meta")


class TrainedWeights:
    """Weights of one checkpoint.

    Attributes:
        model: the run's model on meta, with its adapter, not quantised.
        shared: name -> the name whose tensor it shares.
    """

    def __init__(self, run: SavedRun):
        self.recipe = run.recipe
        self.model = adapted(run.recipe, build_on_meta(run.recipe))
        self.shared = dict(run.state.shared)
        self._tensors = CheckpointTensors(run.checkpoint)
        self._forms = {name: Form(one.shape, one.dtype) for name, one in self.model.state_dict().items()}
        self._last: tuple[str, Tensor] | None = None
        self._check(run.checkpoint)

    def form(self, name: str) -> Form:
        """Return a weight's form; its dtype is the checkpoint's, of quantised ones the model's."""
        name = self.shared.get(name, name)
        stored = self._tensors.forms.get(name)
        return self._forms[name] if stored is None else stored

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight on the CPU; a quantised one in fp32. The last one read stays in memory.

        Args:
            dtype: of the file. For fp32 the optimizer's master weight is read, if it kept one.
        """
        name = self.shared.get(name, name)
        source = self._tensors.master(name) if dtype == torch.float32 else None
        key = source or name
        if self._last is None or self._last[0] != key:
            self._last = None
            is_stored = name in self._tensors.forms
            self._last = key, self._tensors.read(key) if is_stored else self._dequantized(name)
        return self._last[1]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer kept weights in more bits than the model's."""
        return any(self._tensors.master(name) for name in self._forms)

    def _check(self, checkpoint: Path) -> None:
        """Refuse a checkpoint whose weights are not those of the recipe's model."""
        stored = self._tensors.forms
        used: set[str] = set()
        for name, form in self._forms.items():
            source = self.shared.get(name, name)
            if source in stored:
                used.add(source)
                if stored[source].shape != form.shape:
                    shape = tuple(stored[source].shape)
                    raise _unlike(checkpoint, name, f"{shape}, the model has {tuple(form.shape)}")
            elif parts := self._parts(source):
                used |= set(parts)
            else:
                raise _unlike(checkpoint, name, "not in the checkpoint")
        if more := sorted(set(stored) - used):
            raise _unlike(checkpoint, more[0], "not in the model")

    def _parts(self, name: str) -> list[str]:
        """Return the names of a quantised weight's parts; none: it is not quantised."""
        layer, stored = name.removesuffix(".weight"), self._tensors.forms
        if self.recipe.base is None or f"{layer}.codes" not in stored:
            return []
        return [one for one in stored if one.rpartition(".")[0] == layer and not one.endswith(".bias")]

    def _dequantized(self, name: str) -> Tensor:
        holder = nn.Module()
        holder.layer = self.model.get_submodule(name.rpartition(".")[0])
        is_transposed = type(holder.layer).__name__ == "Conv1D"
        assert self.recipe.base is not None
        (layer,) = replace_linears([holder], self.recipe.base).values()
        buffers = dict(layer.to_empty(device="cpu").named_buffers())
        for part in self._parts(name):
            memory, stored = buffers[part.rpartition(".")[2]], self._tensors.read(part)
            # Sharded codes have another dtype than whole ones.
            memory.copy_(stored if stored.dtype == memory.dtype else stored.view(memory.dtype))
        weight = layer.dequantize(torch.float32)
        return weight.t() if is_transposed else weight


def build_on_meta(recipe: Recipe) -> nn.Module:
    """Return the recipe's model on meta, not quantised and without an adapter."""
    return build_model(recipe.model, dtype=weight_dtype(recipe), device=META).train()


def adapted(recipe: Recipe, model: nn.Module) -> nn.Module:
    """Return the model with the recipe's adapter, on meta."""
    draft = Draft(model, META, _not_compiled)
    for technique in registry.applied(recipe):
        if "adapter" in technique.fields:
            technique.apply(recipe, draft)
    return draft.model


def _not_compiled(module: nn.Module) -> None:
    """Leave a module as it is."""


def _unlike(checkpoint: Path, name: str, problem: str) -> InputError:
    remedy = "export with the version of trainfit that trained it"
    return InputError(f"checkpoint and model do not fit: {problem}", remedy, field=name, file=str(checkpoint))
