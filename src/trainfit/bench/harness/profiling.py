"""Where a step's time goes: parts of the model as ranges for the profiler, and what it saw, part by part.

Enters: a native decoder with ``attention: eager``, and the events of ``torch.profiler`` of one step. Leaves: a Launch for each
kernel of a GPU (on a CPU: each operation), with its phase and the part of the model that asked for it.

A kernel of the backward belongs to the part whose forward made its node: autograd gives both the same sequence number
(``torch.autograd.profiler.emit_nvtx`` says so; of several operations with one number the last one made the node).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from trainfit.models.native import attention, decoder
from trainfit.step import Batch, Step

PHASE, PART = "phase: ", "part: "
"""What the names of ranges begin with."""
PARTS = (
    "embedding", "norms", "projections", "RoPE and copies", "scores", "scale and mask", "softmax", "values", "MLP",
    "residuals", "head", "loss", "optimizer", "other",
)  # fmt: skip
"""``projections``: query, key, value and output of attention; ``other``: what no part could be found for."""
PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})
"""Operations that are a matrix product; helpers that they launch (split-K sums) count as theirs."""
ENGINE = "autograd::engine::evaluate_function"
"""The engine around one node: it also sums gradients, which is the node's work too."""
OVERHEADS = frozenset(
    {
        "Activity Buffer Request",
        "Buffer Flush",
        "Command Buffer Full",
        "Driver Compiler",
        "Instrumentation",
        "Lazy Function Loading",
        "Resource",
        "Runtime Triggered Module Loading",
        "Unrecognized",
    }
)
"""Events of CUPTI's own cost (Kineto, ``overheadKindString``). They can bear an operation's number, and torch then gives them all of
its kernels once more: the 163 of a 2.7B model's ``_fused_adamw_`` to each of 84 ``Command Buffer Full``."""
BACKWARD_SCOPE = 1
"""``at::RecordScope::BACKWARD_FUNCTION`` (ATen/record_function.h)."""


class Launch(NamedTuple):
    """One kernel, or on a CPU one operation without those it calls."""

    phase: str
    part: str
    op: str
    kernel: str
    seconds: float


def part(name: str) -> Any:
    """A range around a part of the model; the innermost one counts."""
    assert name in PARTS, name
    return record_function(PART + name)


@contextmanager
def ranges(model: nn.Module) -> Iterator[None]:
    """The model's modules, its attention's operations and its loss in ranges. The modules keep theirs."""
    assert isinstance(model, decoder.NativeDecoder)
    _wrap(model, "residuals")
    _wrap(model.embed, "embedding")
    _wrap(model.norm, "norms")
    _wrap(model.lm_head, "head")
    for block in model.layers:
        inside: Any = block
        for module in (inside.attention_norm, inside.mlp_norm):
            _wrap(module, "norms")
        _wrap(inside.attention, "RoPE and copies")
        _wrap(inside.attention.qkv, "projections")
        _wrap(inside.attention.out, "projections")
        _wrap(inside.mlp, "MLP")
    loss = decoder.next_token_loss
    with ExitStack() as stack:
        stack.enter_context(_replaced(attention, "eager_attention", attention_in_ranges))
        stack.enter_context(_replaced(decoder, "next_token_loss", _in_part("loss", loss)))
        yield


def _wrap(module: nn.Module, name: str) -> None:
    module.forward = _in_part(name, module.forward)


def _in_part(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with part(name):
            return function(*args, **kwargs)

    return run


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A function of the native decoder's files replaced for a while, as the course's handout has it."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def attention_in_ranges(
    q_bhsd: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    bias: Tensor | None,
    softmax: Callable[[Tensor], Tensor] = attention.fused_softmax,
) -> Tensor:
    """``attention.eager_attention``, the same operations in the same order, each step in its range."""
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


def run_in_phases(step: Step, batches: list[Batch]) -> None:
    """One step, each phase in its range."""
    with ExitStack() as stack:

        def begin(phase: str) -> None:
            stack.close()
            stack.enter_context(record_function(PHASE + phase))

        step(batches, on_phase=begin)


def profiler(device: torch.device) -> profile:
    """The profiler for one step on this device. (``acc_events``: without it torch warns of cycles, which there are none of.)"""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def launches(events: Iterable[Any], *, on_gpu: bool) -> list[Launch]:
    """What ran, of the events of ``profile.events()``.

    Raises:
        RuntimeError: the profiler saw no kernel on a GPU, or not each kernel has one operation that launched it.
    """
    events = list(events)
    found = [
        Launch(*place, event.name, name, seconds)
        for event, place, ran in _working(events, on_gpu=on_gpu)
        for name, seconds in ran
    ]
    if on_gpu and not found:
        raise RuntimeError("the profiler saw no kernel: this process may not use CUPTI here")
    if on_gpu and len(found) != (ran := num_on_gpu(events)):
        raise RuntimeError(f"{ran} kernels ran, and operations account for {len(found)}")
    return found


def places(events: Iterable[Any], *, on_gpu: bool) -> dict[int, tuple[str, str]]:
    """Phase and part by the operation's number (``External id`` in a trace), the very ones that ``launches`` tells."""
    return {event.id: place for event, place, _ in _working(list(events), on_gpu=on_gpu)}


def _working(
    events: list[Any], *, on_gpu: bool
) -> Iterator[tuple[Any, tuple[str, str], list[tuple[str, float]]]]:
    """Each operation that launched kernels (on a CPU: each operation), where it belongs, and what it ran in how many seconds."""
    told = [event for event in events if event.device_type == DeviceType.CPU]
    parts = _parts_of_nodes(told)
    seen: set[int] = set()
    for event in told:
        # A range's own "kernels" are the range again, as seen on the GPU; the profiler's overheads have those of some operation.
        if _is_range(event) or event.name in OVERHEADS:
            continue
        ran = _kernels(event) if on_gpu else _itself(event)
        if ran and not (on_gpu and event.id in seen):
            seen.add(event.id)
            yield event, _place(event, parts), ran


def num_on_gpu(events: Iterable[Any]) -> int:
    """Kernels, copies and fills that ran on a GPU, whoever launched them."""
    return sum(event.device_type == DeviceType.CUDA and not _is_range(event) for event in events)


def num_launched(step: Step, batches: list[Batch]) -> int:
    """How many of them one more step runs."""
    with profiler(step.device) as seen:
        step(batches)
        torch.cuda.synchronize(step.device)
    return num_on_gpu(seen.events() or ())


def _is_range(event: Any) -> bool:
    return event.is_user_annotation or event.name.startswith((PHASE, PART, "Optimizer."))


def _kernels(event: Any) -> list[tuple[str, float]]:
    return [(kernel.name, kernel.duration / 1e6) for kernel in event.kernels]


def _itself(event: Any) -> list[tuple[str, float]]:
    """On a CPU an operation is its own kernel, less the time of the operations that it calls."""
    return [(event.name, event.self_cpu_time_total / 1e6)] if event.name.startswith("aten::") else []


def _parts_of_nodes(events: list[Any]) -> dict[int, str]:
    """The part whose forward made each autograd node, by its sequence number. Events are in the order in which they began."""
    found: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and event.scope != BACKWARD_SCOPE:
            phase, where = _place(event, {})
            if phase == "forward":
                found[event.sequence_nr] = where
    return found


def _place(event: Any, parts: dict[int, str]) -> tuple[str, str]:
    """Phase and part, from the ranges and the autograd node that the event is in."""
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
    # On a GPU the backward runs in a thread of its own, which no range of ours is in.
    return "backward", where or "other"
