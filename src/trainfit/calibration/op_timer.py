"""Time each distinct operation that runs in a dispatch mode, on its own tensors, while the device stays busy.

Before each operation products run for ``LOAD_S``, and none is waited for until several more are issued, so
that the host never delays the device. Products are so timed at about the clocks of a step in which they take
half of the time. Those of other operations are higher: what a step at the power limit adds to attention is
known apart (prediction/time/power_limit.py).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.bench.harness.stopwatch import Stopwatch
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.spec.bench import SLOWDOWNS
from trainfit.spec.calibration import LEAST_S, OpTime
from trainfit.spec.hardware import Gpu
from trainfit.virtual.cuda.attention_kernel import attention_kernel
from trainfit.virtual.cuda.bytes_moved import bytes_moved
from trainfit.virtual.cuda.flops import count
from trainfit.virtual.cuda.op_kinds import FREE, UNWRITTEN, base_name, written
from trainfit.virtual.cuda.op_layout import layout, product_dtype, product_shape
from trainfit.virtual.trace.op_entries import dtype_of
from trainfit.virtual.trace.tensors import tensors_of

LOAD_S, RUNS_S = 4e-3, 4e-3
"""Seconds of products before an operation, and of its own runs."""
LOAD_SIZE = 4096
REACHED = 0.69
"""Share of the dense peak that products of this size reach: 682 of an H200's 989 TFLOP/s."""
MOST_RUNS = 100
"""Runs of a short operation."""
ISSUE_SHARE = 0.9
"""Of the load's time, in which the host issues them; the fewest are issued however long it takes."""
LEAST_RUNS = 3
AHEAD = 3
"""Operations issued before the first of them is waited for."""
ASSUMED_FLOPS_PER_S, ASSUMED_BYTES_PER_S, ASSUMED_S = 3e14, 2e12, 4e-6
"""Of a GPU, to choose the number of runs."""


class _Issued(NamedTuple):
    row: OpTime
    start: Any
    end: Any
    runs: int


class OpTimer(TorchDispatchMode):
    """Times operations while it is entered; ``rows`` after ``finish`` holds one for each distinct call.

    Args:
        stopwatch: the device's.
        gpu: its row of the catalog; None: a CPU, which runs without load and few times.
        is_over: says that no time is left.
    """

    def __init__(self, stopwatch: Stopwatch, gpu: Gpu | None, is_over: Callable[[], bool]):
        super().__init__()
        self.stopwatch, self.gpu, self.is_over = stopwatch, gpu, is_over
        self.rows: list[OpTime] = []
        self.failures: list[str] = []
        self.states: list[dict[str, float]] = []
        self.part = ""
        self._seen: set[Any] = set()
        self._pending = deque[_Issued]()
        self._num_held, self._reasons = 0, set[str]()
        self._load = self._products() if gpu is not None else lambda: None

    def _products(self) -> Callable[[], None]:
        a = torch.randn(LOAD_SIZE, LOAD_SIZE, device="cuda", dtype=torch.bfloat16)
        b, out = torch.randn_like(a), torch.empty_like(a)
        assert self.gpu is not None
        flops_per_s = REACHED * peak_flops_per_s(self.gpu, "bf16")
        num = max(1, round(LOAD_S * flops_per_s / (2 * LOAD_SIZE**3)))

        def load() -> None:
            for _ in range(num):
                torch.mm(a, b, out=out)

        load()  # The first product loads cuBLAS.
        return load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # The operations of a wrapper subclass come back here.
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.is_over():
            self.time(func, args, kwargs, out)
        return out

    def time(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Time one more call of an operation, unless an equal one was timed."""
        tensors = tensors_of((args, kwargs))
        if func.is_view or base_name(func) in FREE | UNWRITTEN or not _is_on_one_device(tensors, out):
            return
        signature = str(func), _signature(args), _signature(tuple(kwargs.items()))
        if signature in self._seen:
            return
        self._seen.add(signature)
        try:
            self._issue(func, args, kwargs, out)
        except Exception as error:  # Of this operation alone.
            torch.cuda.empty_cache()
            self.failures.append(
                f"{self.part}: {func}: {type(error).__name__}: {str(error).splitlines()[:1]}"
            )

    def _issue(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        row = self._row(func, args, kwargs, out)
        if not row.num_bytes and not row.flops:
            return
        args, kwargs = _with_own_targets(func, args, kwargs)
        estimate_s = max(row.flops / ASSUMED_FLOPS_PER_S, row.num_bytes / ASSUMED_BYTES_PER_S, ASSUMED_S)
        runs = max(LEAST_RUNS, min(MOST_RUNS, round(RUNS_S / estimate_s)))
        begin_s = time.perf_counter()
        self._load()
        start = self.stopwatch.mark()
        done = 0
        while done < LEAST_RUNS or (done < runs and not self._is_load_over(begin_s)):
            func(*args, **kwargs)
            done += 1
        self._pending.append(_Issued(row, start, self.stopwatch.mark(), done))
        while len(self._pending) > AHEAD:
            self._take()

    def _is_load_over(self, begin_s: float) -> bool:
        """Return whether the load may soon be done, so that no further run is issued; a CPU has no load.

        Kernels that are launched from Python, as Triton's, take the host up to 0.1 ms a launch. Runs that are
        issued after the load has ended would be timed by the host's speed.

        Args:
            begin_s: when the host began to issue the load, by ``time.perf_counter``.
        """
        return self.gpu is not None and time.perf_counter() - begin_s > ISSUE_SHARE * LOAD_S

    def _row(self, func: Any, args: Any, kwargs: Any, out: Any) -> OpTime:
        capability = self.gpu.compute_capability if self.gpu else None
        attention = attention_kernel(func, args, kwargs, capability)
        counted = count(func, args, kwargs, out, attention.kernel)
        dtype = product_dtype(func, dtype_of(args, out), capability)
        return OpTime(
            str(func), dtype, layout(func, args, out), product_shape(func, args), *attention,
            flops=counted.causal if counted else 0, num_bytes=bytes_moved(func, args, kwargs, out),
            seconds=0.0, part=self.part,
        )  # fmt: skip

    def _take(self) -> None:
        row, start, end, runs = self._pending.popleft()
        reasons = set(self.stopwatch.held_until(end)) & set(SLOWDOWNS)
        if self.gpu is None:
            self.stopwatch.wait()
        if reasons:  # Its time is none of the GPU's.
            self._num_held, self._reasons = self._num_held + 1, self._reasons | reasons
            return
        taken_s = self.stopwatch.between(start, end) / runs
        if taken_s < LEAST_S:
            self.failures.append(f"{self.part}: {row.op}: no time between its marks")
            return
        self.rows.append(row._replace(seconds=taken_s))
        if len(self.rows) % 25 == 0 and (state := self.stopwatch.state()):
            self.states.append(state)

    def finish(self) -> None:
        """Wait for the operations that were issued."""
        while self._pending:
            self._take()
        if self._num_held:
            self.failures.append(f"{self.part}: {self._num_held} operations: {held_back(self._reasons)}")
        self._num_held, self._reasons = 0, set()


def held_back(reasons: Iterable[str]) -> str:
    """Return why something has no time."""
    return f"the driver throttled the GPU ({', '.join(sorted(reasons))})"


def _is_on_one_device(tensors: Iterable[torch.Tensor], out: Any) -> bool:
    """Return whether a call is the device's work; a CPU's scalars may take part."""
    kinds = {t.device.type for t in (*tensors, *tensors_of(out)) if t.ndim}
    return len(kinds) == 1 and kinds != {"meta"} and (kinds == {"cuda"} or not torch.cuda.is_available())


def _signature(value: Any) -> Any:
    """Return what distinguishes calls: tensors by shape, strides and dtype, other arguments by value."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_signature(each) for each in value)
    return value if isinstance(value, int | str | bool | torch.dtype) else None


def _with_own_targets(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments, those that the operation writes replaced by copies."""
    targets = {id(t) for target in written(func, args, kwargs) for t in tensors_of((target,))}
    if not targets:
        return args, kwargs

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if id(value) in targets else value
        if isinstance(value, list | tuple):
            return type(value)(own(each) for each in value)
        return {key: own(each) for key, each in value.items()} if isinstance(value, dict) else value

    return own(args), own(kwargs)
