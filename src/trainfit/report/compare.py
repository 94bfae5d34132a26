"""Join each recipe's predictions and measurements, and summarise the errors.

Records join by recipe id, a hash of the whole recipe with its GPU. Of a recipe's predictions, the newest counts whose
versions of torch and transformers are the measurement's; without one, the newest of all, and it is marked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, PHASES, Estimate, Measurement, Record
from trainfit.spec.units import GIB
from trainfit.spec.value import parse
from trainfit.techniques.registry import describe

GOAL = 0.03
"""Predictions are to lie this close to the measured peak (a share)."""


@dataclass(frozen=True)
class Comparison:
    """One recipe on one device; either side may be None."""

    recipe: Recipe
    predicted: Estimate | None
    measured: Measurement | None

    @property
    def model(self) -> str:
        return self.recipe.model.display_name

    @property
    def batch(self) -> str:
        """``micro x seq``, and ``x accumulate`` where there is accumulation."""
        batch = self.recipe.batch
        return f"{batch.micro} x {batch.seq}" + (f" x {batch.accumulate}" if batch.accumulate > 1 else "")

    @property
    def technique(self) -> str:
        return describe(self.recipe)

    @property
    def device(self) -> str:
        """Where it was measured, else the GPU it is predicted for."""
        return self.measured.environment.device if self.measured else self.recipe.hardware.gpu

    @property
    def on_its_device(self) -> bool:
        """Whether it was measured on the device that the recipe names, as far as their names tell."""
        if self.measured is None:
            return False
        if self.measured.environment.cuda is None:
            return self.recipe.hardware.gpu == "cpu"
        return self.recipe.hardware.gpu.split("-")[0] in self.device.lower()

    @property
    def status(self) -> str:
        """``done``, or how the measurement ended; ``not measured``."""
        return self.measured.status if self.measured else "not measured"

    @property
    def lacking(self) -> str:
        """Why a finished measurement has no peak, in its own words; empty where it has one."""
        held = self.measured
        unknown = held is not None and held.status == "done" and held.peak_allocated_bytes is None
        return (held.message or "memory not measured") if held is not None and unknown else ""

    @property
    def other_versions(self) -> str:
        """Where the prediction is for other versions than the measurement's, which; else empty."""
        if self.predicted is None or self.measured is None:
            return ""
        ran = _versions(self.measured)
        other = {
            name: version
            for name, version in self.predicted.versions.items()
            if name in ran and version != ran[name]
        }
        if not other:
            return ""
        predicted = ", ".join(f"{name} {version}" for name, version in other.items())
        return (
            f"predicted for {predicted}, measured with {', '.join(f'{name} {ran[name]}' for name in other)}"
        )

    def peaks_gib(self) -> tuple[float, float] | None:
        """Measured and predicted peak allocated, GiB, of a trial that came to its end."""
        if self.predicted is None or self.measured is None or self.status != "done":
            return None
        measured = self.measured.peak_allocated_bytes
        return (measured / GIB, self.predicted.peak_allocated_bytes / GIB) if measured else None

    def error(self, name: str) -> float | None:
        """Return (predicted - measured) / measured of a field, or of a phase such as ``phases.steady.backward``.

        None where a side lacks it, or where the measurement did not come to its end. On a CPU the device's bytes
        are those of the whole process, Python and libraries included, which are not predicted.
        """
        if self.predicted is None or self.measured is None or self.measured.status != "done":
            return None
        if name == "peak_device_bytes" and self.measured.environment.cuda is None:
            return None
        pair = [_value(side, name) for side in (self.predicted, self.measured)]
        return None if pair[0] is None or not pair[1] else (pair[0] - pair[1]) / pair[1]

    def phase_errors(self) -> dict[str, float]:
        """Error by phase: ``after_init``, ``first.forward`` ... ``steady.optimizer``, as far as both sides know it."""
        names = ["after_init", *(f"{step}.{phase}" for step in ("first", "steady") for phase in PHASES)]
        errors = {name: self.error(f"phases.{name}") for name in names}
        return {name: error for name, error in errors.items() if error is not None}

    def breakdown(self, side: str) -> dict[str, int] | None:
        """Bytes by category at the peak; ``side``: predicted or measured."""
        held = self.predicted if side == "predicted" else self.measured
        if held is None or held.breakdown is None:
            return None
        return {name: getattr(held.breakdown, name) for name in CATEGORIES}

    def utilisation(self, name: str) -> float | None:
        """Measured ``mfu`` or ``hfu``; where the measurement has none, from the prediction's FLOPs and the measured time."""
        if self.measured is None:
            return None
        known = getattr(self.measured, name)
        if known is not None or self.predicted is None or not self.on_its_device:
            return known
        share, step_s = getattr(self.predicted, name), self.predicted.step_s
        if share is None or step_s is None or not self.measured.step_s:
            return None
        return share * step_s / self.measured.step_s  # FLOPs / peak, over the time it really took


def _versions(measured: Measurement) -> dict[str, str]:
    """The versions that a measurement names, without their builds (``+cu128``)."""
    named = {name: getattr(measured.environment, name) for name in ("torch", "transformers")}
    return {name: version.partition("+")[0] for name, version in named.items() if version}


def _value(side: Estimate | Measurement, name: str) -> float | None:
    value: object = side
    for part in name.split("."):
        value = getattr(value, part) if value is not None else None
    assert value is None or isinstance(value, int | float)
    return value


@dataclass(frozen=True)
class Summary:
    """How good the predictions of peak allocated bytes are, over the recipes that have both sides."""

    num_compared: int
    num_within_goal: int
    median_error: float | None
    """Of the errors' sizes."""
    worst: Comparison | None
    num_out_of_memory: int
    num_foreseen: int
    """Measured out of memory, and predicted not to fit."""
    num_other_versions: int = 0
    """Predicted for other versions than the measurement's."""

    def text(self) -> str:
        """One or two plain sentences."""
        if self.worst is None or self.median_error is None:
            parts = ["No recipe has both a prediction and a finished measurement."]
        else:
            error = self.worst.error("peak_allocated_bytes") or 0.0
            parts = [
                f"{self.num_within_goal} of {self.num_compared} recipes within {GOAL:.0%} of the measured peak; "
                f"median error {self.median_error:.2%}, largest {error:+.2%} ({self.worst.model}, {self.worst.batch})."
            ]
        if self.num_out_of_memory:
            parts.append(
                f"{self.num_foreseen} of {self.num_out_of_memory} out of memory were predicted not to fit."
            )
        if self.num_other_versions:
            parts.append(f"{self.num_other_versions} predicted for other versions than those measured.")
        return " ".join(parts)


def compare(records: Sequence[Record]) -> list[Comparison]:
    """A Comparison for each recipe and measured device, in the order the recipes first came.

    Raises:
        InputError: there is neither a prediction nor a measurement among the records.
    """
    predicted: dict[str, list[Record]] = {}
    measured: dict[str, dict[str, Record]] = {}
    recipes: dict[str, Record] = {}
    for record in sorted(records, key=lambda one: one.created_at):
        if record.estimate is not None:
            predicted.setdefault(record.recipe_id, []).append(record)
        if record.measurement is not None:
            device = record.measurement.environment.device
            measured.setdefault(record.recipe_id, {})[device] = record
    for record in records:
        if record.estimate is not None or record.measurement is not None:
            recipes.setdefault(record.recipe_id, record)
    if not recipes:
        raise InputError(
            f"{len(records)} records, none of them a prediction or a measurement",
            "make some with predict --record FILE and measure --record FILE",
        )
    found = []
    for recipe_id, record in recipes.items():
        recipe = parse(Recipe, record.recipe, file=f"record of {record.created_at}")
        estimates = [one.estimate for one in predicted.get(recipe_id, [])]
        measurements = [one.measurement for one in measured.get(recipe_id, {}).values()] or [None]
        found += [_joined(recipe, estimates, one) for one in measurements]
    return found


def _joined(recipe: Recipe, estimates: Sequence[Estimate | None], measured: Measurement | None) -> Comparison:
    """Join a measurement with the newest of the estimates (oldest first) that is for its versions."""
    newest = [Comparison(recipe, one, measured) for one in reversed(estimates)]
    same = [one for one in newest if not one.other_versions]
    return next(iter(same or newest), Comparison(recipe, None, measured))


def summarise(comparisons: Sequence[Comparison]) -> Summary:
    """Return how well the peaks of ``comparisons`` are predicted."""
    errors = {index: one.error("peak_allocated_bytes") for index, one in enumerate(comparisons)}
    sizes = {index: abs(error) for index, error in errors.items() if error is not None}
    out = [one for one in comparisons if one.status == "out-of-memory"]
    return Summary(
        num_compared=len(sizes),
        num_within_goal=sum(size <= GOAL for size in sizes.values()),
        median_error=median(sizes.values()) if sizes else None,
        worst=comparisons[max(sizes, key=lambda index: sizes[index])] if sizes else None,
        num_out_of_memory=len(out),
        num_foreseen=sum(one.predicted is not None and not one.predicted.fits for one in out),
        num_other_versions=sum(bool(one.other_versions) for one in comparisons),
    )
