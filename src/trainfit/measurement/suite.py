"""Many recipes on one device, one after another, each in a process of its own.

``python -m trainfit.measurement.suite recipes.jsonl records.jsonl [--limit-s 120] [--total-s 540] [--steps 10] ...``

Enters: one recipe a line, as plain data (a Recipe's content; ``extends`` is not followed). Leaves: one Record a line,
appended and on the disk as soon as it is there; what the file has already is not measured again. Then a short table.

By default each process is a copy of this one (fork), which has imported torch, transformers and peft but not touched
CUDA: importing them anew costs 10 s a recipe. A first copy only tries CUDA; if that fails, each trial is a new
interpreter. Needs torch, transformers, peft, pydantic and ruamel.yaml, nothing else.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from trainfit.measurement.environment import host_environment
from trainfit.measurement.process import Start, forked, spawned
from trainfit.measurement.run import measure
from trainfit.measurement.trial import import_for_steps
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say
from trainfit.spec.provenance import new_record
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import read_recipes
from trainfit.spec.record_line import append_line, check_whole, from_line, lines_of
from trainfit.spec.result import Environment, Measurement
from trainfit.spec.units import GIB


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; exit code 0 when every recipe has a record, 75 when time ended first (run it again), 65 bad input."""
    options = _options(arguments)
    try:
        recipes = read_recipes(options.recipes)
        done = read_done(options.records)
    except InputError as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    wanted = {recipe.id: recipe for recipe in recipes if options.again or recipe.id not in done}
    say(f"{len(wanted)} of {len(recipes)} recipes to measure")
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # so that importing libraries leaves CUDA untouched
    start = spawned if options.spawn or not wanted else ready_to_fork(options.device)
    lines = _measure_all(list(wanted.values()), start, options)
    say(table(lines))
    return 0 if len(lines) == len(wanted) else 75


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.measurement.suite", description="Measure many recipes on one device."
    )
    parser.add_argument("recipes", type=Path, help="JSON Lines, one recipe each")
    parser.add_argument("records", type=Path, help="JSON Lines, records are appended")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (0: memory only)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps, at least 2 run")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--limit-s", type=float, default=180.0, help="seconds for one recipe")
    parser.add_argument(
        "--total-s", type=float, default=float("inf"), help="start no recipe after this many seconds"
    )
    parser.add_argument("--memory-limit-gib", type=float, help="what a recipe's steps may allocate")
    parser.add_argument(
        "--shared", action="store_true", help="others use the device too: no times, no device memory are kept"
    )
    parser.add_argument("--spawn", action="store_true", help="a new interpreter for each recipe")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--tag", action="append", default=[], help="put into each record")
    return parser.parse_args(arguments)


def read_done(path: Path) -> set[str]:
    """Ids of the recipes that the record file has a result for; a trial that crashed or ran out of time is no result."""
    if not path.is_file():
        return set()
    content = path.read_bytes()
    check_whole(path, content)  # Records are appended to it.
    records = [from_line(line, where) for line, where in lines_of(path, content)]
    results = {"done", "out-of-memory"}
    return {
        record.recipe_id for record in records if record.measurement and record.measurement.status in results
    }


def ready_to_fork(device: str) -> Start:
    """Import what the trials need, then see whether a copy of this process can use CUDA."""
    start_s = time.monotonic()
    import torch

    import_for_steps()  # Once for all copies, which otherwise take seconds each.
    if "peft" not in sys.modules:
        say("peft cannot be imported: recipes with an adapter will be refused")
    can = not torch.cuda.is_initialized() and (device == "cpu" or _copy_can_use_cuda())
    say(f"imports took {time.monotonic() - start_s:.1f} s; trials start by {'fork' if can else 'spawn'}")
    return forked if can else spawned


def _copy_can_use_cuda() -> bool:
    """Whether a forked child can make a CUDA context, or rightly finds no CUDA at all."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return True
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")
            code = 0
        except RuntimeError as error:
            say(f"CUDA does not work in a copy of this process: {error}", err=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _measure_all(
    recipes: Iterable[Recipe], start: Start, options: argparse.Namespace
) -> list[tuple[Recipe, Measurement]]:
    began = time.monotonic()
    host = host_environment(options.device)
    lines = []
    for recipe in recipes:
        if time.monotonic() - began > options.total_s:
            say(f"{options.total_s:g} s are over: run the same command again for the rest")
            break
        trial_s = time.monotonic()
        measured = _measure_one(recipe, start, options, host)
        append_line(
            options.records, new_record("measure", recipe, measurement=measured, tags=tuple(options.tag))
        )
        lines.append((recipe, measured))
        say(f"{time.monotonic() - trial_s:6.1f} s  {row(recipe, measured)}")
    return lines


def _measure_one(recipe: Recipe, start: Start, options: argparse.Namespace, host: Environment) -> Measurement:
    limit = None if options.memory_limit_gib is None else round(options.memory_limit_gib * GIB)
    try:
        measured = measure(
            recipe, steps=0 if options.shared else options.steps, warmup=options.warmup, device=options.device,
            timeout_s=options.limit_s, memory_limit_bytes=limit, start=start, environment=host,
        )  # fmt: skip
        return measured.model_copy(update={"peak_device_bytes": None}) if options.shared else measured
    except InputError as error:  # One refused recipe is told in its record; the others go on.
        return Measurement(
            recipe_id=recipe.id, status="crashed", message=f"refused: {error}", environment=host
        )


def table(lines: list[tuple[Recipe, Measurement]]) -> str:
    """A line for each recipe: status, peaks in GiB, time, tokens per second."""
    head = f"{'recipe':16}  {'model':28} {'batch':>12}  {'status':13} {'alloc':>8} {'reserved':>8} {'device':>8} {'step s':>8} {'tokens/s':>9}"
    return "\n".join([head, *(row(recipe, measured) for recipe, measured in lines)])


def row(recipe: Recipe, measured: Measurement) -> str:
    """One line of the table."""

    def gib(size: int | None) -> str:
        return f"{'-':>8}" if size is None else f"{size / GIB:8.3f}"

    batch = f"{recipe.batch.accumulate}x{recipe.batch.micro}x{recipe.batch.seq}"
    sizes = (measured.peak_allocated_bytes, measured.peak_reserved_bytes, measured.peak_device_bytes)
    step_s = f"{'-':>8}" if measured.step_s is None else f"{measured.step_s:8.4f}"
    speed = f"{'-':>9}" if measured.tokens_per_s is None else f"{measured.tokens_per_s:9.0f}"
    text = " ".join([f"{measured.status:13}", *map(gib, sizes), step_s, speed])
    message = measured.message.splitlines()[-1][:100] if measured.message else ""
    return f"{recipe.id:16}  {recipe.model.display_name[:28]:28} {batch:>12}  {text}  {message}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
