"""``trainfit.trace``: a person's own training code on the virtual GPU, without a GPU and without its data's size.

Enters: a callable that builds a ``torch.nn.Module`` and trains it with plain PyTorch on "cuda". Leaves: Traced, what a
run of it would take on a GPU. No recipe, no layers repeated: what the callable does is what is counted.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from trainfit.catalog.load import gpu as find_gpu
from trainfit.ledger.allocator import OutOfMemory
from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.ledger.replay import Replay, replay
from trainfit.prediction import attention_time
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.estimate import CONVENTION
from trainfit.prediction.roofline import roofline
from trainfit.prediction.versions import LIBRARIES, versions_of
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.result import CATEGORIES, PHASES, MemoryBreakdown, Phases, StepTime
from trainfit.spec.units import format_bytes, format_count, format_flops, format_seconds
from trainfit.spec.value import Bytes, Count, Flops, Seconds, Value
from trainfit.virtual.cuda.attention_kernel import prefers_cudnn
from trainfit.virtual.user import UserGpu, user_gpu
from trainfit.virtual.user.memory_stats import EmptyCacheAllocator
from trainfit.virtual.user.steps import TraceComplete

NUM_HOLDERS = 10
LIBRARY_WORKSPACE = (
    "convolutions: cuDNN's workspaces are not modelled, nor the copies it makes of layouts it does not like"
)


class Holder(Value):
    """What one operation in one module holds at the peak."""

    num_bytes: Bytes
    category: str
    module: str
    operation: str


class Traced(Value):
    """What a traced callable would take on a GPU: bytes, FLOPs and seconds of one optimizer step on it."""

    name: str
    gpu: str
    num_steps: Count
    """Optimizer steps that were traced."""
    phases: Phases
    """Of the first step and of the last whole one (``steady``)."""
    breakdown: MemoryBreakdown
    """At the moment of the peak."""
    peak_phase: str
    """Where the peak is, such as ``steady.backward``; ``setup``: before the first forward."""
    peak_allocated_bytes: Bytes
    """What ``torch.cuda.max_memory_allocated()`` would say at the end."""
    peak_reserved_bytes: Bytes
    """What ``torch.cuda.max_memory_reserved()`` would say at the end."""
    peak_device_bytes: Bytes
    """What nvidia-smi would show: reserved and the CUDA context."""
    device_bytes: Bytes
    fits: bool
    holders: tuple[Holder, ...]
    """Who holds the most at the peak."""
    params: Count
    trainable_params: Count
    model_flops: Flops
    hardware_flops: Flops
    flops_convention: str
    step_s: Seconds | None
    """A roofline of the steady step, not calibrated."""
    time: StepTime | None
    assumptions: tuple[str, ...] = ()
    ops_without_flops: tuple[str, ...] = ()
    versions: dict[str, str] = {}  # noqa: RUF012 - pydantic copies a default
    """Versions of the libraries that it holds for, by name: torch, and those that are imported beside it."""

    @property
    def headroom_bytes(self) -> int:
        """Free bytes left on the device; negative when it does not fit."""
        return self.device_bytes - self.peak_device_bytes

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def trace(step: Callable[[], Any], *, gpu: str = "h200", steps: int = 3) -> Traced:
    """Run ``step`` on a virtual GPU and tell what it would take on a real one.

    One trace or prediction runs at a time in a process; another thread's waits. PyTorch's random state, defaults and
    switches, those that ``step`` itself sets included, are afterwards what they were.

    Args:
        step: builds the model, the optimizer and the data, and trains, written for "cuda" as for a real run. It is
            called once without arguments; wrap one that takes some: ``trace(lambda: main(epochs=1))``. Values on the
            device are not computed: what is read back (a loss) is 0 unless it follows from the host alone.
        gpu: name of an NVIDIA GPU in the catalog.
        steps: the callable is ended where the forward after so many optimizer steps begins; fewer if it returns.

    Raises:
        InputError: an unknown GPU, code that trains nothing or needs values that only a run can know, or several ranks.
        Exception: whatever the callable itself raises.
    """
    row = find_gpu(gpu)
    if steps < 1:
        raise InputError("at least one step is traced", "use steps=3", field="steps", value=steps)
    with user_gpu(row, prefers_cudnn=prefers_cudnn(row), max_steps=steps) as virtual:
        with contextlib.suppress(TraceComplete):
            step()
        segments, whole = virtual.steps.segments(), virtual.steps.num_steps()
        ledger = virtual.tracer.finish()
    name = _name_of(step)
    if len(segments) == 1 or not virtual.steps.num_parameters:
        raise InputError(
            "no module with parameters was called on the GPU",
            'build the model inside the callable, move it with .to("cuda") and call it',
            field="step",
            value=name,
        )
    after_init = _after_setup(ledger)
    ledger.segments = segments
    ledger.params, ledger.trainable_params = virtual.steps.num_parameters, virtual.steps.num_trained
    ledger.assumptions = _assumptions(ledger, virtual, whole)
    return _traced(name, row, ledger, virtual, after_init, whole)


def _name_of(step: Callable[..., Any]) -> str:
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__qualname__", type(step).__name__)


def _traced(name: str, gpu: Gpu, ledger: Ledger, virtual: UserGpu, after_init: int, whole: int) -> Traced:
    replayed, fits = _replay_on(gpu, ledger, virtual.memory_stats.emptied_at)
    phases = replayed.phases.model_copy(update={"after_init": after_init})
    if whole <= 1:
        phases = phases.model_copy(update={"steady": phases.first})
        ledger.segments = [s._replace(step="steady") if s.step == "first" else s for s in ledger.segments]
    ops = [op for op in ledger.ops if ledger.segments[op.segment].step == "steady"]
    time = roofline(ledger, gpu)
    return Traced(
        name=name,
        gpu=gpu.name,
        num_steps=whole,
        phases=phases,
        breakdown=replayed.breakdown,
        peak_phase=_peak_phase(replayed, phases),
        peak_allocated_bytes=replayed.peak_allocated_bytes,
        peak_reserved_bytes=replayed.peak_reserved_bytes,
        peak_device_bytes=replayed.peak_reserved_bytes + overhead_bytes(gpu, ledger),
        device_bytes=gpu.usable_bytes,
        fits=fits,
        holders=_holders(ledger, replayed),
        params=ledger.params,
        trainable_params=ledger.trainable_params,
        model_flops=float(sum(op.model_flops for op in ops)),
        hardware_flops=float(sum(op.causal_flops for op in ops)),
        flops_convention=CONVENTION,
        step_s=time.expected.total if time else None,
        time=time.expected if time else None,
        assumptions=(*ledger.assumptions, *(attention_time.assumptions(ledger, gpu) if time else ())),
        ops_without_flops=ledger.ops_without_flops,
        versions=versions_of(name for name in LIBRARIES if name in sys.modules),
    )


def _peak_phase(replayed: Replay, phases: Phases) -> str:
    """Where the peak is; ``steady`` where that step comes to the same height as the first that reached it."""
    step, phase = replayed.peak_phase.split(".")
    if step != "first" and getattr(phases.steady, phase, 0) == replayed.peak_allocated_bytes:
        return f"steady.{phase}"
    return step if step == "setup" else replayed.peak_phase


def _replay_on(gpu: Gpu, ledger: Ledger, emptied_at: set[int]) -> tuple[Replay, bool]:
    """As ``estimate.replay_on``, the cache given back where the code did so."""
    capacity = gpu.usable_bytes - overhead_bytes(gpu, ledger)
    free = replay(ledger, EmptyCacheAllocator(emptied_at))
    if free.peak_reserved_bytes <= capacity or free.peak_allocated_bytes > capacity:
        return free, free.peak_reserved_bytes <= capacity
    try:
        return replay(ledger, EmptyCacheAllocator(emptied_at, capacity)), True
    except OutOfMemory:
        return free, False


def _after_setup(ledger: Ledger) -> int:
    """Allocated bytes when the first forward begins."""
    allocator, handles = EmptyCacheAllocator(set()), {}
    for event in ledger.events:
        if event.segment:
            break
        if event.kind == ALLOCATE:
            handles[event.storage] = allocator.malloc(ledger.storages[event.storage].num_bytes)
        else:
            allocator.free(handles.pop(event.storage))
    return allocator.allocated_bytes


def _holders(ledger: Ledger, replayed: Replay) -> tuple[Holder, ...]:
    totals: dict[tuple[str, str, str], int] = {}
    for index, num_bytes in replayed.at_peak:
        storage = ledger.storages[index]
        op = ledger.ops[storage.op] if storage.op >= 0 else None
        known = storage.category in ("weights", "gradients", "optimizer") or op is None
        name = "" if known or op is None else op.name.removeprefix("aten.").partition(".")[0]
        key = (storage.category, "" if known or op is None else op.module, name)
        totals[key] = totals.get(key, 0) + num_bytes
    largest = sorted(totals.items(), key=lambda item: -item[1])[:NUM_HOLDERS]
    return tuple(
        Holder(num_bytes=size, category=category, module=module, operation=name)
        for (category, module, name), size in largest
    )


def _assumptions(ledger: Ledger, virtual: UserGpu, whole: int) -> tuple[str, ...]:
    notes = [
        "values on the device are not computed: code that decides by them was shown zeros",
        "step time is a roofline, not yet calibrated on your GPU",
    ]
    if whole == 0:
        notes.append("no backward ran" if not virtual.steps.has_trained else "no whole step ran")
    elif whole == 1:
        notes.append("one optimizer step ran: the steady step is taken to be like the first")
    if any("convolution" in op.name for op in ledger.ops):
        notes.append(LIBRARY_WORKSPACE)
    if any("rnn" in op.name for op in ledger.ops):
        notes.append(
            "recurrent layers: cuDNN's kernels are not modelled, neither what they save nor their FLOPs"
        )
    return (*notes, *sorted(virtual.tracer.notes))


def _lines(t: Traced) -> list[str]:
    """The text of a Traced, for people."""
    where = t.peak_phase.replace(".", " step, ")
    lines = [
        f"{t.name}: {format_count(t.params)} parameters, {format_count(t.trainable_params)} trained; {t.num_steps} steps traced",
        f"{'FITS' if t.fits else 'DOES NOT FIT'} on {t.gpu}: {format_bytes(t.peak_device_bytes)} of {format_bytes(t.device_bytes)}",
        "",
        f"{'allocated':<14}{format_bytes(t.peak_allocated_bytes):>14}   (peak: {where})",
        f"{'reserved':<14}{format_bytes(t.peak_reserved_bytes):>14}",
        f"{'on device':<14}{format_bytes(t.peak_device_bytes):>14}",
        "",
        "At the peak",
        *(
            f"  {name:<12}{format_bytes(size):>14}"
            for name in CATEGORIES
            if (size := getattr(t.breakdown, name))
        ),
        "",
        f"{'By phase':<14}{'first step':>14}{'steady step':>14}",
        f"  {'before it':<12}{format_bytes(t.phases.after_init):>14}",
    ]
    for phase in PHASES:
        first, steady = getattr(t.phases.first, phase), getattr(t.phases.steady, phase)
        lines.append(f"  {phase:<12}{format_bytes(first):>14}{format_bytes(steady):>14}")
    lines += ["", "Largest holders", *(_holder_line(holder) for holder in t.holders)]
    seconds = f", about {format_seconds(t.step_s)} a step" if t.step_s else ""
    lines += ["", f"{format_flops(t.model_flops)} (executed: {format_flops(t.hardware_flops)}){seconds}"]
    held = ", ".join(f"{name} {version}" for name, version in t.versions.items())
    lines += ["", *(f"- {text}" for text in (f"holds for {held}", *t.assumptions))]
    if t.ops_without_flops:
        lines.append(f"- without a FLOP rule, counted as 0: {', '.join(t.ops_without_flops)}")
    return lines


def _holder_line(holder: Holder) -> str:
    where = " ".join(part for part in (holder.module, holder.operation) if part)
    return f"  {format_bytes(holder.num_bytes):>12}  {holder.category}  {where}".rstrip()
