"""Shards of the native decoder's fused projections, as a checkpoint names their rows.

Tensor parallel gives each rank a share of every part of a fused projection. Rows of a rank follow one another
in its DTensor, but not in the model: of a projection with parts q and k over two ranks, rank 0 has the first
half of q and the first half of k. Checkpoints hold the model's rows, so that any mesh reads them::

    model     q0 q1 q2 q3 k0 k1        rank 0's DTensor  q0 q1 k0   chunks  rows 0 to 1, row 4
                                       rank 1's DTensor  q2 q3 k1   chunks  rows 2 to 3, row 5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

TENSOR = "tensor"
"""The mesh's dimension of tensor parallel."""


class Rows(NamedTuple):
    """Rows of a rank's part of a tensor, and where they begin in the model's tensor."""

    start: int
    stop: int
    whole_start: int


def in_model_order(tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the tensors, fused ones as DTensors whose shards are the model's rows; memory is shared.

    Args:
        tensors: by ``model/NAME``, ``optimizer/NAME/KEY`` or ``reference/NAME``.
        parts: name of a parameter or buffer -> the sizes of its parts.
    """
    return {path: _ordered(tensor, parts.get(_owner(path), ())) for path, tensor in tensors.items()}


def _owner(path: str) -> str:
    kind, _, name = path.partition("/")
    return name.rpartition("/")[0] if kind == "optimizer" else name


def _ordered(tensor: Tensor, parts: Sequence[int]) -> Tensor:
    if not parts or not isinstance(tensor, DTensor) or tensor.shape[0] != sum(parts):
        return tensor
    local = tensor.to_local().detach()
    rows = rows_of(tensor, parts)
    shards = [local[one.start : one.stop] for one in rows]
    offsets = [(one.whole_start, *(0 for _ in local.shape[1:])) for one in rows]
    return DTensor.from_local(
        LocalShardsWrapper(shards, offsets),  # pyright: ignore[reportArgumentType]
        tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def rows_of(tensor: DTensor, parts: Sequence[int]) -> list[Rows]:
    """Return the runs of this rank's rows that follow one another in the model too."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    assert mesh.mesh_dim_names is not None
    at = mesh.mesh_dim_names.index(TENSOR)
    num_ranks, rank = mesh.size(at), coordinate[at]
    # FSDP2 cuts a rank's rows further.
    first, last = 0, tensor.shape[0] // num_ranks
    for axis, placement in enumerate(tensor.placements):
        if axis != at and not placement.is_replicate():
            chunk = -(-(last - first) // mesh.size(axis))
            first, last = (min(last, first + chunk * n) for n in (coordinate[axis], coordinate[axis] + 1))
    assert last - first == tensor.to_local().shape[0]
    found: list[Rows] = []
    before = whole_before = 0
    for part in parts:
        share = part // num_ranks
        start, stop = max(first, before), min(last, before + share)
        if start < stop:
            whole_start = whole_before + rank * share + start - before
            found.append(Rows(start - first, stop - first, whole_start))
        before, whole_before = before + share, whole_before + part
    return found
