"""Context parallel: each rank holds a share of every sequence's tokens, and attends to the keys of all ranks.

Keys and values are gathered in each layer, as in the training of Llama 3 (arXiv:2407.21783, 3.3.2).
Sequences are cut into 2 n chunks; rank r holds chunks r and 2 n - 1 - r, so that causal attention costs all
ranks alike.

Shapes: b batch, s sequence, n ranks, c = s / (2 n) tokens of a chunk, h heads, k key-value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainfit.kernels.flash_attention.op import attend
from trainfit.models.native.decoder import IGNORED_LABEL
from trainfit.parallel.tensor_parallel import gathered


class SequenceShards:
    """The ranks that share sequences."""

    def __init__(self, mesh: DeviceMesh):
        self.group, self.size = mesh.get_group(), mesh.size()
        self.chunks = mesh.get_local_rank(), 2 * self.size - 1 - mesh.get_local_rank()

    def own(self, x_bs: Tensor) -> Tensor:
        """Return this rank's tokens, [b, s / n]."""
        cut = x_bs.chunk(2 * self.size, dim=1)
        return torch.cat([cut[chunk] for chunk in self.chunks], dim=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None = None) -> Tensor:
        """Return causal attention of this rank's queries [b, h, s / n, d] to the keys of all ranks."""
        assert is_causal, "a plain causal model"
        k, v = self._whole(k, v)
        size = q.shape[2] // 2
        parts = [
            attend(part, *(x[:, :, : (chunk + 1) * size] for x in (k, v)), is_causal=True, scale=scale)
            for part, chunk in zip(q.chunk(2, dim=2), self.chunks, strict=True)
        ]
        return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)

    def _whole(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return the keys and values of the whole sequence, [b, k, s, d] each, by one gather."""
        b, heads, _, d = k.shape
        whole = gathered(torch.stack((k, v)), self.group).view(self.size, 2, b, heads, 2, -1, d)
        ranks = range(self.size)
        order = [*((rank, 0) for rank in ranks), *((rank, 1) for rank in reversed(ranks))]
        return [torch.cat([whole[rank, i, :, :, half] for rank, half in order], dim=2) for i in (0, 1)]

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean next-token loss over all ranks' tokens; its gradient is this rank's, times n.

        The mean of the ranks' gradients, which FSDP2 takes, is therefore that of the whole sequence.
        """
        ids_bs, labels_bs = batch["input_ids"], batch["labels"]
        targets = F.pad(labels_bs[:, 1:], (0, 1), value=IGNORED_LABEL)
        logits = model(input_ids=self.own(ids_bs), position_ids=self.positions(ids_bs)).logits
        own = F.cross_entropy(
            logits.float().flatten(0, 1),
            self.own(targets).flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        return self._of_all(own * self.size / (targets != IGNORED_LABEL).sum())

    def positions(self, ids_bs: Tensor) -> Tensor:
        """Return the positions of this rank's tokens, [1, s / n]."""
        return self.own(torch.arange(ids_bs.shape[1], device=ids_bs.device)[None])

    def mean_loss(
        self, mean: Callable[[Tensor, Tensor], Tensor], targets_bs: Tensor, expected: Tensor | float
    ) -> Tensor:
        """Return the loss as ``loss`` does, from a mean over this rank's tokens.

        Args:
            mean: takes this rank's targets, and the gradient that its result will receive.
            expected: the gradient that the returned loss will receive.
        """
        own_bs = self.own(targets_bs)
        count, total = ((each != IGNORED_LABEL).sum() for each in (own_bs, targets_bs))
        share = torch.where(count > 0, count * self.size / total, 1.0)
        own = mean(own_bs, share * expected)
        return self._of_all(torch.where(count > 0, own * share, 0.0))  # Without targets the mean is NaN.

    def _of_all(self, own: Tensor) -> Tensor:
        """Return the mean of all ranks' losses, with the gradient of this rank's."""
        mean = own.detach() / self.size
        dist.all_reduce(mean, group=self.group)
        return own + (mean - own.detach())
