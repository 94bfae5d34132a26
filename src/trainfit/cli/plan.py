"""``trainfit plan``: the fastest recipe within a memory limit, without a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from trainfit.cli import options
from trainfit.cli.options import EXIT_DOES_NOT_FIT, Check, Json, RecipeArgument, Settings, finite, share
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.api.plans import Plan

STEP_HELP = "Tokens a step of all GPUs, such as 1M, by micro-batches and accumulation."
TUNE_HELP = "Train all weights, or a LoRA adapter on bf16 or 4-bit weights."
MEMORY_HELP = "Memory of each GPU that may be used."
HOST_HELP = "Pinned memory of the host that may be used for each GPU (default: as much as the GPU has)."
QUALITY_HELP = "Exclude recipes that change the numerics."
VARY_HELP = "Vary these fields only, such as batch.micro or recompute,loss."
MARGIN_HELP = "Share of the memory that stays free, such as 2% (the default)."
TOKENS_HELP = "Tokens of the whole run, such as 15B, for its time and cost."
OUT_HELP = "File of the best recipe (plan.yaml); with --json it is written only if named."
PLOT_HELP = "Also draw memory against speed, as SVG."
OUT = Path("plan.yaml")
HEADER = "# Written by trainfit plan"


def run(
    recipe: RecipeArgument,
    gpu: options.GpuOption = None,
    count: options.Count = None,
    seq: options.Seq = None,
    tokens_per_step: Annotated[
        float | None, Option(metavar="N", parser=options.count, help=STEP_HELP)
    ] = None,
    tune: Annotated[Literal["full", "lora", "qlora"] | None, Option(help=TUNE_HELP)] = None,
    memory_gib: Annotated[
        float | None, Option(min=0.001, metavar="GIB", callback=finite, help=MEMORY_HELP)
    ] = None,
    host_memory_gib: Annotated[
        float | None, Option(min=0, metavar="GIB", callback=finite, help=HOST_HELP)
    ] = None,
    keep_quality: Annotated[bool, Option("--keep-quality", help=QUALITY_HELP)] = False,
    vary: Annotated[str | None, Option(metavar="FIELDS", help=VARY_HELP)] = None,
    margin: Annotated[float | None, Option(metavar="SHARE", parser=share, help=MARGIN_HELP)] = None,
    tokens: Annotated[float | None, Option(metavar="N", parser=options.count, help=TOKENS_HELP)] = None,
    settings: Settings = None,
    price: options.Price = None,
    out: Annotated[Path | None, Option(metavar="FILE", help=OUT_HELP)] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help=PLOT_HELP)] = None,
    calibration: options.CalibrationFile = None,
    check: Check = False,
    no_cache: bool = Option(False, "--no-cache", help="Trace again, even what is cached."),
    json: Json = False,
) -> int:
    """Find the fastest recipe that fits. Needs no GPU.

    Fields given with --set stay as they are; every other field may vary.
    """
    given = [setting.partition("=")[0].strip() for setting in settings or []]
    settings = options.with_fields(settings, gpu, count, seq, price)
    requested = options.read_recipe(recipe, settings)
    path = OUT if out is None and not json else out
    if path is not None:
        _check_ours(path, named=out is not None)
    if plot is not None:
        from trainfit.spec.optional import require

        require("matplotlib", "plots", field="--plot", value=str(plot))
    from trainfit.api.plans import plan_recipe
    from trainfit.prediction.time.calibrated import using
    from trainfit.report.console import progress

    name = requested.model.display_name
    with (
        using(calibration),
        options.work(recipe, settings, json=json, record=None),
        progress(f"planning {name}") as say,
    ):
        found = plan_recipe(
            requested, given, tune=tune, memory_gib=memory_gib, host_memory_gib=host_memory_gib,
            keep_quality=keep_quality,
            tokens_per_step=None if tokens_per_step is None else round(tokens_per_step),
            vary=[field.strip() for field in vary.split(",")] if vary else [], margin=margin, tokens=tokens,
            use_cache=not no_cache, say=lambda text: say(f"planning {name}: {text}"),
        )  # fmt: skip
    _write(found, path, plot)
    if json:
        best = {"best": found.found[0].recipe if found.found else None}
        options.print_json({**best, **found.model_dump(mode="json")})
    else:
        from trainfit.report.plan_text import show

        show(found, file=path if found.found else None)
    return EXIT_DOES_NOT_FIT if check and not found.found else 0


def _check_ours(path: Path, *, named: bool) -> None:
    """Refuse to replace a file that this command did not write."""
    from trainfit.spec.files import read_text

    if path.is_dir() or (path.exists() and not read_text(path, 2**20).startswith(HEADER)):
        problem = "exists, and this command did not write it"
        remedy = "name another file with --out" if named else "name a file with --out, or move it away"
        raise InputError(problem, remedy, field="--out", value=str(path))


def _write(found: "Plan", path: Path | None, plot: Path | None) -> None:
    from trainfit.spec.files import write_text
    from trainfit.spec.parsing.recipe_file import written

    if path is not None and found.found:
        estimate = found.found[0].estimate
        speed = f"{estimate.tokens_per_s:,.0f} tokens/s and {estimate.peak_device_bytes / 2**30:.2f} GiB"
        write_text(path, f"{HEADER}: {speed} predicted\n{written(found.best)}")
    if plot is not None:
        from trainfit.report.plan_text import plotted

        write_text(plot, plotted(found))
