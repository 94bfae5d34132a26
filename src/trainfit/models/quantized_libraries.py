"""Frozen 4-bit linear layers in the layouts of bitsandbytes and torchao, multiplied by these libraries' code.

The layouts' tensors are buffers of a ``QuantizedLinear``, so saving, sharding and loading are as for
trainfit's own. The libraries' ``Params4bit`` and ``NF4Tensor`` hold the same tensors as attributes.
"""

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.kernels.quantize import nf4
from trainfit.models.quantized_linear import COMPUTE, QuantizedLinear
from trainfit.spec.errors import InputError
from trainfit.spec.optional import optional
from trainfit.spec.quantize import Quantized
from trainfit.virtual.quiet_imports import quiet_imports

GROUP = 256  # Magnitudes of one scale, in both libraries


@cache
def bitsandbytes() -> Any:
    """Import bitsandbytes."""
    return optional("bitsandbytes", "bitsandbytes", field="quantize.library", value="bitsandbytes")


@cache
def dynamic_map() -> list[float]:
    """Return bitsandbytes' table of 8-bit magnitudes, which it computes; called first outside of traces."""
    return bitsandbytes().functional.create_dynamic_map().tolist()


@cache
def nf4_tensor() -> Any:
    """Import torchao's ``NF4Tensor``."""
    with quiet_imports():
        where = "torchao.quantization"
        module = optional(where, "torchao", field="quantize.library", value="torchao")
        # Where it stood before torchao 0.17
        found = (
            getattr(module, "NF4Tensor", None)
            or importlib.import_module("torchao.dtypes.nf4tensor").NF4Tensor
        )
    return found


def import_library(base: Quantized) -> None:
    """Import the library of a base's layout, if it is not trainfit."""
    if base.library != "trainfit":
        {"bitsandbytes": dynamic_map, "torchao": nf4_tensor}[base.library]()


class BitsandbytesNf4(NamedTuple):
    """What a ``Params4bit`` and its ``QuantState`` hold, of n weights in B blocks."""

    codes: Tensor  # uint8 [ceil(n / 2)]
    absmax: Tensor  # fp32 [B]; uint8 where they are quantised
    code: Tensor  # fp32 [16]
    nested_absmax: Tensor  # fp32 [ceil(B / 256)]; empty where absmax is in fp32, as are the next two
    nested_code: Tensor  # fp32 [256]
    offset: Tensor  # fp32 []


class BitsandbytesLinear(QuantizedLinear):
    """bitsandbytes' ``Linear4bit``: its ``matmul_4bit`` in the compute dtype, also under autocast.

    In the backward, and in the forward of many tokens, the library dequantises the weight for the product.
    """

    def _empty(self, device: torch.device | str) -> BitsandbytesNf4:
        num_blocks = -(-self.num_quantized // self.base.block)
        wide = {"dtype": torch.float32, "device": device}
        double = self.base.double
        return BitsandbytesNf4(
            torch.empty(-(-self.num_quantized // 2), dtype=torch.uint8, device=device),
            torch.empty(num_blocks, dtype=torch.uint8 if double else torch.float32, device=device),
            torch.tensor(nf4.LEVELS, dtype=torch.float32).to(device),
            torch.empty(-(-num_blocks // GROUP) if double else 0, **wide),
            torch.tensor(dynamic_map() if double else [], dtype=torch.float32).to(device),
            torch.empty(() if double else 0, **wide),
        )

    def _quantize(self, weight: Tensor) -> BitsandbytesNf4:
        library = bitsandbytes()
        code, nested = self._part("code"), self._part("nested_code")
        operators = torch.ops.bitsandbytes
        codes, absmax = operators.quantize_4bit.default(weight, self.base.block, "nf4", torch.uint8)
        if not self.base.double:
            empty = nested.new_empty(0)
            return BitsandbytesNf4(codes.view(-1), absmax, code, empty, nested, empty)
        offset = absmax.mean()
        # As ``quantize_4bit`` does, which would take the table of codes from a cache of the process.
        quantize = library.functional.quantize_blockwise
        absmax, state = quantize(absmax - offset, code=nested, blocksize=GROUP)
        return BitsandbytesNf4(codes.view(-1), absmax, code, state.absmax, nested, offset)

    def _state(self) -> Any:
        """Return the library's ``QuantState`` of the buffers."""
        state: Any = bitsandbytes().functional.QuantState
        parts = BitsandbytesNf4(*self._parts())
        options: dict[str, Any] = {"blocksize": self.base.block, "quant_type": "nf4", "shape": self.shape}
        # Of a model loaded in the compute dtype, as scripts do.
        options["dtype"] = COMPUTE[self.base.compute] if self.base.compute else self.compute_dtype
        if self.base.double:
            options["offset"] = parts.offset
            options["state2"] = state(
                absmax=parts.nested_absmax, code=parts.nested_code, blocksize=GROUP, dtype=torch.float32
            )
        return state(absmax=parts.absmax, code=parts.code, **options)

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        if self.base.compute is not None:
            x = x.to(COMPUTE[self.base.compute])
        bias = None if self.bias is None else self.bias.to(x.dtype)
        codes = self._part("codes").view(-1, 1)
        return bitsandbytes().matmul_4bit(x, codes, quant_state=self._state(), bias=bias).to(given)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        weight = bitsandbytes().functional.dequantize_4bit(self._part("codes").view(-1, 1), self._state())
        return weight if dtype is None else weight.to(dtype)


class TorchaoNf4(NamedTuple):
    """What an ``NF4Tensor`` holds, of n weights in B blocks; wide is the original weight's dtype."""

    codes: Tensor  # uint8 [n / 2]: quantized_data
    block_codes: Tensor  # int8 [B]: quantized_scalers
    factors: Tensor  # wide [B / 256]: quantization_factor
    mean: Tensor  # wide []: scaler_mean
    levels: Tensor  # wide [16]: nf4


class TorchaoLinear(QuantizedLinear):
    """A linear layer with torchao's ``NF4Tensor`` as weight, multiplied as its ``linear_nf4`` does."""

    def _empty(self, device: torch.device | str) -> TorchaoNf4:
        nf4_tensor()
        group = GROUP * self.base.block
        if self.num_quantized % group:
            problem = (
                f"torchao's NF4Tensor takes multiples of {group:,} weights, and a layer has "
                f"{self.out_features:,} x {self.in_features:,}"
            )
            remedy = "use another library, or name the layer in quantize.skip_modules"
            raise InputError(problem, remedy, field="quantize.library", value="torchao")
        num_blocks = self.num_quantized // self.base.block
        wide: dict[str, Any] = {"dtype": self.compute_dtype, "device": device}
        return TorchaoNf4(
            torch.empty(self.num_quantized // 2, dtype=torch.uint8, device=device),
            torch.empty(num_blocks, dtype=torch.int8, device=device),
            torch.empty(num_blocks // GROUP, **wide),
            torch.empty((), **wide),
            torch.empty(16, **wide),
        )

    def _quantize(self, weight: Tensor) -> TorchaoNf4:
        made = nf4_tensor().from_tensor(weight, self.base.block, GROUP)
        return TorchaoNf4(
            made.quantized_data, made.quantized_scalers, made.quantization_factor, made.scaler_mean, made.nf4
        )

    def _product(self, x: Tensor) -> Tensor:
        out: Any = _TorchaoProduct.apply(x, self, *self._parts())
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.of_parts(self._parts()).to(dtype or self.compute_dtype)

    def of_parts(self, parts: Any) -> Tensor:
        """Return the weight of the parts, in the original weight's dtype, by torchao's code."""
        kind, one = nf4_tensor(), TorchaoNf4(*parts)
        size = self.out_features, self.in_features
        meta = _meta(kind)(size, (self.in_features, 1), 0, self.compute_dtype, one.codes.device, False)
        made = kind(
            meta, self.base.block, one.block_codes.numel(), GROUP, one.block_codes, one.factors, one.mean,
            one.codes, one.levels,
        )  # fmt: skip
        return made.get_original_weight()


def _meta(kind: Any) -> Any:
    """Return the class of an ``NF4Tensor``'s sizes, which its module holds."""
    return importlib.import_module(kind.__module__).SubclassTensorArgs


class _TorchaoProduct(torch.autograd.Function):
    """torchao's ``LinearNF4``, whose backward dequantises the weight again, on the tensors that it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: TorchaoLinear, *parts: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*parts)
        return F.linear(x, layer.of_parts(parts).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, parts = gradients[0], ctx.saved_tensors  # read once: checkpointing unpacks once
        dx = gradient @ ctx.layer.of_parts(parts).to(gradient.dtype)
        return dx, None, *(None for _ in parts)


CLASSES: dict[str, type[QuantizedLinear]] = {
    "trainfit": QuantizedLinear, "bitsandbytes": BitsandbytesLinear, "torchao": TorchaoLinear,
}  # fmt: skip


def peft_layers() -> dict[type[nn.Module], type[nn.Module]]:
    """Return PEFT's own layers for layouts of a library, by the layer that they adapt."""
    layers: Any = importlib.import_module("peft.tuners.lora.bnb")
    return {BitsandbytesLinear: layers.Linear4bit}
