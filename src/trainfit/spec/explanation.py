"""Explanations: the peak of a recipe, a script or a snapshot, what would change it, what comes later.

Sizes in bytes, times in seconds.
"""

from typing import Any, Literal

from trainfit.spec.result import MemoryBreakdown, Phases, TwoPeaks
from trainfit.spec.value import Bytes, Count, Seconds, Value

ONE_OF_EQUAL = "*"
"""Stands in a path for the number of a layer (or an expert) where several are grouped."""


class Moment(Value):
    """The moment of an allocation: step (first, steady), phase and operation."""

    step: str
    phase: str
    op: str  # PyTorch's name; ``library workspace`` where no operation allocated
    module: str  # Dotted path; of layers represented by three, ``layers.last.mlp``. Empty: in no module.


class Holder(Value):
    """Live allocations of equal layers that the same operation of the same module made."""

    category: str
    path: str
    """Name of the parameter (weights, gradients, optimizer state), else of the module; ``*`` for a number."""
    op: str
    made_in: str  # Step and phase it was made in: ``init``, ``steady.forward``
    count: Count
    num_bytes: Bytes  # Of all of them together


class CurvePoint(Value):
    """The highest moment of a stretch of the step: the stretch's phase, and what is alive then."""

    phase: str
    alive: MemoryBreakdown


class CourseMoment(Value):
    """The highest moment of a stretch of a step."""

    at: float
    """Seconds since the step began, or the number of allocations and frees."""
    phase: str
    alive: MemoryBreakdown
    largest: tuple[tuple[str, Bytes], ...]
    """Names and bytes of the largest holders."""


class PhaseSpan(Value):
    """A phase of a step, from its first to its last moment."""

    name: str
    begin: float
    end: float


class MemoryCourse(Value):
    """The course of memory through a step."""

    moments: tuple[CourseMoment, ...]
    phases: tuple[PhaseSpan, ...]
    is_timed: bool
    """Moments are placed in seconds."""
    unsplit_bytes: Bytes = 0
    """Of the allocator's blocks beyond their holders, at the peak."""
    capacity_bytes: Bytes | None = None
    """What the allocator may hold on the GPU; None: not known."""

    @property
    def peak(self) -> CourseMoment:
        """The highest moment."""
        return max(self.moments, key=lambda one: one.alive.total)


class PhaseCommunication(Value):
    """Computation and communication of one phase of a steady step, on one GPU."""

    phase: str
    compute_s: Seconds
    communication_s: Seconds
    exposed_s: Seconds  # The computation waits for it, or is slower meanwhile
    compute_bound_tokens: float | None
    """Tokens of all GPUs in a step from which the computation takes as long, and as its host; None: never."""


class CommunicationBound(Value):
    """When a recipe of several GPUs is bound by communication, at the rates that its prediction expects."""

    tokens: Count  # Of all GPUs in one step, as the recipe has them
    phases: tuple[PhaseCommunication, ...]  # Those with collectives
    compute_bound_tokens: float | None
    """Smallest batch, in tokens of all GPUs, at which no phase is bound by communication or its host; None:
    there is none."""

    @property
    def is_bound(self) -> bool:
        """Whether a phase of the recipe's own batch is bound by communication."""
        return any(one.communication_s > one.compute_s for one in self.phases)


class FailedRequest(Value):
    """A request that ended in an OutOfMemoryError."""

    num_bytes: Bytes
    allocated_bytes: Bytes  # Before it
    reserved_bytes: Bytes
    free_bytes: Bytes  # On the device, outside PyTorch

    @property
    def missing_bytes(self) -> int:
        """Bytes that were missing in all; 0: they were there, in pieces."""
        there = self.reserved_bytes - self.allocated_bytes + self.free_bytes
        return max(0, self.num_bytes - there)


class SnapshotFacts(Value):
    """What a memory snapshot of PyTorch says of one device, in addition to its peak."""

    file: str
    device: Count
    num_events: Count
    is_whole: bool  # Its history begins with the first allocation
    reserved_at_peak_bytes: Bytes
    peak_reserved_bytes: Bytes
    expandable_reserved_bytes: Bytes
    """The highest reserved bytes of the same requests with ``expandable_segments:True``."""
    is_expandable: bool = False  # It was set
    has_stacks: bool = True
    failed: FailedRequest | None = None  # The last one


class LaterSpike(Value):
    """Memory of what comes later in a run than its steady step."""

    name: str
    what: str
    """In words: how it was run."""
    peak_allocated_bytes: Bytes
    peak_device_bytes: Bytes | None = None  # None: only allocated bytes are known
    more_bytes: int
    """Allocated bytes beyond the step's own peak; negative: it stays below."""
    fits: bool


class LengthsRun(Value):
    """Steps of varied lengths, one after another, through the caching allocator."""

    num_steps: Count
    lengths: tuple[Count, Count, Count]
    """Tokens of a sequence: the shortest, the median and the longest."""
    num_lengths: Count  # Distinct ones; each has a prediction of its own
    longest_alone_bytes: Bytes
    """Reserved where every step has the longest length."""
    reserved_bytes: dict[int, Bytes]
    """Number of steps -> reserved bytes after them."""
    expandable_bytes: Bytes
    """After the last step, with ``expandable_segments:True``."""
    num_retries: Count  # How often the cache was emptied to make room
    failed: Count | None = None  # The step that ran out of memory, from 1 on
    expandable_failed: Count | None = None
    late_length: Count
    """Tokens of the longest sample, which comes late."""
    late_after: Count  # Steps before it
    late_alone_fits: bool
    """It fits as the first step of a run."""
    late_fits: bool
    late_expandable_fits: bool
    late_reserved_bytes: Bytes


class Later(Value):
    """What comes later in a run than its steady step."""

    spikes: tuple[LaterSpike, ...]
    lengths: LengthsRun | None
    notes: tuple[str, ...] = ()


class Saving(Value):
    """A change of a recipe, and what it saves."""

    change: str  # As a recipe writes it
    saved_bytes: int  # On the device; negative: it takes more
    peak_device_bytes: Bytes
    fits: bool
    time_ratio: float | None  # Of the step's time over the recipe's, for as many tokens; None: no speed known
    numerics: str = ""  # What of the mathematics it changes


class Savings(Value):
    """What each change of a recipe would save, the most first."""

    peak_device_bytes: Bytes  # The recipe's own
    changes: tuple[Saving, ...]
    is_complete: bool  # False: the time was over before everything had been tried


class Explanation(Value):
    """The peak of a recipe, or of a memory snapshot, explained."""

    kind: Literal["explanation"] = "explanation"
    recipe: dict[str, Any] | None = None
    recipe_id: str = ""
    gpu: str = ""
    snapshot: SnapshotFacts | None = None
    script: str = ""  # Of a training script: its name
    peak_allocated_bytes: Bytes
    two_peaks: TwoPeaks | None = None  # All else is of the expected one
    versions: dict[str, str] = {}  # Versions of the libraries that it holds for, as an Estimate has them
    phases: Phases
    moment: Moment  # The allocation that reached the peak
    breakdown: MemoryBreakdown  # At the peak
    holders: tuple[Holder, ...]
    """At the peak, the largest first; sizes rounded to the allocator's 512 bytes."""
    unsplit_bytes: Bytes
    """Bytes of the allocator's blocks beyond their holders at the peak; part of ``temporary``."""
    ends: dict[str, MemoryBreakdown]
    """Live bytes at the end of each phase of the peak's step: forward, backward, optimizer."""
    curve: tuple[CurvePoint, ...]
    """The peak's step cut into stretches of equally many allocations and frees."""
    most: MemoryBreakdown
    """Maximum of each category over the peak's step; not of one moment, so no sum."""
    communication: CommunicationBound | None = None  # None: of one GPU
    later: Later | None = None  # None: not requested
    savings: Savings | None = None
