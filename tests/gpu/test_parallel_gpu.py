"""Data parallel over NCCL, a process a GPU: gradients are the mean of what each rank computes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainfit.bench.harness.processes import Rank, Ranks
from trainfit.parallel import DataParallel

STRATEGIES = ("naive", "flat", "overlapped", "bucketed")


def differences(rank: Rank) -> Iterator[float]:
    """Yield, for each strategy, the largest difference from the mean of the ranks' own gradients."""
    for strategy in STRATEGIES:
        torch.manual_seed(rank.number)
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(rank.device)
        wrapper = DataParallel(module, strategy, bucket_mb=0.04)
        x = torch.randn(8, 64, device=rank.device)
        with wrapper.no_sync():
            wrapper(x).square().sum().backward()
        expected = []
        for parameter in module.parameters():
            assert parameter.grad is not None
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            expected.append(mean / rank.world_size)
            parameter.grad = None
        wrapper(x).square().sum().backward()
        wrapper.wait_for_gradients()
        found = [parameter.grad for parameter in module.parameters()]
        yield max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_strategy_averages_over_two_gpus() -> None:
    with Ranks(2, "cuda", differences) as ranks:
        for strategy in STRATEGIES:
            assert max(ranks.results()) <= 1e-4, strategy
