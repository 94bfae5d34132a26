"""Observers of a trace, and the rule that nothing of our own is replaced."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainfit.catalog.load import gpu as find_gpu
from trainfit.virtual.cluster.rank import fake_group, one_rank, rank_observers
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu
from trainfit.virtual.trace import exclusive
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.observer import Observer, StreamPools

CPU = torch.device("cpu")
H200 = GpuTraits.of(find_gpu("h200"))


class Seen(Observer):
    """Notes the calls of its hooks."""

    def __init__(self) -> None:
        self.allocations: list[int] = []
        self.forwards: list[str] = []

    def allocated(self, index: int) -> None:
        self.allocations.append(index)

    def forward_begins(self, module: nn.Module) -> None:
        self.forwards.append(f"{type(module).__name__} begins")

    def forward_ended(self) -> None:
        self.forwards.append("ended")


def test_observers_see_each_allocation_and_each_outermost_forward() -> None:
    one, other = Seen(), Seen()
    with virtual_gpu(H200, prefers_cudnn=False, observers=(one, other)) as virtual:
        with CPU:
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            model(torch.ones(2, 4))
        assert one.tracer is virtual.tracer
        num_storages = len(virtual.finish().storages)
    assert num_storages >= 5  # weight, bias, input and two results
    assert one.allocations == list(range(num_storages))
    assert one.forwards == ["Sequential begins", "ended"]
    assert (other.allocations, other.forwards) == (one.allocations, one.forwards)


def test_allocations_have_the_number_of_their_stream() -> None:
    running = "first"
    pools = StreamPools(lambda: running, "communication")
    with virtual_gpu(H200, prefers_cudnn=False, observers=(pools,)) as virtual:
        kept = []
        for running in ("first", "second", "third", "second"):
            kept.append(torch.ones(4, device=CPU))
            assert pools.on_first_stream() is (running == "first")
        storages = virtual.finish().storages
    assert [one.stream for one in storages] == [0, 1, 2, 1]
    assert [one.category == "communication" for one in storages] == [False, True, True, True]


def test_an_all_reduce_of_a_list_is_one_collective() -> None:
    with (
        fake_group({"replicate": 2}),
        virtual_gpu(H200, prefers_cudnn=False, observers=rank_observers()) as virtual,
        one_rank(virtual.tracer),
    ):
        options = dist.AllreduceCoalescedOptions()
        assert dist.group.WORLD is not None
        dist.group.WORLD.allreduce_coalesced([torch.ones(n, device=CPU) for n in (4, 8)], options).wait()
        found = virtual.finish().collectives
    assert [(one.name, one.num_bytes) for one in found] == [("all_reduce", 4 * (4 + 8))]


@pytest.mark.parametrize("owner", [exclusive, Seen(), StreamPools, StreamPools(lambda: 0)])
def test_nothing_of_our_own_is_replaced(owner: Any) -> None:
    name = "exclusive" if owner is exclusive else "allocated"
    if isinstance(owner, Seen):  # A class of the tests is not ours.
        with replaced(owner, name, lambda index: None):
            return
    with pytest.raises(AssertionError, match="observers"), replaced(owner, name, lambda *_: None):
        pass
