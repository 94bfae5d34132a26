"""Results that print like the commands do, and show as tables and pictures in notebooks. No torch here.

Each is the plain value (an Estimate, a Measurement, ...) with the recipe it is of; the recipe is no field, so
the JSON is the command's.
"""

import io
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import PrivateAttr
from rich.console import Console

from trainfit.api.run import count_of, run_of
from trainfit.report import results
from trainfit.report.prediction_text import show as show_prediction
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import MemoryCourse
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement, Run
from trainfit.spec.terminal import Terminal
from trainfit.spec.value import Count, Flops, Seconds, Share, Value
from trainfit.training.export.result import Export
from trainfit.training.observer import TrainSummary

if TYPE_CHECKING:
    from trainfit.prediction.time.calibrated import OwnCalibration
    from trainfit.prediction.user_step import CodeLedger
    from trainfit.spec.plan import Advice


NUM_MOMENTS = 240
"""Moments of a course of memory: a picture of 700 pixels shows no more apart."""


def drawn(show: Callable[[Console], None], width: int | None = None) -> str:
    """Return what ``show`` prints on a console without colours, ``width`` columns wide."""
    text = io.StringIO()
    # In a notebook rich would display parts of the text, whatever the file.
    show(Terminal(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False))
    return text.getvalue().rstrip("\n")


class Printed(Value):
    """A value whose ``str`` is what its command prints, without colours."""

    def text(self, *, width: int | None = None) -> str:
        """Return the command's text, in ``width`` columns; None: the terminal's, or 80."""
        return drawn(self._print, width)

    @abstractmethod
    def _print(self, out: Console) -> None:
        """Print the command's text to ``out``."""

    def __str__(self) -> str:
        return self.text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the command's text in IPython, where a notebook shows no HTML too."""
        printer.text(self.text())


class _OfRecipe(Printed):
    """A printed value that knows its recipe.

    It equals one of its plain kind with the same fields, such as one read back from JSON.
    """

    _recipe: Recipe | None
    _calibration: "OwnCalibration | None" = None
    _notes: tuple[str, ...] = ()
    _assumed: str = ""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Value) and (isinstance(self, type(other)) or isinstance(other, type(self))):
            return dict(self) == dict(other)
        return NotImplemented

    @property
    def recipe(self) -> Recipe:
        """The recipe, with its open fields planned.

        Raises:
            ValueError: the value is of the user's own code, which has no recipe.
        """
        if self._recipe is None:
            raise ValueError("no recipe: this is an estimate of traced code, which .code describes")
        return self._recipe

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices made for open fields, and keys of the model's config that are ignored."""
        return self._notes

    @property
    def assumed(self) -> str:
        """One line with the fields that were not given and have defaults, such as the GPU; empty: none."""
        return self._assumed

    @classmethod
    def of(
        cls,
        recipe: Recipe | None,
        value: Value,
        notes: tuple[str, ...] = (),
        assumed: str = "",
        calibration: "OwnCalibration | None" = None,
    ) -> Self:
        """Return ``value``, of the plain kind, as this kind; ``recipe`` is None for the user's own code."""
        made = cls.model_construct(value.model_fields_set, **dict(value))
        made._recipe, made._notes, made._assumed = recipe, notes, assumed
        made._calibration = calibration
        return made


class Prediction(_OfRecipe, Estimate):
    """An Estimate with its recipe, or of the user's own code."""

    _deterministic: bool = False
    _code: "CodeLedger | None" = None

    def run(self, tokens: float | str) -> Run:
        """Return the time, GPU-hours and dollars of a run over so many tokens, such as ``"15T"``.

        Raises:
            InputError: no count above 0, or no speed is predicted.
        """
        found = run_of(self, count_of(tokens))
        if found is None:
            remedy = "choose a GPU whose speed is known"
            raise InputError("no tokens a second are predicted", remedy, field="tokens", value=tokens)
        return found

    def text(self, *, width: int | None = None, verbose: bool = False) -> str:
        """Return the text of ``trainfit predict`` or ``trainfit trace``.

        Args:
            width: columns; None: the terminal's, or 80.
            verbose: add conventions, assumptions and the basis of the bounds.
        """
        return drawn(lambda out: self._print(out, verbose=verbose), width)

    def _print(self, out: Console, *, verbose: bool = False) -> None:
        show_prediction(self._recipe, self, notes=self.notes, assumed=self.assumed, verbose=verbose, out=out)

    def _repr_html_(self) -> str:
        return results.prediction_html(self._recipe, self, self.notes, self.course())

    def course(self) -> MemoryCourse | None:
        """Return the memory over the step that has the peak, by category; None: its ledger is not kept."""
        from trainfit.explanation.course import course_of_explained
        from trainfit.explanation.peak import explained, explained_script
        from trainfit.prediction.cache import NotKeptError, only_kept
        from trainfit.prediction.machine import machine_of

        if self._code is not None:
            return course_of_explained(explained_script(self._code), NUM_MOMENTS)
        if self._recipe is None:
            return None
        machine = machine_of(self._recipe.hardware, self._calibration)
        try:
            with only_kept():
                found = explained(self._recipe, machine, deterministic=self._deterministic)
        except NotKeptError:
            return None
        return course_of_explained(found, NUM_MOMENTS)

    def advice(self, say: Callable[[str], None] = lambda text: None) -> "Advice":
        """Return what would make a recipe fit: changes, a larger GPU, more GPUs.

        It takes some seconds, and starts no trace after a minute.

        Args:
            say: called with what is tried next.

        Raises:
            InputError: the speed of its GPU is not known.
        """
        from trainfit.planning.advice import advise
        from trainfit.planning.estimates import Estimates

        # This process has traced the recipe already.
        with Estimates(processes=0, calibration=self._calibration) as estimates:
            return advise(self.recipe, self, estimates, say)


class Measured(_OfRecipe, Measurement):
    """A Measurement with the recipe it is of."""

    def _print(self, out: Console) -> None:
        results.show_measurement(self.recipe, self, out=out)

    def _repr_html_(self) -> str:
        return results.measurement_html(self.recipe, self)

    def compare(self, predicted: Estimate) -> "Compared":
        """Return the prediction of the same recipe beside this measurement, with its errors.

        Raises:
            ValueError: a prediction of another recipe.
        """
        if predicted.recipe_id != self.recipe_id:
            raise ValueError(f"recipe {predicted.recipe_id} was predicted, {self.recipe_id} was measured")
        made = Compared(predicted=predicted, measured=self)
        made._recipe = self.recipe
        return made


class Compared(Printed):
    """A prediction and a measurement of one recipe."""

    predicted: Estimate
    measured: Measurement
    _recipe: Recipe = PrivateAttr()

    def _print(self, out: Console) -> None:
        results.show_compared(self._recipe, self.predicted, self.measured, out=out)

    def _repr_html_(self) -> str:
        return results.compared_html(self._recipe, self.predicted, self.measured)


class TrainingRun(_OfRecipe, TrainSummary):
    """A TrainSummary with the recipe it is of."""

    def _print(self, out: Console) -> None:
        results.show_training(self.recipe, self, out=out)

    def _repr_html_(self) -> str:
        return results.training_html(self.recipe, self)


class Exported(Printed, Export):
    """An Export that prints as the command does."""

    def _print(self, out: Console) -> None:
        results.show_export(self, out=out)


class Usage(Printed):
    """MFU and HFU of a step, and the time and cost of a run of such steps where its tokens are given."""

    model: str
    params: Count
    trainable_params: Count
    gpu: str
    num_gpus: Count
    peak_flops_per_s: float
    """Dense, of one GPU."""
    attention: Literal["causal", "full"]
    step_s: Seconds
    model_flops: Flops
    """FLOPs that one step needs over all GPUs, recomputation not counted."""
    hardware_flops: Flops
    """FLOPs executed, recomputation included."""
    tokens_per_s: float
    mfu: Share
    hfu: Share
    closed_form: Mapping[str, Any] | None
    """FLOPs, mfu, hfu and convention of the closed form; None: it does not cover the model's shape."""
    of_full_training: Mapping[str, Share] | None = None
    """mfu and hfu by the closed form if every weight were trained (6N, 8N with recomputation), as some count
    a LoRA run; None without an adapter."""
    ops_without_flops: tuple[str, ...] = ()
    tokens: float | None = None
    """Of a whole run; this and the following fields: None if no run was requested."""
    step_tokens: Count | None = None
    run_s: Seconds | None = None
    gpu_hours: float | None = None
    price_per_gpu_hour: float | None = None
    dollars: float | None = None

    def content(self) -> dict[str, Any]:
        """Return the numbers by name, as the command's JSON has them."""
        return self.model_dump(mode="json", exclude_unset=True)

    def _print(self, out: Console) -> None:
        results.show_usage(self.content(), out=out)

    def _repr_html_(self) -> str:
        return results.usage_html(self.content())
