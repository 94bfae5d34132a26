"""Facts that a step needs from other ranks apart from collectives; a virtual rank supplies its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainfit.parallel.collectives import Group
from trainfit.parallel.peer_memory import PeerMemory


class Cluster:
    """The real ranks. ``assemble`` takes another one for ranks that do not exist."""

    def peer_memory(self, num_bytes: int, device: torch.device) -> PeerMemory:
        """Return memory of this rank that the other ranks of its host can read and write."""
        return PeerMemory(num_bytes, device)

    def read_sizes(self, sizes_2n: Tensor, num_pairs: int) -> list[list[int]]:
        """Return the pairs to and from each rank, ``num_pairs`` of them sent; the host waits for the device.

        Args:
            sizes_2n: int64 [2, ranks]; the pairs of a token and an expert to, and from, each rank.
        """
        sent, received = sizes_2n.tolist()
        assert sum(sent) == num_pairs, "each pair has an expert"
        return [sent, received]

    def optimizer_rank(self, group: Group, bytes_of_rank: list[int]) -> int:
        """Return the rank of the group whose share of the parameters this process updates.

        Args:
            bytes_of_rank: the bytes of the parameters that each rank updates.
        """
        return dist.get_rank(group)

    def averages(self, parameters: list[nn.Parameter]) -> None:
        """Called when the average of gradients has begun, which may be views of a buffer since."""


REAL = Cluster()
