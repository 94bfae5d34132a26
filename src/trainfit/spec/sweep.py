"""Sweep: variants of a recipe, what is done with each, and a row of the table that comes out."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue, field_validator, model_validator

from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement, Outcome
from trainfit.spec.value import Count, PositiveInt, Value, disagreement

Part = Literal["predict", "measure", "train"]
PARTS: tuple[Part, ...] = ("predict", "measure", "train")
"""What a trial does, in this order."""
RESULTS = ("done", "out-of-memory", "refused", "diverged")
"""Outcomes that another try would not change; ``--retry`` repeats the others."""
WAITING, RUNNING = "waiting", "running"
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
LATE_FROM_STEP = 10
"""Speed is reported for the whole run, and without its first steps, which compile and choose kernels."""


Steps = Annotated[int, Field(ge=0, le=2**24)]
"""As many as ``PositiveInt``, or none."""


class MeasurePart(Value):
    """What ``measure`` does with each variant: the options of the verb."""

    steps: Steps = 10
    warmup: Steps = 3


class TrainPart(Value):
    """Options of the training run of each variant: loss, speed and perplexity on real text."""

    steps: PositiveInt = 100
    data: str = "stories"
    """As ``train --data``: stories, stories:N, hub:NAME, or a path relative to the sweep's file."""
    eval_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    eval_sequences: PositiveInt = 64
    eval_every: PositiveInt | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Count = 0
    deterministic: bool = False
    """On CUDA, kernels that repeat bit by bit: slower and larger than those predicted."""


class Limits(Value):
    """What ends a trial: ``seconds`` for each of its parts; ``memory_gib``: what its steps may allocate."""

    seconds: Annotated[float, Field(gt=0, le=10**8)] = 600.0
    memory_gib: Annotated[float, Field(gt=0, le=2**30)] | None = None


class SweepFile(Value):
    """A sweep's file. See docs/guide/sweep.md.

    ``base`` (or each change of its ``list``) and ``recipes`` are the starting points; ``product`` varies
    each.
    """

    name: str | None = None
    """Of the folder in ``runs/``."""
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
        if self.list and self.base is None:
            raise disagreement("a list of changes, and nothing to change", "write base", field="list")
        for field in ("list", "recipes", "product"):
            if field in self.model_fields_set and not getattr(self, field):
                raise disagreement("nothing in it", "write a variant, or leave it out", field=field)
        if not self.parts():
            raise disagreement("nothing to do", "write measure, or train", field="predict")
        for field, values in self.product.items():
            if not values:
                raise disagreement("no values", "write at least one", field=f"product.{field}")
        return self

    def parts(self) -> tuple[Part, ...]:
        """What each trial does, in order."""
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
        """Return the file with the command line's options set.

        Args:
            measure: measure also where the file does not.
            only: neither predict nor train.
            steps: timed steps of a measurement.
            warmup: untimed steps of a measurement.
            limits: fields of ``Limits``; None keeps the file's.
        """
        part = self.measure or (MeasurePart() if measure else None)
        given = {name: value for name, value in (("steps", steps), ("warmup", warmup)) if value is not None}
        changes: dict[str, Any] = {
            "measure": part and part.model_copy(update=given),
            "limits": self.limits.model_copy(
                update={name: value for name, value in limits.items() if value is not None}
            ),
        }
        return self.model_copy(update=changes | ({"predict": False, "train": None} if only else {}))


class Variant(Value):
    """One trial's recipe and what the sweep calls it."""

    name: str
    recipe: Recipe


class Row(Value):
    """One variant, predicted and measured side by side. Sizes in bytes; errors and utilisation are shares."""

    variant: str
    recipe: dict[str, Any]
    recipe_id: str
    status: str
    """``done``; ``waiting``, ``running``; else how the first part ended that did not come to its end."""
    message: str = ""
    outcomes: dict[str, Outcome] = {}
    """By part."""
    estimate: Estimate | None = None
    measurement: Measurement | None = None
    train: dict[str, Any] | None = None
    """Summary of the training run, and its ``speed``."""

    @property
    def samples(self) -> int:
        """Sequences of one step."""
        batch = self.recipe["batch"]
        return batch["micro"] * batch["accumulate"]

    @property
    def predicted_bytes(self) -> int | None:
        """Peak allocated."""
        return self.estimate.peak_allocated_bytes if self.estimate else None

    @property
    def verdict(self) -> str | None:
        """``fits``, ``does not fit``, or ``tight``: within the device, but a later step may not be."""
        if self.estimate is None:
            return None
        if self.estimate.fits:
            return "fits"
        return "tight" if self.estimate.headroom_bytes >= 0 else "does not fit"

    @property
    def predicted_device_bytes(self) -> int | None:
        """Reserved bytes, the CUDA context and the libraries' memory at the peak."""
        return self.estimate.peak_device_bytes if self.estimate else None

    @property
    def device_bytes(self) -> int | None:
        """What the GPU offers a process."""
        return self.estimate.device_bytes if self.estimate else None

    @property
    def headroom_bytes(self) -> int | None:
        """Free on the device at the predicted peak; negative: missing."""
        return self.estimate.headroom_bytes if self.estimate else None

    @property
    def predicted_tokens_per_s(self) -> float | None:
        return self.estimate.tokens_per_s if self.estimate else None

    @property
    def measured_bytes(self) -> int | None:
        """Peak allocated of a trial that came to its end: the measurement's, else the training run's."""
        if self._measured is not None:
            return self._measured.peak_allocated_bytes
        return self._trained.get("peak_memory_bytes")

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        predicted, measured = self.predicted_bytes, self.measured_bytes
        return (predicted - measured) / measured if predicted is not None and measured else None

    @property
    def predicted_samples_per_s(self) -> float | None:
        step_s = self.estimate.step_s if self.estimate else None
        return self.samples / step_s if step_s else None

    @property
    def samples_per_s(self) -> float | None:
        """Measured: of the median step; where it was only trained, of the steps after the first ten."""
        if self._measured is not None and self._measured.step_s:
            return self.samples / self._measured.step_s
        speed = self._trained.get("speed", {})
        return speed.get("late_samples_per_s") or speed.get("samples_per_s")

    @property
    def tokens_per_s(self) -> float | None:
        speed = self.samples_per_s
        return None if speed is None else speed * self.recipe["batch"]["seq"]

    def place(self, *, predicted: bool = False) -> tuple[int, float] | None:
        """Return peak bytes and tokens a second, measured or predicted; None where one is not known."""
        size = self.predicted_bytes if predicted else self.measured_bytes
        speed = self.predicted_samples_per_s if predicted else self.samples_per_s
        return None if size is None or speed is None else (size, speed * self.recipe["batch"]["seq"])

    @property
    def mfu(self) -> float | None:
        return self._measured.mfu if self._measured and self._measured.mfu else self._trained.get("mfu")

    @property
    def hfu(self) -> float | None:
        return self._measured.hfu if self._measured and self._measured.hfu else self._trained.get("hfu")

    @property
    def perplexity(self) -> float | None:
        return self._trained.get("eval_perplexity")

    @property
    def _measured(self) -> Measurement | None:
        done = self.measurement is not None and self.measurement.status == "done"
        return self.measurement if done else None

    @property
    def _trained(self) -> dict[str, Any]:
        return self.train if self.train is not None and self.train.get("status") == "done" else {}

    def numbers(self) -> dict[str, float | None]:
        """What the tables show, by name."""
        names = (
            "predicted_bytes", "measured_bytes", "error", "predicted_samples_per_s", "samples_per_s",
            "tokens_per_s", "mfu", "hfu", "perplexity",
            "predicted_device_bytes", "device_bytes", "headroom_bytes", "predicted_tokens_per_s",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


class Frontier(NamedTuple):
    """The variants that no other beats in both memory and speed, the smallest first; ``meaning``: by what."""

    variants: tuple[str, ...]
    meaning: str
    is_predicted: bool = False


MEASURED_MEANING = "Pareto frontier: nothing here is both smaller and faster"
PREDICTED_MEANING = (
    "the predicted frontier: of what fits, nothing needs less memory on the device and is faster"
)


def frontier(rows: Sequence[Row]) -> Frontier:
    """The measured front; where nothing is to be measured any more and nothing was, the predicted one.

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


def front(rows: Sequence[Row], *, predicted: bool = False) -> tuple[str, ...]:
    """Variants that no other beats in both memory and speed (tokens a second), the smallest first.

    Only rows whose memory and speed are measured (or predicted) take part.
    """
    points = [(row.place(predicted=predicted), row.variant) for row in rows]
    return _unbeaten([(*point, variant) for point, variant in points if point is not None])


def _unbeaten(points: Sequence[tuple[int, float, str]]) -> tuple[str, ...]:
    """Of (bytes, speed, variant): the variants that none beats in both, the smallest first."""
    best, kept = 0.0, []
    for _, slowness, variant in sorted((size, -speed, variant) for size, speed, variant in points):
        if slowness < best:
            best = slowness
            kept.append(variant)
    return tuple(kept)
