"""The trace of a profiled step with each kernel's phase and part, for https://ui.perfetto.dev.

Enters: a ``torch.profiler`` profile, and by each operation's number the phase and part that the tables give it. Leaves: a gzipped file of
Chrome's trace format (times in microseconds). The profiler's own ranges on a GPU cover only what the thread that opened them launched,
and autograd launches the backward in another one: they are left out, and ranges made of the kernels themselves stand in their place.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from trainfit.bench.harness.profiling import PART, PHASE

Place = tuple[str, str]
"""Phase and part."""
Track = tuple[Any, Any]
"""Process and thread; of a GPU its number and the stream."""
ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
OPERATION = "cpu_op"
NUMBER = "External id"
"""The operation's, as Kineto calls it in a trace; a kernel has the number of what launched it."""


def write_trace(seen: profile, known: Mapping[int, Place], path: Path) -> None:
    """Write the profile's trace with phases and parts."""
    with TemporaryDirectory() as folder:
        raw = Path(folder, "raw.json")
        seen.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_bytes())
    trace["traceEvents"] = in_parts(trace["traceEvents"], known)
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def in_parts(events: Iterable[dict[str, Any]], known: Mapping[int, Place]) -> list[dict[str, Any]]:
    """The events, ``phase`` and ``part`` among the arguments of what ran, and two more tracks above each one it ran on.

    What ran are kernels, copies and fills; in a trace without any, a CPU's operations.
    """
    events = [event for event in events if not _is_cut_short(event)]
    on_gpu = any(event.get("cat") in ON_GPU for event in events)
    ran: dict[Track, list[dict[str, Any]]] = {}
    for index, event in enumerate(events):
        place = known.get(event.get("args", {}).get(NUMBER))
        if place is not None and (event.get("cat") in ON_GPU if on_gpu else event.get("cat") == OPERATION):
            args = event["args"] | {"phase": place[0], "part": place[1]}
            events[index] = event | {"args": args}
            ran.setdefault((event["pid"], event["tid"]), []).append(events[index])
    return events + _tracks(events, ran, "kernel" if on_gpu else "operation")


def _is_cut_short(event: dict[str, Any]) -> bool:
    """Whether it is one of our ranges as the profiler draws it on a GPU, where it misses the backward."""
    return event.get("cat") == "gpu_user_annotation" and event["name"].startswith((PHASE, PART))


def _tracks(
    events: list[dict[str, Any]], ran: dict[Track, list[dict[str, Any]]], what: str
) -> list[dict[str, Any]]:
    """Ranges of phases and of parts for each track that something ran on, under thread numbers that no event has."""
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
    """A range from the first to the last of each run of neighbours that have the same phase and ``kind``; gaps between them are in it.

    ``busy, us`` is their time without the gaps (on a CPU operations lie in one another, so it is not known there).
    """
    runs: list[list[dict[str, Any]]] = []
    for event in these:
        # The loss's forward and its backward are neighbours, and two ranges.
        if not runs or any(runs[-1][-1]["args"][name] != event["args"][name] for name in ("phase", kind)):
            runs.append([])
        runs[-1].append(event)
    found: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        start, end = run[0]["ts"], max(event["ts"] + event["dur"] for event in run)
        if index + 1 < len(runs):  # An operation may end after the next part's has begun within it.
            end = min(end, runs[index + 1][0]["ts"])
        args: dict[str, Any] = {f"{what}s": len(run)}
        if what == "kernel":
            args["busy, us"] = round(sum(event["dur"] for event in run), 3)
        name = run[0]["args"][kind]
        found.append({"name": name, "ts": start, "dur": round(end - start, 3), "args": args})
    return found
