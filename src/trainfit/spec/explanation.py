"""Explanation: who holds memory at a step's peak, and how memory goes through the step. Sizes in bytes.

Made by ``explain/peak.py`` from a ledger; read by the command and by the pages.
"""

from typing import Any, Literal

from trainfit.spec.result import MemoryBreakdown, Phases
from trainfit.spec.value import Bytes, Count, Value

ONE_OF_EQUAL = "*"
"""Stands in a path for the number of a layer (or an expert) where several are told together."""


class Moment(Value):
    """When something is allocated: step (first, steady), phase, and the operation that asks for the memory."""

    step: str
    phase: str
    op: str
    """As PyTorch names it; ``library workspace`` where no operation asked."""
    module: str
    """Dotted path; of layers told by three, their place (``layers.last.mlp``). Empty: in none."""


class Holder(Value):
    """What is alive together: allocations of equal layers that the same operation of the same module made."""

    category: str
    path: str
    """Parameter's name for weights, gradients and optimizer state, else the module's, ``*`` for the layer's number."""
    op: str
    made_in: str
    """Step and phase it was made in: ``init``, ``steady.forward``."""
    count: Count
    num_bytes: Bytes
    """Of all of them together."""


class CurvePoint(Value):
    """The highest moment of a stretch of the step: the stretch's phase, and what is alive then."""

    phase: str
    alive: MemoryBreakdown


class Explanation(Value):
    """One recipe's peak explained."""

    kind: Literal["explanation"] = "explanation"
    recipe: dict[str, Any]
    recipe_id: str
    gpu: str
    peak_allocated_bytes: Bytes
    versions: dict[str, str] = {}
    """Versions of the libraries that it holds for, as an Estimate has them."""
    phases: Phases
    moment: Moment
    """What was being allocated when the peak was reached."""
    breakdown: MemoryBreakdown
    """At the peak."""
    holders: tuple[Holder, ...]
    """At the peak, the largest first; sizes rounded to the allocator's 512 bytes."""
    unsplit_bytes: Bytes
    """What the allocator's blocks have beyond their holders at the peak; part of the breakdown's ``temporary``."""
    ends: dict[str, MemoryBreakdown]
    """What is alive when a phase of the peak's step ends: forward, backward, optimizer."""
    curve: tuple[CurvePoint, ...]
    """The peak's step cut into stretches of equally many allocations and frees."""
    most: MemoryBreakdown
    """The most that each category holds at any moment of the peak's step; not at one moment, so no sum."""
