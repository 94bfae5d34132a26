"""``trainfit explain``: the peak of a recipe's step by category and holder, and how another recipe differs.

Torch is imported only where a ledger is not cached yet.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trainfit.cli.options import (
    GpuOption,
    Json,
    RecipeArgument,
    Settings,
    print_json,
    read_recipe,
    tell,
    with_hardware,
    work,
)

if TYPE_CHECKING:
    from rich.console import Console

    from trainfit.explanation.difference import Change
    from trainfit.spec.explanation import CurvePoint, Explanation, Holder
    from trainfit.spec.recipe import Recipe

CHART_ROWS = 8

Other = Annotated[str | None, typer.Argument(metavar="[OTHER]", help="A second recipe, to compare with.")]
Top = Annotated[int, typer.Option("--top", min=1, metavar="N", help="Holders shown, the largest first.")]


def register(app: typer.Typer) -> None:
    app.command("explain")(run)


def run(
    recipe: RecipeArgument,
    other: Other = None,
    settings: Settings = None,
    gpu: GpuOption = None,
    top: Top = 15,
    json: Json = False,
) -> None:
    """Explain a recipe's peak memory. Needs no GPU. --set and --gpu change both recipes."""
    settings = with_hardware(settings, gpu, None)
    names = [recipe] if other is None else [recipe, other]
    recipes = [read_recipe(name, settings) for name in names]
    from trainfit.api.planned import planned
    from trainfit.report.console import progress

    built: list[Recipe] = []
    found: list[Explanation] = []
    for name, one in zip(names, recipes, strict=True):
        with (
            work(name, settings, json=json, record=None),
            progress(f"explaining {one.model.display_name}: one step on the virtual GPU"),
        ):
            from trainfit.explanation.peak import explain

            planned_one, notes = planned(one)
            tell(notes)
            built.append(planned_one)
            found.append(explain(built[-1]))
    if json:
        print_json(
            found[0] if other is None else {"explanations": [one.model_dump(mode="json") for one in found]}
        )
        return
    for one, explained in zip(built, found, strict=True):
        show(one, explained, top)
    if other is not None:
        show_difference(found[0], found[1], top)


def show(recipe: "Recipe", explained: "Explanation", top: int) -> None:
    """Print the peak's moment, the step's memory as a chart, and what is alive by category and by holder."""
    from trainfit.report.console import console
    from trainfit.report.words import describe, holds_for
    from trainfit.spec.units import format_bytes

    out = console()
    out.print(describe(recipe), style="bold")
    at = explained.moment
    where = f" of {at.module}" if at.module else ""
    out.print(
        f"Peak {format_bytes(explained.peak_allocated_bytes)}: {at.step} step, {at.phase}, at {at.op}{where}"
    )
    if line := holds_for(explained.versions):
        out.print(line)
    _chart(out, explained)
    _categories(out, explained)
    _holders(out, explained, top)
    out.print()


def _chart(out: "Console", explained: "Explanation") -> None:
    """Draw allocated bytes through the step with the peak; a row is an eighth of it."""
    from trainfit.report.console import can_draw, heading
    from trainfit.spec.units import format_bytes

    heading(out, f"Allocated through the {explained.moment.step} step (not to scale of time)")
    highest = max((point.alive.total for point in explained.curve), default=0)
    if not highest:
        return
    label = len(format_bytes(highest))
    points = _fitted(explained.curve, out.width - label - 3)
    heights = [point.alive.total / highest * CHART_ROWS for point in points]
    for row in range(CHART_ROWS, 0, -1):
        named = format_bytes(highest * row / CHART_ROWS) if row in (CHART_ROWS, CHART_ROWS // 2) else ""
        line = "".join(_cell(height - row + 1, blocks=can_draw(out)) for height in heights)
        out.file.write(f"  {named:>{label}} {line.rstrip()}\n")
    out.file.write(f"  {'':>{label}} {_phase_line([point.phase for point in points])}\n")


def _fitted(curve: "Sequence[CurvePoint]", columns: int) -> "Sequence[CurvePoint]":
    """Return at most ``columns`` points, the highest of each stretch."""
    size = -(-len(curve) // max(1, columns))
    stretches = [curve[at : at + size] for at in range(0, len(curve), size)]
    return [max(stretch, key=lambda point: point.alive.total) for stretch in stretches]


def _cell(filled: float, *, blocks: bool) -> str:
    """Return one character of a column, of which the share ``filled`` is under the curve."""
    if not blocks:
        return "#" if filled >= 0.5 else " "
    return " ▁▂▃▄▅▆▇█"[max(0, min(8, round(filled * 8)))]


def _phase_line(phases: Sequence[str]) -> str:
    """Return the names of the phases below the chart, each where it begins and as far as it has room."""
    line = ""
    for index, phase in enumerate(phases):
        begins = index == 0 or phases[index - 1] != phase
        if begins:
            end = next((at for at in range(index, len(phases)) if phases[at] != phase), len(phases))
            line += ("|" + phase)[: end - index].ljust(end - index)
    return line.rstrip()


def _categories(out: "Console", explained: "Explanation") -> None:
    from trainfit.report.console import bar, can_draw, heading, rows
    from trainfit.spec.result import CATEGORIES
    from trainfit.spec.units import format_bytes

    heading(out, "Alive at the peak")
    width, blocks = max(0, min(40, out.width - 40)), can_draw(out)
    lines = []
    for name in CATEGORIES:
        size = getattr(explained.breakdown, name)
        share = size / explained.peak_allocated_bytes if explained.peak_allocated_bytes else 0.0
        if size:
            lines.append([name, format_bytes(size), f"{share:.1%}", bar(share, width, blocks=blocks)])
    rows(out, lines, "left", "right", "right", "left")


def _holders(out: "Console", explained: "Explanation", top: int) -> None:
    from trainfit.report.console import heading
    from trainfit.spec.units import format_bytes

    heading(out, "Who holds it (equal layers together)")
    lines = [
        [format_bytes(one.num_bytes), str(one.count), one.category, _what(one), _made_in(one.made_in)]
        for one in explained.holders[:top]
    ]
    rest = explained.holders[top:]
    if rest:
        lines.append([format_bytes(sum(one.num_bytes for one in rest)), "", "", f"{len(rest)} more", ""])
    if explained.unsplit_bytes:
        lines.append([format_bytes(explained.unsplit_bytes), "", "", "ends of blocks that are not split", ""])
    _named_rows(out, [["bytes", "number", "category", "what", "made in"], *lines], "right", "right")


def _named_rows(out: "Console", lines: list[list[str]], *numbers: str) -> None:
    """Print rows of numbers, a category, a holder and its phase; long names break at their dots."""
    from trainfit.report.console import broken, rows

    what = len(numbers) + 1
    others = [index for index in range(len(lines[0])) if index != what]
    taken = sum(2 + max(len(line[index]) for line in lines) for index in others)
    room = out.width - taken - 4
    shown = [[*line[:what], broken(line[what], room), *line[what + 1 :]] for line in lines]
    rows(out, shown, *numbers, "left", "wrap", "left")


def _made_in(step_and_phase: str) -> str:
    """Return step and phase, without the name of the steady step."""
    return step_and_phase.removeprefix("steady.").replace(".", " ")


def _what(one: "Holder | Change") -> str:
    return f"{one.path} {one.op}".strip() or "-"


def show_difference(first: "Explanation", second: "Explanation", top: int) -> None:
    """Print the second recipe's peak minus the first's, by category and holder."""
    from trainfit.explanation.difference import difference
    from trainfit.report.console import console, heading, rows
    from trainfit.spec.result import CATEGORIES

    out = console()
    heading(out, "The second recipe's peak minus the first's")
    lines = [["peak", _signed(second.peak_allocated_bytes - first.peak_allocated_bytes)]]
    for name in CATEGORIES:
        more = getattr(second.breakdown, name) - getattr(first.breakdown, name)
        if more:
            lines.append([name, _signed(more)])
    rows(out, lines, "left", "right")
    changes = difference(first, second)[:top]
    if not changes:
        return
    heading(out, "By holder, the largest changes")
    lines = [[_signed(one.num_bytes), one.category, _what(one), _made_in(one.made_in)] for one in changes]
    _named_rows(out, lines, "right")


def _signed(num_bytes: int) -> str:
    from trainfit.spec.units import format_bytes

    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"
