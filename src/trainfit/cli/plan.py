"""``trainfit plan``: the fastest recipe within a memory limit, without a GPU."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from trainfit.cli import options
from trainfit.cli.options import (
    EXIT_DOES_NOT_FIT,
    Check,
    Json,
    RecipeArgument,
    Settings,
    finite,
    share,
    takes_recipe,
)
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.api.plans import Plan
    from trainfit.report.plot import Form

STEP_HELP = "Tokens a step over all GPUs, such as 1M; reached by micro-batch and accumulation."
TUNE_HELP = "Train all weights, or a LoRA adapter on bf16 or 4-bit weights."
MEMORY_HELP = "Memory of each GPU that may be used."
HOST_HELP = "Pinned memory of the host that may be used for each GPU (default: as much as the GPU has)."
QUALITY_HELP = "Exclude recipes that change the numerics."
VARY_HELP = "Vary these fields only, such as batch.micro or recompute,loss."
MARGIN_HELP = "Share of the memory that stays free, such as 2% (the default)."
TOKENS_HELP = "Tokens of the whole run, such as 15B, for its time and cost."
OUT_HELP = "File of the best recipe (plan.yaml); with --json it is written only if named."
PLOT_HELP = "Also draw memory against speed: .svg, .png or .pdf."
OUT = Path("plan.yaml")
HEADER = "# Written by trainfit plan"


@takes_recipe
def run(
    recipe: RecipeArgument,
    settings: Settings = None,
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
    each = options.variants(settings or [])
    several = len(each) > 1
    if several and (out or plot):
        raise typer.BadParameter(f"{'--out' if out else '--plot'} is of one plan: name one GPU and one count")
    path = OUT if out is None and not json and not several else out
    if path is not None:
        _check_ours(path, named=out is not None)
    form: Form | None = None
    if plot is not None:
        from trainfit.report.plot import check_plot_file

        form = check_plot_file(plot)
    from trainfit.api.plans import given_fields, plan_recipe
    from trainfit.prediction.time.calibrated import own_calibration
    from trainfit.report.console import progress

    requested = [options.read_recipe(recipe, one) for one in each]
    found: list[Plan] = []
    own = own_calibration(calibration)
    for wanted, its_settings in zip(requested, each, strict=True):
        name = wanted.model.display_name
        name += f" on {wanted.hardware.count} x {wanted.hardware.gpu}" if several else ""
        with (
            options.work(recipe, its_settings, json=json, record=None),
            progress(f"planning {name}") as say,
        ):
            found.append(plan_recipe(
                wanted, given_fields({}, its_settings), tune=tune, memory_gib=memory_gib,
                host_memory_gib=host_memory_gib, keep_quality=keep_quality,
                tokens_per_step=None if tokens_per_step is None else round(tokens_per_step),
                vary=vary or (), margin=margin,
                tokens=tokens, calibration=own, use_cache=not no_cache,
                say=functools.partial(_say, say, name),
            ))  # fmt: skip
    failure = options.attempt(lambda: _write(found[0], path, plot, form))
    _show(found, path if failure is None else None, json=json)
    if failure is not None:
        raise failure
    if plot is not None:
        options.print_notes([f"plot: {plot}"])
    return EXIT_DOES_NOT_FIT if check and not all(one.found for one in found) else 0


def _say(say: "Callable[[str], None]", name: str, text: str) -> None:
    say(f"planning {name}: {text}")


def _show(found: "list[Plan]", path: Path | None, *, json: bool) -> None:
    from trainfit.report.plan_text import compare, random_base_notes, search_notes, show

    if json:
        options.print_notes(f"note: {note}" for note in (*random_base_notes(found), *search_notes(found)))
        content = [{"best": one.found[0].recipe if one.found else None, **one.model_dump(mode="json")}
                   for one in found]  # fmt: skip
        options.print_json(content[0] if len(found) == 1 else {"plans": content})
        return
    if len(found) == 1:
        show(found[0], file=path if found[0].found else None)
    else:
        compare(found)


def _check_ours(path: Path, *, named: bool) -> None:
    """Refuse to replace a file that this command did not write; a named one must be writable too."""
    from trainfit.spec.files import check_can_write, read_text

    if named:
        check_can_write(path, "--out")
    if path.is_dir() or (path.exists() and not read_text(path, 2**20).startswith(HEADER)):
        problem = "exists, and this command did not write it"
        remedy = "name another file with --out" if named else "name a file with --out, or move it away"
        raise InputError(problem, remedy, field="--out", value=str(path))


def _write(found: "Plan", path: Path | None, plot: Path | None, form: "Form | None") -> None:
    from trainfit.spec.files import write_bytes
    from trainfit.spec.parsing.recipe_file import written

    if path is not None and found.found:
        estimate = found.found[0].estimate
        speed = f"{estimate.tokens_per_s:,.0f} tokens/s and {estimate.highest.device / 2**30:.2f} GiB"
        write_bytes(path, f"{HEADER}: {speed} predicted\n{written(found.best)}".encode())
    if plot is not None and form is not None:
        from trainfit.report.plan_text import plotted

        write_bytes(plot, plotted(found, form))
