"""A loss scaler for weights, and so gradients, in fp16."""

import torch
from torch import Tensor


class HalfGradScaler(torch.amp.GradScaler):  # pyright: ignore[reportPrivateImportUsage]
    """``torch.amp.GradScaler`` that also unscales gradients in fp16, which PyTorch's refuses.

    Optimizers that unscale in their own kernel (PyTorch's fused ones and ours with master weights) read the
    scaled gradients and lose nothing. For others, and for clipping, gradients are unscaled in place, where
    those below 6e-8 become 0. ``torch.distributed.fsdp.sharded_grad_scaler`` does the same.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
