"""``trainfit explain``: where a peak occurs and what is alive there, what would change it, what follows.

A recipe, a script and a memory snapshot of PyTorch become a ledger and are explained alike; a profiler's
trace and a Trainer's log become the use of the GPU; the message of an OutOfMemoryError is read.

Torch is imported only if a ledger is not cached.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trainfit.cli import options
from trainfit.cli.options import Json, RecipeArgument, Settings, at_most
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.cli.explain.more import More
    from trainfit.cli.explain.outputs import Files
    from trainfit.cli.explain.subjects import Subject
    from trainfit.explanation.peak import Explained

OTHER_HELP = "A second recipe, script or snapshot to compare with."
RECIPE_HELP = "The same, a recipe: what was predicted. Of a trace or a log: the FLOPs for MFU."
SCRIPT_HELP = 'The same, the command line of a script: "train.py --lr 1e-4".'
PLOT_HELP = "Draw the memory of the step by category: .html, .svg, .png or .pdf."
SNAPSHOT_HELP = "Write the ledger as a memory snapshot (.pickle) for pytorch.org/memory_viz."
PERFETTO_HELP = "Write the predicted step as a trace (.json, .json.gz) for ui.perfetto.dev."
CHANGES_HELP = "Also predict what each single change of the recipe would save, and its time."
LATER_HELP = "Also predict what comes later: evaluation, checkpoints, longer samples, varied lengths."
EVAL_HELP = "Sequences of an evaluation's batch, with --later (the recipe's batch.micro)."
LONGEST_HELP = "Tokens of the longest sample, with --later (twice the recipe's batch.seq)."
ONE_KIND = "name two ledgers, which predict --verbose prints, or two recipes"


@options.takes_recipe
def run(
    recipe: RecipeArgument,
    other: Annotated[str | None, Argument(metavar="[OTHER]", help=OTHER_HELP)] = None,
    settings: Settings = None,
    compared: Annotated[str | None, Option("--recipe", metavar="RECIPE", help=RECIPE_HELP)] = None,
    script: Annotated[str | None, Option(metavar="COMMAND", help=SCRIPT_HELP)] = None,
    top: Annotated[
        int, Option(min=1, callback=at_most, metavar="N", help="Number of holders, the largest first.")
    ] = 15,
    device: Annotated[
        int | None, Option(min=0, metavar="N", help="GPU of a snapshot or a trace. Default: the busiest.")
    ] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help=PLOT_HELP)] = None,
    snapshot: Annotated[Path | None, Option(metavar="FILE", help=SNAPSHOT_HELP)] = None,
    perfetto: Annotated[Path | None, Option(metavar="FILE", help=PERFETTO_HELP)] = None,
    changes: Annotated[bool, Option("--changes", help=CHANGES_HELP)] = False,
    later: Annotated[bool, Option("--later", help=LATER_HELP)] = False,
    eval_batch: Annotated[int | None, Option(min=1, callback=at_most, metavar="B", help=EVAL_HELP)] = None,
    longest: Annotated[int | None, Option(metavar="S", parser=options.length, help=LONGEST_HELP)] = None,
    json: Json = False,
) -> None:
    """Show what holds memory at the peak of a recipe, a script (.py) or a snapshot (.pickle). Needs no GPU.

    A second one is compared with it; options change both recipes. A trace of torch.profiler (.json, .json.gz)
    or a Trainer's log: how busy the GPU was, with what, and MFU. Also reads the message of an
    OutOfMemoryError (.txt, .log, - for standard input), and compares two ledgers (files of the cache).
    """
    from trainfit.cli.explain.more import More
    from trainfit.cli.explain.outputs import Files
    from trainfit.cli.explain.subjects import subjects

    first, second = subjects(recipe, other, compared, script)
    files = Files(plot, snapshot, perfetto)
    files.check()
    given = settings or []
    more = More(changes, later, eval_batch, longest)
    more.check(first, second)
    if first.kind in ("text", "trace", "trainer state"):
        files.refuse(first)
        _explain_run(first, second, given, device, json=json)
    elif "ledger" in (first.kind, second.kind if second else ""):
        files.refuse(first)
        _compare_ledgers(first, second, given, top, json=json)
    else:
        _explain_memory(first, second, given, device, top, files, more, json=json)


def _explain_run(
    first: "Subject", second: "Subject | None", settings: list[str], device: int | None, *, json: bool
) -> None:
    """Print what a trace, a Trainer's log or the text of an error says."""
    from trainfit.cli.explain import runs

    if first.kind == "trace":
        runs.show_trace(first.name, second, settings, device, json=json)
        return
    if device is not None:
        raise InputError("it is of no GPU of several", "leave it out", field="--device", value=device)
    from trainfit.explanation.trainer_log import read_log, read_state

    if first.kind == "trainer state":
        runs.show_trainer_run(read_state(Path(first.name)), second, settings, json=json)
        return
    from trainfit.explanation.kinds import STANDARD_INPUT
    from trainfit.explanation.oom_text import LONGEST, has_message, last_of

    file = "" if first.name == STANDARD_INPUT else first.name
    text = last_of(Path(file) if file else None, LONGEST)
    run = None if has_message(text) else read_log(text, file=file)
    if run is not None:
        runs.show_trainer_run(run, second, settings, json=json)
    else:
        _explain_message(text, file, second, settings, json=json)


def _explain_memory(
    first: "Subject",
    second: "Subject | None",
    settings: list[str],
    device: int | None,
    top: int,
    files: "Files",
    more: "More",
    *,
    json: bool,
) -> None:
    """Print the peak of a recipe, a script or a snapshot, and its difference from a second one."""
    from trainfit.cli.explain.subjects import explain

    both = [first, second] if second else [first]
    if settings and all(one.kind == "snapshot" for one in both):
        raise InputError("a snapshot has no fields to set", "leave it out", field="--set", value=settings[0])
    if device is not None and all(one.kind != "snapshot" for one in both):
        raise InputError("only a snapshot has several GPUs", "leave it out", field="--device", value=device)
    found = [explain(one, settings, device, json=json) for one in both]
    found[0] = more.added(found[0], json=json)
    failure = options.attempt(lambda: files.write(found[0]))
    explanations = [one.explanation for one in found]
    if json:
        contents = {"explanations": [one.model_dump(mode="json") for one in explanations]}
        options.print_json(contents if second else explanations[0])
    else:
        _show(found, top)
    if failure is not None:
        raise failure
    options.print_notes(files.notes())


def _show(found: "list[Explained]", top: int) -> None:
    from trainfit.api.explanation_text import show, show_difference, show_script, show_snapshot

    for one in found:
        if one.recipe is not None:
            show(one.recipe, one.explanation, top)
        elif one.machine is not None:
            show_script(one.explanation, top)
        else:
            show_snapshot(one.explanation, top)
    if len(found) > 1:
        show_difference(found[0].explanation, found[1].explanation, top)


def _explain_message(
    text: str, file: str, second: "Subject | None", settings: list[str], *, json: bool
) -> None:
    """Print what the message of an OutOfMemoryError says."""
    from trainfit.api.explanation_text import show_message
    from trainfit.explanation.oom_text import read_message

    if second is not None or settings:
        value = second.name if second else str(settings)
        raise InputError("a message is explained alone", "leave the rest out", value=value)
    found = read_message(text, file=file)
    if json:
        options.print_json(found)
    else:
        show_message(found)


def _compare_ledgers(
    first: "Subject", second: "Subject | None", settings: list[str], top: int, *, json: bool
) -> None:
    """Print how the second of two files of ledgers differs from the first."""
    names = [first.name, *([second.name] if second else [])]
    if second is None or (first.kind, second.kind) != ("ledger", "ledger"):
        raise InputError("a ledger is compared with another ledger", ONE_KIND, value=" ".join(names))
    if settings:
        raise InputError("a ledger has no fields to set", "leave it out", field="--set", value=settings[0])
    from trainfit.explanation.ledgers import compare
    from trainfit.ledger.file import load

    ledgers = []
    for name in names:
        if not Path(name).is_file():
            raise InputError("there is no such file", ONE_KIND, value=name)
        try:
            ledgers.append(load(Path(name)))
        except ValueError as error:
            raise InputError(str(error), ONE_KIND) from None
    found = compare(*ledgers)
    if json:
        tables = {key: [one._asdict() for one in table] for key, table in found._asdict().items()}
        options.print_json(tables)
        return
    from trainfit.api.explanation_text import show_ledgers

    show_ledgers(found, top)
