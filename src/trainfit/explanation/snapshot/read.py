"""A memory snapshot of PyTorch as columns: its events, its segments and the stacks that they name."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.explanation.snapshot.unpickle import NotPlainError, loads
from trainfit.spec.errors import InputError

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "oom", "snapshot",
)  # fmt: skip
"""Of events; others, such as a user's own, are kept as the last plus one."""
NUMBERS = {name: number for number, name in enumerate(ACTIONS)}
OTHER = len(ACTIONS)
LARGEST = (1 << 63) - 1
MOST_BYTES = 1 << 44
"""Of one allocation, far above any GPU's memory."""
NO_STACK = -1
REMEDY = "save it with torch.cuda.memory._dump_snapshot, after torch.cuda.memory._record_memory_history()"
FEWEST_BYTES = 8
"""An event takes more bytes of the file: where there are more events, one list is named many times."""


class Frame(NamedTuple):
    """One call of a stack."""

    function: str
    file: str
    line: int


class Block(NamedTuple):
    """A part of a segment, when the snapshot was taken."""

    address: int
    num_bytes: int
    requested_bytes: int
    is_active: bool
    stack: int


class Segment(NamedTuple):
    """What the allocator held from the driver, when the snapshot was taken."""

    device: int
    address: int
    num_bytes: int
    stream: int
    is_expandable: bool
    blocks: tuple[Block, ...]


class Events:
    """What the allocator of one device did, in order, a column each."""

    def __init__(self) -> None:
        self.actions = array("b")
        self.addresses = array("q")
        """Of a failed request: bytes that were free on the device."""
        self.sizes = array("q")
        """Bytes requested; of segments, theirs."""
        self.streams = array("q")
        self.times_us = array("q")
        self.stacks = array("l")
        """Index into the snapshot's stacks; NO_STACK: none was recorded."""

    def __len__(self) -> int:
        return len(self.actions)

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield action, address, bytes and stream of each event."""
        return zip(self.actions, self.addresses, self.sizes, self.streams, strict=True)


class Snapshot(NamedTuple):
    """A memory snapshot."""

    events: tuple[Events, ...]
    """By device."""
    segments: tuple[Segment, ...]
    stacks: tuple[tuple[int, ...], ...]
    """Indices of frames, the innermost call first."""
    frames: tuple[Frame, ...]
    settings: dict[str, Any]
    """The allocator's, as PyTorch reports them."""

    def stack(self, index: int) -> list[Frame]:
        """Return the calls of a stack, the innermost first."""
        return [self.frames[at] for at in self.stacks[index]] if index != NO_STACK else []


class _Stack:
    """Stands for the frames of a list that was read."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class _Reader:
    """Takes events and blocks over from the pickle while it is read."""

    def __init__(self, num_bytes: int):
        self.most = num_bytes // FEWEST_BYTES
        self.events: dict[int, tuple[list[Any], Events]] = {}
        self.blocks: dict[int, tuple[list[Any], list[Block]]] = {}
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], _Stack] = {}
        self._known: dict[int, tuple[dict[str, Any], int]] = {}

    def take(self, target: list[Any], items: list[Any]) -> bool:
        """Take over a list's next items, if they are events or blocks."""
        first = items[0]
        if type(first) is not dict:
            return False
        if "action" in first:
            found = self.events.setdefault(id(target), (target, Events()))[1]
            for item in items:
                self._event(found, item)
            return self._bounded(found)
        if "state" in first and "blocks" not in first:
            blocks = self.blocks.setdefault(id(target), (target, []))[1]
            blocks += [self._block(item) for item in items]
            return self._bounded(blocks)
        return False

    def _bounded(self, found: Any) -> bool:
        if len(found) > self.most:
            raise NotPlainError("it repeats a list more often than a snapshot does")
        return True

    def _event(self, into: Events, item: dict[str, Any]) -> None:
        into.actions.append(NUMBERS.get(_text(item, "action"), OTHER))
        into.addresses.append(_number(item, "device_free" if "device_free" in item else "addr"))
        into.sizes.append(_number(item, "size", most=MOST_BYTES))
        into.streams.append(_number(item, "stream"))
        into.times_us.append(_number(item, "time_us"))
        into.stacks.append(self._stack(item.get("frames")))

    def _block(self, item: dict[str, Any]) -> Block:
        size = _number(item, "size", most=MOST_BYTES)
        return Block(
            address=_number(item, "address"),
            num_bytes=size,
            requested_bytes=_number(item, "requested_size", size),
            is_active=_text(item, "state") == "active_allocated",  # Not what only waits for another stream
            stack=self._stack(item.get("frames")),
        )

    def _stack(self, frames: Any) -> int:
        if not frames:
            return NO_STACK
        if type(frames) is not list:
            raise NotPlainError("the frames of an event are no list")
        if type(frames[0]) is _Stack:
            return frames[0].index
        indices = tuple(map(self._frame, frames))
        stack = self._stacks.setdefault(indices, _Stack(len(self._stacks)))
        frames[:] = [stack]  # Frees the list, which the memo keeps, and is known when it comes again.
        return stack.index

    def _frame(self, frame: Any) -> int:
        known = self._known.get(id(frame))
        if known is not None:
            return known[1]
        if type(frame) is not dict:
            raise NotPlainError("a frame is no dict")
        file = _text(frame, "filename").replace("\\", "/")
        value = Frame(_text(frame, "name"), file, _number(frame, "line"))
        index = self._frames.setdefault(value, len(self._frames))
        self._known[id(frame)] = frame, index
        return index

    @property
    def frames(self) -> tuple[Frame, ...]:
        return tuple(self._frames)

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._stacks)


def read_snapshot(path: Path, advance: Callable[[int, int], None] = lambda at, of: None) -> Snapshot:
    """Read a memory snapshot; nothing in it is executed.

    Args:
        advance: called now and then with the bytes that were read, and all.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(len(data))
            content = loads(data, reader.take, lambda at: advance(at, len(data)))
            return _snapshot(content, reader)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _no_snapshot(path, f"{type(error).__name__}: {error}") from None
    except ValueError as error:  # NotPlainError, and mmap of an empty file
        raise _no_snapshot(path, str(error)) from None


def _no_snapshot(path: Path, why: str) -> InputError:
    return InputError(f"no memory snapshot of PyTorch: {why[:200]}", REMEDY, file=str(path))


def _snapshot(content: Any, reader: _Reader) -> Snapshot:
    if type(content) is not dict or "device_traces" not in content or "segments" not in content:
        raise NotPlainError("it has no device_traces and segments")
    traces = content["device_traces"]
    events = [reader.events.get(id(trace), (trace, Events()))[1] for trace in traces]
    if len({id(trace) for trace in traces}) < len(traces) or any(map(len, traces)):
        raise NotPlainError("its device_traces are no lists of events")
    segments, num_blocks = list[Segment](), 0
    for one in content["segments"]:
        num_blocks += 1 + len(reader.blocks.get(id(one["blocks"]), ([], []))[1])
        if num_blocks > reader.most:
            raise NotPlainError("it repeats a list more often than a snapshot does")
        segments.append(_segment(one, reader))
    settings = content.get("allocator_settings")
    return Snapshot(
        tuple(events),
        tuple(segments),
        reader.stacks,
        reader.frames,
        settings if type(settings) is dict else {},
    )


def _segment(item: dict[str, Any], reader: _Reader) -> Segment:
    blocks = tuple(reader.blocks.get(id(item["blocks"]), ([], []))[1])
    address = _number(item, "address")
    if blocks and not any(block.address for block in blocks):  # Before torch 2.1 blocks had no addresses.
        at = address
        placed = []
        for block in blocks:
            placed.append(block._replace(address=at))
            at += block.num_bytes
        blocks = tuple(placed)
    return Segment(
        device=_number(item, "device"),
        address=address,
        num_bytes=_number(item, "total_size", most=MOST_BYTES),
        stream=_number(item, "stream"),
        is_expandable=item.get("is_expandable") is True,
        blocks=blocks,
    )


def _number(item: dict[str, Any], name: str, default: int = 0, most: int = LARGEST) -> int:
    value = item.get(name, default)
    if type(value) is not int:
        raise NotPlainError(f"{name} is no whole number")
    if not 0 <= value <= most:
        raise NotPlainError(f"{name} = {value}: not from 0 to {most}")
    return value


def _text(item: dict[str, Any], name: str) -> str:
    value = item[name]
    if type(value) is not str:
        raise NotPlainError(f"{name} is no text")
    return value
