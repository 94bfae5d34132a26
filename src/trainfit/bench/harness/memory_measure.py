"""Memory of a step as it really runs: the allocator's peaks on CUDA, every storage followed on any device, a snapshot for memory_viz."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.memory_prediction import NUM_POINTS, Told
from trainfit.bench.harness.memory_timeline import BEFORE, Account, Follower, Piece
from trainfit.measurement.meter import name_holders, tree_tensors
from trainfit.step import Batch, Step

MOST_ENTRIES = 500_000
"""Allocations and frees that a snapshot keeps."""

Begin = Callable[[str], None]
Run = Callable[[Begin], object]
"""Runs once, calling its argument as each phase begins."""


@dataclass
class Measured:
    """What was measured of one kind of run, and what held its peak."""

    told: Told
    at_peak: list[Piece] = field(default_factory=list)


def forward_only(step: Step, batches: list[Batch], begin: Begin) -> object:
    """A forward without gradients, as for inference."""
    begin("forward")
    with torch.no_grad():
        return step.loss(batches[0])


def whole_step(step: Step, batches: list[Batch], begin: Begin) -> object:
    """Forward, backward and optimizer."""
    return step(batches, on_phase=begin)


def start_afresh(bench: Bench) -> int:
    """Leave the allocator as in a new process, and count the harness's own bytes on a GPU.

    Workspaces (cuBLAS has 32 MiB for each thread that multiplies) are given back first, the segments that they lie in after them. A
    weight of 25 MiB that comes to lie in such a segment takes 25 MiB, in a segment of its own 26.
    """
    if bench.device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    bench.tidy()
    return allocated(bench.device)


def allocated(device: torch.device) -> int:
    """Bytes that CUDA's allocator has handed out; 0 on a CPU, which has none."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure(
    bench: Bench, step: Step, batches: list[Batch], once: Run, built: int, held: int, snapshot: str
) -> Measured:
    """Run it a first time, a second time, and followed; on CUDA once more for the snapshot, where its name is given.

    Args:
        built: bytes of the built step on CUDA, ``held`` not counted.
    """
    start_afresh(bench)
    if bench.device.type != "cuda":
        first_account, account = (follow(step, batches, once) for _ in range(2))
        first, steady = first_account.peaks(), account.peaks()
        before = first[BEFORE]
        steady.pop(BEFORE)
    else:
        before = built
        first, steady = (AllocatorPeaks(bench.device, held).of(once) for _ in range(2))
        account = follow(step, batches, once)
    if snapshot:
        bench.keep(snapshot, partial(write_snapshot, once))
    return Measured(Told(before, steady, max(first.values()), account.curve(NUM_POINTS)), account.at_peak())


class AllocatorPeaks:
    """The highest bytes that CUDA's allocator handed out in each phase, less ``held``."""

    def __init__(self, device: torch.device, held: int):
        self.device, self.held, self.phase = device, held, ""
        self.found: dict[str, int] = {}

    def of(self, once: Run) -> dict[str, int]:
        """Run it once. The count is the host's, so it needs no synchronisation."""
        torch.cuda.reset_peak_memory_stats(self.device)
        once(self.begin)
        self.begin("")
        return self.found

    def begin(self, phase: str) -> None:
        """A phase begins, the one before it ends."""
        if self.phase:
            peak = torch.cuda.max_memory_allocated(self.device) - self.held
            self.found[self.phase] = max(peak, self.found.get(self.phase, 0))
            torch.cuda.reset_peak_memory_stats(self.device)
        self.phase = phase


def follow(step: Step, batches: list[Batch], once: Run) -> Account:
    """Run it once with every storage followed."""
    # A parameter's device has its number; the one that was asked for may not, and they would not be equal.
    follower = Follower(next(step.model.parameters()).device)
    with follower:
        hooks = name_holders(follower, step)
        follower.assign(tree_tensors(batches), "activations")
        once(follower.begin)
        for hook in hooks:
            hook.remove()
    return follower.close()


def write_snapshot(once: Run, path: Path) -> None:
    """What pytorch.org/memory_viz reads: the allocations of one run, those of the forward and of the optimizer with their Python stacks.

    The backward's have none: autograd runs in a thread for each GPU, which no Python called. ``Follower`` tells their autograd nodes.
    """
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST_ENTRIES)
    try:
        once(lambda phase: None)
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
