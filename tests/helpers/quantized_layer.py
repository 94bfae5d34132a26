"""A quantised layer for tests, and the kinds there are."""

import torch

from trainfit.models.quantized import QuantizedLinear

KINDS = ("nf4", "int8", "fp8")


def quantized_layer(
    kind: str, num_in: int, num_out: int, bias: bool = False, dtype: torch.dtype = torch.float32
) -> QuantizedLinear:
    """A quantised layer with weights of N(0, 1), and its bias."""
    torch.manual_seed(num_in)
    made = QuantizedLinear(num_in, num_out, bias, kind, dtype, "cpu")
    made.load(torch.randn(num_out, num_in, dtype=dtype), torch.randn(num_out, dtype=dtype) if bias else None)
    return made
