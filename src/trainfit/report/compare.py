"""Join each recipe's predictions and measurements, and summarise the errors.

Records join by recipe id, a hash of the whole recipe with its GPU. A measurement joins the newest prediction
for its versions of torch and transformers; without one, the newest of all, which is marked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainfit.report.words import batch_text
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import release
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES, Estimate, Loop, Measurement, Record, WhichPeak
from trainfit.techniques.registry import describe

GOAL = 0.03  # Predictions are to lie this close to the measured peak (a share)
TIMES = ("step_s", "step_times", "tokens_per_s", "mfu", "hfu")
PHASE_NAMES = ("after_init", *(f"{step}.{phase}" for step in ("first", "steady") for phase in PHASES))


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
        return batch_text(self.recipe)

    @property
    def technique(self) -> str:
        return describe(self.recipe)

    @property
    def device(self) -> str:
        """The measuring device, else the GPU that the prediction is for."""
        return self.measured.environment.device if self.measured else self.recipe.hardware.gpu

    @property
    def on_its_device(self) -> bool:
        """Return whether the measuring device is the recipe's, by their names."""
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
        """Why a finished measurement has no peak or no time; empty where it has both."""
        if self.status == "done" and self.measured is not None and self.measured.environment.held_back:
            return self.measured.message or f"no step time: {', '.join(self.measured.environment.held_back)}"
        unknown = self.status == "done" and self.value("measured", "peak_allocated_bytes") is None
        return (self.value("measured", "message") or "memory not measured") if unknown else ""

    @property
    def other_versions(self) -> str:
        """Versions of both sides where they differ; else empty."""
        if self.predicted is None or self.measured is None:
            return ""
        where, named = self.measured.environment, self.predicted.versions
        # Without its build (``+cu128``).
        ran = {name: release(getattr(where, name) or "") for name in ("torch", "transformers")}
        other = [name for name in named if ran.get(name) and named[name] != ran[name]]
        predicted, measured = (", ".join(f"{name} {held[name]}" for name in other) for held in (named, ran))
        return f"predicted for {predicted}, measured with {measured}" if other else ""

    @property
    def peak_met(self) -> WhichPeak | None:
        """The one of two predicted peaks that was measured; None: one peak, or no measurement."""
        if self.predicted is None or self.measured is None or self.status != "done":
            return None
        sizes = {name: getattr(self.measured, f"peak_{name}_bytes") for name in ("allocated", "reserved")}
        return self.predicted.met(**sizes)

    def value(self, side: str, name: str) -> Any:
        """Return a field of ``predicted`` or ``measured``, such as ``phases.steady.backward``, or None.

        Of two predicted peaks, sizes and phases are of the one that was measured.
        """
        held = getattr(self, side)
        if side == "measured" and name.partition(".")[0] in TIMES and held and held.environment.held_back:
            return None  # Of a record made before such times were left out.
        if side == "predicted" and held is not None:
            held = held.with_peak(self.peak_met)
        for part in name.split("."):
            held = getattr(held, part, None)
        return held

    def error(self, name: str) -> float | None:
        """Return (predicted - measured) / measured of a field.

        None where a side lacks it or the measurement did not finish. On a CPU the device's bytes are of the
        whole process, which are not predicted.
        """
        on_cpu = self.measured is not None and self.measured.environment.cuda is None
        if self.status != "done" or (on_cpu and name == "peak_device_bytes"):
            return None
        predicted, measured = (self.value(side, name) for side in ("predicted", "measured"))
        return None if predicted is None or not measured else (predicted - measured) / measured

    def phase_errors(self) -> dict[str, float]:
        """Return the error by phase (``after_init``, ``first.forward`` ...), where known."""
        errors = {name: self.error(f"phases.{name}") for name in PHASE_NAMES}
        return {name: error for name, error in errors.items() if error is not None}

    @property
    def loops(self) -> tuple[Loop | None, Loop | None]:
        """A policy's loop, predicted and measured."""
        return self.predicted and self.predicted.loop, self.measured and self.measured.loop

    def loop_errors(self) -> dict[str, float]:
        """Return the error of each phase's peak and of the times of a policy's loop, where known.

        Names: ``loop.rollout.peak_allocated_bytes``, ``loop.longest.decode``, ``loop.longest``.
        """
        predicted, measured = self.loops
        if predicted is None or measured is None or self.status != "done":
            return {}
        means = [one.expected and one.expected.mean_new for one in (predicted, measured)]
        if means[0] != means[1]:  # Times of other lengths.
            measured = measured.model_copy(update={"expected": None})
        values = [loop_values(one) for one in (predicted, measured)]
        return {
            name: (values[0][name] - value) / value
            for name, value in values[1].items()
            if value and name in values[0]
        }

    def utilisation(self, name: str) -> float | None:
        """Return the measured ``mfu`` or ``hfu``; without one, the predicted FLOPs over the measured time."""
        known, measured_s = self.value("measured", name), self.value("measured", "step_s")
        share, step_s = self.value("predicted", name), self.value("predicted", "step_s")
        if known is not None or share is None or step_s is None or not measured_s or not self.on_its_device:
            return known
        return share * step_s / measured_s  # FLOPs / peak, over the time it really took


def loop_values(loop: Loop | None) -> dict[str, float]:
    """Return peaks in bytes and times in seconds of a loop, by the names of ``Comparison.loop_errors``."""
    if loop is None:
        return {}
    names = ["peak_allocated_bytes", *(["peak_reserved_bytes"] if loop.reserves else [])]
    found = {f"loop.{one.phase}.{name}": float(getattr(one, name)) for one in loop.memory for name in names}
    if loop.longest is not None:
        found |= {f"loop.longest.{one.name}": one.seconds for one in loop.longest.parts}
        found["loop.longest"] = loop.longest.seconds
    if loop.expected is not None:
        found |= {f"loop.expected.{phase}": taken for phase, taken in loop.expected.by_phase().items()}
        found["loop.expected"] = loop.expected.seconds
    return found


@dataclass(frozen=True)
class Summary:
    """Errors of the predicted peak allocated bytes, over the recipes that have both sides."""

    num_compared: int
    num_within_goal: int
    median_error: float | None  # Of the errors' sizes
    worst: Comparison | None
    num_out_of_memory: int
    num_foreseen: int  # Measured out of memory, and predicted not to fit
    num_other_versions: int = 0  # Predicted for other versions than the measurement's

    def text(self) -> str:
        """One or two plain sentences."""
        if self.worst is None or self.median_error is None:
            parts = ["No recipe has both a prediction and a finished measurement."]
        else:
            error = self.worst.error("peak_allocated_bytes") or 0.0
            num_within = f"{self.num_within_goal} of {self.num_compared} recipes"
            within = f"{num_within} within {GOAL:.0%} of the measured peak"
            largest = f"largest {error:+.2%} ({self.worst.model}, {self.worst.batch})"
            parts = [f"{within}; median error {self.median_error:.2%}, {largest}."]
        if self.num_out_of_memory:
            foreseen = f"{self.num_foreseen} of {self.num_out_of_memory}"
            parts.append(f"{foreseen} out of memory were predicted not to fit.")
        if self.num_other_versions:
            parts.append(f"{self.num_other_versions} predicted for other versions than those measured.")
        return " ".join(parts)


def compare(records: Sequence[Record]) -> list[Comparison]:
    """Return a comparison for each recipe and measured device, in the order of the recipes' first records.

    Raises:
        InputError: there is neither a prediction nor a measurement among the records.
    """
    predicted: dict[str, list[Estimate]] = {}
    measured: dict[str, dict[str, Measurement]] = {}
    for record in sorted(records, key=lambda one: one.created_at):
        if record.estimate is not None:
            predicted.setdefault(record.recipe_id, []).append(record.estimate)
        if record.measurement is not None:
            device = record.measurement.environment.device
            measured.setdefault(record.recipe_id, {})[device] = record.measurement
    recipes: dict[str, Record] = {}
    for record in records:
        if record.recipe_id in predicted or record.recipe_id in measured:
            recipes.setdefault(record.recipe_id, record)
    if not recipes:
        raise InputError(
            f"{len(records)} records, none of them a prediction or a measurement",
            "make some with predict --record FILE and measure --record FILE",
        )
    found = []
    for recipe_id, record in recipes.items():
        recipe = parse(Recipe, record.recipe, file=f"record of {record.created_at}")
        estimates = predicted.get(recipe_id, [])
        found += [_joined(recipe, estimates, one) for one in measured.get(recipe_id, {}).values() or [None]]
    return found


def _joined(recipe: Recipe, estimates: Sequence[Estimate], measured: Measurement | None) -> Comparison:
    """Join a measurement with the newest of the estimates (oldest first) that is for its versions."""
    newest = [Comparison(recipe, one, measured) for one in reversed(estimates)]
    same = [one for one in newest if not one.other_versions]
    return next(iter(same or newest), Comparison(recipe, None, measured))


def summarise(comparisons: Sequence[Comparison]) -> Summary:
    """Return how well the peaks of ``comparisons`` are predicted."""
    errors = [(one.error("peak_allocated_bytes"), one) for one in comparisons]
    sizes = [(abs(error), one) for error, one in errors if error is not None]
    out = [one for one in comparisons if one.status == "out-of-memory"]
    return Summary(
        num_compared=len(sizes),
        num_within_goal=sum(size <= GOAL for size, _ in sizes),
        median_error=median(size for size, _ in sizes) if sizes else None,
        worst=max(sizes, key=lambda pair: pair[0])[1] if sizes else None,
        num_out_of_memory=len(out),
        num_foreseen=sum(one.predicted is not None and not one.predicted.fits for one in out),
        num_other_versions=sum(bool(one.other_versions) for one in comparisons),
    )
