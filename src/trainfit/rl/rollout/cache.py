"""Cache of keys and values of the sequences that are generated together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.models.native.config import NativeConfig


@dataclass(frozen=True)
class KVCache:
    """Keys and values by layer, one slot a sequence, allocated once.

    Attributes:
        keys, values: [layers, slots, k, positions, d].
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, config: NativeConfig, slots: int, positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Return an empty cache."""
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, positions, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def num_positions(self) -> int:
        return self.keys.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write_prompts(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the first positions of some slots; keys and values are [n, s, k, d], slots int64 [n]."""
        s = keys.shape[1]
        for held, given in ((self.keys, keys), (self.values, values)):
            held[layer, :, :, :s].index_copy_(0, slots, given.transpose(1, 2).to(held.dtype))

    def write_tokens(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one position of every slot; keys and values are [slots, k, d], positions int64 [slots]."""
        slots = torch.arange(self.num_slots, device=positions.device)
        for held, given in ((self.keys, keys), (self.values, values)):
            held[layer][slots, :, positions] = given.to(held.dtype)
