"""A plan for a notebook: the best recipe, memory against speed, what was not chosen."""

from trainfit.report.html import Line, Part, notebook
from trainfit.report.pictures import Point, frontier
from trainfit.report.plan_text import ZOOM, answer_lines, differing, limit_text, reason_text, words_of
from trainfit.report.words import describe
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.plan import Found, Plan
from trainfit.spec.units import format_bytes


def html(plan: Plan) -> str:
    """Return a plan for a notebook: the best recipe, memory against speed, what was not chosen."""
    given = recipe_from(plan.given)
    best = plan.found[0] if plan.found else None
    if best is None:
        lines = [Line("limit", limit_text(plan))]
        if (least := plan.least) is not None:
            size = format_bytes(least.estimate.highest.device)
            lines.append(Line("least", size, words_of(least)))
    else:
        lines = [Line(name, value) for name, value in answer_lines(plan, best)]
    parts = [Part(lines)]
    if plan.frontier:
        parts.append(Part(_numbered(plan), _picture(plan)))
    if plan.rejected:
        parts.append(
            Part([Line("Not chosen"), *(Line(one.choice, reason_text(one)) for one in plan.rejected)])
        )
    title = f"{given.model.display_name} on {given.hardware.count} x {given.hardware.gpu}"
    verdict = f"NOTHING FITS: {describe(given)}" if best is None else describe(best.as_recipe())
    return notebook(title, verdict, parts, good=best is not None)


def _numbered(plan: Plan) -> list[Line]:
    """Return a line for each recipe of the frontier, by the number that it has in the picture."""
    lines = [Line(f"Memory against speed, of {plan.num_traced} traced recipes")]
    for number, one in enumerate(plan.frontier, 1):
        size = one.estimate.highest.device
        over = "over the limit: " * (size > plan.usable_bytes)
        changed = f"; numerics changed: {', '.join(one.numerics)}" if one.numerics else ""
        value = f"{one.estimate.tokens_per_s:,.0f} tokens/s, {format_bytes(size)}"
        lines.append(Line(f"{number}", value, f"{over}{differing(plan, one)}{changed}"))
    return lines


def _picture(plan: Plan) -> str:
    shown = [one for one in plan.frontier if one.estimate.highest.device <= ZOOM * plan.limit_bytes]
    best = plan.found[0] if plan.found else None
    points = [_point(plan, one, is_best=best is not None and one.recipe == best.recipe) for one in shown]
    if best is not None and not any(one.is_best for one in points):  # One as fast takes a little less memory.
        points.append(_point(plan, best, is_best=True)._replace(is_on_frontier=False))
    usable = f"limit less {plan.margin:.1%}: {format_bytes(plan.usable_bytes)}"
    return frontier("Memory against speed", points, plan.usable_bytes, usable) if points else ""


def _point(plan: Plan, one: Found, *, is_best: bool) -> Point:
    size, speed = one.estimate.highest.device, one.estimate.tokens_per_s or 0.0
    return Point(
        size,
        speed,
        f"{speed:,.0f} tokens/s, {format_bytes(size)}",
        changes_numerics=bool(one.numerics),
        is_over=size > plan.usable_bytes,
        is_best=is_best,
    )
