"""Explain which tensors hold memory at a step's peak, from the recipe's ledger and without a GPU.

The ledger is replayed on the caching allocator, as for a prediction, so the peak equals the predicted one to
the byte. Live memory is listed by category, module and operation; identical layers share a row.
"""

import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainfit.explanation.communication import communication_bound
from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.ledger import ALLOCATE, FIRST, LAST, NO_LAYER, Ledger, LiveEvent, Op, Storage, part_of
from trainfit.ledger.replay import Replay
from trainfit.ledger.segments import rounded
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.estimate import of_both_peaks, replay_on, two_peaks
from trainfit.prediction.machine import Machine, machine_of
from trainfit.prediction.predict import ledger_of
from trainfit.spec.explanation import ONE_OF_EQUAL, CurvePoint, Explanation, Holder, Moment
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, PHASES, MemoryBreakdown

if TYPE_CHECKING:
    from trainfit.prediction.user_step import CodeLedger

CURVE_POINTS = 64
LAYER_NUMBER = re.compile(r"(?<=\.)(?:R\d+\.)?(?:L|lead|tail)?\d+(?=\.|$)")
"""Layer number in a module path, or the name of a group of identical layers (``virtual.trace.scope``)."""
OPERATION = re.compile(r"^(aten|prims|trainfit)\.")
WORKSPACE = "library workspace"
LATER = "later"
"""Steps of a traced script after the steady one, which are its repetitions."""
BEFORE_STEPS = ("init", "setup")
BELONGS_TO_PARAMETERS = ("weights", "optimizer")  # Categories whose path is a parameter's name


class Change(NamedTuple):
    """A holder's bytes in the second explanation minus those in the first."""

    category: str
    path: str
    op: str
    made_in: str
    num_bytes: int


class Explained(NamedTuple):
    """An explanation, and the ledger that it is of."""

    explanation: Explanation
    ledger: Ledger
    machine: Machine | None = None
    """None: of a snapshot."""
    recipe: Recipe | None = None
    expandable: bool = False
    """The allocator has ``expandable_segments:True``."""

    @property
    def capacity_bytes(self) -> int | None:
        """The allocator's limit on the machine's GPU; None: none is known."""
        if self.machine is None or self.machine.gpu.vendor == "host":
            return None
        return self.machine.gpu.usable_bytes - overhead_bytes(self.machine.gpu, self.ledger)


def explain(recipe: Recipe) -> Explanation:
    """Explain the memory at the peak of the recipe's step, and its course through that step.

    Raises:
        InputError: an unknown model or GPU, or techniques that are not there or exclude each other.
    """
    return explained(recipe).explanation


def explained(recipe: Recipe, machine: Machine | None = None, *, deterministic: bool = False) -> Explained:
    """Return a recipe's explanation with its ledger; raises as ``explain``.

    Args:
        machine: of the recipe's ``hardware``; None: with the catalog's calibration.
        deterministic: as ``ledger_of`` takes it.
    """
    machine = machine or machine_of(recipe.hardware)
    gpu, ledger = machine.gpu, ledger_of(recipe, machine, deterministic=deterministic)
    found = _of_ledger(machine, ledger, of_both_peaks(ledger, lambda one: replay_on(gpu, one))[0])
    explanation = found.model_copy(
        update={
            "recipe": recipe.content(),
            "recipe_id": recipe.id,
            "communication": communication_bound(recipe, machine, ledger.with_lower_peak()),
        }
    )
    expandable = allocator_settings(os.environ).expandable_segments
    return Explained(explanation, ledger.with_lower_peak(), machine, recipe, expandable)


def explained_script(traced: "CodeLedger") -> Explained:
    """Return the explanation of a traced script with its ledger."""
    ledger = traced.step_ledger()
    found = _of_ledger(traced.machine, ledger, traced.replayed()[0])
    explanation = found.model_copy(update={"script": traced.name})
    return Explained(explanation, ledger.with_lower_peak(), traced.machine, None, traced.expandable)


def _of_ledger(machine: Machine, ledger: Ledger, replays: Sequence[Replay]) -> Explanation:
    """Return the explanation of a ledger from its replays (``estimate.of_both_peaks``)."""
    replayed, *others = replays
    outside = overhead_bytes(machine.gpu, ledger)
    return Explanation(
        gpu=machine.gpu.name,
        two_peaks=two_peaks(ledger, replayed, others[0], outside) if others else None,
        **memory_of(ledger.with_lower_peak(), replayed),
    )


def memory_of(ledger: Ledger, replayed: Replay) -> dict[str, Any]:
    """Return what a replayed ledger says of its peak, as fields of an Explanation."""
    events = ledger.expand()
    holders = _holders(ledger, replayed.at_peak)
    moment = _moment(ledger, events, replayed.peak_event)
    reached = getattr(replayed.phases.steady, moment.phase, 0)
    if moment.step == LATER and reached == replayed.peak_allocated_bytes:
        moment = moment.model_copy(update={"step": "steady"})
    step = moment.step
    walk = _Walk(ledger, events, step)
    return {
        "peak_allocated_bytes": replayed.peak_allocated_bytes,
        "versions": ledger.versions,
        "phases": replayed.phases,
        "moment": moment,
        "breakdown": replayed.breakdown,
        "holders": holders,
        "unsplit_bytes": replayed.peak_allocated_bytes - sum(holder.num_bytes for holder in holders),
        "ends": walk.ends,
        "curve": walk.curve,
        "most": MemoryBreakdown(**walk.most),
    }


def difference(first: Explanation, second: Explanation) -> list[Change]:
    """Return the holders that differ, the largest change first; equal names are the same holder."""
    totals: dict[tuple[str, str, str, str], int] = {}
    for sign, one in ((-1, first), (1, second)):
        for holder in one.holders:
            key = (holder.category, holder.path, holder.op, holder.made_in)
            totals[key] = totals.get(key, 0) + sign * holder.num_bytes
    changes = [Change(*key, num_bytes) for key, num_bytes in totals.items() if num_bytes]
    return sorted(changes, key=lambda change: (-abs(change.num_bytes), change))


def _moment(ledger: Ledger, events: Sequence[LiveEvent], index: int) -> Moment:
    storage = ledger.storages[events[index].storage]
    segment = ledger.segments[events[index].segment]
    op = ledger.ops[storage.op] if storage.op >= 0 else None
    return Moment(
        step=segment.step,
        phase=segment.phase,
        op=_short(op.name) if op else WORKSPACE,
        module=_place(ledger, op) if op else "",
    )


def _place(ledger: Ledger, op: Op) -> str:
    """The module's path; where three layers stand for all, which of them, not its number among the three."""
    if op.group == NO_LAYER or not ledger.repeats:
        return op.module
    name = {FIRST: "first", LAST: "last"}.get(part_of(op.group), "middle")
    return LAYER_NUMBER.sub(name, op.module, count=1)


def _holders(ledger: Ledger, alive: Iterable[tuple[int, int]]) -> tuple[Holder, ...]:
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for index, num_bytes in alive:
        found.setdefault(holder_name(ledger, ledger.storages[index]), []).append(rounded(num_bytes))
    holders = [
        Holder(category=c, path=path, op=op, made_in=made_in, count=len(sizes), num_bytes=sum(sizes))
        for (c, path, op, made_in), sizes in found.items()
    ]
    return tuple(sorted(holders, key=lambda holder: (-holder.num_bytes, holder.path, holder.op)))


def holder_name(ledger: Ledger, storage: Storage) -> tuple[str, str, str, str]:
    """Category, path, operation, and where it was made: equal for the same allocation of equal layers."""
    op = ledger.ops[storage.op] if storage.op >= 0 else None
    if op is None:
        return storage.category, "", WORKSPACE, "any"
    segment = ledger.segments[op.segment]
    step = "steady" if segment.step == LATER else segment.step
    made_in = step if step in BEFORE_STEPS else f"{step}.{segment.phase}"
    if storage.category in BELONGS_TO_PARAMETERS:
        return storage.category, merged_path(storage.path.split("/")[1] or op.module), "", made_in
    return storage.category, merged_path(op.module), _short(op.name), made_in


def merged_path(path: str) -> str:
    """A dotted path with a star for the layer's number: ``layers.*.mlp.down``."""
    return LAYER_NUMBER.sub(ONE_OF_EQUAL, path).replace("..", ".").strip(".")


def _short(op: str) -> str:
    """``mm`` for ``aten.mm.default``; a library's own operation keeps its library's name."""
    return OPERATION.sub("", op).removesuffix(".default")


class _Walk:
    """Live bytes by category through one step, those from before it included."""

    def __init__(self, ledger: Ledger, events: Sequence[LiveEvent], step: str):
        self.ends: dict[str, MemoryBreakdown] = {}
        phases = [segment.phase if segment.step == step else "" for segment in ledger.segments]
        size = -(-sum(bool(phases[event.segment]) for event in events) // CURVE_POINTS) or 1
        alive, total, number, phase = dict.fromkeys(CATEGORIES, 0), 0, 0, ""
        self.most = dict(alive)
        points: list[tuple[int, str, dict[str, int]]] = []
        """The highest moment of each of CURVE_POINTS equal stretches: bytes, phase, bytes by category."""
        for event in events:
            before, phase = phase, phases[event.segment]
            if before in PHASES and before != phase:
                self.ends[before] = MemoryBreakdown(**alive)
            change = rounded(event.num_bytes) * (1 if event.kind == ALLOCATE else -1)
            alive[event.category] += change
            total += change
            if not phase:
                continue
            if number % size == 0:
                points.append((total, phase, dict(alive)))
            elif total > points[-1][0]:
                points[-1] = total, phase, dict(alive)
            for name in (event.category,) if number else CATEGORIES:
                self.most[name] = max(self.most[name], alive[name])
            number += 1
        if phase in PHASES:
            self.ends[phase] = MemoryBreakdown(**alive)
        self.curve = tuple(
            CurvePoint(phase=phase, alive=MemoryBreakdown(**alive)) for _, phase, alive in points
        )
