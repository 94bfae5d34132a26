"""An explanation for a notebook: the peak by category, memory over the step, and who holds it."""

from collections.abc import Sequence

from trainfit.api.explanation_text import made_in, moment, signed, snapshot_notes, what
from trainfit.explanation.peak import difference
from trainfit.report.html import Line, Part, notebook
from trainfit.report.pictures import Bar, bars, categories, course
from trainfit.report.words import describe
from trainfit.spec.explanation import Explanation, MemoryCourse
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.result import CATEGORIES
from trainfit.spec.units import format_bytes


def explanation_html(
    explanation: Explanation, top: int, over_time: MemoryCourse | None, capacity_bytes: int | None
) -> str:
    """Return an explanation for a notebook.

    Args:
        top: number of holders, the largest first.
        over_time: memory over the step that has the peak; None: not known.
        capacity_bytes: what the allocator may hold on the GPU; None: not known.
    """
    peak = explanation.peak_allocated_bytes
    fits = capacity_bytes is None or peak <= capacity_bytes
    parts = [
        Part(picture=bars("Alive at the peak", [_bar("alive at the peak", explanation, capacity_bytes)]))
    ]
    if explanation.snapshot is not None:
        parts.append(Part([Line("note", text) for text in snapshot_notes(explanation)]))
    if over_time is not None:
        parts.append(Part(picture=course(f"Memory over the {explanation.moment.step} step", over_time)))
    parts += [Part(_sizes(explanation)), Part(_holders(explanation, top))]
    verdict = f"Peak {format_bytes(peak)}: {moment(explanation.moment)}"
    return notebook(name_of(explanation), verdict, parts, good=fits)


def name_of(explanation: Explanation) -> str:
    """Return what is explained: a recipe, traced code or a snapshot's file."""
    if explanation.snapshot is not None:
        return f"{explanation.snapshot.file}: GPU {explanation.snapshot.device}"
    if explanation.script:
        return f"{explanation.script}, on 1 x {explanation.gpu}"
    return describe(recipe_from(explanation.recipe or {}))


def difference_html(before: Explanation, after: Explanation, top: int) -> str:
    """Return the difference of two explanations for a notebook: both peaks, then what changed."""
    change = after.peak_allocated_bytes - before.peak_allocated_bytes
    both = [_bar(name_of(one), one, None) for one in (before, after)]
    lines = [
        Line(name, signed(more))
        for name in CATEGORIES
        if (more := getattr(after.breakdown, name) - getattr(before.breakdown, name))
    ]
    parts = [Part(picture=bars("Alive at both peaks", both)), Part([Line("By category"), *lines])]
    if (before.snapshot is None) is (after.snapshot is None):  # A snapshot names lines of code.
        rows = [
            Line(signed(one.num_bytes), one.category, f"{what(one.path, one.op)}; {made_in(one.made_in)}")
            for one in difference(before, after)[:top]
        ]
        parts.append(Part([Line("By holder, the largest changes"), *rows] if rows else []))
    title = f"{name_of(after)}, against {name_of(before)}"
    return notebook(title, f"{signed(change)} at the peak", parts, good=change <= 0)


def _bar(name: str, explanation: Explanation, capacity_bytes: int | None) -> Bar:
    of = "" if capacity_bytes is None else f" of {format_bytes(capacity_bytes)} for the allocator"
    text = f"{format_bytes(explanation.peak_allocated_bytes)}{of}"
    return Bar(name, text, categories(explanation.breakdown), capacity_bytes)


def _sizes(explanation: Explanation) -> Sequence[Line]:
    peak = explanation.peak_allocated_bytes
    sizes = categories(explanation.breakdown)
    rows = [Line(one.name, format_bytes(one.num_bytes), f"{one.num_bytes / peak:.1%}") for one in sizes]
    return [Line("Alive at the peak"), *rows]


def _holders(explanation: Explanation, top: int) -> Sequence[Line]:
    lines = [Line("Who holds it (equal layers together)")]
    for one in explanation.holders[:top]:
        number = f"{one.count} x " * (one.count > 1)
        about = f"{one.category}: {number}{what(one.path, one.op)}; made in {made_in(one.made_in)}"
        lines.append(Line(format_bytes(one.num_bytes), about))
    if rest := explanation.holders[top:]:
        lines.append(Line(format_bytes(sum(one.num_bytes for one in rest)), f"{len(rest)} more"))
    return lines
