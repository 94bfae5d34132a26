"""``gpu``: properties of the device, latency and bandwidth of each memory level, matrix products by dtype.

Properties are read from the driver. Latency is that of a pointer chase, whose kernel is shown from its source
to the machine's code (``--only chase=global``, ``--only level=L2``, ``--only "code of=global_chase"``).
Bandwidth and products are measured, on random data (zeros make a GPU draw less power and run faster), against
the data sheet. Last, a linear layer's products in bf16 and fp8 for seconds without a pause (``--only
sustained=bf16,fp8,fp8-casts``). On a CPU all of this is of the CPU's own caches and memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Part, fp32_products, of_work
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import Lap
from trainfit.bench.workloads import cpu_caches, kernel_code, memory_levels, pointer_chase, sustained
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.hardware import PeakDtype
from trainfit.spec.units import KIB, MIB

COPY_BYTES = {"tiny": (256 * KIB, 4 * MIB), "full": (4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)}
MATMUL_SIZES = {"tiny": (128,), "full": (4096, 8192)}
CPU_DTYPES: tuple[PeakDtype, ...] = ("fp64", "fp32", "bf16")
CUDA_DTYPES: tuple[PeakDtype, ...] = ("bf16", "fp16", "tf32", "fp8", "int8", "fp32", "fp64")
CHASED = (pointer_chase.SHARED, pointer_chase.CONSTANT, pointer_chase.LOCAL)
"""Memories in the plot of latencies, with global memory; a register's chase has no set."""
PROPERTIES = {
    "multi_processor_count": "streaming multiprocessors",
    "regs_per_multiprocessor": "registers of 32 bits a multiprocessor",
    "max_threads_per_multi_processor": "threads a multiprocessor",
    "warp_size": "threads a warp",
    "shared_memory_per_multiprocessor": "shared memory a multiprocessor, bytes",
    "shared_memory_per_block_optin": "shared memory a block at most, bytes",
    "L2_cache_size": "L2 cache, bytes",
    "total_memory": "memory, bytes",
    "memory_bus_width": "memory bus, bits",
}
"""Attributes of ``torch.cuda.get_device_properties``; names that a torch version lacks are left out."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield properties, latencies, bandwidths, code, products, copies, host copies, sustained products."""
    for quantity, number in properties(bench.device).items():
        yield from bench.find({"property": quantity}, lambda number=number: {"value": number})
    chased: list[BenchRow] = []
    for row in pointer_chase.rows(bench, memory_levels.to_chase(bench)):
        chased.append(row)
        yield row
    yield from memory_levels.rows(bench, chased)
    yield from kernel_code.rows(bench)
    dtypes = CUDA_DTYPES if bench.device.type == "cuda" else CPU_DTYPES
    for size in MATMUL_SIZES[bench.form]:
        for dtype in dtypes:
            yield from _matmul(bench, dtype, size)
    for num_bytes in COPY_BYTES[bench.form]:
        for cache in ("cold", "warm"):
            yield from _copy(bench, num_bytes, cache)
    if bench.device.type == "cuda":
        for pinned in (True, False):
            for direction in ("to the GPU", "to the host"):
                yield from _host_copy(bench, direction, pinned)
    yield from sustained.rows(bench)


def properties(device: torch.device) -> dict[str, int]:
    """Return what the driver reports of a GPU; of a CPU the threads that torch uses, and its caches."""
    if device.type != "cuda":
        found = {f"{name} cache, bytes": size for name, size in cpu_caches.caches().items()}
        return {"threads that torch uses": torch.get_num_threads()} | found
    known = torch.cuda.get_device_properties(device)
    found = {title: int(getattr(known, name)) for name, title in PROPERTIES.items() if hasattr(known, name)}
    return found | {"compute capability, times ten": known.major * 10 + known.minor}


def _copy(bench: Bench, num_bytes: int, cache: str) -> Iterator[BenchRow]:
    """Yield a copy within the device's memory; cold: the cache is flushed before each sample."""

    def build() -> Callable[[Lap], object]:
        source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        return lambda lap: target.copy_(source)

    cold = cache == "cold"
    # The data sheet gives no bandwidth of a cache.
    work = Work(cold_read_bytes=num_bytes, write_bytes=num_bytes) if cold else None
    point: dict[str, Cell] = {"copied_mib": num_bytes / MIB, "cache": cache}
    part = Part(point, work=work, rates=of_work(num_bytes=2 * num_bytes))
    yield from bench.time([part], build, replace(bench.rule, flush=cold, hide=True))


def _matmul(bench: Bench, dtype: PeakDtype, size: int) -> Iterator[BenchRow]:
    """Yield one square product, checked against the data sheet's peak of its dtype."""
    flops = 2.0 * size**3
    peak = bench.gpu.peak_flops_per_s.get(dtype) if bench.gpu else None
    part = Part({"dtype": dtype, "size": size}, work=Work(flops, dtype), rates=of_work(flops, peak=peak))
    with fp32_products("tf32" if dtype == "tf32" else "fp32"):
        build = partial(product, dtype, size, bench.device)
        yield from bench.time([part], build, replace(bench.rule, hide=True))


def product(dtype: PeakDtype, size: int, device: torch.device) -> Callable[[Lap], object]:
    """Return a product of two random matrices [size, size] in ``dtype``; the caller sets tf32."""
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    if dtype == "fp8":
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        return lambda lap: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)
    if dtype == "int8":
        ai, bi = ((40 * x).clamp(-127, 127).to(torch.int8) for x in (a, b))
        return lambda lap: torch._int_mm(ai, bi.t())
    dtypes: dict[str, Any] = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
    x, y = a.to(dtypes.get(dtype, torch.float32)), b.to(dtypes.get(dtype, torch.float32))
    return lambda lap: x @ y


def _host_copy(bench: Bench, direction: str, pinned: bool) -> Iterator[BenchRow]:
    num_bytes = COPY_BYTES[bench.form][-1] // 4

    def build() -> Callable[[Lap], object]:
        host: Tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).fill_(1)
        device = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
        into, source = (device, host) if direction == "to the GPU" else (host, device)
        return lambda lap: into.copy_(source, non_blocking=pinned)

    point: dict[str, Cell] = {"host_copy": direction, "pinned": pinned, "copied_mib": num_bytes // MIB}
    # The host itself copies pageable memory, which varies more: take more samples.
    rule = bench.rule if pinned else replace(bench.rule, cap_s=5 * bench.rule.cap_s)
    yield from bench.time([Part(point, rates=of_work(num_bytes=num_bytes))], build, rule)


def _data_sheet_tflops(row: BenchRow) -> float | None:
    share = row.numbers.get("of_data_sheet")
    return float(row.numbers["tflops_per_s"]) / float(share) if share else None


EXPERIMENT = Experiment(
    title="Properties and rates of this device",
    question="What latency and bandwidth has each memory level, and what rate do matrix products reach?",
    run=run,
    limit_s=240,
    columns=(
        Column("set_kib", "set, KiB", note="read or chased again and again"),
        Column("size_bytes", "size", note="of the level; L1: the largest set that a chase finds there"),
        Column("latency_ns", "latency, ns", ",.3g", note="of a load whose address is the value loaded last"),
        Column("cycles", format=",.1f", note="the same in cycles of the multiprocessor"),
        Column("text", note="an instruction of the marked source line"),
        Column("made_by", "by"),
        Column("count", note="instructions of this operation in that line"),
        Column("copied_mib", "copied, MiB"),
        Column("value"),
        Column("tflops_per_s", "TFLOP/s"),
        Column("gb_per_s", "GB/s"),
        Column("of_data_sheet", "of data sheet", ".1%", note="rate over the dense peak of the data sheet"),
        Column("sm_mhz", "SM, MHz", ".0f", note="median of the lowest clock in each sample"),
        Column("watts", "W", ".0f", note="median power"),
        Column("held_by", "held by", note="why the driver held the clocks down"),
    ),
    plots=(
        Plot(
            x=("set_kib",), y="latency_ns", series="chase", x_log=True, y_log=True,
            where={"chase": (pointer_chase.GLOBAL, *CHASED, pointer_chase.CPU_MEMORY)},
            title="Latency of a load by its set", x_label="KiB", y_label="ns",
        ),
        Plot(
            x=("level", "set_kib"), y="gb_per_s", is_bar=True, is_horizontal=True, text=",.0f",
            title="Reads by level and KiB of the set", y_label="GB/s",
        ),
        Plot(
            x=("dtype", "size"), y="tflops_per_s", bound=_data_sheet_tflops, bound_label="data sheet, dense",
            is_bar=True, is_horizontal=True, text=",.0f", title="Products by dtype and size",
            y_label="TFLOP/s",
        ),
    ),
)  # fmt: skip
