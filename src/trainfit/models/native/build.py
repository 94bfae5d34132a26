"""A config.json mapping becomes a NativeDecoder on a device."""

from typing import Any

import torch

from trainfit.kernels.flash_attention.op import register
from trainfit.models.native.decoder import NativeDecoder
from trainfit.models.native.families import native_config


def build_native(
    config: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str, attention: str = "sdpa"
) -> NativeDecoder:
    """The native decoder of ``config``, randomly initialised on ``device`` in ``dtype``, in training mode.

    Raises:
        InputError: a family or a key that native cannot express.
    """
    if attention == "triton":
        register()  # Here, not when it first runs: torch.compile cannot trace it.
    return NativeDecoder(native_config(config), kind=attention, dtype=dtype, device=torch.device(device))
