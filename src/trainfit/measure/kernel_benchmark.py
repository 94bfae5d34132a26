"""Our loss and block kernels beside eager PyTorch, its compiler and cuBLAS: errors, times, memory.

``python -m trainfit.measure.kernel_benchmark FILE`` runs on the GPU (under three minutes on an H200), writes JSON Lines and
prints a table. ``--tiny`` takes sizes of a few kilobytes and any device, to see that everything runs.

Every line has ``case``, its ``size``, ``way`` and ``part``. Times are milliseconds between events on the device, after a fill of 2 GiB that
empties the caches and lets the host run ahead: median, and the 10th and 90th percentile. ``tflops`` counts the three products of 2 n v e that a linear
cross-entropy needs, ``gb_per_s`` the bytes that must be read and written; both of the median. ``extra_bytes``: the allocator's peak
over what was there before and the gradients. ``error`` is the norm of the difference from fp64 by the norm, ``of_eager`` by eager
PyTorch's error in the same dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainfit.measure import kernel_cases
from trainfit.measure.kernel_cases import Case, Sizes
from trainfit.spec.provenance import commit, now

FLUSH_BYTES = 2**31
FULL = Sizes(
    tokens=8192, vocabulary=131072, hidden=4096, rows=32768, feedforward=14336, length=4096, heads=32
)
TINY = Sizes(tokens=40, vocabulary=130, hidden=16, rows=12, feedforward=24, length=8, heads=4)
Row = dict[str, Any]


@dataclass(frozen=True)
class Clock:
    """How a call is timed on this device."""

    device: torch.device
    repeats: int
    flush: Tensor

    @classmethod
    def of(cls, device: torch.device) -> Clock:
        on_gpu = device.type == "cuda"
        flush = torch.empty(FLUSH_BYTES if on_gpu else 1, dtype=torch.uint8, device=device)
        return cls(device, 20 if on_gpu else 2, flush)

    def times_ms(self, run: Callable[[], Any]) -> list[float]:
        """Of each repetition, after three that do not count."""
        for _ in range(3):
            run()
        return [self._one(run) for _ in range(self.repeats)]

    def _one(self, run: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end)

    def extra_bytes(self, run: Callable[[], Any]) -> int | None:
        """Peak over what is there before and what ``run`` gives; None without a GPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = run()
        kept = torch.cuda.memory_allocated(self.device) - before
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del result
        return peak - kept


def rows_of(case: Case, clock: Clock) -> Iterator[Row]:
    """Every way of a case; a way that fails says so and the others go on."""
    for way, run in case.ways.items():
        base: Row = {"case": case.name, "size": case.size, "way": way}
        try:
            for part in case.parts:
                call = run if part == "forward" else partial(_both, run, case)
                yield base | {"part": part} | _told(case, part, clock, call)
        except (
            Exception
        ) as error:  # one missing way must not lose the lent machine's other answers; the line says it
            yield base | {"part": "failed", "message": f"{type(error).__name__}: {error}"[:300]}
        torch.compiler.reset()


def _told(case: Case, part: str, clock: Clock, call: Callable[..., Any]) -> Row:
    run = partial(call, *case.inputs)
    times = sorted(clock.times_ms(run))
    median = statistics.median(times)
    row: Row = {
        "ms": median,
        "ms_p10": times[len(times) // 10],
        "ms_p90": times[-1 - len(times) // 10],
        "extra_bytes": clock.extra_bytes(run),
    }
    if case.flops:
        row["tflops"] = case.flops / median / 1e9
    if case.bytes_moved:
        row["gb_per_s"] = case.bytes_moved[part] / median / 1e6
    return row


def _both(run: Callable[..., Any], case: Case, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the inputs that have any."""
    out = run(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad(out, wanted, case.upstream)


def errors_of(case: Case) -> Iterator[Row]:
    """Each way's results and gradients against the definition in fp64 from the same inputs."""
    wide = tuple(
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in case.inputs
    )
    upstream = None if case.upstream is None else tuple(x.double() for x in case.upstream)
    exact = _results(case, case.definition, wide, upstream)
    eager = _differences(_results(case, case.definition, case.inputs, case.upstream), exact)
    for way, run in case.ways.items():
        if way.startswith("ours"):
            found = _differences(_results(case, run, case.inputs, case.upstream), exact)
            yield {
                "case": case.name, "size": case.size, "way": way, "part": "errors", "error": found, "eager": eager,
                "of_eager": max(a / b if b else float(a > 0) for a, b in zip(found, eager, strict=True)),
            }  # fmt: skip


def _results(case: Case, run: Callable[..., Any], inputs: tuple[Tensor, ...], upstream: Any) -> list[Tensor]:
    out = run(*(x.clone() for x in inputs) if case.in_place else inputs)
    outs = out if isinstance(out, tuple) else (out,)
    wanted = [x for x in inputs if x.requires_grad]
    if not wanted:
        return list(outs)
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, wanted, upstream)]


def _differences(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def benchmark(sizes: Sizes, device: torch.device, compiled: bool) -> Iterator[Row]:
    """Errors at small sizes, then times, one case after the other; the inputs of a case go before the next one's come."""
    dtype = torch.bfloat16
    for make in kernel_cases.CASES:
        small = make(kernel_cases.SMALL, device, dtype, False)
        yield from errors_of(small)
    if device.type == "cuda":
        yield kernel_cases.beyond_32_bits(device)
    clock = Clock.of(device)
    for make in kernel_cases.CASES:
        yield from rows_of(make(sizes, device, dtype, compiled), clock)
    for tuning in kernel_cases.TUNINGS:
        yield from rows_of(tuning(sizes, device, dtype), clock)


def table(row: Row) -> str:
    """A line for people."""
    name = f"{row['case']:<15} {row['way']:<26} {row['part']:<8}"
    if "ms" in row:
        speed = " ".join(f"{row[key]:8.1f} {key}" for key in ("tflops", "gb_per_s") if key in row)
        extra = "" if row["extra_bytes"] is None else f" {row['extra_bytes'] / 1e9:7.3f} GB extra"
        return f"{name} {row['ms']:9.3f} ms {speed}{extra}"
    return f"{name} " + ", ".join(
        f"{key} {value}" for key, value in row.items() if key not in ("case", "size", "way", "part")
    )


def main(arguments: list[str] | None = None) -> int:
    """Write and print; exit code 0, or 1 if a way failed or is more than twice as wrong as eager PyTorch."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.measure.kernel_benchmark", description="Benchmark the loss and block kernels."
    )  # fmt: skip
    parser.add_argument("into", type=Path, help="JSON Lines to write")
    parser.add_argument("--tiny", action="store_true", help="small sizes, any device, no compiler")
    asked = parser.parse_args(arguments)
    if not asked.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --tiny runs without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    made = {"made_at": now(), "commit": commit(), "gpu": name, "torch": torch.__version__}
    bad = 0
    with asked.into.open("w", encoding="utf-8") as file:
        for row in benchmark(TINY if asked.tiny else FULL, device, compiled=not asked.tiny):
            file.write(json.dumps({**made, **row}) + "\n")
            file.flush()
            print(table(row), flush=True)
            bad += row["part"] == "failed" or row.get("of_eager", 0) > 2
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
