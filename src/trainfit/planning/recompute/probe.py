"""Probe the cost of each way to save a decoder block's forward, in one short trace on the virtual GPU.

The trace is cut at the blocks' borders. The result holds, for each kind of block and each level of
recomputation, the peak and net bytes and the time of its forward and its backward, and the same of what
lies before, between and after the blocks.

Where all blocks are equal, the model is cut to one block per level and one more at either end, because the
first and the last block share tensors with what is outside them. Otherwise every block is traced, levels
assigned in turn, as often as it takes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfit.checkpointing.per_block import BLOCK_STATE
from trainfit.ledger.ledger import ALLOCATE, Ledger, Op, Segment
from trainfit.ledger.micro_batches import MicroBatchesDifferError, with_left_out
from trainfit.ledger.segments import rounded
from trainfit.models.few_blocks import OutlinesLeftError, check_no_outlines, few_blocks
from trainfit.models.layers import layer_lists
from trainfit.prediction.machine import Machine
from trainfit.prediction.shortening import micro_batches_left_out
from trainfit.prediction.time.roofline import device_seconds
from trainfit.prediction.traced_steps import gpu_of, run_steps
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import BudgetGib, LayerRun, Layers
from trainfit.step import assemble
from trainfit.techniques.recompute.layers import planned_field
from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG, signature

WATCHED = 1e-9
"""A share to offload that no storage fits into: a block's storages are recorded, and all of them stay."""
UNKNOWN_GPU = {"flops_per_s": 1e12, "bytes_per_s": 1e11}
"""Rates of a device whose own are not known (a CPU): they only rank plans."""
BEFORE, AFTER = -1, -2
"""Numbers of the stretches before the first block and after the last one."""


@dataclass
class Piece:
    """Memory of one stretch of a step, in bytes relative to its beginning."""

    peak_bytes: int = 0
    net_bytes: int = 0


@dataclass
class Work:
    """Work of a stretch of one step, all micro-batches."""

    gpu_s: float = 0.0
    num_ops: int = 0
    num_products: int = 0
    num_again: int = 0
    """FLOPs of recomputed matrix products."""


class Labels:
    """Map operations and storages to the block that they belong to; None: no block."""

    def __init__(self, ledger: Ledger, name: str):
        self._ledger = ledger
        self._pattern = re.compile(rf"(?:^|[./]){re.escape(name)}\.(\d+)\.")

    def of_op(self, op: Op) -> int | None:
        return self._in(op.module + ".")

    def of_storage(self, index: int) -> int | None:
        storage = self._ledger.storages[index]
        found = self._in(storage.path)
        if found is None and storage.op >= 0:
            found = self.of_op(self._ledger.ops[storage.op])
        return found

    def _in(self, text: str) -> int | None:
        match = self._pattern.search(text)
        return int(match.group(1)) if match else None


def _size(ledger: Ledger, index: int) -> int:
    return rounded(ledger.storages[index].num_bytes)


def alive_bytes(ledger: Ledger, label: Labels, segment: int) -> tuple[int, Counter[int | None]]:
    """Return the bytes alive when a segment begins: in total, and by block."""
    alive: set[int] = set()
    for event in ledger.events:
        if event.segment >= segment:
            break
        (alive.add if event.kind == ALLOCATE else alive.discard)(event.storage)
    by_block: Counter[int | None] = Counter()
    for index in alive:
        by_block[label.of_storage(index)] += _size(ledger, index)
    return by_block.total(), by_block


def pieces_of(ledger: Ledger, label: Labels, segment: int, order: range) -> dict[int, Piece]:
    """Return the pieces of one forward or backward: before, of each block in ``order``, and after the blocks.

    A block's piece begins with the first allocation in it. Frees belong to the allocations before them.
    """
    events = [event for event in ledger.events if event.segment == segment]
    blocks = [label.of_storage(event.storage) if event.kind == ALLOCATE else None for event in events]
    ends = max((i for i, block in enumerate(blocks) if block is not None), default=-1)
    ranks = {block: rank for rank, block in enumerate(order)}
    pieces = {BEFORE: Piece(), AFTER: Piece(), **{block: Piece() for block in order}}
    current = BEFORE
    for i, event in enumerate(events):
        block = blocks[i]
        if block is not None and (current == BEFORE or ranks[block] > ranks[current]):
            current = block
        elif event.kind == ALLOCATE and i > ends and current != BEFORE:
            current = AFTER
        piece, size = pieces[current], _size(ledger, event.storage)
        piece.net_bytes += size if event.kind == ALLOCATE else -size
        piece.peak_bytes = max(piece.peak_bytes, piece.net_bytes)
    return pieces


def late_bytes(ledger: Ledger, label: Labels, segment: int) -> Counter[int | None]:
    """Return the bytes, by block, that a forward frees after its last block's last allocation."""
    events = [event for event in ledger.events if event.segment == segment]
    ends = max(
        (i for i, e in enumerate(events) if e.kind == ALLOCATE and label.of_storage(e.storage) is not None),
        default=0,
    )
    begins = next((i for i in range(ends + 1, len(events)) if events[i].kind == ALLOCATE), len(events))
    late: Counter[int | None] = Counter()
    for event in events[begins:]:
        if event.kind != ALLOCATE:
            late[label.of_storage(event.storage)] += _size(ledger, event.storage)
    return late


def work_by_block(
    ledger: Ledger, label: Labels, machine: Machine
) -> defaultdict[tuple[int | None, str], Work]:
    """Return the work of a steady step by block and phase.

    (None, "optimizer") is the update, (None, "") all other work outside the blocks.
    """
    works: defaultdict[tuple[int | None, str], Work] = defaultdict(Work)
    seconds = _device_seconds(ledger, machine)
    for op in ledger.steady_ops:
        block, phase = label.of_op(op), ledger.segments[op.segment].phase
        if phase == "optimizer":
            block = None
        elif block is None:
            phase = ""
        work = works[block, phase]
        work.gpu_s += seconds.get(id(op), 0.0)
        work.num_ops += op.calls
        if op.causal_flops and phase == "forward":
            work.num_products += 1
        if ledger.recomputes(op):
            work.num_again += 1
    return works


def _device_seconds(ledger: Ledger, machine: Machine) -> dict[int, float]:
    if machine.gpu.memory_bytes_per_s is not None and machine.gpu.peak_flops_per_s:
        return device_seconds(ledger, machine)
    flops_per_s, bytes_per_s = UNKNOWN_GPU["flops_per_s"], UNKNOWN_GPU["bytes_per_s"]
    return {
        id(op): max(op.causal_flops / flops_per_s, op.num_bytes / bytes_per_s) for op in ledger.steady_ops
    }


@dataclass
class Cost:
    """One block saved in one way."""

    forward: Piece
    backward: Piece
    forward_work: Work
    backward_work: Work
    late_bytes: int = 0
    """Bytes left by its forward that are freed when the whole forward ends (autocast's copies of weights)."""
    held_bytes: tuple[int, ...] = ()
    """Bytes of the storages that can be offloaded, in the order in which they are saved."""


@dataclass
class Probe:
    """Measurements from which plans are composed."""

    kinds: list[int]
    """Kind of each block of the model."""
    costs: dict[tuple[int, str], Cost]
    start_bytes: int
    """Allocated when the last micro-batch's forward begins."""
    before: Piece
    head: Piece
    """From the last block's forward to the end of the forward."""
    loss: Piece
    """From there to the first block's backward."""
    after: Piece
    rest: Work
    """Work outside all blocks."""


def probe(recipe: Recipe, levels: Sequence[str], machine: Machine) -> Probe:
    """Trace a few blocks of the recipe, each level at least once for each kind of block.

    Args:
        levels: of recomputation; the last one saves a block's input.
    Raises:
        InputError: the model has no single list of decoder blocks, or what assembling the recipe refuses.
    """
    costs: dict[tuple[int, str], Cost] = {}
    first = 0
    while True:
        found = _probed(recipe, levels, machine, first)
        costs = found.costs = costs | found.costs
        if all((kind, level) in costs for kind in found.kinds for level in levels):
            return found
        first += 1


def _probed(recipe: Recipe, levels: Sequence[str], machine: Machine, first: int) -> Probe:
    try:
        with few_blocks(lambda number, _: number < len(levels) + 2):
            return _Traced(recipe, levels, machine, first).probe()
    except OutlinesLeftError:
        return _Traced(recipe, levels, machine, first).probe()


class _Traced:
    """One trace, with levels assigned in turn beginning with the ``first``-th."""

    def __init__(self, recipe: Recipe, levels: Sequence[str], machine: Machine, first: int):
        self.levels, self.first = levels, first
        self.machine = machine
        self.requested = recipe
        self.recipe = recipe.model_copy(update={"recompute": Layers(layers=(LayerRun(),))})
        try:
            self.ledger = self._trace(micro_batches_left_out(recipe))
        except MicroBatchesDifferError:
            self.ledger = self._trace(range(0))

    def _trace(self, left_out: range) -> Ledger:
        """Run the steps, and return their ledger with the micro-batches that are left out of them."""
        with gpu_of(self.recipe, self.machine.row) as (virtual, ranks):
            self.virtual = virtual
            step = assemble(
                self.recipe,
                torch.device("cpu"),
                on_model=self._choose,
                compiler=virtual.compiler,
                mesh=ranks and ranks.mesh,
                cluster=ranks and ranks.cluster,
                gpu=self.machine.row,
            )
            step.left_out = left_out
            virtual.model_is_complete(step.model, [])
            run_steps(step, virtual)
            self.held = self._held(step.model)
            ledger = virtual.finish()
        return with_left_out(ledger, len(left_out)) if left_out else ledger

    def _choose(self, model: nn.Module) -> None:
        lists = layer_lists(model)
        goal = self.requested.recompute
        if len(lists) != 1:
            raise InputError(
                "this model has no single list of decoder blocks to plan",
                "use recompute: none or full",
                field=planned_field(self.requested),
                value=goal.budget_gib if isinstance(goal, BudgetGib) else goal,
            )
        self.name, blocks = lists[0]
        known: dict[Any, int] = {}
        self.kinds = [known.setdefault(signature(block), len(known)) for block in blocks]
        trained = _num_trained(model)
        if len(known) == 1 and len(blocks) > len(self.levels) + 2:
            removed = list(blocks)[len(self.levels) + 2 :]
            del blocks[len(self.levels) + 2 :]
            self.virtual.tracer.live.forget(
                t for block in removed for t in (*block.parameters(), *block.buffers())
            )
        check_no_outlines(list(blocks))
        self.times_update = trained / max(1, _num_trained(model))
        self.traced = self.kinds[: len(blocks)]
        self.chosen = self._assign()
        for block, level in zip(blocks, self.chosen, strict=True):
            setattr(block, BLOCK_CONFIG, f"{level} {0.0 if self.recipe.compile else WATCHED}")

    def _measured_blocks(self) -> list[int]:
        """Return the blocks whose cost counts: inner ones, and outer ones of a kind without inner blocks."""
        middle = range(1, len(self.traced) - 1)
        inside = {self.traced[index] for index in middle}
        outer = (index for index in {0, len(self.traced) - 1} if self.traced[index] not in inside)
        return sorted({*middle, *outer})

    def _assign(self) -> list[str]:
        chosen = [self.levels[0]] * len(self.traced)
        # Some models hold the first block's input until the forward ends; a block that saves it hides that.
        chosen[0] = self.levels[-1]
        assigned = dict.fromkeys(self.traced, self.first)
        for index in self._measured_blocks():
            kind = self.traced[index]
            chosen[index] = self.levels[assigned[kind] % len(self.levels)]
            assigned[kind] += 1
        return chosen

    def _held(self, model: nn.Module) -> dict[int, tuple[int, ...]]:
        _, blocks = layer_lists(model)[0]
        own = getattr(blocks[0], BLOCK_STATE, None)
        return {index: tuple(sizes) for index, sizes in own[0].held_bytes.items()} if own else {}

    def probe(self) -> Probe:
        """Cut the ledger at the borders of the blocks."""
        label = Labels(self.ledger, self.name)
        segments = {segment: index for index, segment in enumerate(self.ledger.segments)}  # The last of each.
        last_forward, last_backward = (
            segments[Segment("steady", phase)] for phase in ("forward", "backward")
        )
        start_bytes, static = alive_bytes(self.ledger, label, last_forward)
        start_bytes += sum(static[self.traced.index(kind)] for kind in self.kinds)
        start_bytes -= sum(static[index] for index in range(len(self.traced)))
        order = range(len(self.traced))
        forward = pieces_of(self.ledger, label, last_forward, order)
        backward = pieces_of(self.ledger, label, last_backward, order[::-1])
        late = late_bytes(self.ledger, label, last_forward)
        work = work_by_block(self.ledger, label, self.machine)
        costs: dict[tuple[int, str], Cost] = {}
        for index in self._measured_blocks():
            costs[self.traced[index], self.chosen[index]] = Cost(
                forward[index], backward[index], work[index, "forward"], work[index, "backward"], late[index],
                self.held.get(index, ()),
            )  # fmt: skip
        # What the outer blocks' forwards leave until the end is counted with each block, not with the head.
        for index in order:
            cost = costs.get((self.traced[index], self.chosen[index]))
            forward[AFTER].net_bytes += cost.late_bytes if cost else late[index]
        rest, update = work[None, ""], work[None, "optimizer"]
        rest.gpu_s += update.gpu_s * self.times_update
        rest.num_ops += round(update.num_ops * self.times_update)
        return Probe(
            self.kinds, costs, start_bytes, forward[BEFORE], forward[AFTER], backward[BEFORE],
            backward[AFTER], rest,
        )  # fmt: skip


def _num_trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
