"""``trainfit verify``: predict and measure a small suite on this machine, and print the errors."""

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from trainfit.cli import completion
from trainfit.cli.options import Json, RecordFile, attempt, finite, keep, only_json, print_json
from trainfit.spec.printable import say

if TYPE_CHECKING:
    from trainfit.verification.verify import Check, Verification

EXIT_NOT_PASSED = 1
DEFAULT_COUNT, DEFAULT_COUNT_CPU = 8, 4
COUNT_HELP = "Recipes to check (8; on a CPU 4)."
GPU_HELP = "The catalog's name of this machine's GPU."


def run(
    count: Annotated[int | None, Option(min=1, max=1000, metavar="N", help=COUNT_HELP)] = None,
    seed: Annotated[int, Option(min=0, metavar="N", help="Which recipes are drawn.")] = 0,
    gpu: Annotated[str | None, Option(metavar="NAME", help=GPU_HELP, autocompletion=completion.gpus)] = None,
    timeout: Annotated[
        float, Option(metavar="SECONDS", min=1, callback=finite, help="Limit of one measurement.")
    ] = 300.0,
    json: Json = False,
    record: RecordFile = None,
) -> int:
    """Predict and measure a small suite on this machine.

    Prints the table of errors; exit code 1 if the median error is over 2 %. Without a GPU, predictions for
    this CPU are verified, with tiny models.
    """
    from trainfit.verification.this_machine import gpu_here
    from trainfit.verification.verify import verify

    failures: list[OSError] = []

    def keep_both(recipe: Any, estimate: Any, measured: Any) -> None:
        def write() -> None:
            keep(record, "predict", recipe, estimate=estimate)
            keep(record, "measure", recipe, measurement=measured)

        failure = None if failures else attempt(write)  # After the first one nothing more is recorded.
        failures.extend([failure] if failure is not None else [])

    if record is not None:
        from trainfit.records import check_can_append

        check_can_append(record)
    with only_json(json):
        row, device = gpu_here(gpu)
        on_cpu = row.vendor == "host"
        cpu_note = "no CUDA GPU in this machine: verifying the CPU path with tiny models"
        _say(cpu_note if on_cpu else f"{device}: {row.name} of the catalog")
        count = count or (DEFAULT_COUNT_CPU if on_cpu else DEFAULT_COUNT)
        result = verify(row, device, count=count, seed=seed, timeout_s=timeout, say=_say, keep=keep_both)
    if json:
        print_json(result)
    else:
        show(result)
    if failures:
        raise failures[0]
    return 0 if result.passed else EXIT_NOT_PASSED


def _say(line: str) -> None:
    say(line, err=True)


def show(result: "Verification") -> None:
    """Print the signed errors, their median and worst, and the verdict."""
    from trainfit.report.console import console, heading, rows

    out = console()
    names = list(result.medians) or ["allocated"]
    heading(out, f"Predicted against measured on {result.device}, seed {result.seed}")
    lines = [["recipe", "", "measured", *names]]
    lines += [_line(check, names) for check in result.checks]
    lines.append(["median", "", "", *(_percent(result.medians.get(name), signed=False) for name in names)])
    lines.append(["worst", "", "", *(_percent(result.worst.get(name)) for name in names)])
    rows(out, lines, "left", "wrap", "right", *("right" for _ in names))
    out.print()
    compared = sum(bool(check.errors) for check in result.checks)
    if result.passed:
        verdict = f"PASSED: {compared} recipes, median error of the allocated peak within {result.limit:.0%}"
    elif not compared:
        verdict = "NOT PASSED: nothing could be compared"
    elif any(check.status == "out-of-memory" for check in result.checks):
        verdict = "NOT PASSED: a recipe that was predicted to fit ran out of memory"
    else:
        verdict = f"NOT PASSED: the median error of the allocated peak is over {result.limit:.0%}"
    out.print(verdict, style="bold green" if result.passed else "bold red")


def _line(check: "Check", names: list[str]) -> list[str]:
    from trainfit.report.words import describe
    from trainfit.spec.parsing.recipe_file import recipe_from
    from trainfit.spec.units import format_bytes

    words = describe(recipe_from(check.recipe)).rpartition(", on ")[0]
    words += f" ({check.peak_met} peak)" if check.peak_met else ""
    size = format_bytes(check.measured["allocated"]) if check.errors else check.status
    return [check.recipe_id, words, size, *(_percent(check.errors.get(name)) for name in names)]


def _percent(share: float | None, *, signed: bool = True) -> str:
    if share is None:
        return ""
    return f"{share:+.2%}" if signed else f"{share:.2%}"
