"""Read a trace of torch.profiler: JSON of the Trace Event Format, as a stream, in columns.

A trace of some hundred megabytes has millions of events. One at a time is decoded; kernels, launches, host
operations and marked steps are kept as columns of numbers, everything else is dropped.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from trainfit.spec.errors import InputError

CHUNK = 1 << 22
MOST_OF_EVENT = 1 << 24
"""Characters of one event, and of what precedes the events."""
MOST_BYTES = 1 << 36
"""Of a whole trace, decompressed."""
MOST_EVENTS = 1 << 27
LATEST_US = 1e18
BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
STEP = re.compile(r"ProfilerStep#(\d{1,12})\Z")
ON_GPU = {"kernel": 0, "gpu_memcpy": 1, "gpu_memset": 1, "gpu_memory_copy": 1}
LAUNCHES = ("cuda_runtime", "cuda_driver", "privateuse1_runtime")
FIRST_FACTOR = {
    "aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::_grouped_mm": 0,
    "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1,
}  # fmt: skip
"""Matrix product -> position of its first factor among the inputs; the second is the next one."""
REMEDY = "save it with torch.profiler's export_chrome_trace or tensorboard_trace_handler"


class NotATraceError(ValueError):
    """The file is damaged, or no trace."""


class Spans:
    """Columns of spans: begin and duration in microseconds, and the numbers of name and track."""

    def __init__(self) -> None:
        self.begins, self.durations = array("d"), array("d")
        self.names, self.tracks = array("l"), array("l")
        self.ids = array("q")
        """Correlation of a kernel and its launch; -1: none."""

    def add(self, begin: float, duration: float, name: int, track: int, number: int = -1) -> None:
        """Append a span."""
        self.begins.append(begin)
        self.durations.append(duration)
        self.names.append(name)
        self.tracks.append(track)
        self.ids.append(number)

    def __len__(self) -> int:
        return len(self.begins)


class ProfiledStep(NamedTuple):
    """A range that the profiler's ``step`` marks on the host."""

    number: int
    begin_us: float
    duration_us: float


class Trace:
    """The events of a trace that say what a GPU and its host did."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.devices: dict[int, str] = {}
        """Number of a GPU -> its name by the driver."""
        self.kernels: dict[int, Spans] = {}
        """By GPU; copies and fills too."""
        self.copies: dict[int, array[int]] = {}
        """By GPU: whether each of its kernels is a copy or a fill."""
        self.launches, self.ops, self.ranges = Spans(), Spans(), Spans()
        self.steps: list[ProfiledStep] = []
        self.flops_at: array[float] = array("d")
        self.flops: array[float] = array("d")
        """FLOPs of matrix products by their recorded shapes, and when the host issued them."""
        self.dtypes: dict[str, float] = {}
        """Dtype of matrix products -> FLOPs."""
        self.num_events = self.num_bytes = 0
        self._name_numbers: dict[str, int] = {}
        self._track_numbers: dict[tuple[Any, Any], int] = {}

    def _name(self, text: str) -> int:
        number = self._name_numbers.setdefault(text, len(self._name_numbers))
        if number == len(self.names):
            self.names.append(text)
        return number

    def _track(self, event: dict[str, Any]) -> int:
        at = event.get("pid"), event.get("tid")
        if not all(isinstance(one, int | str | None) for one in at):
            raise NotATraceError("pid or tid is neither a number nor text")
        return self._track_numbers.setdefault(at, len(self._track_numbers))

    def take(self, event: dict[str, Any]) -> None:
        """Keep what an event says."""
        if event.get("ph") != "X":
            return
        kind, name = event.get("cat"), event.get("name")
        if not isinstance(kind, str) or not isinstance(name, str):
            return
        kind = kind.lower()
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if kind in ON_GPU:
            device = _whole(args.get("device", event.get("pid")))
            kernels = self.kernels.setdefault(device, Spans())
            self.copies.setdefault(device, array("b")).append(ON_GPU[kind])
            number = _whole(args.get("correlation", -1))
            stream = self._track_numbers.setdefault(("stream", args.get("stream") if isinstance(
                args.get("stream"), int) else event.get("tid")), len(self._track_numbers))  # fmt: skip
            kernels.add(*_span(event), self._name(name), stream, number)
        elif kind in LAUNCHES:
            number = _whole(args.get("correlation", -1))
            self.launches.add(*_span(event), self._name(name), self._track(event), number)
        elif kind == "cpu_op":
            begin, duration = _span(event)
            self.ops.add(begin, duration, self._name(name), self._track(event))
            if name in FIRST_FACTOR and "Input Dims" in args:
                self._product(name, begin, args)
        elif kind == "user_annotation":
            if found := STEP.match(name):
                self.steps.append(ProfiledStep(int(found[1]), *_span(event)))
            else:
                self.ranges.add(*_span(event), self._name(name), self._track(event))

    def _product(self, name: str, begin: float, args: dict[str, Any]) -> None:
        dims = args["Input Dims"]
        at = FIRST_FACTOR[name]
        # Scales, offsets and, in compiled code, the output follow the factors.
        factors = dims[at : at + 2] if isinstance(dims, list) else []
        if len(factors) < 2 or not all(_is_shape(one) for one in factors):
            return
        first, second = factors
        flops = 2.0 * math.prod(map(float, first)) * second[-1]
        types = args.get("Input type")
        dtype = types[-1] if isinstance(types, list) and types else ""
        dtype = next((one for one in (types if isinstance(types, list) else ()) if one in DTYPES), dtype)
        self.flops_at.append(begin)
        self.flops.append(flops)
        if isinstance(dtype, str) and dtype in DTYPES:
            self.dtypes[DTYPES[dtype]] = self.dtypes.get(DTYPES[dtype], 0.0) + flops


DTYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip
"""Dtypes as the profiler names them."""


def _is_shape(one: Any) -> bool:
    if not isinstance(one, list) or len(one) not in (2, 3):
        return False
    return all(type(n) is int and 0 <= n < 1 << 40 for n in one)


def _span(event: dict[str, Any]) -> tuple[float, float]:
    begin: Any = event.get("ts")
    duration: Any = event.get("dur", 0)
    for name, value in (("ts", begin), ("dur", duration)):
        if type(value) not in (int, float) or not 0 <= value < LATEST_US:
            raise NotATraceError(f"{name} of an event is no time")
    return float(begin), float(duration)


def _whole(value: Any) -> int:
    if type(value) is not int or not -(1 << 62) < value < 1 << 62:
        raise NotATraceError("a device or a correlation is no whole number")
    return value


def read_trace(path: Path, advance: Callable[[int, int], None] = lambda at, of: None) -> Trace:
    """Read a trace.

    Args:
        advance: called now and then with the bytes of the file that were read, and all.

    Raises:
        InputError: naming the file and what is wrong with it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            plain: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            return _read(plain, lambda: advance(raw.tell(), size))
    except (NotATraceError, ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"no trace of torch.profiler: {error}"[:300], REMEDY, file=str(path)) from None
    except RecursionError:
        problem = "no trace of torch.profiler: it is nested too deeply"
        raise InputError(problem, REMEDY, file=str(path)) from None


def _read(file: IO[bytes], advance: Callable[[], None]) -> Trace:
    trace = Trace()
    text = _Text(file, trace, advance)
    header = _header(text)
    for device in header.get("deviceProperties", ()) if isinstance(header, dict) else ():
        if isinstance(device, dict) and type(device.get("id")) is int and isinstance(device.get("name"), str):
            trace.devices[device["id"]] = device["name"][:200]
    for event in _events(text):
        trace.num_events += 1
        if trace.num_events > MOST_EVENTS:
            raise NotATraceError(f"it has more than {MOST_EVENTS:,} events")
        trace.take(event)
    return trace


class _Text:
    """The file's text, a part at a time."""

    def __init__(self, file: IO[bytes], trace: Trace, advance: Callable[[], None]):
        self._file, self._trace, self._advance = file, trace, advance
        self.part = ""
        self._rest = b""

    def more(self, keep_from: int) -> bool:
        """Drop the part before ``keep_from`` and read on; return whether there was more."""
        data = self._file.read(CHUNK)
        self._trace.num_bytes += len(data)
        if self._trace.num_bytes > MOST_BYTES:
            raise NotATraceError(f"it has more than {MOST_BYTES >> 30} GiB")
        self._advance()
        kept = self.part[keep_from:]
        if len(kept) > MOST_OF_EVENT:
            raise NotATraceError(f"an event, or the header, has more than {MOST_OF_EVENT:,} characters")
        # A character may be cut at the part's end: its bytes are at most three of the last.
        data = self._rest + data
        cut = len(data) if not data or len(data) < CHUNK else _whole_characters(data)
        self.part, self._rest = kept + data[:cut].decode("utf-8", "replace"), data[cut:]
        return bool(data)


def _whole_characters(data: bytes) -> int:
    end = len(data)
    while end > len(data) - 4 and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if data[end - 1] >= 0xC0 else len(data)


def _header(text: _Text) -> Any:
    """Read up to the first event and return what precedes them; the text begins with the events."""
    text.more(0)
    stripped = text.part.lstrip("\ufeff \t\r\n")
    if stripped.startswith("["):
        text.part = stripped[1:]
        return {}
    while (found := BEGIN.search(text.part)) is None:
        if not text.more(0):
            raise NotATraceError("it has no traceEvents")
    head = text.part[: found.start()].rstrip().rstrip(",")
    text.part = text.part[found.end() :]
    try:
        return json.loads(f"{head}}}")
    except ValueError:
        return {}


def _not_json(name: str) -> float:
    raise NotATraceError(f"{name} is no number of JSON")


def _events(text: _Text) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder(parse_constant=_not_json).raw_decode
    at = 0
    while True:
        while at < len(text.part) and text.part[at] in " \t\r\n,":
            at += 1
        if at == len(text.part):
            if not text.more(at):
                raise NotATraceError("it ends within its events")
            at = 0
            continue
        if text.part[at] == "]":
            return
        if text.part[at] != "{":
            raise NotATraceError("an event is no object")
        try:
            event, at = decode(text.part, at)
        except json.JSONDecodeError:
            if not text.more(at):
                raise NotATraceError("it ends within an event, or is damaged") from None
            at = 0
            continue
        yield event
