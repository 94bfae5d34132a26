"""A config.json mapping becomes a NativeDecoder on a device."""

from typing import Any

import torch

from trainfit.models.native.config import NativeConfig
from trainfit.models.native.decoder import NativeDecoder


def build_native(
    config: dict[str, Any], *, dtype: torch.dtype, device: torch.device | str, attention: str = "sdpa"
) -> NativeDecoder:
    """The native decoder of ``config``, randomly initialised on ``device`` in ``dtype``, in training mode.

    Raises:
        InputError: a family or a key that native cannot express.
    """
    return NativeDecoder(
        NativeConfig.from_config(config), eager=attention == "eager", dtype=dtype, device=torch.device(device)
    )
