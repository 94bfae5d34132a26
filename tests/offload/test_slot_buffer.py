"""What a copy to a slot waits for: told by copy_streams that note events in place of streams, because a CPU copies at once."""

from typing import Any

import pytest
import torch

from trainfit.offload import slot_buffer
from trainfit.offload.copies import CopyStream, CopyStreams
from trainfit.offload.slot_buffer import SlotBuffer


class NotedLane(CopyStream):
    """A stream of its own: ``waits`` has, for each copy, the events that it waited for."""

    def __init__(self, name: str):
        self.name = name
        self.waits: list[set[Any]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, *after: Any) -> Any:
        target.copy_(source)
        self.waits.append({event for event in after if event is not None})
        return f"{self.name} {len(self.waits)}"


class NotedLanes(CopyStreams):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.to_device, self.to_host = NotedLane("in"), NotedLane("out")
        self.moments = 0

    def now(self) -> Any:
        self.moments += 1
        return f"now {self.moments}"


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events that the computation waited for."""
    found: list[Any] = []
    monkeypatch.setattr(slot_buffer, "wait", lambda event: found.append(event) if event else None)
    return found


def test_a_new_slots_memory_is_not_written_while_somebody_reads_it(waited: list[Any]):
    """A guest whose value is on the host from the start (a resumed run's moments): its first copy waits all the same."""
    copy_streams = NotedLanes()
    ring = SlotBuffer(copy_streams, 2)
    ring.invite(0, 64).fill_(7)
    ring.arrive(0, None)
    assert copy_streams.to_device.waits == [{"now 1"}]
    assert waited == ["in 1"]
    assert ring.room(0).tolist() == [7] * 64


def test_a_guest_comes_after_the_one_before_it_is_used_and_written(waited: list[Any]):
    copy_streams = NotedLanes()
    ring = SlotBuffer(copy_streams, 2)
    for index in range(3):
        ring.invite(index, 8).fill_(index)
    ring.arrive(0, 1)
    ring.room(0).fill_(9)
    ring.leave(0, changed=True)
    assert copy_streams.to_host.waits == [{"now 3"}]  # "now 1" and "now 2" are the slots'.
    ring.arrive(1, 2)
    assert copy_streams.to_device.waits[-1] == {
        "out 1"
    }  # Guest 2 has guest 0's slot, which goes to the host first.
    assert ring.host(0).tolist() == [9] * 8
    ring.leave(1, changed=False)
    ring.arrive(2, 1)
    ring.leave(2, changed=True)
    ring.arrive(0, None)
    assert copy_streams.to_device.waits[-1] == {
        "out 2",
        "out 1",
    }  # Its slot's last guest has left, its own value is there.
    assert waited[-1] == f"in {len(copy_streams.to_device.waits)}"
