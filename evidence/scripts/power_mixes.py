"""Time products and attention in mixes of kernels, at the clocks that each mix leaves them.

    python -m evidence.scripts.power_mixes MIXES.jsonl

Runs on one GPU. Every kernel is timed as `trainfit calibrate` does, then in mixes of products, attention and
additions, which no clock slows down, each for 1.2 s, of which the second half counts. A line a mix: shares
of the time that kernels timed alone would take, seconds of each kind over those alone, and the clock and the
power in the median.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from trainfit.bench.harness.runner import data_sheet
from trainfit.bench.harness.stopwatch import Stopwatch, stopwatch_of
from trainfit.calibration.op_timer import OpTimer
from trainfit.spec.printable import say
from trainfit.spec.provenance import commit

WARM_S, COUNTED_S, CYCLE_S = 0.6, 0.6, 0.032
AHEAD = 3
"""Cycles that the host issues before it waits for the first."""
TOKENS, WIDTH, INNER, HEADS = 8192, 4096, 14336, 32
ELEMENTS = 2**27
SHARES = (
    (0.0, 0.1), (0.0, 0.3), (0.0, 0.6), (0.0, 1.0), (0.2, 0.2), (0.2, 0.5), (0.2, 0.8), (0.4, 0.1),
    (0.4, 0.3), (0.4, 0.6), (0.6, 0.1), (0.6, 0.2), (0.6, 0.4), (0.8, 0.1), (0.8, 0.2), (0.9, 0.1),
)  # fmt: skip
"""Of products and of attention, in the time that kernels alone would take; the rest is additions."""
WITHOUT_ATTENTION = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
ATTENTION = (
    ("gluon", 128, 8192), ("cudnn", 128, 8192), ("gluon", 64, 2048), ("cudnn", 64, 2048), ("flash", 128, 8192)
)  # fmt: skip
"""Kernels, their head sizes and lengths."""
Run = Callable[[], object]


def product_of(device: torch.device, dtype: str) -> Run:
    """Return a product of a linear layer's forward."""
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    w = torch.randn(INNER, WIDTH, device=device, dtype=torch.bfloat16)
    if dtype == "bfloat16":
        return lambda: x @ w.t()
    scale = torch.ones((), device=device)
    a, b = (t.mul(64).to(torch.float8_e4m3fn) for t in (x, w))
    return lambda: torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def attention_of(device: torch.device, kernel: str, head: int, length: int) -> tuple[Run, Run]:
    """Return a forward of causal attention and the backward of the last one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from trainfit.kernels.flash_attention.op import flash_attention

    shape = TOKENS // length, length, HEADS, head
    inputs = [
        torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    gradient = torch.randn_like(inputs[0])
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        if kernel == "gluon":
            outputs[:] = [flash_attention(*inputs, is_causal=True)]
            return
        with sdpa_kernel(getattr(SDPBackend, f"{kernel.upper()}_ATTENTION")):
            outputs[:] = [F.scaled_dot_product_attention(*inputs, is_causal=True)]

    return forward, lambda: torch.autograd.grad(outputs.pop(), inputs, gradient)


def alone_s(timer: OpTimer, part: str, *runs: Run) -> list[float]:
    """Return the seconds of each call's operations, timed as ``trainfit calibrate`` does."""
    found = list[float]()
    for run in runs:
        done = len(timer.rows)
        timer.part = part
        with timer:
            run()
        timer.finish()
        found.append(sum(row.seconds for row in timer.rows[done:]))
        if not found[-1]:
            raise SystemExit(f"{part} was not timed: {timer.failures}")
    return found


class Mixes:
    """Runs mixes on one GPU; the kernels' seconds alone are found first."""

    def __init__(self, device: torch.device, stopwatch: Stopwatch, timer: OpTimer):
        self.stopwatch = stopwatch
        a, b, out = (torch.randn(ELEMENTS, device=device, dtype=torch.bfloat16) for _ in range(3))
        self.runs: dict[str, tuple[Run, ...]] = {"additions": (lambda: torch.add(a, b, out=out),)}
        for dtype in ("bfloat16", "float8_e4m3fn"):
            self.runs[dtype] = (product_of(device, dtype),)
        for kernel, head, length in ATTENTION:
            self.runs[f"{kernel} {head} {length}"] = attention_of(device, kernel, head, length)
        for runs in self.runs.values():
            for run in runs:  # Compiles kernels.
                run()
        self.alone = {name: alone_s(timer, name, *runs) for name, runs in self.runs.items()}

    def measure(self, dtype: str, attention: str, products: float, share: float) -> dict[str, Any]:
        """Return one mix's line."""
        shares = {"additions": 1 - products - share, dtype: products, attention: share}
        counts = {
            name: round(CYCLE_S * one / sum(self.alone[name])) or 1
            for name, one in shares.items()
            if one > 0.001
        }
        groups = [(name, at) for name in counts for at in range(len(self.runs[name]))]
        marks, states = list[list[Any]](), list[dict[str, float]]()
        begin_s, start = time.perf_counter(), 0
        while time.perf_counter() - begin_s < WARM_S + COUNTED_S:
            if not start and time.perf_counter() - begin_s > WARM_S:
                start = len(marks)
            marks.append(self._cycle(counts))
            if len(marks) > AHEAD:
                self.stopwatch.held_until(marks[-AHEAD - 1][-1])
                states += [self.stopwatch.state()] if start else []
        self.stopwatch.wait()
        taken = dict.fromkeys(groups, 0.0)
        for one in marks[start:]:
            for group, (begin, end) in zip(self._order(counts), pairwise(one), strict=True):
                taken[group] += self.stopwatch.between(begin, end)
        cycles = len(marks) - start
        total_s = sum(count * sum(self.alone[name]) for name, count in counts.items())
        return {
            "attention": attention if share else "",
            "dtype": dtype if products else "",
            "shares": {name: round(n * sum(self.alone[name]) / total_s, 4) for name, n in counts.items()},
            "over_alone": {
                f"{name}{' backward' if at else ''}": round(
                    taken_s / cycles / counts[name] / self.alone[name][at], 4
                )
                for (name, at), taken_s in taken.items()
            },
            "cycles": cycles,
            **{key: median(state[key] for state in states) for key in states[0]},
        }

    def _order(self, counts: dict[str, int]) -> list[tuple[str, int]]:
        return [
            (name, at) for name, n in counts.items() for _ in range(n if len(self.runs[name]) > 1 else 1)
            for at in range(len(self.runs[name]))
        ]  # fmt: skip

    def _cycle(self, counts: dict[str, int]) -> list[Any]:
        """Issue one cycle, and return marks around its groups: each forward and backward is one."""
        marks = [self.stopwatch.mark()]
        for name, count in counts.items():
            runs = self.runs[name]
            if len(runs) == 1:
                for _ in range(count):
                    runs[0]()
                marks.append(self.stopwatch.mark())
                continue
            for _ in range(count):
                for run in runs:
                    run()
                    marks.append(self.stopwatch.mark())
        return marks


def wanted() -> Iterator[tuple[str, str, float, float]]:
    """Yield each mix: dtype of products, attention, their shares."""
    names = [f"{kernel} {head} {length}" for kernel, head, length in ATTENTION]
    for dtype in ("bfloat16", "float8_e4m3fn"):
        yield from ((dtype, names[0], share, 0.0) for share in WITHOUT_ATTENTION)
    for name in names:
        yield from (("bfloat16", name, *shares) for shares in SHARES)
    for name in names[:2]:
        yield from (("float8_e4m3fn", name, *shares) for shares in SHARES if shares[0])


def measure(file: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = data_sheet(device)
    if gpu is None:
        raise SystemExit("this GPU is not in the catalog")
    stopwatch = stopwatch_of(device)
    mixes = Mixes(device, stopwatch, OpTimer(stopwatch, gpu, lambda: False))
    say(json.dumps(mixes.alone))
    versions = {"gpu": gpu.name, "torch": torch.__version__, "commit": commit()}
    with file.open("w", encoding="utf-8") as lines:
        for one in wanted():
            found = mixes.measure(*one)
            lines.write(json.dumps(versions | {"alone_s": mixes.alone} | found) + "\n")
            lines.flush()
            say(
                f"{found['dtype']:14} {found['attention']:16} {found['shares']} "
                f"{list(found['over_alone'].values())} {found.get('sm_mhz')} {found.get('watts')}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    measure(options.file)


if __name__ == "__main__":
    main()
