"""Write the trace of a profiled step with each kernel's phase and part, for https://ui.perfetto.dev.

The file is gzipped Chrome trace JSON, times in microseconds. The profiler's ranges on a GPU cover only what
the thread that opened them launched, and autograd launches the backward in another thread: ranges made of the
kernels replace them.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from trainfit.bench.harness.profiling import PART, PHASE

PhaseAndPart = tuple[str, str]
Track = tuple[Any, Any]  # Process and thread; of a GPU its index and the stream
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
OPERATION = "cpu_op"
NUMBER = "External id"
"""Kineto's key of the operation's number; a kernel has that of the operation that launched it."""


def write_trace(seen: profile, known: Mapping[int, PhaseAndPart], path: Path) -> None:
    """Write the profile's trace with phases and parts, given by the operation's number."""
    with TemporaryDirectory() as folder:
        raw = Path(folder, "raw.json")
        seen.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_bytes())
    trace["traceEvents"] = in_parts(trace["traceEvents"], known)
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def in_parts(events: Iterable[dict[str, Any]], known: Mapping[int, PhaseAndPart]) -> list[dict[str, Any]]:
    """Return the events with ``phase`` and ``part`` in the arguments of kernels, and two tracks of ranges.

    Kernels include copies and fills; in a trace without any, a CPU's operations take their role.
    """
    events = [event for event in events if not _is_cut_short(event)]
    on_gpu = any(event.get("cat") in ON_GPU for event in events)
    ran: dict[Track, list[dict[str, Any]]] = {}
    for index, event in enumerate(events):
        at = known.get(event.get("args", {}).get(NUMBER))
        if at is not None and (event.get("cat") in ON_GPU if on_gpu else event.get("cat") == OPERATION):
            args = event["args"] | {"phase": at[0], "part": at[1]}
            events[index] = event | {"args": args}
            ran.setdefault((event["pid"], event["tid"]), []).append(events[index])
    return events + _tracks(events, ran, "kernel" if on_gpu else "operation")


def _is_cut_short(event: dict[str, Any]) -> bool:
    """Return whether it is one of our ranges on the GPU, where it misses the backward."""
    return event.get("cat") == "gpu_user_annotation" and event["name"].startswith((PHASE, PART))


def _tracks(
    events: list[dict[str, Any]], ran: dict[Track, list[dict[str, Any]]], what: str
) -> list[dict[str, Any]]:
    """Return ranges of phases and of parts for each track, under thread numbers that no event has."""
    names = {
        (event["pid"], event["tid"]): str(event["args"]["name"]).strip()
        for event in events
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }
    free = 1 + max((event["tid"] for event in events if isinstance(event.get("tid"), int)), default=0)
    made: list[dict[str, Any]] = []
    for track, these in ran.items():
        these.sort(key=lambda event: event["ts"])
        above = names.get(track, str(track[1]))
        for order, (kind, title) in enumerate((("phase", "phases"), ("part", f"parts (by {what})"))):
            at = {"pid": track[0], "tid": free}
            free += 1
            made.append({"ph": "M", "name": "thread_name", **at, "args": {"name": f"{above}: {title}"}})
            # Kineto sorts a stream by its number and a thread by its own: ours come before them.
            made.append({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": order - 2}})
            made += [{"ph": "X", "cat": f"{kind}s", **at, **each} for each in _ranges(these, kind, what)]
    return made


def _ranges(these: list[dict[str, Any]], kind: str, what: str) -> list[dict[str, Any]]:
    """Return a range over each run of neighbours with the same phase and ``kind``, gaps included.

    ``busy, us`` is their time without the gaps; it is not known on a CPU, whose operations are nested.
    """
    runs: list[list[dict[str, Any]]] = []
    for event in these:
        # The loss's forward and backward are neighbours, but two ranges.
        if not runs or any(runs[-1][-1]["args"][name] != event["args"][name] for name in ("phase", kind)):
            runs.append([])
        runs[-1].append(event)
    found: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        start, end = run[0]["ts"], max(event["ts"] + event["dur"] for event in run)
        if index + 1 < len(runs):  # An operation may end after the next part's began within it.
            end = min(end, runs[index + 1][0]["ts"])
        args: dict[str, Any] = {f"{what}s": len(run)}
        if what == "kernel":
            args["busy, us"] = round(sum(event["dur"] for event in run), 3)
        name = run[0]["args"][kind]
        found.append({"name": name, "ts": start, "dur": round(end - start, 3), "args": args})
    return found
