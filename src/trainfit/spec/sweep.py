"""Sweep: variants of a recipe, the tasks done with each, and the rows of the resulting table."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue, field_validator, model_validator

from trainfit.spec.objective import Preference
from trainfit.spec.recipe import Parallel, Recipe
from trainfit.spec.result import Estimate, Loop, Measurement, Outcome, WhichPeak
from trainfit.spec.schedule import ScheduleField
from trainfit.spec.value import Count, FromPercent, PositiveInt, Value, disagreement

Part = Literal["predict", "measure", "train"]
PARTS: tuple[Part, ...] = ("predict", "measure", "train")
"""Tasks of a trial, in this order."""
RESULTS = ("done", "out-of-memory", "refused", "diverged")
"""Outcomes that another try would not change; ``--retry`` repeats the others."""
WAITING, RUNNING = "waiting", "running"
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
LATE_FROM_STEP = 10
"""Speed is reported for the whole run, and without its first steps, which compile and choose kernels."""
Steps = Annotated[int, Field(ge=0, le=2**24)]


class MeasurePart(Value):
    """Options of the measurement of each variant."""

    steps: Steps = 10
    warmup: Steps = 3


class TrainPart(Value):
    """Options of the training run of each variant: loss, speed and perplexity on real text."""

    steps: PositiveInt = 100
    data: str | None = None
    """As ``train --data``: stories, stories:N, hub:NAME, or a path relative to the sweep's file. None: what
    ``data.train`` of each recipe names."""
    eval_fraction: Annotated[float, Field(gt=0, le=0.5), FromPercent] | None = None
    """None: ``data.eval_share`` of each recipe."""
    eval_sequences: PositiveInt = 64
    eval_every: PositiveInt | None = None
    schedule: ScheduleField = "constant"
    warmup_steps: Count = 0
    deterministic: bool = False
    """On CUDA, kernels that repeat bit by bit: slower and larger than those predicted."""


class Limits(Value):
    """Limits of a trial: ``seconds`` of each part; ``memory_gib`` that its steps may allocate."""

    seconds: Annotated[float, Field(gt=0, le=10**8)] = 600.0
    memory_gib: Annotated[float, Field(gt=0, le=2**30)] | None = None


class SweepFile(Value):
    """A sweep's file (docs/guide/sweep.md).

    ``base`` (or each change of its ``list``) and ``recipes`` are the starting points, varied by ``product``.
    """

    name: str | None = None  # Of the folder in ``runs/``
    base: str | dict[str, JsonValue] | None = None
    list: tuple[dict[str, JsonValue], ...] = ()
    recipes: tuple[str, ...] = ()
    product: dict[str, tuple[JsonValue, ...]] = {}
    predict: bool = True
    measure: MeasurePart | None = None
    train: TrainPart | None = None
    limits: Limits = Limits()
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str | None) -> str | None:
        if name is not None and not FOLDER_NAME.fullmatch(name):
            remedy = "write 1 to 64 letters, digits and _ . + -, a letter or digit first"
            raise disagreement("not a name for a folder", remedy, field="name")
        return name

    @model_validator(mode="after")
    def _starts_somewhere(self) -> "SweepFile":
        if self.base is None and not self.recipes:
            raise disagreement("no recipe to vary", "write base, or recipes", field="base")
        if self.base is None and self.list:
            raise disagreement("a list of changes without a base", "write base", field="list")
        for field in ("list", "recipes", "product"):
            if field in self.model_fields_set and not getattr(self, field):
                raise disagreement("is empty", "write a variant, or leave it out", field=field)
        if not self.parts():
            raise disagreement("nothing to do", "write measure, or train", field="predict")
        for field, values in self.product.items():
            if not values:
                raise disagreement("no values", "write at least one", field=f"product.{field}")
        return self

    def parts(self) -> tuple[Part, ...]:
        """Return the tasks of each trial, in order."""
        wanted = (self.predict, self.measure is not None, self.train is not None)
        return tuple(part for part, is_wanted in zip(PARTS, wanted, strict=True) if is_wanted)

    def with_options(
        self,
        *,
        measure: bool = False,
        only: bool = False,
        steps: int | None = None,
        warmup: int | None = None,
        **limits: float | None,
    ) -> "SweepFile":
        """Return the file with the command line's options set; None keeps the file's value.

        Args:
            measure: measure also where the file does not.
            only: neither predict nor train.
            steps: timed steps of a measurement; ``warmup``: untimed ones.
            limits: fields of ``Limits``.
        """
        part = self.measure or (MeasurePart() if measure else None)
        changes: dict[str, Any] = {
            "measure": part and _changed(part, steps=steps, warmup=warmup),
            "limits": _changed(self.limits, **limits),
        }
        return self.model_copy(update=changes | ({"predict": False, "train": None} if only else {}))


def _changed(value: Value, **fields: float | None) -> Value:
    return value.model_copy(update={name: new for name, new in fields.items() if new is not None})


class Variant(Value):
    """One trial's recipe and its name in the sweep."""

    name: str
    recipe: Recipe


def _of_estimate(name: str) -> Any:
    return property(lambda row: getattr(row.estimate, name, None))


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else (predicted - measured) / measured


class Row(Value):
    """One variant, predicted and measured. Sizes in bytes; errors and utilisation are shares."""

    variant: str
    recipe: dict[str, Any]
    recipe_id: str
    status: str
    """``done``; ``waiting``, ``running``; else the outcome of the first part that did not finish."""
    message: str = ""
    outcomes: dict[str, Outcome] = {}  # By part
    estimate: Estimate | None = None
    measurement: Measurement | None = None
    train: dict[str, Any] | None = None  # Summary of the training run, and its ``speed``

    predicted_bytes = _of_estimate("peak_allocated_bytes")
    device_bytes = _of_estimate("device_bytes")
    headroom_bytes = _of_estimate("headroom_bytes")

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """Of a step; of a policy, those that its loop generates."""
        found = None if self.estimate is None else self.estimate.tokens_per_s
        return self.new_tokens_per_s or found

    @property
    def predicted_device_bytes(self) -> int | None:
        """On the device at the highest peak, which the verdict is by."""
        return None if self.estimate is None else self.estimate.highest.device

    @property
    def samples(self) -> int:
        """Examples of one step of all GPUs: sequences, or pairs of answers."""
        batch, count = self.recipe["batch"], self.recipe.get("hardware", {}).get("count", 1)
        mesh = Parallel(**self.recipe.get("parallel", {})).over(count)
        return batch["micro"] * batch["accumulate"] * mesh.data_ranks

    @property
    def verdict(self) -> str | None:
        """``fits``, ``does not fit``, or ``tight``: within the device, but a later step may not be."""
        if self.estimate is None:
            return None
        if self.estimate.fits:
            return "fits"
        return "tight" if self.estimate.headroom_bytes >= 0 else "does not fit"

    @property
    def measured_bytes(self) -> int | None:
        """Peak allocated of a finished trial: the measurement's, else the training run's."""
        if self._measured is not None:
            return self._measured.peak_allocated_bytes
        return self._trained.get("peak_memory_bytes")

    @property
    def peak_met(self) -> WhichPeak | None:
        """Which of two predicted peaks was measured; None: one was predicted, or none measured."""
        return None if self.estimate is None else self.estimate.met(allocated=self.measured_bytes)

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; of two predicted peaks of the one that was measured.

        Of a policy that was trained alone None: the peak of its completions is below that of the longest.
        """
        measured = self.measured_bytes
        if self.estimate is None or not measured:
            return None
        if self._measured is None and self.estimate.loop is not None:
            return None
        return (self.estimate.with_peak(self.peak_met).peak_allocated_bytes - measured) / measured

    def phase_bytes(self, side: str, phase: str) -> int | None:
        """Return the peak of a phase of a policy's loop; ``side``: ``estimate`` or ``measurement``."""
        loop = self._loop(side)
        memory = () if loop is None else loop.memory
        return next((one.peak_allocated_bytes for one in memory if one.phase == phase), None)

    def phase_error(self, phase: str) -> float | None:
        """Return (predicted - measured) / measured of a phase's peak in a policy's loop."""
        return _error(self.phase_bytes("estimate", phase), self.phase_bytes("measurement", phase))

    def loop_s(self, side: str, kind: str = "longest") -> float | None:
        """Return the seconds of a policy's loop; ``kind``: ``longest`` or ``expected``."""
        time = getattr(self._loop(side), kind, None)
        return None if time is None else time.seconds

    @property
    def loop_error(self) -> float | None:
        """(predicted - measured) / measured of those seconds, every completion at its longest."""
        return _error(self.loop_s("estimate"), self.loop_s("measurement"))

    @property
    def expected_error(self) -> float | None:
        """Likewise with the lengths that a prediction assumes."""
        return _error(self.loop_s("estimate", "expected"), self.loop_s("measurement", "expected"))

    def _loop(self, side: str) -> Loop | None:
        found = self.estimate if side == "estimate" else self._timed
        return None if found is None else found.loop

    @property
    def new_tokens_per_s(self) -> float | None:
        """Tokens that a policy generates a second of its whole loop, predicted, on all GPUs."""
        loop = self._loop("estimate")
        return None if loop is None or loop.longest is None else loop.longest.new_tokens_per_s

    @property
    def predicted_samples_per_s(self) -> float | None:
        """Of all GPUs, as ``predicted_tokens_per_s``."""
        if self.estimate is None or not self.estimate.step_s:
            return None
        return self.samples / self.estimate.step_s

    @property
    def samples_per_s(self) -> float | None:
        """Of all GPUs, measured: of the median step; where only trained, of the steps after the first ten."""
        if self._timed is not None and self._timed.step_s:
            return self.samples / self._timed.step_s
        speed = self._trained.get("speed", {})
        return speed.get("late_samples_per_s") or speed.get("samples_per_s")

    @property
    def tokens_per_s(self) -> float | None:
        """Measured, counted as ``predicted_tokens_per_s``."""
        loop = self._loop("measurement")
        if loop is not None and loop.longest is not None:
            return loop.longest.new_tokens_per_s
        if self._timed is not None and self._timed.tokens_per_s:
            return self._timed.tokens_per_s
        speed = self.samples_per_s
        pairs = self.recipe.get("objective", {}).get("name") == "dpo"
        sequences = Preference.sequences if pairs else 1
        return None if speed is None else speed * sequences * self.recipe["batch"]["seq"]

    def place(self) -> tuple[int, float] | None:
        """Return measured peak bytes and tokens a second; None where one is not known."""
        size, speed = self.measured_bytes, self.tokens_per_s
        return None if size is None or speed is None else (size, speed)

    @property
    def mfu(self) -> float | None:
        return getattr(self._timed, "mfu", None) or self._trained.get("mfu")

    @property
    def hfu(self) -> float | None:
        return getattr(self._timed, "hfu", None) or self._trained.get("hfu")

    @property
    def perplexity(self) -> float | None:
        return self._trained.get("eval_perplexity")

    @property
    def reward(self) -> float | None:
        """Mean reward of a policy on held-out prompts after its training."""
        return self._trained.get("eval_reward")

    @property
    def _measured(self) -> Measurement | None:
        done = self.measurement is not None and self.measurement.status == "done"
        return self.measurement if done else None

    @property
    def _timed(self) -> Measurement | None:
        """The measurement whose times are figures of the device."""
        return None if self._measured is None or self._measured.environment.held_back else self._measured

    @property
    def _trained(self) -> dict[str, Any]:
        return self.train if self.train is not None and self.train.get("status") == "done" else {}

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers of the tables, by name."""
        names = (
            "predicted_bytes", "measured_bytes", "error", "predicted_samples_per_s", "samples_per_s",
            "tokens_per_s", "mfu", "hfu", "perplexity", "reward", "predicted_device_bytes", "device_bytes",
            "headroom_bytes", "predicted_tokens_per_s",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


class Frontier(NamedTuple):
    """Variants that no other beats in both memory and speed, the smallest first; and what that means."""

    variants: tuple[str, ...]
    meaning: str
    is_predicted: bool = False


MEASURED_MEANING = "Pareto frontier: nothing here is both smaller and faster"
PREDICTED_MEANING = (
    "the predicted frontier: of what fits, nothing needs less memory on the device and is faster"
)


def frontier(rows: Sequence[Row]) -> Frontier:
    """Return the measured front; where nothing was measured and nothing will be, the predicted one.

    The predicted one is of bytes on the device and tokens a second, among the variants that fit.
    """
    measured = any(row.place() is not None for row in rows)
    if measured or any(row.status in (WAITING, RUNNING) for row in rows):
        return Frontier(front(rows), MEASURED_MEANING)
    points = [
        (row.predicted_device_bytes, row.predicted_tokens_per_s, row.variant)
        for row in rows
        if row.verdict == "fits" and row.predicted_device_bytes and row.predicted_tokens_per_s
    ]
    return Frontier(_unbeaten(points), PREDICTED_MEANING, is_predicted=True)


def front(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the measured variants that no other beats in both memory and speed, the smallest first."""
    return _unbeaten([(*point, row.variant) for row in rows if (point := row.place()) is not None])


def _unbeaten(points: Sequence[tuple[int, float, str]]) -> tuple[str, ...]:
    """Return the variants of (bytes, speed, variant) that none beats in both, the smallest first."""
    best, kept = 0.0, []
    for _, speed, variant in sorted(points, key=lambda point: (point[0], -point[1], point[2])):
        if speed > best:
            best = speed
            kept.append(variant)
    return tuple(kept)
