"""Compare loss and block kernels with eager PyTorch, its compiler and cuBLAS: errors, times, memory.

``python -m evidence.scripts.kernels.loss_and_blocks FILE`` runs on the GPU (minutes on an H200), writes JSON
Lines and prints a table. ``--tiny`` takes sizes of a few kilobytes and any device, to see that everything
runs.

Every line has ``case``, its ``size``, ``way`` and ``part``. Times are the harness's of every experiment
(timing.py), milliseconds: median, and the 10th and 90th percentile; ``samples`` were kept, ``discarded``
thrown away because the driver held the clocks down. Where there is no clean run ``part`` is "failed" and
``message`` says why. ``tflops`` counts the three products of 2 n v e that a linear cross-entropy needs,
``gb_per_s`` the bytes that must be read and written; both of the median. ``extra_bytes``: the allocator's
peak over what was there before and the gradients. ``error`` is the norm of the difference from fp64 by the
norm, ``of_eager`` by eager PyTorch's error in the same dtype, of a single number by half a last place at
least.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evidence.scripts.kernels import cases as kernel_cases
from evidence.scripts.kernels.cases import Case, Sizes
from trainfit.bench.harness.bench import Bench, Part
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.runner import RULES, data_sheet
from trainfit.bench.harness.stopwatch import stopwatch_of
from trainfit.bench.harness.timing import Rule
from trainfit.spec.bench import BenchRow
from trainfit.spec.errors import EXIT_BAD_INPUT
from trainfit.spec.printable import say
from trainfit.spec.provenance import commit, now

FULL = Sizes(
    tokens=8192, vocabulary=131072, hidden=4096, rows=32768, feedforward=14336, length=4096, heads=32
)
TINY = Sizes(tokens=40, vocabulary=130, hidden=16, rows=12, feedforward=24, length=8, heads=4)
SEED = 0
"""Of the inputs, so that errors are the same in every run."""
MAX_OF_EAGER = 2.0
"""Limit of ``of_eager``."""
MAX_OF_EAGER_IN_32_CHUNKS = 2.5
"""Its weight gradient is rounded to bf16 once per chunk: 1.95 to 2.01, by the inputs. No recipe takes it."""
RULE = Rule(warmup=3, min_samples=10, max_samples=20, cap_s=8.0, hide=True, rest_s=0.015)
PRODUCTS_REST_S = 0.3
"""Before 40 ms of matrix products, which back to back draw more power than the GPU may."""
Row = dict[str, Any]


def bench_of(device: torch.device, tiny: bool) -> Bench:
    """The engine of the experiments, without a time limit."""
    rule = RULES["tiny"] if tiny else RULE
    return Bench(device, "tiny" if tiny else "full", stopwatch_of(device), data_sheet(device), rule, math.inf)


def rows_of(case: Case, bench: Bench) -> Iterator[Row]:
    """Every way of a case; a way that fails says so and the others go on."""
    for way, run in case.ways.items():
        for part in case.parts:
            call = partial(run if part == "forward" else partial(_both, run, case), *case.inputs)
            row = _timed(case, part, call, bench)
            base: Row = {"case": case.name, "size": case.size, "way": way}
            if row.times is None or row.status == "impossible":
                yield base | {"part": "failed", "message": f"{part}: {row.status}: {row.message}"[:300]}
            else:
                yield base | {"part": part} | _numbers(row, extra_bytes(call, bench.device))
        if way == "compiled":
            torch.compiler.reset()


def _timed(case: Case, part: str, call: Callable[[], Any], bench: Bench) -> BenchRow:
    """The engine's row of one call; the data sheet bounds it by what the case must compute and move."""

    def rates(seconds: float) -> dict[str, float]:
        found = {"tflops": case.flops / seconds / 1e12} if case.flops else {}
        return found | ({"gb_per_s": case.bytes_moved[part] / seconds / 1e9} if case.bytes_moved else {})

    # Reads count as writes here: nothing stays in the flushed cache, so both come from memory.
    work = Work(case.flops, "bf16", write_bytes=case.bytes_moved.get(part, 0))
    rule = replace(bench.rule, rest_s=PRODUCTS_REST_S) if case.flops and not bench.tiny else bench.rule
    (row,) = bench.time([Part({"part": part}, work=work, rates=rates)], lambda: lambda lap: call(), rule)
    return row


def _numbers(row: BenchRow, extra: int | None) -> Row:
    assert row.times is not None
    found: Row = {
        "ms": 1e3 * row.times.median, "ms_p10": 1e3 * row.times.low, "ms_p90": 1e3 * row.times.high,
        "extra_bytes": extra,
        "samples": len(row.times.samples), "discarded": row.discarded, "status": row.status,
    }  # fmt: skip
    return found | dict(row.numbers)


def extra_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Peak over what is there before and what ``run`` gives; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    kept = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak - kept


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
    theirs = _results(case, case.definition, case.inputs, case.upstream)
    eager = _differences(theirs, exact)
    measures = list(map(_measure, eager, theirs))
    for way, run in case.ways.items():
        if way.startswith("ours"):
            found = _differences(_results(case, run, case.inputs, case.upstream), exact)
            yield {
                "case": case.name, "size": case.size, "way": way, "part": "errors", "error": found,
                "eager": eager,
                "of_eager": max(a / b for a, b in zip(found, measures, strict=True)),
            }  # fmt: skip


def _measure(error: float, result: Tensor) -> float:
    """What another way's error is divided by: eager's own, and of a single number half a last place at least.

    A loss that eager PyTorch happens to round to almost nothing is no measure for one that is off by less
    than its own last place. Over many numbers such luck is even. What eager has exactly is held to half a
    last place, too.
    """
    half = torch.finfo(result.dtype).eps / 2
    return max(error, half) if result.numel() == 1 or not error else error


def _results(case: Case, run: Callable[..., Any], inputs: tuple[Tensor, ...], upstream: Any) -> list[Tensor]:
    out = run(*(x.clone() for x in inputs) if case.in_place else inputs)
    outs = out if isinstance(out, tuple) else (out,)
    wanted = [x for x in inputs if x.requires_grad]
    if not wanted:
        return list(outs)
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, wanted, upstream)]


def _differences(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def benchmark(sizes: Sizes, bench: Bench, compiled: bool) -> Iterator[Row]:
    """Yield errors at small sizes, then times; a case's inputs are freed before the next one's."""
    dtype, device = torch.bfloat16, bench.device
    for make in kernel_cases.CASES:
        small = make(kernel_cases.SMALL, device, dtype, False)
        yield from errors_of(small)
    if device.type == "cuda":
        yield kernel_cases.beyond_32_bits(device)
    for make in kernel_cases.CASES:
        yield from rows_of(make(sizes, device, dtype, compiled), bench)
    for tuning in kernel_cases.TUNINGS:
        yield from rows_of(tuning(sizes, device, dtype), bench)


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
    """Write and print; exit code 0, 65 for a bad path, 1 if a way failed or its error is over its limit."""
    parser = argparse.ArgumentParser(
        prog="python -m evidence.scripts.kernels.loss_and_blocks",
        description="Benchmark the loss and block kernels.",
    )
    parser.add_argument("into", type=Path, help="JSON Lines to write")
    parser.add_argument("--tiny", action="store_true", help="small sizes, any device, no compiler")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --tiny runs without one")
    if not options.into.parent.is_dir():
        say(f"trainfit: INTO = {options.into}: no such folder; make it, or name another", err=True)
        return EXIT_BAD_INPUT
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    made = {"made_at": now(), "commit": commit(), "gpu": name, "torch": torch.__version__}
    bad, sizes = 0, TINY if options.tiny else FULL
    torch.manual_seed(SEED)
    with options.into.open("w", encoding="utf-8") as file:
        for row in benchmark(sizes, bench_of(device, options.tiny), compiled=not options.tiny):
            file.write(json.dumps({**made, **row}) + "\n")
            file.flush()
            say(table(row))
            most = MAX_OF_EAGER_IN_32_CHUNKS if row["way"].endswith(" 32 chunks") else MAX_OF_EAGER
            bad += row["part"] == "failed" or row.get("of_eager", 0) > most
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
