"""Build a NativeDecoder from a config.json mapping."""

from typing import Any

import torch

from trainfit.kernels.flash_attention.op import register
from trainfit.models.native.decoder import NativeDecoder
from trainfit.models.native.families import native_config


def build_native(
    config: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str, attention: str = "sdpa"
) -> NativeDecoder:
    """Build the native decoder of ``config``, randomly initialised and in training mode."""
    if attention == "triton":
        register()  # torch.compile cannot trace this.
    native = native_config(config)
    return NativeDecoder(native, kind=attention, dtype=dtype, device=torch.device(device))
