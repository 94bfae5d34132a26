"""``explain`` of a run's speed: a profiler's trace, a Trainer's log."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainfit.cli import options
from trainfit.cli.explain.subjects import Subject, planned
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.spec.hardware import Gpu
    from trainfit.spec.profile import TrainerRun
    from trainfit.spec.recipe import Recipe


class RecipeFlops(NamedTuple):
    """A recipe with the model FLOPs of its step on one GPU, and the dense peak of their dtype."""

    recipe: "Recipe"
    flops: float
    peak_flops_per_s: float | None
    dtype: str

    @property
    def step_tokens(self) -> int:
        """Tokens of a step of all GPUs."""
        return self.recipe.step_tokens


def show_trace(
    name: str, second: Subject | None, settings: list[str], device: int | None, *, json: bool
) -> None:
    """Print the use of the GPU in a trace of torch.profiler."""
    from trainfit.cli.text.profile import show_trace as show
    from trainfit.explanation.trace.explain import Given, explain_trace
    from trainfit.explanation.trace.read import read_trace
    from trainfit.report.console import progress
    from trainfit.spec.units import MIB

    known, gpu = _flops(second, settings, json=json), _gpu(second, settings)
    path = Path(name)
    with progress(f"reading {path.name}") as replace:

        def advance(at: int, of: int) -> None:
            replace(f"reading {path.name}: {at / MIB:,.0f} of {of / MIB:,.0f} MiB")

        trace = read_trace(path, advance)
        given = known and Given(known.flops, known.peak_flops_per_s, known.dtype)
        found = explain_trace(trace, path, device, given, gpu)
    if json:
        options.print_json(found)
    else:
        show(found)


def show_trainer_run(run: "TrainerRun", second: Subject | None, settings: list[str], *, json: bool) -> None:
    """Print the speed of a Trainer's run; with a recipe also MFU."""
    from trainfit.cli.text.profile import show_trainer_run as show
    from trainfit.explanation.trainer_log import with_recipe

    known = _flops(second, settings, json=json)
    if known is not None:
        count = known.recipe.hardware.count
        run = with_recipe(run, known.flops, known.step_tokens, known.peak_flops_per_s, count)
    if json:
        options.print_json(run)
    else:
        show(run)


def _flops(second: Subject | None, settings: list[str], *, json: bool) -> RecipeFlops | None:
    """Return the FLOPs of the recipe that is named; None: none is."""
    if second is None:
        return None
    if second.kind != "recipe":
        problem, remedy = "it says no FLOPs of a step", "name a recipe: --recipe"
        raise InputError(problem, remedy, value=second.name)
    from trainfit.report.console import progress

    given = options.read_recipe(second.name, settings)
    with (
        options.work(second.name, settings, json=json, record=None),
        progress(f"counting the FLOPs of {given.model.display_name}"),
    ):
        from trainfit.catalog.load import gpu as find_gpu
        from trainfit.prediction.estimate import matmul_dtype
        from trainfit.prediction.predict import ledger_of
        from trainfit.prediction.time.peaks import peak_flops_per_s

        recipe = planned(given)
        ledger, gpu = ledger_of(recipe), find_gpu(recipe.hardware.gpu)
        dtype = matmul_dtype(ledger)
        peak = peak_flops_per_s(gpu, dtype) if gpu.peak_flops_per_s else None
        return RecipeFlops(recipe, ledger.steady_sum("model_flops"), peak, dtype)


def _gpu(second: Subject | None, settings: list[str]) -> "Gpu | None":
    """Return the GPU that --gpu names where no recipe is given."""
    if second is not None or not settings:
        return None
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.cli.explain.subjects import hardware_of

    name = hardware_of(settings, "a trace").get("gpu")
    return None if name is None else find_gpu(name)
