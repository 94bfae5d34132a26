"""Times of operations that ``trainfit calibrate`` does not time: measured on one GPU, and as predicted.

``python -m evidence.scripts.operations_without_rows measure FILE`` runs on the GPU (a minute on an H100) and
writes one JSON object. ``python -m evidence.scripts.operations_without_rows compare FILE [--gpu h100-sxm]``
needs none: it traces the same operations and prints measured and predicted milliseconds and their ratio.

``forward_s`` is the mean of 20 calls between two CUDA events; ``backward_s``, of the gradients of input and
weight, is that of forward and backward together less ``forward_s``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

WARMUP, CALLS = 5, 20
WAIT_CYCLES = 60_000_000
"""What the GPU waits before the timed calls, so that it never waits for the host: some 30 ms."""
CONVOLUTIONS = (
    (128, 64, 64, 56, 3, 1), (256, 64, 256, 56, 1, 1), (256, 256, 256, 14, 3, 1), (256, 1024, 256, 14, 1, 1),
    (256, 512, 512, 7, 3, 1), (64, 256, 256, 56, 3, 1), (64, 256, 256, 56, 7, 256), (64, 256, 256, 56, 3, 32),
)  # fmt: skip
"""Images, channels, filters, height and width, filter size, groups."""
MANY_STEPS = 1000
"""The trace never ends before the last operation."""
FP32 = (64, 256, 256, 56, 3, 1)
IMAGES = (256, 256, 56, 56)
MATRIX = (65536, 1024)
Row = dict[str, Any]


class Case(NamedTuple):
    """One operation: what it is, its forward, and its backward from the forward's output, if timed."""

    row: Row
    forward: Callable[[], Any]
    backward: Callable[[Any], Any] | None


def cases() -> Iterator[Case]:
    """Yield every operation, built on the current CUDA device."""
    for last in (True, False):
        for sizes in CONVOLUTIONS:
            yield _convolution(*sizes, last=last, dtype=torch.bfloat16)
        yield _convolution(*FP32, last=last, dtype=torch.float32)
    layers = {
        "batch_norm": nn.BatchNorm2d(256), "group_norm": nn.GroupNorm(32, 256), "max_pool": nn.MaxPool2d(2),
        "upsample": nn.Upsample(scale_factor=2),
    }  # fmt: skip
    for name, layer in layers.items():
        yield _of_images(name, layer)
    yield from _of_matrix()
    for kind in (nn.LSTM, nn.GRU):
        yield _recurrent(kind)


def _convolution(
    n: int, c: int, k: int, hw: int, r: int, groups: int, *, last: bool, dtype: torch.dtype
) -> Case:
    layer = nn.Conv2d(c, k, r, padding=r // 2, groups=groups, bias=False).to("cuda", dtype)
    x = torch.randn(n, c, hw, hw, device="cuda", dtype=dtype)
    if last:
        layer.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    gradient = torch.randn_like(layer(x))
    row = {
        "kind": "conv", "n": n, "c": c, "k": k, "hw": hw, "r": r, "groups": groups, "last": last,
        "dtype": str(dtype),
    }  # fmt: skip
    return Case(row, lambda: layer(x), lambda out: torch.autograd.grad(out, (x, layer.weight), gradient))


def _of_images(name: str, layer: nn.Module) -> Case:
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(IMAGES, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    x.requires_grad_()
    gradient = torch.randn_like(layer(x))
    row = {"kind": name, "numel": x.numel()}
    return Case(row, lambda: layer(x), lambda out: torch.autograd.grad(out, x, gradient))


def _of_matrix() -> Iterator[Case]:
    z = torch.randn(MATRIX, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "sort": lambda: z.sort(-1),
        "cumsum": lambda: z.cumsum(1),
        "rfft": lambda: torch.fft.rfft(z),
        "scatter_add": lambda: torch.zeros_like(z).scatter_add_(1, (z > 0).long(), z),
    }
    for name, call in calls.items():
        yield Case({"kind": name, "numel": z.numel()}, call, None)


def _recurrent(kind: type[nn.LSTM | nn.GRU]) -> Case:
    layer = kind(512, 512, 2, batch_first=True).to("cuda", torch.bfloat16)
    x = torch.randn(64, 128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return Case({"kind": kind.__name__}, lambda: layer(x), lambda out: out[0].sum().backward())


def measure() -> dict[str, Any]:
    """Time every operation on the GPU."""
    rows = list[Row]()
    for row, forward, backward in cases():
        row["forward_s"] = _timed(forward)
        if backward is not None:
            row["backward_s"] = _timed(lambda f=forward, b=backward: b(f())) - row["forward_s"]
        rows.append(row)
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}


def _timed(call: Callable[[], Any]) -> float:
    """Return the mean seconds of a call on the GPU."""
    for _ in range(WARMUP):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT_CYCLES)  # pyright: ignore[reportPrivateUsage]
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e-3


def predict(gpu_name: str) -> list[tuple[float, float | None]]:
    """Return the predicted seconds of every operation's forward and backward, the host left out."""
    from trainfit.catalog.load import gpu
    from trainfit.prediction.machine import machine_with
    from trainfit.prediction.time.device_time import op_s
    from trainfit.user import user_gpu

    machine, found = machine_with(gpu(gpu_name)), list[tuple[float, float | None]]()
    with user_gpu(machine.gpu, prefers_cudnn=False, max_steps=MANY_STEPS) as virtual:
        ops = virtual.tracer.ledger.ops

        def seconds(since: int) -> float:
            return sum(op_s(op, machine) for op in ops[since:])

        for _, forward, backward in cases():
            begin = len(ops)
            out = forward()
            forward_s, begin = seconds(begin), len(ops)
            if backward is not None:
                backward(out)
            found.append((forward_s, seconds(begin) if backward is not None else None))
    return found


def compare(rows: list[Row], gpu_name: str) -> None:
    """Print measured and predicted milliseconds, and the median error by part."""
    errors: dict[str, list[float]] = {"forward": [], "backward": []}
    for row, (forward_s, backward_s) in zip(rows, predict(gpu_name), strict=True):
        what = " ".join(str(value) for key, value in row.items() if not key.endswith("_s") and key != "flops")
        line = f"{what:52s}"
        for part, predicted_s in (("forward", forward_s), ("backward", backward_s)):
            measured_s = row.get(f"{part}_s")
            if measured_s is None or predicted_s is None:
                continue
            ratio = measured_s / predicted_s
            errors[part].append(max(ratio, 1 / ratio) - 1)
            line += f"  {part} {1e3 * measured_s:6.3f} {1e3 * predicted_s:6.3f} {ratio:5.2f}"
        sys.stdout.write(line + "\n")
    for part, each in errors.items():
        sys.stdout.write(f"{part}: median error {statistics.median(each):.0%} of {len(each)}\n")


def main(arguments: list[str] | None = None) -> int:
    """Measure or compare; exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m evidence.scripts.operations_without_rows")
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--gpu", default="h100-sxm", help="the catalog's name of the GPU")
    options = parser.parse_args(arguments)
    if options.action == "measure":
        options.file.write_text(json.dumps(measure(), indent=1) + "\n")
    else:
        compare(json.loads(options.file.read_text())["rows"], options.gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
