"""Make only this rank's chunk of a parameter, of which FSDP2 cuts one chunk per rank and keeps one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param

from trainfit.virtual.trace.exclusive import replaced


class Chunks:
    """The chunks of ``torch.chunk``, then empty ones; each is made when it is read."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int):
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._length
        left = self._tensor.size(self._dim) - start
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, left))


@contextmanager
def own_chunks() -> Iterator[None]:
    """Make only the chunk of this rank; with 1,024 ranks making all takes most of a trace."""
    with replaced(_fsdp_param, "_chunk_with_empty", Chunks):
        yield
