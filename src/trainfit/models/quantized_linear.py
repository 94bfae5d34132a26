"""Frozen linear layers with weights in 4 or 8 bits."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainfit.kernels.quantize import nf4
from trainfit.kernels.quantize import rowwise as rows
from trainfit.models.deferred_init import ReadPart, deferred
from trainfit.spec.quantize import Quantized

ROW_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHARDED = ("codes", "block_codes")
"""Buffers of a quantised layer that FSDP2 shards. The others are under 0.02 bits a weight, or magnitudes in
fp32, which bitsandbytes keeps whole on every rank as well."""
SHARDED_AS = torch.bfloat16
"""Dtype as which FSDP2 holds codes: torch 2.11 makes parameters that could require gradients, so of a
floating dtype, and a mixed-precision policy casts every other one. Bytes are only copied."""
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class QuantizedLinear(nn.Linear):
    """``y = x W^T + b`` with frozen, quantised W, in x's dtype (autocast's under autocast).

    Forward and backward dequantise W for their product each, so nothing of its size is saved. In fp8 the
    forward multiplies with the codes, and the backward with a transposed copy of them.

    Args:
        base: The kind (nf4, int8 or fp8), or also its blocks and the dtype of its products.
        dtype: Dtype of the original weight, which adapters and the frozen bias take.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        base: str | Quantized,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        nn.Module.__init__(self)  # nn.Linear would allocate a full-precision weight.
        self.base = base = Quantized.of(base)
        self.in_features, self.out_features, self.kind = in_features, out_features, base.kind
        self.compute_dtype = dtype  # The name that PEFT reads.
        self.emulates_fp8 = False  # Whether the device has no fp8 products
        own_bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if own_bias is None else nn.Parameter(own_bias, requires_grad=False)
        parts = self._empty(device)
        self._fields = parts._fields
        self._viewed = dict[str, torch.dtype]()  # Codes that are parameters of another dtype
        for name, part in zip(parts._fields, parts, strict=True):
            self.register_buffer(name, part)

    @torch.no_grad()
    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise a weight ([out, in], on the layer's device) into the layer's memory, and copy the bias."""
        if weight.shape != self.shape:
            raise ValueError(f"weight {list(weight.shape)}: the layer has {self.shape[0]} x {self.shape[1]}")
        if not self._reads_rows_of(weight):
            for memory, part in zip(self._parts(), self._quantize(weight.contiguous()), strict=True):
                if memory is not part:
                    memory.copy_(part)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def _reads_rows_of(self, weight: Tensor) -> bool:
        """Record codes and scales of a weight that a file has as read by rows; return whether it is so.

        A rank of tensor parallel then reads and quantises those rows alone whose outputs it has.
        """
        recorded = deferred() if self.kind in ROW_CODES else None
        source = recorded.source_of(weight) if recorded is not None and weight.is_contiguous() else None
        if recorded is None or source is None:
            return False
        quantized = _QuantizedRows(source, self.in_features, weight.dtype, ROW_CODES[self.kind])
        recorded.read(self.codes, quantized.codes)  # pyright: ignore[reportArgumentType]
        recorded.read(self.scales, quantized.scales)  # pyright: ignore[reportArgumentType]
        recorded.forget([weight])
        return True

    def _empty(self, device: torch.device | str) -> Any:
        """Allocate the tensors of the layout, a named tuple."""
        if self.kind == "nf4":
            nf4.register()
            return nf4.empty_nf4(self.num_quantized, device, self.base.block, double=self.base.double)
        rows.register()
        return rows.empty_rows(*self.shape, ROW_CODES[self.kind], device)

    def _quantize(self, weight: Tensor) -> Any:
        """Return the layout's tensors of a contiguous weight."""
        if self.kind == "nf4":
            return nf4.quantize_nf4(weight, self.base.block, double=self.base.double)
        return rows.quantize_rows(weight, ROW_CODES[self.kind])

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The codes, for code that reads the device of a layer's weight."""
        return self.codes  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def codes_to_parameters(self) -> None:
        """Make the codes frozen parameters, which FSDP2 shards; an odd number of bytes stays a buffer."""
        for name in SHARDED:
            codes = self._buffers.get(name)
            own = codes.to_local() if isinstance(codes, DTensor) else codes
            if own is None or own.dtype == torch.float32 or own.shape[-1] % SHARDED_AS.itemsize:
                continue
            del self._buffers[name]
            self._viewed[name] = own.dtype
            viewed: Tensor = own.view(SHARDED_AS)
            if isinstance(codes, DTensor):
                viewed = DTensor.from_local(viewed, codes.device_mesh, codes.placements, run_check=False)
            self.register_parameter(name, nn.Parameter(viewed, requires_grad=False))

    @property
    def sharded_names(self) -> list[str]:
        """Names of the codes that FSDP2 shards."""
        return [name for name in SHARDED if name in self._fields]

    @property
    def code_parameters(self) -> list[nn.Parameter]:
        """Codes that are parameters."""
        return [self._parameters[name] for name in self._viewed]  # pyright: ignore[reportReturnType]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs; of this rank's part while it computes by a part of the codes."""
        codes = getattr(self, "codes", None)
        if codes is None or self.kind not in ROW_CODES:
            return self.out_features, self.in_features
        return codes.shape[0], codes.shape[1] * codes.element_size()

    @property
    def num_quantized(self) -> int:
        """Number of weights stored as codes."""
        return self.out_features * self.in_features

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The codes: PEFT's DoRA calls ``dequantize`` of layers with this name, which is HQQ's."""
        return self.weight

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantised weight, [out, in], by default in the original weight's dtype."""
        like = torch.empty(0, dtype=dtype or self.compute_dtype, device=self.weight.device)
        return _dequantize(like, self._parts(), self.shape)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        if self.base.compute == "fp8":
            x = x.to(torch.get_autocast_dtype(device)) if autocast else x
            with torch.autocast(device, enabled=False) if autocast else nullcontext():
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return _Fp8Product.apply(x, bias, self.emulates_fp8, *self._parts())  # pyright: ignore
        if self.base.compute is not None:
            with torch.autocast(device, enabled=False) if autocast else nullcontext():
                return self._product(x.to(COMPUTE[self.base.compute])).to(x.dtype)
        if autocast:
            x = x.to(torch.get_autocast_dtype(device))
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, bias, self.shape, *self._parts())  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.base}"

    def _parts(self) -> list[Tensor]:
        return [self._part(name) for name in self._fields]

    def _part(self, name: str) -> Tensor:
        part = getattr(self, name)
        return part.view(self._viewed[name]) if name in self._viewed else part


class _QuantizedRows:
    """Codes and scales of rows of a weight that a file has."""

    def __init__(self, source: ReadPart, num_columns: int, dtype: torch.dtype, code: torch.dtype):
        self._source, self._columns = source, slice(0, num_columns)
        self._dtype, self._code = dtype, code
        self._next: dict[tuple[str, int, int], Tensor] = {}
        """What was computed with what was asked for, and is asked for next."""

    def codes(self, ranges: tuple[slice, ...], device: torch.device) -> Tensor:
        """Return the codes of a range of rows and columns. A row's scale is of all its columns."""
        of_rows, of_columns = ranges
        return self._part("codes", of_rows, device)[:, of_columns]

    def scales(self, ranges: tuple[slice, ...], device: torch.device) -> Tensor:
        """Return the scales of a range of rows."""
        return self._part("scales", ranges[0], device)

    def _part(self, name: str, of_rows: slice, device: torch.device) -> Tensor:
        at = of_rows.start, of_rows.stop
        if (known := self._next.pop((name, *at), None)) is not None:
            return known
        weight = self._source((of_rows, self._columns), device).to(device, self._dtype)
        quantized = rows.quantize_rows(weight, self._code)._asdict()
        found = quantized.pop(name)
        self._next |= {(other, *at): part for other, part in quantized.items()}
        return found


class _Product(torch.autograd.Function):
    """x W^T + b, whose backward dequantises W again. Only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        # (bias, shape, *parts): Dynamo decides by the number of parameters whether a function takes ctx.
        bias, shape, *parts = others
        ctx.shape = shape
        ctx.save_for_backward(*parts)
        return F.linear(x, _dequantize(x, parts, shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, parts = gradients[0], ctx.saved_tensors  # read once: checkpointing unpacks once
        dx = gradient @ _dequantize(gradient, parts, ctx.shape)
        return dx, None, None, *(None for _ in parts)


class _Fp8Product(torch.autograd.Function):
    """x W^T + b of x and W in e4m3. Only x gets a gradient, of which each token is rounded to e4m3 as well.

    The sum over outputs in the backward has W's scales inside, so that the gradient is multiplied by them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        # (bias, emulated, codes, scales)
        bias, emulated, codes, scales = others
        ctx.emulated = emulated
        ctx.save_for_backward(codes, scales)
        rounded = rows.quantize_tokens(x.flatten(0, -2))
        y = rows.fp8_product(rounded, codes, scales, x.dtype, emulated=emulated)
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, (codes, scales) = gradients[0], ctx.saved_tensors
        rounded = rows.quantize_tokens(gradient.flatten(0, -2) * scales)
        transposed = torch.ops.trainfit.transpose_codes(gradient, codes)
        ones = torch.ones_like(scales[:1]).expand(transposed.shape[0]).contiguous()
        dx = rows.fp8_product(rounded, transposed, ones, gradient.dtype, emulated=ctx.emulated, fast=False)
        return dx.view(*gradient.shape[:-1], -1), None, None, None, None


def _dequantize(like: Tensor, parts: Any, shape: tuple[int, int]) -> Tensor:
    """Return the weight in the dtype of ``like``.

    ``like`` is a tensor so that in the backward a compiler does not reuse the forward's result.
    """
    if len(parts) == len(rows.Rows._fields):
        codes, scales = parts
        return torch.ops.trainfit.dequantize_rows(like, codes, scales)
    return torch.ops.trainfit.dequantize_nf4(like, *parts, *shape)
