"""Traces as torch.profiler writes them, with GPU events that no GPU made: the times are chosen."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BASE_US = 4_896_637_780_000.0
HOST_PID, HOST_TID = 773, 773
H100 = "NVIDIA H100 80GB HBM3"
Events = list[dict[str, Any]]


class Kernel(NamedTuple):
    """A kernel: when the host launches it, when it runs, and what launches it."""

    launched: float
    begin: float
    duration: float
    name: str = ADD
    op: str = "aten::add"
    stream: int = 7
    cat: str = "kernel"


def events_of(kernels: list[Kernel], steps: list[tuple[float, float]], first: int = 1) -> Events:
    """Return the events of kernels and marked steps; times in microseconds since the beginning."""
    host = {"pid": HOST_PID, "tid": HOST_TID}
    found: Events = [
        {"ph": "M", "name": "process_name", "ts": BASE_US, **host, "args": {"name": "python"}},
    ]
    for number, (begin, duration) in enumerate(steps, 3):
        name = f"ProfilerStep#{number}"
        found.append(_span("user_annotation", name, begin, duration, **host))
        found.append(_span("gpu_user_annotation", name, begin, duration, pid=0, tid=7))
    for number, one in enumerate(kernels, first):
        found.append(_span("cpu_op", one.op, one.launched - 2, 6, **host, args={"External id": number}))
        args = {"correlation": number, "External id": number}
        found.append(_span("cuda_runtime", "cudaLaunchKernel", one.launched, 3, **host, args=args))
        on_gpu = args | {"device": 0, "stream": one.stream, "context": 1}
        found.append(_span(one.cat, one.name, one.begin, one.duration, pid=0, tid=one.stream, args=on_gpu))
        found.append({"ph": "s", "id": number, "cat": "ac2g", "name": "ac2g", "ts": BASE_US, **host})
    return found


def _span(cat: str, name: str, begin: float, duration: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": BASE_US + begin, "dur": duration, **more}


def product(begin: float, m: int, k: int, n: int) -> dict[str, Any]:
    """Return a host operation whose shapes were recorded."""
    args = {"Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    return _span("cpu_op", "aten::mm", begin, 1, pid=HOST_PID, tid=HOST_TID, args=args)


def sync(begin: float, duration: float, op: str = "aten::_local_scalar_dense") -> Events:
    """Return a wait for the GPU in an operation."""
    host = {"pid": HOST_PID, "tid": HOST_TID}
    return [
        _span("cpu_op", op, begin - 1, duration + 2, **host),
        _span("cuda_runtime", "cudaStreamSynchronize", begin, duration, **host, args={"correlation": 0}),
    ]


def saved(path: Path, events: Events, gpu: str = H100) -> Path:
    """Write a trace; gzipped where the name ends with ``.gz``."""
    content = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": gpu, "totalGlobalMem": 85_000_000_000}],
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "traceName": str(path),
    }
    text = json.dumps(content, indent=1).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def busy_and_slow(num_steps: int = 3) -> Events:
    """90 % busy, few products: 90 kernels of 9 us a step, a launch each 10 us."""
    kernels: list[Kernel] = []
    for number in range(num_steps * 90):
        launched = 10.0 * number
        is_product = number % 30 == 0
        name, op = (GEMM, "aten::mm") if is_product else (ADD, "aten::add")
        kernels.append(Kernel(launched, launched + 5, 9.0, name, op))
    steps = [(900.0 * number - 5, 900.0) for number in range(num_steps)]
    found = events_of(kernels, steps)
    found += [product(900.0 * number + 300.0 * at, 128, 1024, 1024)
              for number in range(num_steps) for at in range(3)]  # fmt: skip
    return found


def busy_and_fast(num_steps: int = 3) -> Events:
    """Products of 1 ms, issued ahead: never idle."""
    kernels: list[Kernel] = []
    for number in range(num_steps):
        for at in range(10):
            begin = 10_000.0 * number + 1000.0 * at
            kernels.append(Kernel(10_000.0 * number + 8 * at, begin + 100, 1000.0, GEMM, "aten::mm"))
    found = events_of(kernels, [(10_000.0 * number, 10_000.0) for number in range(num_steps)])
    found += [
        product(10_000.0 * number + at, 8192, 8192, 4096) for number in range(num_steps) for at in range(10)
    ]
    return found
