"""PyTorch's DistributedDataParallel on a virtual rank: buckets, reductions and the second step's peaks."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainfit.catalog.load import gpu as find_gpu
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import Replay, replay
from trainfit.virtual.cluster.ddp import ddp_on_fakes
from trainfit.virtual.cluster.rank import fake_group, one_rank, rank_observers
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu

N = 1024
MATRIX = 4 * N * N  # Bytes of one of four matrices: 4 MiB
BUCKET_MB = 8
WORKSPACES = 2 * (32 << 20)  # Of the cuBLAS handles of the forward and the backward on an H200


def trained(**options: Any) -> tuple[Ledger, Replay]:
    """Train two steps of four matrices under DDP on one of two ranks."""
    cpu = torch.device("cpu")
    with (
        fake_group({"replicate": 2}),
        virtual_gpu(
            GpuTraits.of(find_gpu("h200")), prefers_cudnn=False, observers=rank_observers()
        ) as virtual,
        one_rank(virtual.tracer),
        ddp_on_fakes(virtual.tracer),
    ):
        with cpu:
            model = nn.Sequential(*[nn.Linear(N, N, bias=False) for _ in range(4)])
        parallel = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, **options)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        virtual.model_is_complete(parallel, [])
        for step in ("first", "steady"):
            virtual.begin(step, "forward")
            loss = parallel(torch.randn(8, N, device=cpu)).square().mean()
            virtual.begin(step, "backward")
            loss.backward()
            virtual.begin(step, "optimizer")
            optimizer.step()
            optimizer.zero_grad()
        ledger = virtual.finish()
    return ledger, replay(ledger, CachingAllocator())


def test_one_bucket_is_reduced_in_the_first_step_and_two_in_the_second() -> None:
    ledger, replayed = trained()
    assert replayed.phases.after_init == 2 * 4 * MATRIX  # the weights and as many bytes of buckets
    found = [(one.name, one.num_bytes) for one in ledger.collectives]
    assert found == [
        ("broadcast", 4 * MATRIX),  # rank 0's parameters
        ("all_reduce", 4 * MATRIX),  # The first backward has one bucket, whatever the bucket size.
        ("all_reduce", 2 * MATRIX),
        ("all_reduce", 2 * MATRIX),
    ]


def test_first_buckets_are_held_until_the_second_backward_reduces() -> None:
    ledger, expected = trained(gradient_as_bucket_view=True)
    later = ledger.with_higher_peak()
    assert later is not None
    replayed = replay(later, CachingAllocator())
    held, rebuilt = 4 * MATRIX, 4 * MATRIX
    forward = replayed.phases.steady.forward
    assert 0 <= forward - (4 * MATRIX + held + rebuilt + WORKSPACES) < 1 << 20  # activations of 8 rows
    assert replayed.peak_phase == "steady.backward"
    assert expected.peak_allocated_bytes == replayed.peak_allocated_bytes - held
    assert later.with_higher_peak() is None
