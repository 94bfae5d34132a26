"""Masks as tensors, as transformers gives them to SDPA: causal, and within a sliding window of half the sequence.

No kernel of PyTorch's leaves out what such a mask hides, so how wide the window is changes no time.
"""

from typing import Literal

import torch
from torch import Tensor

MaskKind = Literal["none", "boolean", "additive"]
"""none: ``is_causal`` alone; boolean: True where a key is seen, which SDPA turns into an additive mask first; additive: 0 or -inf in the
query's dtype, what the kernel itself is given."""


def mask_of(kind: str, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask [batch, 1, n, n]: a boolean one is expanded over the batch, as transformers does; an additive one is laid out whole, as
    SDPA's conversion leaves it.

    Raises:
        ValueError: ``kind`` is no mask.
    """
    if kind not in ("boolean", "additive"):
        raise ValueError(f"kind = {kind}: must be boolean or additive")
    at = torch.arange(n, device=device)
    behind = at[:, None] - at[None, :]
    seen = ((behind >= 0) & (behind < max(1, n // 2))).expand(batch, 1, n, n)
    if kind == "boolean":
        return seen
    zero, hidden = (torch.tensor(value, dtype=dtype, device=device) for value in (0.0, float("-inf")))
    return torch.where(seen, zero, hidden)
