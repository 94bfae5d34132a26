"""``trainfit.trace``: a training step of one's own on the virtual GPU, with a table for notebooks. Imports torch."""

from collections.abc import Callable
from typing import Any

from trainfit.api.results import Comparable
from trainfit.prediction import user_step
from trainfit.report import notebook


class Trace(Comparable, user_step.Traced):
    """A Traced that shows as a table in a notebook."""

    def _repr_html_(self) -> str:
        return notebook.traced(self)


def trace(step: Callable[[], Any], *, gpu: str, steps: int) -> Trace:
    """Return what ``step`` takes, as ``prediction.user_step.trace`` finds it."""
    traced = user_step.trace(step, gpu=gpu, steps=steps)
    return Trace.model_construct(traced.model_fields_set, **dict(traced))
