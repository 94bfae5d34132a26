"""``trainfit.plan``: the fastest recipe within a memory limit. No torch in this process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from rich.console import Console

from trainfit.api.recipes import RecipeFields, Source, errors_name, fields_of, wanted
from trainfit.api.results import Printed
from trainfit.api.run import count_of
from trainfit.measurement.machine import check_processes
from trainfit.report.words import assumed
from trainfit.spec import plan as values
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import apply_settings, flat
from trainfit.spec.parsing.synonyms import written_out
from trainfit.spec.recipe import RANDOM, Recipe
from trainfit.spec.units import GIB, is_usual
from trainfit.spec.value import texts

if TYPE_CHECKING:
    from trainfit.planning.estimates import Estimates
    from trainfit.prediction.time.calibrated import OwnCalibration

Tune = Literal["full", "lora", "qlora"]
ALWAYS_FIXED = ("hardware", "seed", "model.config", "batch.seq")
"""Fields of the question itself: a plan never varies them, even where they are not written."""


NO_MASTER = "bf16 weights without fp32 master weights"


class Plan(values.Plan, Printed):
    """The result of a search, printed as ``trainfit plan`` prints it.

    ``best`` is its recipe, ``frontier`` the recipes of which none is both smaller and faster, ``rejected``
    the other choices with their reasons.
    """

    def _print(self, out: Console) -> None:
        from trainfit.report.plan_text import show

        show(self, out=out)

    def _repr_html_(self) -> str:
        from trainfit.report.plan_html import html

        return html(self)


def plan(
    recipe: Source,
    *,
    tokens_per_step: int | None = None,
    tune: Tune | None = None,
    memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    keep_quality: bool = False,
    vary: Sequence[str] | str = (),
    margin: float | None = None,
    tokens: float | str | None = None,
    calibration: str | Path | None = None,
    use_cache: bool = True,
    processes: int | None = None,
    **fields: Unpack[RecipeFields],
) -> Plan:
    """Return the fastest recipes that fit, the frontier of memory against speed, and why others lost.

    Fields that are given stay as they are; every other field may vary. Where new weights are trained and
    neither a precision nor ``vary`` is given, it is bf16-master (amp-fp16 on a GPU without bf16); where
    nothing fits with it, bf16.

    Args:
        recipe: what to plan from, as ``predict`` takes it.
        tokens_per_step: of all GPUs, reached by micro-batches and accumulation; None: the recipe's own where
            it has a batch, else any.
        tune: train all weights, or a LoRA adapter on bf16 or 4-bit weights; None: as the recipe says.
        memory_gib: memory of each GPU that may be used; None: all of it.
        host_memory_gib: pinned host memory that may be used for each GPU; None: as much as the GPU has.
        keep_quality: exclude what changes the numerics.
        vary: fields that may vary, such as ``["batch.micro"]`` or ``"recompute,loss"``; empty: every field.
        margin: share of the memory that stays free; None: 2 %.
        tokens: of the whole training run, such as ``"10B"``, for its time and cost.
        calibration: as ``predict`` takes it.
        use_cache: False traces anew.
        processes: that trace at once; 0: this one; None: one a CPU core, at most 4.
        fields: as ``predict`` takes them.

    Raises:
        InputError: as ``predict``, or the goal contradicts itself.
    """
    chosen = wanted(recipe, fields, stacklevel=3)
    over, settings = fields_of(fields)
    given = given_fields(over, settings)
    from trainfit.prediction.time.calibrated import own_calibration

    own = own_calibration(calibration)
    run_tokens = None if tokens is None else count_of(tokens)
    with errors_name(recipe, fields):
        return plan_recipe(
            chosen, given, tokens_per_step=tokens_per_step, tune=tune, memory_gib=memory_gib, margin=margin,
            host_memory_gib=host_memory_gib, keep_quality=keep_quality, vary=vary, tokens=run_tokens,
            calibration=own, use_cache=use_cache, processes=processes,
        )  # fmt: skip


def given_fields(over: dict[str, Any], settings: Sequence[str]) -> list[str]:
    """Return the fields that keyword arguments and settings give, short forms written out too."""
    named = [setting.partition("=")[0].strip() for setting in settings]
    return [*_leaves(over), *named, *flat(apply_settings(written_out(over), list(settings)))]


def plan_recipe(
    recipe: Recipe,
    given: Sequence[str],
    *,
    tokens_per_step: int | None = None,
    tune: Tune | None = None,
    memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    margin: float | None = None,
    keep_quality: bool = False,
    vary: Sequence[str] | str = (),
    tokens: float | None = None,
    calibration: "OwnCalibration | None" = None,
    use_cache: bool = True,
    processes: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Return the plan of a recipe; ``given``: fields that stay as they are, unless ``vary`` names them."""
    from trainfit.planning.estimates import Estimates
    from trainfit.planning.search.candidate import MARGIN, Goal
    from trainfit.planning.search.search import plan as search

    _check(memory_gib, host_memory_gib, margin)
    parts = [part.strip() for one in texts(vary, field="vary") for part in one.split(",")]
    vary = tuple(part for part in parts if part)
    if processes is not None:
        check_processes(processes, "processes")
    chosen = {"adapter": recipe.adapter} if tune else {}  # ``tune`` decides which weights are trained.
    as_given = recipe.model_copy(update=chosen)
    recipe = _tuned(recipe.without_open_fields(), tune, given)
    is_set = "micro" in recipe.batch.model_fields_set  # Their number alone leaves their size free.
    if tokens_per_step is None and is_set and not any(name.startswith("batch") for name in vary):
        tokens_per_step = recipe.step_tokens
    goal = Goal(
        memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
        host_bytes=None if host_memory_gib is None else int(host_memory_gib * GIB),
        margin=MARGIN if margin is None else margin,
        tokens_per_step=tokens_per_step,
        keep_quality=keep_quality,
        vary=vary,
        fixed=tuple(name for name in (*ALWAYS_FIXED, *given) if name not in vary),
    )
    stage = ""

    def on_stage(text: str) -> None:
        nonlocal stage
        stage = text
        say(text)

    def on_progress(count: int) -> None:
        say(f"{stage}, {count} done" if stage else f"{count} done")

    options: Any = {"calibration": calibration, "use_cache": use_cache, "on_progress": on_progress}
    is_open = "precision" not in as_given.model_fields_set and not vary
    of_pretraining = _with_master(recipe) if is_open else None
    with Estimates(processes, **options) as estimates:
        found = search(of_pretraining or recipe, goal, estimates, on_stage)
        if of_pretraining is not None and not found.found and not keep_quality:
            smaller = search(recipe, goal, estimates, on_stage)
            if smaller.found:
                found, of_pretraining = _without_master(smaller), None
        found = _with_eager(found, estimates)
        if tokens_per_step is None and not {"batch", "batch.accumulate"} & {*given, *vary}:
            found = _with_accumulation(found, estimates)
        notes = (estimates.room.note,) if estimates.room.note else ()
    precision = (of_pretraining or recipe).precision
    not_given = assumed(as_given, varies_batch=True, precision=precision)
    return Plan.model_construct(**{**dict(found), "run_tokens": tokens, "assumed": not_given, "notes": notes})


LONG_UPDATE = 0.05
"""Share of a step that the update takes, from which more micro-batches a step are worth a line."""
MICRO_BATCHES = 8
"""Micro-batches of that line."""


def _with_eager(found: values.Plan, estimates: "Estimates") -> values.Plan:
    """Return the plan with what compiling gains its best recipe, if that is compiled."""
    from trainfit.planning.answer import Request
    from trainfit.prediction import compilation

    if not found.found or found.found[0].estimate.compilation is None:
        return found
    best, *others = found.found
    eager = compilation.without(best.as_recipe())
    if eager is None:
        return found
    (result,) = estimates.of([Request(eager)])
    estimate = compilation.compared(best.estimate, result.estimate)
    best = best.model_copy(update={"estimate": estimate})
    return found.model_copy(update={"found": (best, *others)})


def _with_accumulation(found: values.Plan, estimates: "Estimates") -> values.Plan:
    """Return the plan with what more micro-batches gain its best recipe, if its update takes long.

    Nothing else is said of the tokens of a step, so the search compares single micro-batches. Where memory is
    short these are small, and each pays for an update.
    """
    from trainfit.planning.answer import Request
    from trainfit.planning.search.space import changed
    from trainfit.spec.objective import Policy

    best = found.found[0] if found.found else None
    if best is None or best.estimate.time is None or not best.estimate.step_s:
        return found
    recipe, share = best.as_recipe(), best.estimate.time.optimizer_s / best.estimate.step_s
    if recipe.batch.accumulate > 1 or share < LONG_UPDATE or isinstance(recipe.objective, Policy):
        return found
    try:
        more = changed(recipe, {"batch.accumulate": MICRO_BATCHES})
    except InputError:
        return found
    (result,) = estimates.of([Request(more)])
    one, rate = result.estimate, best.estimate.tokens_per_s or 0.0
    if one is None or not one.fits or one.highest.device > found.usable_bytes:
        return found
    if one.host_bytes > found.host_limit_bytes or (one.tokens_per_s or 0.0) < (1 + LONG_UPDATE / 2) * rate:
        return found
    fields = {"recipe": more.content(), "changes": values.changed_fields(recipe, more), "estimate": one}
    return found.model_copy(update={"accumulated": best.model_copy(update=fields)})


def _with_master(recipe: Recipe) -> Recipe | None:
    """Return the recipe with the precision of pretraining: fp32 master weights, or fp32 ones without bf16.

    None where that is not its precision: an adapter or given weights train, or its optimizer keeps none.
    """
    from trainfit.catalog.load import gpu as find_gpu
    from trainfit.techniques.registry import check

    is_new = recipe.adapter is None and recipe.model.weights == RANDOM
    if not is_new or recipe.precision != "bf16":
        return None
    gpu = find_gpu(recipe.hardware.gpu)
    lacks_bf16 = gpu.vendor == "nvidia" and "bf16" not in gpu.peak_flops_per_s
    found = recipe.model_copy(update={"precision": "amp-fp16" if lacks_bf16 else "bf16-master"})
    try:
        check(found)
    except InputError:
        return None
    return found


def _without_master(found: values.Plan) -> values.Plan:
    """Return a plan of bf16 weights alone, where nothing with fp32 master weights fits, with that change."""

    def changed(one: values.Found) -> values.Found:
        return one.model_copy(update={"numerics": (NO_MASTER, *one.numerics)})

    every = {name: tuple(map(changed, getattr(found, name))) for name in ("found", "frontier")}
    return found.model_copy(update=every)


def _check(memory_gib: float | None, host_memory_gib: float | None, margin: float | None) -> None:
    for field, value in (("memory_gib", memory_gib), ("host_memory_gib", host_memory_gib)):
        if value is not None and not is_usual(value):
            raise InputError("is no size of a memory", "write its GiB", field=field, value=value)
    if memory_gib is not None and memory_gib <= 0:
        raise InputError("no memory at all", "write a number above 0", field="memory_gib", value=memory_gib)
    if host_memory_gib is not None and host_memory_gib < 0:
        raise InputError("below 0", "write 0 or more", field="host_memory_gib", value=host_memory_gib)
    if margin is not None and not 0 <= margin < 1:
        raise InputError("no share of the memory", "write 0 to 0.99", field="margin", value=margin)


def _tuned(recipe: Recipe, tune: Tune | None, given: Sequence[str]) -> Recipe:
    """Return the recipe with the adapter and base of ``tune``; refuse ``given`` fields that contradict it."""
    from trainfit.planning.search.space import changed

    adapter = recipe.adapter
    values: dict[str, Any] = {}
    if tune == "full":
        values = {"adapter": None, "quantize": None}
    elif tune is not None:
        values = {} if adapter is not None else {"adapter": {"kind": "lora"}}
        values["quantize"] = None if tune == "lora" else recipe.quantize or "nf4"
    for field, value in values.items():
        named = any(name.partition(".")[0] == field for name in given)
        if named and value != getattr(recipe, field):
            remedy = f"leave tune or {field} out"
            raise InputError(f"{field} is set to something else", remedy, field="tune", value=tune)
    if not values:
        return recipe
    batch = recipe.batch
    tuned = changed(recipe, values)
    return tuned.model_copy(update={"batch": batch})  # Keep which fields were written.


def _leaves(data: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in data.items():
        inner = _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else []
        found += inner or [f"{prefix}{name}"]
    return found
