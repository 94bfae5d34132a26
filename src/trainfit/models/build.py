"""One entry for both implementations: a ModelSpec becomes a module on a device.

Enters: a ModelSpec (catalog name or the mapping of a config.json), the weights' dtype, a device. Leaves: a randomly
initialised causal LM in training mode whose ``forward(input_ids, labels=None)`` gives ``.loss`` (fp32 scalar, labels
shifted inside, -100 ignored) and ``.logits`` ([batch, seq, vocabulary]). Works on ``meta``, on fake CPU tensors
(under FakeTensorMode) and on real devices; nothing is made on the CPU first and moved.
"""

import torch
from torch import nn

from trainfit.catalog.load import model_config
from trainfit.spec.recipe import ModelSpec


def build_model(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str, attention: str = "sdpa"
) -> nn.Module:
    """The model of ``spec``, its parameters created on ``device`` in ``dtype``.

    Args:
        attention: the recipe's word. ``eager`` writes softmax(QK^T)V out; everything else goes through
            ``F.scaled_dot_product_attention``, whose backend the caller chooses with ``sdpa_kernel``.

    Raises:
        InputError: unknown catalog name, unknown or unfit ``model_type``, or a key its config refuses.
    """
    config = model_config(spec.config)
    if spec.implementation == "native":
        from trainfit.models.native.build import build_native

        return build_native(config, dtype=dtype, device=device, attention=attention)
    from trainfit.models.hf import build_hf

    return build_hf(config, dtype=dtype, device=device, attention=attention)
