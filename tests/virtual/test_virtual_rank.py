"""A virtual rank leaves nothing behind for the real ranks of its process."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rank_processes import Ranks
from trainfit.catalog.load import gpu as find_gpu
from trainfit.virtual.cluster.rank import fake_group, one_rank, rank_observers
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu


def doubled(mesh: DeviceMesh) -> Any:
    """Return twice a sharded tensor, with the mesh that DTensor's rule for the product names."""
    return DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False) * 2


def place_of_result() -> Any:
    """Return this rank's coordinate in the mesh of an operation's result: which shard of it a rank saves."""
    return doubled(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))).device_mesh.get_coordinate()


def test_a_real_rank_is_not_taken_for_rank_0_after_a_virtual_one() -> None:
    with (
        fake_group({"shard": 2}) as mesh,
        virtual_gpu(
            GpuTraits.of(find_gpu("h200")), prefers_cudnn=False, observers=rank_observers()
        ) as virtual,
        one_rank(virtual.tracer),
    ):
        doubled(mesh)
    with Ranks(2) as ranks:  # Forked: they have what DTensor cached here.
        assert [list(place) for place in ranks.run(place_of_result)] == [[0], [1]]
