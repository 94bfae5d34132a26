"""The ledger of one GPU of a pipeline, from traces of its stages, one micro-batch after the other. No torch.

A micro-batch's forward or backward allocates and frees the same, whichever others are in flight. So the
schedule's order of them is written out from three traced ones: the first, which makes gradients, one in
between, and the last, which reduces them.

What a micro-batch leaves to the one traced after it, which frees it, is freed by the micro-batch that the
schedule runs next, if there is any left by then.
"""

from collections.abc import Sequence

from trainfit.ledger.ledger import (
    ALLOCATE,
    FREE,
    NO_LAYER,
    Event,
    Ledger,
    LiveEvent,
    RepeatError,
    Segment,
    Storage,
)
from trainfit.spec.pipeline import Action

TRACED = 3
"""Micro-batches that are traced at most."""
MAX_STREAMS = 8
"""Over the number of streams of one stage; another stage on the GPU has streams of its own."""
OF_NONE = -1
"""Micro-batch of what belongs to the whole step."""


def role(micro_batch: int, num_micro_batches: int) -> int:
    """Return the number of the traced micro-batch that one of a step is like."""
    if micro_batch == num_micro_batches - 1:
        return min(num_micro_batches, TRACED) - 1
    return min(micro_batch, 1)


def segments_of(ledger: Ledger, step: str, phase: str) -> list[int]:
    """Return the numbers of a step's segments of one phase, in order."""
    return [index for index, segment in enumerate(ledger.segments) if segment == (step, phase)]


def composed(traced: Sequence[Ledger], actions: Sequence[Action], num_held: int) -> Ledger:
    """Return the ledger of a GPU that runs its stages in this order, all layers written out.

    Args:
        traced: a ledger for each of its stages.
        num_held: micro-batches whose tokens are on the GPU during a step.

    Raises:
        RepeatError: a micro-batch frees what another one allocated.
    """
    made = _Composer(traced)
    made.each_stage("init", "init")
    num_micro_batches = 1 + max(action.micro_batch for action in actions)
    for step in ("first", "steady"):
        made.data(step, num_held, min(num_micro_batches, TRACED))
        for action in actions:
            phase = "forward" if action.is_forward else "backward"
            found = segments_of(traced[action.chunk], step, phase)
            made.begin(step, phase)
            at = found[role(action.micro_batch, num_micro_batches)]
            made.copy(action.chunk, at, action.micro_batch)
        made.each_stage(step, "optimizer")
    return made.finish()


class _Composer:
    def __init__(self, traced: Sequence[Ledger]):
        self.traced = traced
        self.out = Ledger()
        self.alive: dict[tuple[int, tuple[int, int]], dict[int, int]] = {}
        """Stage and traced allocation -> micro-batch -> storage, of each live copy."""
        self.segment_of: dict[tuple[int, int], int] = {}
        """Stage and its segment -> the first copy of that segment."""
        self.events: list[dict[int, list[LiveEvent]]] = [{} for _ in traced]
        for events, ledger in zip(self.events, traced, strict=True):
            for event in ledger.expand():
                if event.num_bytes:  # FSDP2 keeps parameters that are not gathered with none.
                    events.setdefault(event.segment, []).append(event)
        freed = [{event.storage for event in one.events if event.kind == FREE} for one in traced]
        self.kept = [
            {index for index, s in enumerate(one.storages) if s.category == "workspace" and index not in gone}
            for one, gone in zip(traced, freed, strict=True)
        ]
        """Workspaces that libraries keep, by stage; all stages share them."""
        self.left = [_left_over(*one) for one in zip(traced, self.events, strict=True)]
        """By stage, traced allocation -> path, of what a micro-batch leaves to the next one."""
        self.storages: dict[tuple[int, int], Storage] = {}
        """Stage and number of a traced storage -> as in the composed ledger."""
        self.num_ops = [sum(len(one.ops) for one in traced[:chunk]) for chunk in range(len(traced))]

    def begin(self, step: str, phase: str) -> None:
        self.out.segments.append(Segment(step, phase))

    def each_stage(self, step: str, phase: str) -> None:
        """Copy a phase that all stages go through one after the other."""
        self.begin(step, phase)
        for chunk, ledger in enumerate(self.traced):
            for segment in segments_of(ledger, step, phase):
                self.copy(chunk, segment, OF_NONE)

    def data(self, step: str, num_held: int, num_traced: int) -> None:
        """Copy the tokens of each stage's traced micro-batches, and of the first stage's others."""
        self.each_stage(step, "data")
        (segment,) = segments_of(self.traced[0], step, "data")
        made = [one for one in self.events[0].get(segment, ()) if one.kind == ALLOCATE]
        for number in range(num_held - num_traced):
            for event in made[: len(made) // num_traced]:
                self._allocate(0, event, number)

    def copy(self, chunk: int, segment: int, micro_batch: int) -> None:
        """Copy a traced segment of a stage for one micro-batch."""
        self.segment_of.setdefault((chunk, segment), len(self.out.segments) - 1)
        for event in self.events[chunk].get(segment, ()):
            if event.kind == FREE:
                self._free(chunk, event, micro_batch)
            elif not (chunk and event.storage in self.kept[chunk]):
                self._allocate(chunk, event, micro_batch)

    def _allocate(self, chunk: int, event: LiveEvent, micro_batch: int) -> None:
        index, found = len(self.out.storages), self.storages.get((chunk, event.storage))
        if found is None:
            found = self.traced[chunk].storages[event.storage]
            stream = found.stream + chunk * MAX_STREAMS * (found.stream > 0)
            op = found.op + self.num_ops[chunk] * (found.op >= 0)
            found = found._replace(group=NO_LAYER, op=op, stream=stream)
            self.storages[chunk, event.storage] = found
        self.out.storages.append(found)
        self.alive.setdefault((chunk, event.key), {})[micro_batch] = index
        self._add(ALLOCATE, index)

    def _free(self, chunk: int, event: LiveEvent, micro_batch: int) -> None:
        if event.key in self.left[chunk]:
            self._free_left_over(chunk, self.left[chunk][event.key], micro_batch)
            return
        copies = self.alive.get((chunk, event.key))
        if not copies:
            raise RepeatError(f"{self.traced[chunk].storages[event.storage].path} is freed twice")
        own = micro_batch != OF_NONE and micro_batch in copies
        freed = [micro_batch] if own else list(copies)
        for one in freed:
            self._add(FREE, copies.pop(one))

    def _free_left_over(self, chunk: int, path: str, micro_batch: int) -> None:
        """Free what other micro-batches have left; the first ones of a schedule find nothing."""
        for key, one in self.left[chunk].items():
            copies = self.alive.get((chunk, key), {}) if one == path else {}
            for other in [each for each in copies if each != micro_batch]:
                self._add(FREE, copies.pop(other))

    def _add(self, kind: int, index: int) -> None:
        self.out.events.append(Event(kind, index, NO_LAYER, len(self.out.segments) - 1))

    def finish(self) -> Ledger:
        """Return the ledger, with each stage's operations once, as they were traced."""
        out = self.out
        for chunk, one in enumerate(self.traced):
            at = {segment: new for (of, segment), new in self.segment_of.items() if of == chunk}
            out.ops += [op._replace(segment=at.get(op.segment, 0), group=NO_LAYER) for op in one.ops]
            out.collectives += [
                each._replace(segment=at.get(each.segment, 0), group=NO_LAYER) for each in one.collectives
            ]
            out.params += one.params
            out.trainable_params += one.trainable_params
            out.active_params += one.active_params
            out.warnings = tuple(dict.fromkeys((*out.warnings, *one.warnings)))
            out.ops_without_flops = tuple(sorted({*out.ops_without_flops, *one.ops_without_flops}))
            out.assumptions = tuple(dict.fromkeys((*out.assumptions, *one.assumptions)))
            out.versions |= one.versions
            out.empty_cache_every = one.empty_cache_every
        return out


def _left_over(ledger: Ledger, events: dict[int, list[LiveEvent]]) -> dict[tuple[int, int], str]:
    """Return the paths of what a traced micro-batch allocates and the next one frees."""
    paths = dict[tuple[int, int], str]()
    for step in ("first", "steady"):
        forwards, backwards = (segments_of(ledger, step, phase) for phase in ("forward", "backward"))
        made = set[tuple[int, int]]()
        for segments in zip(forwards, backwards, strict=True):
            now = [event for segment in segments for event in events.get(segment, ())]
            for event in now:
                if event.kind == FREE and event.key in made:
                    paths[event.key] = ledger.storages[event.storage].path.partition("/")[2]
            made = {event.key for event in now if event.kind == ALLOCATE}
    return paths
