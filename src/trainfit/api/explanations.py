"""``trainfit.explain``: what holds memory at the peak of a recipe, of one's own code or of a memory snapshot.

Torch is imported only without a cached ledger.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console

from trainfit.api.explanation_html import difference_html, explanation_html
from trainfit.api.explanation_text import show, show_difference, show_script, show_snapshot
from trainfit.api.planned import planned
from trainfit.api.recipes import RecipeFields, Source, errors_name, wanted
from trainfit.api.results import NUM_MOMENTS, Printed, drawn
from trainfit.explanation.course import course_of_explained
from trainfit.explanation.kinds import kind_of
from trainfit.explanation.peak import Explained, explained, explained_script
from trainfit.explanation.snapshot.explain import explained_snapshot
from trainfit.spec import DEFAULT_GPU
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import Explanation, MemoryCourse
from trainfit.spec.recipe import Recipe

TOP = 15
READ_BY_THE_COMMAND = {"text", "trace", "trainer state", "script", "ledger"}


class PeakExplanation(Printed, Explanation):
    """An Explanation that prints as ``trainfit explain`` does."""

    _recipe: Recipe | None = None
    _found: Explained | None = None

    @classmethod
    def of(cls, found: Explained) -> "PeakExplanation":
        """Return an explanation as this kind."""
        value = found.explanation
        made = cls.model_construct(value.model_fields_set, **dict(value))
        made._recipe, made._found = found.recipe, found
        return made

    def course(self) -> MemoryCourse | None:
        """Return the memory over the step that has the peak; None: it was not made of a ledger."""
        return None if self._found is None else course_of_explained(self._found, NUM_MOMENTS)

    def text(self, *, width: int | None = None, top: int = TOP) -> str:
        """Return the text of ``trainfit explain``.

        Args:
            width: columns; None: the terminal's, or 80.
            top: number of holders, the largest first.
        """
        return drawn(lambda out: self._print(out, top=top), width)

    def difference(self, other: Explanation) -> "Difference":
        """Return the bytes of ``other`` minus this one's, by category and holder."""
        return Difference(before=self, after=other)

    def _print(self, out: Console, *, top: int = TOP) -> None:
        if self._recipe is not None:
            show(self._recipe, self, top, out=out)
        elif self.snapshot is not None:
            show_snapshot(self, top, out=out)
        else:
            show_script(self, top, out=out)

    def _repr_html_(self) -> str:
        found = self._found
        return explanation_html(self, TOP, self.course(), None if found is None else found.capacity_bytes)


class Difference(Printed):
    """What holds memory at the peaks of two explanations; prints as ``trainfit explain A B`` does."""

    before: Explanation
    after: Explanation

    def text(self, *, width: int | None = None, top: int = TOP) -> str:
        """Return the text; arguments as ``PeakExplanation.text`` takes them."""
        return drawn(lambda out: self._print(out, top=top), width)

    def _print(self, out: Console, *, top: int = TOP) -> None:
        show_difference(self.before, self.after, top, out=out)

    def _repr_html_(self) -> str:
        return difference_html(self.before, self.after, TOP)


def explain(
    source: Source | Callable[[], object], *, device: int | None = None, **fields: Unpack[RecipeFields]
) -> PeakExplanation:
    """Return what is alive at the peak of a training step, by category, module and holder.

    Args:
        source: as ``predict`` takes it; or the path of a memory snapshot of PyTorch (``.pickle``), which is
            read without executing anything; or a callable that trains, as ``trace`` takes it.
        device: of a snapshot: the GPU. None: the one with the most memory.
        fields: as ``predict`` takes them; of a callable, ``gpu`` and ``count`` alone.

    Raises:
        InputError: as ``predict``; no snapshot, or one that is damaged; a trace or a log, which
            ``trainfit explain`` reads.
    """
    if callable(source):
        return PeakExplanation.of(_of_code(source, dict(fields)))
    kind = kind_of(str(source)) if isinstance(source, str | Path) else "recipe"
    if kind in READ_BY_THE_COMMAND:
        remedy = f"run: trainfit explain {source}"
        raise InputError(f"a {kind} is explained by the command", remedy, field="source", value=str(source))
    if kind == "snapshot":
        if fields:
            remedy = "leave it out"
            raise InputError("a snapshot has no fields to set", remedy, field=next(iter(fields)))
        return PeakExplanation.of(explained_snapshot(Path(str(source)), device))
    if device is not None:
        raise InputError("only a snapshot has several GPUs", "leave it out", field="device", value=device)
    recipe = wanted(source, fields, stacklevel=3)  # pyright: ignore[reportArgumentType]
    with errors_name(recipe, fields):
        return PeakExplanation.of(explained(planned(recipe)[0]))


def _of_code(train: Callable[[], object], fields: dict[str, Any]) -> Explained:
    from trainfit.prediction.user_step import traced

    gpu, count = fields.pop("gpu", DEFAULT_GPU), fields.pop("count", None)
    if fields:
        problem = "code has no fields but its GPU and count"
        raise InputError(problem, "leave it out", field=next(iter(fields)))
    return explained_script(traced(train, gpu=gpu, world_size=count).code)
