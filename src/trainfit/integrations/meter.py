"""Measures a loop that is not trainfit's: ``Watch``, which ``trainfit.watch`` returns.

On CUDA each step ends with an event, and no call waits for the GPU: a step's reading is there once the GPU
has passed its event, usually during the next step.
"""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed
from pydantic import Field
from torch import nn

from trainfit import records
from trainfit.api.calls import predict
from trainfit.api.recipes import Source, load_recipe
from trainfit.catalog.load import gpu as gpu_called
from trainfit.catalog.load import gpu_of_device
from trainfit.catalog.names import CPU
from trainfit.integrations.work import Done, Work
from trainfit.measurement.environment import host_environment
from trainfit.measurement.meter import cuda_environment, is_out_of_memory, out_of_memory_reason
from trainfit.measurement.nvml import Nvml
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.spec.bench import Environment, Spread
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.plain_data import read_json
from trainfit.spec.printable import say
from trainfit.spec.provenance import new_code_record
from trainfit.spec.result import Estimate, Record
from trainfit.spec.units import format_bytes, format_count, format_seconds
from trainfit.spec.value import Bytes, Count, Flops, Seconds, Share, Value
from trainfit.training.gauges import Load

WARM_UP = 2  # Steps that no median has: the first allocates the optimizer's state, compiles and tunes
NO_TOKENS = (
    "no training forward of the watched model was seen, as under torch.compile of its inside: "
    "give w.step(tokens=...) for tokens a second and MFU"
)


class Reading(Value):
    """One step or several together. Tokens are of all processes; utilisation and memory of this one's GPU."""

    step: Count  # The last one's number, from 1
    step_s: Seconds  # Mean
    tokens_per_s: float | None = None
    mfu: Share | None = None
    hfu: Share | None = None
    busy: Share | None = None  # By the GPU's driver; on a CPU this process's share of all usable cores
    held_back: tuple[str, ...] = ()
    """Why the driver throttled the GPU (NVML's names); the speeds are then below the GPU's own."""
    peak_allocated_bytes: Bytes | None = None  # Highest so far in this process; None: on a CPU
    peak_reserved_bytes: Bytes | None = None
    predicted_allocated_bytes: Bytes | None = None
    predicted_reserved_bytes: Bytes | None = None

    def logs(self) -> dict[str, float]:
        """Return the known values by the names that trainfit's own logs have."""
        named = {
            "speed/step_s": self.step_s, "speed/tokens_per_s": self.tokens_per_s, "speed/mfu": self.mfu,
            "speed/hfu": self.hfu, "device/busy": self.busy,
            "device/peak_memory_bytes": self.peak_allocated_bytes,
            "device/predicted_memory_bytes": self.predicted_allocated_bytes,
        }  # fmt: skip
        return {name: float(value) for name, value in named.items() if value is not None}

    def line(self) -> str:
        """Return the reading in one line, without unknown values."""
        parts = [f"step {self.step}", f"{format_seconds(self.step_s)} a step"]
        parts += [f"{format_count(self.tokens_per_s)} tokens/s"] if self.tokens_per_s else []
        shares = {"MFU": self.mfu, "HFU": self.hfu, "busy": self.busy}
        parts += [f"{name} {value:.1%}" for name, value in shares.items() if value is not None]
        parts += [memory_text(self)] if self.peak_allocated_bytes is not None else []
        if self.held_back:
            parts.append(f"THROTTLED by the driver: {', '.join(self.held_back)}")
        return "  ".join(parts)


class WatchSummary(Value):
    """Result of a watched loop: the ``train`` field of its Record. Speeds are medians after the warm-up."""

    name: str
    gpu: str | None  # Of the catalog; None: not in it, so without MFU
    status: Literal["done", "out-of-memory", "crashed"]
    message: str = ""
    steps: Count
    tokens: Count  # Of all processes
    num_processes: Count
    params: Count
    trainable_params: Count
    step_times: Spread | None = None
    step_s: Seconds | None = None
    tokens_per_s: float | None = None
    mfu: Share | None = None
    hfu: Share | None = None
    busy: Share | None = None  # Mean of the readings
    model_flops: Flops | None = None
    """Of the median step, on this process's GPU."""
    flops_convention: str = ""
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    predicted_allocated_bytes: Bytes | None = None
    predicted_reserved_bytes: Bytes | None = None
    predicted_step_s: Seconds | None = None
    predicted_gpu: str | None = None
    """GPU that the prediction is for; None: it does not say."""
    held_back: dict[str, Count] = Field(default={})
    wall_s: Seconds
    environment: Environment


@dataclass(frozen=True)
class _Step:
    """A finished step of this process."""

    seconds: float
    done: Done


class Watch:
    """Context manager that measures a loop; arguments as ``watch`` (watch.py) takes them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        gpu: str | None = None,
        prediction: Estimate | Source | None = None,
        flops_per_token: float | None = None,
        seq: int | None = None,
        peak_flops: float | None = None,
        ranks_per_batch: int = 1,
        log: Callable[[dict[str, float], int], object] | None = None,
        log_every: int = 1,
        print_every_s: float | None = None,
        record: str | Path | None = None,
        name: str | None = None,
    ):
        for field, value in {"log_every": log_every, "ranks_per_batch": ranks_per_batch}.items():
            if value < 1:
                raise InputError("must be at least 1", "count steps or processes", field=field, value=value)
        if record is not None:
            records.check_can_append(record)
        self.name = name or type(model).__name__
        self._estimate = _estimate(prediction)
        self._work = Work(model, flops_per_token=flops_per_token, estimate=self._estimate, seq=seq)
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._gpu = _gpu(gpu, self._device)
        self._peak_flops, self._ranks_per_batch = peak_flops, ranks_per_batch
        self._log, self._log_every, self._print_every_s = log, log_every, print_every_s
        self._record_file = record
        self._pending: deque[tuple[Any, Done]] = deque()
        self._steps: list[_Step] = []
        self._num_printed = self._num_taken = 0
        self._held_back: Counter[str] = Counter()
        self._busy: list[float] = []
        self._tokens = 0
        self._said: set[str] = set()
        self.reading: Reading | None = None
        """Of the newest step that the device has finished."""
        self._now: dict[str, Any] = {}
        self.summary: WatchSummary | None = None
        """After the loop."""
        self.record: Record | None = None

    def __enter__(self) -> Self:
        """Register the hook that counts tokens, and begin the first step's time."""
        if self._device.type == "cpu":  # The model may have moved to the GPU since.
            self._device = next((p.device for p in self._model.parameters()), self._device)
        self._hook = self._work.attach()
        self._load = Load(self._device)
        self._load.share()
        self._start_s = self._printed_s = time.perf_counter()
        self._last = self._mark()
        return self

    def step(self, tokens: int | None = None) -> Reading | None:
        """Mark the end of an optimizer step.

        Args:
            tokens: of this process in the step; None: those that its training forwards had, padding included.

        Returns:
            The reading of the newest step that the device has finished; None: it has finished none yet.
        """
        if tokens is not None and tokens <= 0:
            raise InputError("must be above 0", "count the step's tokens", field="tokens", value=tokens)
        done = self._work.take(tokens)
        if not done.tokens:
            self._say_once(f"note: {NO_TOKENS}")
        self._pending.append((self._mark(), done))
        self._collect(wait=False)
        return self.reading

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Remove the hook, read the last steps, print the summary and append the record."""
        self._hook.remove()
        status, message = "done", ""
        if error is not None and not isinstance(error, KeyboardInterrupt):
            out = is_out_of_memory(error)
            status = "out-of-memory" if out else "crashed"
            message = out_of_memory_reason(error) if out else f"{type(error).__name__}: {error}"
        if error is None:  # After an error the device may never finish.
            self._collect(wait=True)
        self.summary = self._summary(status, message)
        if self._is_first:
            if self._print_every_s is not None:
                say(show(self.summary), err=True)
            self.record = new_code_record(
                "train", train=self.summary.model_dump(mode="json"), tags=("watch",)
            )
            if self._record_file is not None:
                records.append(self._record_file, self.record)

    @property
    def _ranks(self) -> int:
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if there else 1

    @property
    def _is_first(self) -> bool:
        return self._ranks == 1 or torch.distributed.get_rank() == 0

    def _mark(self) -> Any:
        """Return the time now: an event in the device's queue, or on a CPU seconds."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _collect(self, *, wait: bool) -> None:
        """Take the steps that the device has finished."""
        while self._pending:
            mark, done = self._pending[0]
            if self._device.type == "cuda":
                if wait:
                    mark.synchronize()
                if not mark.query():
                    return
                seconds = self._last.elapsed_time(mark) / 1e3
            else:
                seconds = mark - self._last
            self._last = mark
            self._pending.popleft()
            self._take(_Step(max(seconds, 1e-9), done))

    def _take(self, step: _Step) -> None:
        self._steps.append(step)
        of_all = step.done.tokens * self._ranks // self._ranks_per_batch
        self._tokens += of_all
        held_back, busy = self._load.held_back(), self._load.share()
        self._held_back.update(held_back)
        self._busy += [] if busy is None or len(self._steps) <= WARM_UP else [busy]
        self._now = {"busy": busy, "held_back": held_back}
        self.reading = self._reading([step])
        if self._log is not None and len(self._steps) % self._log_every == 0:
            self._log(self._reading(self._steps[-self._log_every :]).logs(), len(self._steps))
        now_s = time.perf_counter()
        if self._print_every_s is not None and now_s - self._printed_s >= self._print_every_s:
            self._printed_s = now_s
            since, self._num_printed = self._steps[self._num_printed :], len(self._steps)
            if self._is_first:
                say(self._reading(since).line(), err=True)

    def take(self) -> Reading | None:
        """Return one reading of all steps that finished since the last call; None: no step did."""
        since, self._num_taken = self._steps[self._num_taken :], len(self._steps)
        return self._reading(since) if since else None

    def _reading(self, steps: Sequence[_Step]) -> Reading:
        seconds = sum(step.seconds for step in steps)
        tokens = sum(step.done.tokens for step in steps) * self._ranks // self._ranks_per_batch

        def total(values: Iterable[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return sum(known) if len(known) == len(steps) else None

        return Reading(
            step=len(self._steps),
            step_s=seconds / len(steps),
            tokens_per_s=tokens / seconds if tokens else None,
            mfu=self._utilisation(total(step.done.model_flops for step in steps), seconds),
            hfu=self._utilisation(total(step.done.hardware_flops for step in steps), seconds),
            **self._now,
            **self._memory(),
        )

    def _memory(self) -> dict[str, Any]:
        found: dict[str, int] = {}
        if self._device.type == "cuda":
            found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(self._device)
            found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(self._device)
        if self._estimate is not None:
            found["predicted_allocated_bytes"] = self._estimate.peak_allocated_bytes
            found["predicted_reserved_bytes"] = self._estimate.peak_reserved_bytes
        return found

    def _utilisation(self, flops: float | None, seconds: float) -> float | None:
        peak = self._peak()
        return None if flops is None or peak is None else flops / self._ranks_per_batch / seconds / peak

    def _peak(self) -> float | None:
        if self._peak_flops is not None:
            return self._peak_flops
        if self._gpu is None or not self._gpu.peak_flops_per_s:
            return None
        return peak_flops_per_s(self._gpu, self._work.dtype or "bf16")

    def _summary(self, status: Any, message: str) -> WatchSummary:
        steady = self._steps[WARM_UP:] or self._steps
        seconds = [step.seconds for step in steady]
        step_s = statistics.median(seconds) if seconds else None
        tokens = [step.done.tokens * self._ranks // self._ranks_per_batch for step in steady]
        speeds = [number / s for number, s in zip(tokens, seconds, strict=True) if number]

        def median(field: Literal["model_flops", "hardware_flops"], *, share: bool) -> float | None:
            known = [(getattr(step.done, field), step.seconds) for step in steady]
            values = [
                self._utilisation(flops, s) if share else flops / self._ranks_per_batch
                for flops, s in known
                if flops is not None
            ]
            found = [value for value in values if value is not None]
            return statistics.median(found) if found else None

        parameters = list(self._model.parameters())
        return WatchSummary(
            name=self.name,
            gpu=self._gpu and self._gpu.name,
            status=status,
            message=message,
            steps=len(self._steps),
            tokens=self._tokens,
            num_processes=self._ranks,
            params=sum(p.numel() for p in parameters),
            trainable_params=sum(p.numel() for p in parameters if p.requires_grad),
            step_times=Spread.of(seconds) if seconds else None,
            step_s=step_s,
            tokens_per_s=statistics.median(speeds) if speeds else None,
            mfu=median("model_flops", share=True),
            hfu=median("hardware_flops", share=True),
            busy=statistics.fmean(self._busy) if self._busy else None,
            model_flops=median("model_flops", share=False),
            flops_convention=self._work.convention,
            predicted_step_s=self._estimate and self._estimate.step_s,
            predicted_gpu=self._estimate and self._estimate.gpu,
            held_back=dict(self._held_back),
            wall_s=time.perf_counter() - self._start_s,
            environment=self._environment(),
            **self._memory(),
        )

    def _environment(self) -> Environment:
        if self._device.type != "cuda":
            return host_environment("cpu")
        return cuda_environment(host_environment("cuda"), self._device, Nvml(self._device.index or 0))

    def _say_once(self, text: str) -> None:
        if text not in self._said and self._is_first and self._print_every_s is not None:
            say(text, err=True)
        self._said.add(text)


def memory_text(one: Reading | WatchSummary) -> str:
    """Return the peak of the allocated and reserved memory, each with its difference from the prediction."""
    assert one.peak_allocated_bytes is not None
    assert one.peak_reserved_bytes is not None
    return ", ".join(
        f"{format_bytes(found)} {name}{_against(found, predicted)}"
        for name, found, predicted in (
            ("allocated", one.peak_allocated_bytes, one.predicted_allocated_bytes),
            ("reserved", one.peak_reserved_bytes, one.predicted_reserved_bytes),
        )
    )


def _against(found: int, predicted: int | None) -> str:
    if not predicted:
        return ""
    off = f"{found / predicted - 1:+.2%}"
    return " (as predicted)" if off in ("+0.00%", "-0.00%") else f" ({off} against the predicted)"


def show(summary: WatchSummary) -> str:
    """Return a watched loop's result as lines of text."""
    device = summary.gpu or summary.environment.device
    several = f"{summary.num_processes} x " if summary.num_processes > 1 else ""
    lines = [f"{summary.name} on {several}{device}: {summary.steps} steps, {format_seconds(summary.wall_s)}"]
    if summary.status != "done":
        lines[0] += f", then {summary.status}: {summary.message}"
    if summary.step_s is not None and summary.step_times is not None:
        times = summary.step_times
        predicted = summary.predicted_step_s
        against = f", predicted {format_seconds(predicted)}" if predicted else ""
        if predicted and summary.predicted_gpu not in (None, summary.gpu):
            against += f" for another GPU, {summary.predicted_gpu}"
        spread = f"80 % of the steps in {format_seconds(times.low)} to {format_seconds(times.high)}"
        lines.append(f"  step    {format_seconds(summary.step_s)}, {spread}{against}")
    if summary.tokens_per_s is not None:
        lines.append(f"  tokens  {summary.tokens_per_s:,.0f} a second, {format_count(summary.tokens)} in all")
    shares = {"MFU": summary.mfu, "HFU": summary.hfu, "busy": summary.busy}
    known = [f"{name} {value:.1%}" for name, value in shares.items() if value is not None]
    if known:
        lines.append(f"  use     {', '.join(known)}")
    if summary.mfu is not None:
        lines.append(f"          FLOPs: {summary.flops_convention}")
    elif summary.gpu is None:
        lines.append("          no MFU: no dense peak is known; give gpu= or peak_flops=")
    if summary.peak_allocated_bytes is not None:
        lines.append(f"  memory  {memory_text(summary)}")
    if summary.held_back:
        reasons = ", ".join(f"{name} ({count} steps)" for name, count in summary.held_back.items())
        lines.append(f"  THROTTLED by the driver: {reasons}; the speeds are below the GPU's own")
    return "\n".join(lines)


def _estimate(prediction: Estimate | Source | None) -> Estimate | None:
    if prediction is None or isinstance(prediction, Estimate):
        return prediction
    if (
        isinstance(prediction, str | Path)
        and Path(prediction).suffix == ".json"
        and Path(prediction).is_file()
    ):
        data = read_json(Path(prediction))
        if isinstance(data, dict) and "peak_allocated_bytes" in data:
            known = {name: value for name, value in data.items() if name in Estimate.model_fields}
            return parse(Estimate, known, file=str(prediction))
    return predict(load_recipe(prediction))


def _gpu(name: str | None, device: torch.device) -> Gpu | None:
    """Return the catalog's row; None: the device is a CPU, or no GPU that the catalog has."""
    if name is not None:
        return gpu_called(name)
    if device.type != "cuda":
        return gpu_called(CPU)
    try:
        return gpu_of_device(torch.cuda.get_device_name(device))
    except InputError:
        return None
