"""What the accuracy page says, as values: errors, times, verdicts, outliers. ``accuracy_summary`` fills them from records."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Errors:
    """Errors of one quantity over several recipes: (predicted - measured) / measured, shares."""

    num_recipes: int
    num_exact: int
    """Predicted to the byte."""
    median: float
    """Of the errors' sizes, as the 95th percentile."""
    percentile_95: float
    worst: float
    """The largest, with its sign."""

    @classmethod
    def of(cls, errors: Iterable[float]) -> "Errors | None":
        """Summarise (nearest-rank percentiles); None without any."""
        ordered = sorted(errors, key=lambda error: (abs(error), error))
        if not ordered:
            return None
        return cls(
            num_recipes=len(ordered), num_exact=sum(error == 0 for error in ordered),
            median=abs(rank(ordered, 0.5)), percentile_95=abs(rank(ordered, 0.95)), worst=ordered[-1],
        )  # fmt: skip


@dataclass(frozen=True)
class Times:
    """Measured over expected step time, and how many lie inside the bounds printed with the expectation."""

    num_recipes: int
    num_inside: int
    lowest: float
    percentile_5: float
    median: float
    percentile_95: float
    highest: float


@dataclass(frozen=True)
class Group:
    """Recipes that are judged together."""

    name: str
    num_recipes: int
    """With a prediction and a measurement, however that ended."""
    statuses: dict[str, int]
    allocated: Errors | None
    after_init: Errors | None
    phases: dict[str, Errors]
    reserved: Errors | None
    device: Errors | None
    times: Times | None


@dataclass(frozen=True)
class Verdicts:
    """Whether a recipe fits, predicted and measured (trials that ran, or ran out of memory)."""

    fits_and_ran: int
    fits_but_out_of_memory: int
    too_large_and_out_of_memory: int
    too_large_but_ran: int
    near_and_ran: int
    near_and_out_of_memory: int
    """Of all of them, those whose predicted use is within ``NEAR`` of the card's size."""
    wrong: tuple[str, ...]
    """The recipes on which they differ."""


@dataclass(frozen=True)
class Outlier:
    """A recipe with its error (a share), and why, where that is known."""

    recipe_id: str
    recipe: str
    error: float
    error_bytes: int
    cause: str


@dataclass(frozen=True)
class PhaseMiss:
    """A phase whose peak is off by more than ``NAMED``, a share."""

    recipe_id: str
    recipe: str
    phase: str
    error: float
    cause: str


@dataclass(frozen=True)
class Unfinished:
    """A trial without a result, whether the recipe was predicted or refused."""

    recipe_id: str
    recipe: str
    status: str
    message: str
    cause: str


@dataclass(frozen=True)
class Accuracy:
    """What the page says."""

    groups: tuple[Group, ...]
    """All; then by half (learned from, held out) and by eager or compiled."""
    by_technique: tuple[Group, ...]
    """Of each technique the recipes that ask for it, with whatever else they ask for."""
    verdicts: Verdicts
    worst: dict[str, tuple[Outlier, ...]]
    """By quantity (allocated, reserved), the largest first."""
    phase_misses: tuple[PhaseMiss, ...]
    """The largest first."""
    origins: dict[str, int]
    """Recipes by how they came about, as their measurements are tagged."""
    families: dict[str, int]
    unfinished: tuple[Unfinished, ...]
    not_measured: tuple[str, ...]
    not_predicted: tuple[str, ...]
    """Measured recipes without a prediction, and how that ended."""
    sources: tuple[str, ...]
    """Devices, versions and commits of the records."""


def rank(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of what is in order."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
