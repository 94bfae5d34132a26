"""Export a ledger's steady step as a trace that ui.perfetto.dev and chrome://tracing open.

The file is JSON of the Trace Event Format, its times in microseconds. Tracks: phases, kernels, collectives by
group of ranks and copies of the GPU, the host that issues them, and counters of memory by category.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from trainfit.explanation.course import course_of
from trainfit.ledger.ledger import Ledger, Op
from trainfit.prediction.machine import Machine
from trainfit.prediction.time.device_time import part_of
from trainfit.prediction.time.roofline import copy_seconds, step_spans
from trainfit.prediction.time.timeline import Span, Spans
from trainfit.spec.errors import InputError
from trainfit.spec.files import writing
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

GPU, HOST = 1, 2
"""Processes of the trace."""
PHASES, KERNELS, COPIES, COLLECTIVES = 1, 2, {"in": 3, "out": 4}, 10
"""Threads of the GPU; each group of ranks has one of its own from COLLECTIVES on."""
MOST_SLICES = 100_000
"""Of a step with more operations, those of a module that follow one another are one slice."""
MOST_MOMENTS = 20_000
"""Of the memory's counters; each is the highest moment of its stretch."""
Event = dict[str, Any]


def write_trace(ledger: Ledger, machine: Machine, path: Path) -> None:
    """Write the predicted steady step; gzipped where the name ends with ``.gz``.

    Raises:
        InputError: the GPU's speed is not known.
        OSError: the file cannot be written.
    """
    if machine.gpu.memory_bytes_per_s is None or not machine.gpu.peak_flops_per_s:
        problem, remedy = "its speed is not known", "name a measured or modelled GPU"
        raise InputError(problem, remedy, field="hardware.gpu", value=machine.gpu.name)
    ledger = ledger.with_lower_peak()
    with writing(path), _open(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(events(ledger, machine)):
            file.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w")


def events(ledger: Ledger, machine: Machine) -> Iterator[Event]:
    """Yield the events of a steady step, names of the tracks first."""
    spans = step_spans(ledger, machine).from_first_issue()
    groups = sorted({(one.num_ranks, one.span) for one in ledger.collectives})
    yield from _names(machine, groups)
    course = course_of(ledger, spans, "steady", MOST_MOMENTS)
    for phase in course.phases:
        yield _slice(phase.name, PHASES, phase.begin, phase.end, {})
    yield from _kernels(ledger, spans)
    yield from _copies(ledger, machine, spans)
    for span in spans.collectives:
        one = ledger.collectives[span.index]
        track = COLLECTIVES + groups.index((one.num_ranks, one.span))
        args = {"bytes": one.num_bytes, "ranks": one.num_ranks, "issued_us": _us(span.issued_s)}
        yield _slice(one.name, track, span.began_s, span.ended_s, args)
    for moment in course.moments:
        counter = {"ph": "C", "pid": GPU, "tid": 0, "ts": _us(moment.at)}
        yield counter | {"name": "allocated by category, bytes", "args": moment.alive.model_dump()}
        yield counter | {"name": "allocated, bytes", "args": {"all": moment.alive.total}}


def _names(machine: Machine, groups: list[tuple[int, int]]) -> Iterator[Event]:
    threads = {
        (GPU, PHASES): "phases", (GPU, KERNELS): "kernels", (GPU, COPIES["in"]): "copies from the host",
        (GPU, COPIES["out"]): "copies to the host", (HOST, 1): "issues",
    }  # fmt: skip
    for number, (num_ranks, span) in enumerate(groups):
        threads[GPU, COLLECTIVES + number] = f"collectives of {num_ranks} ranks, {span} apart"
    for pid, name in ((GPU, f"{machine.gpu.name}, predicted"), (HOST, "host, predicted")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for (pid, tid), name in threads.items():
        at = {"ph": "M", "pid": pid, "tid": tid}
        yield at | {"name": "thread_name", "args": {"name": name}}
        yield at | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def _kernels(ledger: Ledger, spans: Spans) -> Iterator[Event]:
    """Yield a slice for each operation on the GPU, and one for its issue on the host."""
    launches = [span for span in spans.ops if ledger.ops[span.index].name not in COPY_DIRECTIONS]
    runs = [[span] for span in launches]
    if len(launches) > MOST_SLICES:
        runs = _merged(ledger, launches)
    for run in runs:
        op, last = ledger.ops[run[0].index], run[-1]
        name = _short(op) if len(run) == 1 else f"{op.module or 'no module'}: {len(run)} operations"
        if last.ended_s > run[0].began_s:
            yield _slice(name, KERNELS, run[0].began_s, last.ended_s, _arguments(ledger, run), part_of(op))
        issued_from = run[0].issued_s - run[0].issue_s
        if last.issued_s > issued_from:
            yield _slice(name, 1, issued_from, last.issued_s, {"module": op.module}, pid=HOST)


def _merged(ledger: Ledger, launches: list[Span]) -> list[list[Span]]:
    """Return runs of operations of one module in one phase."""
    runs: list[list[Span]] = []
    key = None
    for span in launches:
        op = ledger.ops[span.index]
        if (op.segment, op.module) != key:
            key = op.segment, op.module
            runs.append([])
        runs[-1].append(span)
    return runs


def _arguments(ledger: Ledger, run: list[Span]) -> Event:
    ops = [ledger.ops[span.index] for span in run]
    args: Event = {
        "module": ops[0].module,
        "phase": ledger.segments[ops[0].segment].phase,
        "bytes": sum(op.num_bytes for op in ops),
    }
    if flops := sum(op.causal_flops for op in ops):
        args["FLOP"] = flops
    if len(ops) == 1 and ops[0].shape:
        args["batch, m, n, k"] = list(ops[0].shape)
    if len(ops) == 1 and ops[0].dtype:
        args["dtype"] = ops[0].dtype
    return args


def _copies(ledger: Ledger, machine: Machine, spans: Spans) -> Iterator[Event]:
    """Yield copies to and from the host; those of one direction follow one another."""
    free_s = {"in": 0.0, "out": 0.0}
    for span in spans.ops:
        op = ledger.ops[span.index]
        if (way := COPY_DIRECTIONS.get(op.name)) is None:
            continue
        began_s = max(free_s[way], span.began_s)
        free_s[way] = began_s + copy_seconds(op, machine.gpu)
        yield _slice(_short(op), COPIES[way], began_s, free_s[way], {"bytes": op.num_bytes})


def _slice(
    name: str, tid: int, began_s: float, ended_s: float, args: Event, cat: str = "", *, pid: int = GPU
) -> Event:
    found = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(began_s)}
    return found | {"dur": _us(ended_s) - _us(began_s), "cat": cat or name, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _short(op: Op) -> str:
    return op.name.removeprefix("aten.").removesuffix(".default")
