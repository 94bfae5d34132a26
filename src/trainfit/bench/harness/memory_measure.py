"""Measure the memory of a step: the allocator's peaks on CUDA, the timeline of every storage, a snapshot."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.memory_prediction import NUM_POINTS, RunMemory
from trainfit.bench.harness.memory_timeline import BEFORE, Account, Follower, Piece
from trainfit.measurement.meter import name_holders, tree_tensors
from trainfit.step import Batch, Step

MOST_ENTRIES = 500_000  # Allocations and frees that a snapshot keeps

Begin = Callable[[str], None]
Run = Callable[[Begin], object]  # Runs once, calling its argument as each phase begins


@dataclass
class Measured:
    """Measured memory of one kind of run, and what held its peak."""

    memory: RunMemory
    at_peak: list[Piece]


def forward_only(step: Step, batches: list[Batch], begin: Begin) -> object:
    """Run a forward without gradients, as for inference."""
    begin("forward")
    with torch.no_grad():
        return step.loss(batches[0])


def whole_step(step: Step, batches: list[Batch], begin: Begin) -> object:
    """Run forward, backward and optimizer."""
    return step(batches, on_phase=begin)


def start_afresh(bench: Bench) -> int:
    """Reset the allocator to that of a new process, and return the harness's own bytes on a GPU.

    cuBLAS's workspaces (32 MiB a thread) are freed first, then their segments: a 25 MiB weight placed in such
    a segment takes 25 MiB, in its own segment 26.
    """
    if bench.device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    bench.tidy()
    return allocated(bench.device)


def allocated(device: torch.device) -> int:
    """Return the bytes that CUDA's allocator has handed out; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure(
    bench: Bench, step: Step, batches: list[Batch], once: Run, built: int, held: int, snapshot: str
) -> Measured:
    """Run ``once`` a first and a second time, and tracked; on CUDA once more for a named snapshot.

    Args:
        built: bytes of the built step on CUDA, without ``held``.
        held: bytes of the harness.
    """
    start_afresh(bench)
    if bench.device.type == "cuda":
        before = built
        first, steady = (AllocatorPeaks(bench.device, held).of(once) for _ in range(2))
        account = follow(step, batches, once)
    else:
        first, account = follow(step, batches, once).peaks(), follow(step, batches, once)
        steady, before = account.peaks(), first[BEFORE]
        steady.pop(BEFORE)
    if snapshot:
        bench.keep(snapshot, partial(write_snapshot, once))
    memory = RunMemory(before, steady, max(first.values()), account.curve(NUM_POINTS))
    return Measured(memory, account.at_peak())


class AllocatorPeaks:
    """The highest bytes that CUDA's allocator handed out in each phase, minus ``held``."""

    def __init__(self, device: torch.device, held: int):
        self.device, self.held, self.phase = device, held, ""
        self.found: dict[str, int] = {}

    def of(self, once: Run) -> dict[str, int]:
        """Run ``once``; the allocator counts on the host, so no synchronization is needed."""
        torch.cuda.reset_peak_memory_stats(self.device)
        once(self.begin)
        self.begin("")
        return self.found

    def begin(self, phase: str) -> None:
        """Begin a phase and end the one before it."""
        if self.phase:
            peak = torch.cuda.max_memory_allocated(self.device) - self.held
            self.found[self.phase] = max(peak, self.found.get(self.phase, 0))
            torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = phase


def follow(step: Step, batches: list[Batch], once: Run) -> Account:
    """Run ``once`` with every storage tracked."""
    # A parameter's device has an index; the requested one may have none and would not compare equal.
    follower = Follower(next(step.model.parameters()).device)
    with follower:
        hooks = name_holders(follower, step)
        follower.assign(tree_tensors(batches), "activations")
        once(follower.begin)
        for hook in hooks:
            hook.remove()
    return follower.close()


def write_snapshot(once: Run, path: Path) -> None:
    """Write the allocations of one run for pytorch.org/memory_viz.

    Allocations of the backward have no Python stack, because autograd runs in its own threads.
    """
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_ENTRIES)
    try:
        once(lambda phase: None)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
