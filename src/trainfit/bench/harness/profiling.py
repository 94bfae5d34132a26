"""Attribute a profiled step's kernels to phases and parts of the model.

The parts of a native decoder with ``attention: eager`` become ranges of ``torch.profiler``. From its events
comes a ``Launch`` for each kernel of a GPU (on a CPU: each operation), with the phase and part that launched
it.

A kernel of the backward belongs to the part whose forward created its autograd node: both have the same
sequence number (see ``torch.autograd.profiler.emit_nvtx``; of several operations with one number the last
created the node).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from trainfit.models.native import attention, decoder
from trainfit.step import Batch, Step

PHASE, PART = "phase: ", "part: "  # Prefixes of the names of ranges
PARTS = (
    "embedding", "norms", "projections", "RoPE and copies", "scores", "scale and mask", "softmax", "values",
    "MLP", "residuals", "head", "loss", "optimizer", "other",
)  # fmt: skip
"""``projections``: query, key, value and output of attention; ``other``: kernels without a known part."""
PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})
"""Operations that are a matrix product, including helpers they launch, such as split-K sums."""
ENGINE = "autograd::engine::evaluate_function"  # The engine around one node, which also sums gradients
OVERHEADS = {
    "Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Driver Compiler", "Instrumentation",
    "Lazy Function Loading", "Resource", "Runtime Triggered Module Loading", "Unrecognized",
}  # fmt: skip
"""CUPTI's overhead events (Kineto, ``overheadKindString``). They can have an operation's number, and torch
then attributes all of its kernels to them once more."""
BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION (ATen/record_function.h)


class Launch(NamedTuple):
    """One kernel, or on a CPU one operation without those it calls."""

    phase: str
    part: str
    op: str
    kernel: str
    seconds: float


def part(name: str) -> Any:
    """Return a range around a part of the model; the innermost one counts."""
    assert name in PARTS, name
    return record_function(PART + name)


def put_in_ranges(model: nn.Module) -> None:
    """Put the model's modules, attention's operations and the loss into ranges."""
    assert isinstance(model, decoder.NativeDecoder)
    _wrap(model, "residuals")
    _wrap(model.embed, "embedding")
    _wrap(model.norm, "norms")
    _wrap(model.lm_head, "head")
    for block in model.layers:
        inside: Any = block
        _wrap(inside.attention_norm, "norms")
        _wrap(inside.mlp_norm, "norms")
        _wrap(inside.attention, "RoPE and copies")
        inside.attention.eager = attention_in_ranges
        _wrap(inside.attention.qkv, "projections")
        _wrap(inside.attention.out, "projections")
        _wrap(inside.mlp, "MLP")
    model.loss = _in_part("loss", model.loss)


def _wrap(module: nn.Module, name: str) -> None:
    """Let a module's forward run in a range, by hooks."""
    entered: list[record_function] = []

    def begin(*_: Any) -> None:
        entered.append(part(name))
        entered[-1].__enter__()

    def end(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


def _in_part(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with part(name):
            return function(*args, **kwargs)

    return run


def attention_in_ranges(
    q_bhsd: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    bias: Tensor | None,
    softmax: Callable[[Tensor], Tensor] = attention.fused_softmax,
) -> Tensor:
    """Compute ``attention.eager_attention`` with the same operations in the same order, each in its range."""
    s, d = q_bhsd.shape[2:]
    groups = q_bhsd.shape[1] // k_bksd.shape[1]
    k, v = attention.repeat_heads(k_bksd, groups), attention.repeat_heads(v_bksd, groups)
    with part("scores"):
        scores = q_bhsd @ k.transpose(2, 3)
    with part("scale and mask"):
        scores = scores * (1 / math.sqrt(d))
        if bias is None:
            bias = torch.full((s, s), float("-inf"), dtype=scores.dtype, device=scores.device).triu(1)
        scores = scores + bias
    with part("softmax"):
        weights = softmax(scores).to(v.dtype)
    with part("values"):
        return weights @ v


def run_in_phases(step: Callable[..., object], batches: list[Batch]) -> None:
    """Run one step, each phase in its range."""
    with ExitStack() as stack:

        def begin(phase: str) -> None:
            stack.close()
            stack.enter_context(record_function(PHASE + phase))

        step(batches, on_phase=begin)


def profiler(device: torch.device) -> profile:
    """Return the profiler for one step on this device (``acc_events`` avoids a warning about cycles)."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def launches(events: Iterable[Any], *, on_gpu: bool) -> list[Launch]:
    """Return what ran, from the events of ``profile.events()``."""
    events = list(events)
    found = [
        Launch(*at, event.name, name, seconds)
        for event, at, ran in _working(events, on_gpu=on_gpu)
        for name, seconds in ran
    ]
    if on_gpu and not found:
        raise RuntimeError("the profiler saw no kernel: this process may not use CUPTI here")
    if on_gpu and len(found) != (ran := num_on_gpu(events)):
        raise RuntimeError(f"{ran} kernels ran, and operations account for {len(found)}")
    return found


def operation_parts(events: Iterable[Any], *, on_gpu: bool) -> dict[int, tuple[str, str]]:
    """Return phase and part by the operation's number (``External id`` in a trace)."""
    return {event.id: at for event, at, _ in _working(list(events), on_gpu=on_gpu)}


def _working(
    events: list[Any], *, on_gpu: bool
) -> Iterator[tuple[Any, tuple[str, str], list[tuple[str, float]]]]:
    """Yield each operation that launched kernels (on a CPU: any), its phase and part, and its kernels."""
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    parts = _parts_of_nodes(on_host)
    seen: set[int] = set()
    for event in on_host:
        # A range's "kernels" are the range on the GPU; overhead events repeat those of an operation.
        if _is_range(event) or event.name in OVERHEADS:
            continue
        ran = _ran(event, on_gpu=on_gpu)
        if ran and not (on_gpu and event.id in seen):
            seen.add(event.id)
            yield event, _phase_and_part(event, parts), ran


def num_on_gpu(events: Iterable[Any]) -> int:
    """Return the number of kernels, copies and fills that ran on a GPU."""
    return sum(event.device_type == DeviceType.CUDA and not _is_range(event) for event in events)


def num_launched(step: Step, batches: list[Batch]) -> int:
    """Return the same number for one more step."""
    with profiler(step.device) as seen:
        step(batches)
        torch.cuda.synchronize(step.device)
    return num_on_gpu(seen.events() or ())


def _is_range(event: Any) -> bool:
    return event.is_user_annotation or event.name.startswith((PHASE, PART, "Optimizer."))


def _ran(event: Any, *, on_gpu: bool) -> list[tuple[str, float]]:
    """Return the event's kernels; a CPU's operation is its own, without the time of those that it calls."""
    if on_gpu:
        return [(kernel.name, kernel.duration / 1e6) for kernel in event.kernels]
    return [(event.name, event.self_cpu_time_total / 1e6)] if event.name.startswith("aten::") else []


def _parts_of_nodes(events: list[Any]) -> dict[int, str]:
    """Return the part whose forward created each autograd node, by sequence number; events are in order."""
    found: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and event.scope != BACKWARD_SCOPE:
            phase, where = _phase_and_part(event, {})
            if phase == "forward":
                found[event.sequence_nr] = where
    return found


def _phase_and_part(event: Any, parts: dict[int, str]) -> tuple[str, str]:
    """Return phase and part, from the ranges and the autograd node around the event."""
    where, at = "", event
    while at is not None:
        if at.name.startswith(PART) and not where:
            where = at.name.removeprefix(PART)
        elif at.scope == BACKWARD_SCOPE or at.name.startswith(ENGINE):
            return "backward", parts.get(at.sequence_nr, "other")
        elif at.name.startswith(PHASE):
            phase = at.name.removeprefix(PHASE)
            return phase, "optimizer" if phase == "optimizer" else where or "other"
        at = at.cpu_parent
    # On a GPU the backward runs in its own thread, which no range covers.
    return "backward", where or "other"
