"""``trainfit.compare``: a recipe on several kinds and counts of GPUs, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from pydantic import PrivateAttr
from rich.console import Console

from trainfit.api.recipes import RecipeFields, Source, errors_name, wanted
from trainfit.api.results import Printed
from trainfit.api.run import count_of, run_of
from trainfit.report.gpus import html, show
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, OnGpu
from trainfit.spec.value import texts

if TYPE_CHECKING:
    from trainfit.api.results import Prediction


class GpuComparison(Printed):
    """A recipe on several kinds or counts of GPUs, printed as ``trainfit predict --gpu A,B`` prints it."""

    tokens: float | None
    """Of a run, whose time and cost are compared; None: costs are of a million tokens."""
    gpus: tuple[OnGpu, ...]
    """In the order in which they were named."""
    _recipe: Recipe = PrivateAttr()

    @classmethod
    def of(
        cls, recipes: "Sequence[Recipe]", found: "Sequence[Prediction | InputError]", tokens: float | None
    ) -> "GpuComparison":
        """Return the comparison of predictions, or of the reasons why there is none, by recipe."""
        gpus = tuple(_on_gpu(recipe, one, tokens) for recipe, one in zip(recipes, found, strict=True))
        made = cls(tokens=tokens, gpus=gpus)
        made._recipe = recipes[0]
        return made

    def _print(self, out: Console) -> None:
        show(self._recipe, self.gpus, self.tokens, out=out)

    def _repr_html_(self) -> str:
        return html(self._recipe, self.gpus, self.tokens)


def _on_gpu(recipe: Recipe, found: "Prediction | InputError", tokens: float | None) -> OnGpu:
    hardware = recipe.hardware
    if isinstance(found, InputError):
        return OnGpu(gpu=hardware.gpu, count=hardware.count, refused=str(found))
    return OnGpu(
        gpu=hardware.gpu,
        count=hardware.count,
        estimate=Estimate.model_construct(**dict(found)),
        run=None if tokens is None else run_of(found, tokens),
    )


def _on(fields: RecipeFields, gpu: str | None, count: int | None) -> RecipeFields:
    """Return fields with a GPU and a count; None: those of the fields, or the recipe's."""
    made: RecipeFields = {**fields}
    if gpu is not None:
        made["gpu"] = gpu
    if count is not None:
        made["count"] = count
    return made


def compare(
    recipe: Source,
    *,
    gpus: str | Sequence[str] = (),
    counts: int | Sequence[int] = (),
    tokens: float | str | None = None,
    calibration: str | Path | None = None,
    use_cache: bool = True,
    **fields: Unpack[RecipeFields],
) -> GpuComparison:
    """Return a recipe's predictions on several kinds and counts of GPUs.

    A recipe that a GPU refuses has the reason in its place.

    Args:
        recipe: as ``predict`` takes it.
        gpus: names of GPUs, such as ``["h100-sxm", "h200"]``; empty: the recipe's.
        counts: numbers of GPUs, such as ``[1, 8]``, each with each kind; empty: the recipe's.
        tokens: of a run, such as ``"10B"``, whose time and cost are compared.
        calibration, use_cache, fields: as ``predict`` takes them.

    Raises:
        InputError: as ``predict``, where every GPU refuses the recipe, too.
    """
    names = texts(gpus, field="gpus") or (None,)
    numbers = (counts,) if isinstance(counts, int) else tuple(counts) or (None,)
    given = [_on(fields, name, number) for name in names for number in numbers]
    several = [wanted(recipe, one, stacklevel=3) for one in given]
    amount = None if tokens is None else count_of(tokens)
    from trainfit.api.calls import predict_recipe
    from trainfit.prediction.time.calibrated import own_calibration

    own = own_calibration(calibration)
    found: list[Prediction | InputError] = []
    for one, its_fields in zip(several, given, strict=True):
        try:
            with errors_name(recipe, its_fields):
                found.append(predict_recipe(one, own, use_cache=use_cache))
        except InputError as error:
            found.append(error)
    if all(isinstance(one, InputError) for one in found):
        raise next(one for one in found if isinstance(one, InputError))
    return GpuComparison.of(several, found, amount)
