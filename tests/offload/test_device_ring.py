"""Events that copies into a ring buffer wait for, with streams that record them."""

from typing import Any

import pytest
import torch

from trainfit.offload import device_ring
from trainfit.offload.copies import CopyStream, CopyStreams
from trainfit.offload.device_ring import DeviceRing


class RecordedStream(CopyStream):
    """A stream whose ``waits`` holds, for each copy, the events that it waited for."""

    def __init__(self, name: str):
        self.name = name
        self.waits: list[set[Any]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, *after: Any) -> Any:
        target.copy_(source)
        self.waits.append({event for event in after if event is not None})
        return f"{self.name} {len(self.waits)}"


class RecordedStreams(CopyStreams):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.to_device, self.to_host = RecordedStream("in"), RecordedStream("out")
        self.events = 0

    def now(self) -> Any:
        self.events += 1
        return f"now {self.events}"


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The events that the computation waited for."""
    found: list[Any] = []
    monkeypatch.setattr(device_ring, "wait", lambda event: found.append(event) if event else None)
    return found


def test_a_new_buffer_is_not_written_while_its_memory_is_read(waited: list[Any]):
    """Also the first copy of an entry whose value is on the host from the start, as in a resumed run."""
    copy_streams = RecordedStreams()
    ring = DeviceRing(copy_streams, 2)
    ring.add(0, 64).fill_(7)
    ring.acquire(0, None)
    assert copy_streams.to_device.waits == [{"now 1"}]
    assert waited == ["in 1"]
    assert ring.buffer(0).tolist() == [7] * 64


def test_an_entry_is_copied_in_after_the_previous_one_is_used_and_written_back(waited: list[Any]):
    copy_streams = RecordedStreams()
    ring = DeviceRing(copy_streams, 2)
    for index in range(3):
        ring.add(index, 8).fill_(index)
    ring.acquire(0, 1)
    ring.buffer(0).fill_(9)
    ring.release(0, changed=True)
    assert copy_streams.to_host.waits == [{"now 3"}]  # "now 1" and "now 2" are the buffers'.
    ring.acquire(1, 2)
    # Entry 2 takes the buffer of entry 0, which is copied to the host first.
    assert copy_streams.to_device.waits[-1] == {"out 1"}
    assert ring.host(0).tolist() == [9] * 8
    ring.release(1, changed=False)
    ring.acquire(2, 1)
    ring.release(2, changed=True)
    ring.acquire(0, None)
    # The buffer's previous entry is written back, and its own value is on the host.
    assert copy_streams.to_device.waits[-1] == {"out 2", "out 1"}
    assert waited[-1] == f"in {len(copy_streams.to_device.waits)}"
