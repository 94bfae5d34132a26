"""Tokens and FLOPs of a model's training forwards, counted by their shapes from a hook on the model.

A forward counts while gradients are on and the model is in training mode; evaluation and generation do not.
FLOPs are of the closed form of the model's type (flops/closed_form.py), each batch at its own length.
Shapes: b sequences, s tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from trainfit.flops.closed_form import Recomputed, StepFlops, Trained, product_step_flops
from trainfit.spec.errors import InputError
from trainfit.spec.result import Estimate

LINEAR_CONVENTION = (
    "6 FLOPs a weight of the linear layers, 4 where it is frozen; attention's scores not counted"
)


@dataclass(frozen=True)
class Done:
    """Work of one step of this process. ``model_flops`` and ``hardware_flops``: None where not known."""

    tokens: int
    model_flops: float | None
    hardware_flops: float | None


class Work:
    """Counts what a model's training forwards compute; ``take`` returns the count and begins the next.

    Args:
        model: a module, or what DDP, FSDP, torch.compile or PEFT made of it.
        flops_per_token: forward and backward of one token, in place of the closed form.
        estimate: a prediction whose FLOPs a token serve a model that the closed form does not cover.
        seq: tokens a sequence, where ``take`` is given tokens that no forward showed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        flops_per_token: float | None = None,
        estimate: Estimate | None = None,
        seq: int | None = None,
    ):
        self._model, self._base, self._seq = model, unwrapped(model), seq
        self._given, self._estimate = flops_per_token, estimate
        self._config = _config(self._base)
        self._shapes: Counter[tuple[int, int]] = Counter()
        self._flops: dict[int, StepFlops | None] = {}
        self._has_mode = False  # Whether a forward in training mode ran: those in eval mode then evaluate.
        self.convention = ""
        """What the FLOPs count; empty: not known yet."""
        self.dtype: str | None = None
        """Name of the peak that the products have (bf16, tf32, ...); None until a forward ran."""

    def attach(self) -> torch.utils.hooks.RemovableHandle:
        """Register the hook that counts; the caller removes it."""
        return self._model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def take(self, tokens: int | None = None) -> Done:
        """Return the work since the last call.

        Args:
            tokens: of this process in the step; None: those that the forwards showed.
        """
        shapes, self._shapes = self._shapes, Counter()
        counted = sum(count * b * s for (b, s), count in shapes.items())
        if not counted and tokens is not None and self._seq is not None and tokens % self._seq == 0:
            shapes[tokens // self._seq, self._seq] = 1
        # Tokens that are fewer than those counted leave padding out: the FLOPs are of what was computed.
        flops = self._flops_of(shapes) if shapes else self._flops_per_token(tokens or 0)
        return Done(counted if tokens is None else tokens, *flops)

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Inside a compiled region Python's side effects would belong to the graph.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        # from_pretrained returns a model in eval mode, and many loops train it so.
        self._has_mode |= module.training
        if self._has_mode and not module.training:
            return
        self.dtype = self.dtype or peak_dtype(self._base)
        shape = _batch_shape([*kwargs.values(), *args], kwargs)
        if shape is not None:
            self._shapes[shape] += 1

    def _flops_of(self, shapes: Mapping[tuple[int, int], int]) -> tuple[float | None, float | None]:
        tokens = sum(count * b * s for (b, s), count in shapes.items())
        if self._given is not None or self._config is None:
            return self._flops_per_token(tokens)
        model = hardware = 0.0
        for (b, s), count in shapes.items():
            found = self._of_sequence(s)
            if found is None:
                return self._flops_per_token(tokens)
            model += count * b * found.model_flops
            hardware += count * b * found.hardware_flops
        return model, hardware

    def _of_sequence(self, s: int) -> StepFlops | None:
        """Return the FLOPs of one sequence by the closed form; None for a type that it does not cover."""
        if s not in self._flops:
            assert self._config is not None
            parameters = list(self._base.parameters())
            trained = {p.requires_grad for p in parameters}
            adapter = _is_lora(self._base)
            try:
                if (trained != {True} and not adapter) or (adapter and _trains_more_than_lora(self._base)):
                    raise InputError("some weights are frozen", "give flops_per_token")
                kind: Trained = "adapter" if adapter else "all"
                recomputed: Recomputed = "full" if recomputes(self._base) else "none"
                self._flops[s] = product_step_flops(
                    self._config, batch=1, seq=s, trained=kind, recomputed=recomputed,
                    adapter_params=sum(p.numel() for p in parameters if p.requires_grad) if adapter else 0,
                )  # fmt: skip
            except InputError:
                self._flops[s] = None
        found = self._flops[s]
        if found is not None:
            self.convention = found.convention
        return found

    def _flops_per_token(self, tokens: int) -> tuple[float | None, float | None]:
        """Return the FLOPs of tokens whose sequences are not known, or are not covered by the closed form."""
        if not tokens:
            return None, None
        if self._given is not None:
            self.convention = f"{self._given:,.0f} FLOPs a token, as given"
            return self._given * tokens, None
        if self._estimate is not None and self._estimate.tokens_per_s and self._estimate.step_s:
            self.convention = f"as predicted: {self._estimate.flops_convention}"
            share = tokens / (self._estimate.tokens_per_s * self._estimate.step_s) * self._estimate.num_gpus
            return share * self._estimate.model_flops, share * self._estimate.hardware_flops
        if self._seq is not None and self._config is not None and (found := self._of_sequence(self._seq)):
            share = tokens / self._seq
            return share * found.model_flops, share * found.hardware_flops
        trained, frozen = linear_weights(self._base)
        if not trained + frozen:
            return None, None
        self.convention = LINEAR_CONVENTION
        model = float(6 * trained + 4 * frozen) * tokens
        return model, model + (2.0 * (trained + frozen) * tokens if recomputes(self._base) else 0.0)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP's and FSDP1's wrappers; torch.compile's and PEFT's pass attributes on."""
    while type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        inner = model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def recomputes(model: nn.Module) -> bool:
    """Return whether the blocks of a Hugging Face model run again in the backward."""
    # transformers 5.23 calls it so; before, gradient checkpointing.
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(model, name)), False))


def _is_lora(model: nn.Module) -> bool:
    """Return whether the model is PEFT's, and every adapter of it LoRA."""
    kinds = {str(getattr(one, "peft_type", "")) for one in dict(getattr(model, "peft_config", {})).values()}
    return bool(kinds) and all(kind.endswith("LORA") for kind in kinds)


def _trains_more_than_lora(model: nn.Module) -> bool:
    """Return whether PEFT's model trains more than LoRA's products: magnitudes, embeddings, whole modules."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return not all(".lora_A." in name or ".lora_B." in name for name in names)


def linear_weights(model: nn.Module) -> tuple[int, int]:
    """Return the number of trained and of frozen weights of linear layers, a shared one once."""
    seen: set[int] = set()
    trained = frozen = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or weight is None or id(weight) in seen:
            continue
        if name.endswith(".original_module"):  # PEFT computes with its copy, of ``modules_to_save``.
            continue
        seen.add(id(weight))
        number = module.in_features * module.out_features  # A 4-bit weight packs two in one element.
        trained, frozen = (trained + number, frozen) if weight.requires_grad else (trained, frozen + number)
    return trained, frozen


def peak_dtype(model: nn.Module) -> str | None:
    """Return the name of the peak (spec/hardware.py) that the model's products have in a forward now."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = "cpu" if parameter is None else parameter.device.type
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    if torch.is_autocast_enabled(device):
        return names.get(torch.get_autocast_dtype(device))
    largest = max(model.parameters(), key=lambda p: p.numel(), default=None)
    if largest is not None and not largest.is_floating_point():
        return "bf16"  # Quantised weights: the usual dtype of their products.
    found = None if largest is None else names.get(largest.dtype)
    if found == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return found


def _config(model: nn.Module) -> dict[str, Any] | None:
    """Return the config of a Hugging Face model as plain data; None: it has none."""
    config = getattr(model, "config", None)
    if isinstance(config, dict):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    found = to_dict() if callable(to_dict) else None
    return found if isinstance(found, dict) else None


def _batch_shape(values: Iterable[Any], named: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return b and s of a forward's inputs: its ids, else its embedded inputs; None: neither is there."""
    ids, embedded = named.get("input_ids"), named.get("inputs_embeds")
    if ids is None:
        ids = next((x for x in values if _has_dims(x, 2) and not x.is_floating_point()), None)
    if _has_dims(ids, 2):
        return ids.shape[0], ids.shape[1]
    if _has_dims(embedded, 3):
        return embedded.shape[0], embedded.shape[1]
    return None


def _has_dims(value: Any, dims: int) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == dims
