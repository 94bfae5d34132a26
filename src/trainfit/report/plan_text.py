"""A plan as text, and its frontier as a plot."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from trainfit.catalog.config_notes import config_notes, random_base_note
from trainfit.report.console import bar, can_draw, console, heading, notes, rows
from trainfit.report.gpus import CHEAPEST
from trainfit.report.plot import (
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    WRONG,
    Form,
    Kind,
    Panel,
    Series,
    plot_file,
)
from trainfit.report.precision import meaning
from trainfit.report.prediction_text import amount, compiling
from trainfit.report.table import NOTHING, Column, Table, or_dash
from trainfit.report.words import batch_text, describe, parameters
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.plan import Found, Plan, Rejection, changed_fields
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.units import GIB, format_bytes, format_count, format_seconds, size_unit
from trainfit.techniques import registry

LONGEST_REASON = 160
ZOOM = 1.15  # Recipes over this multiple of the limit are not plotted


def show(plan: Plan, *, file: Path | None = None, out: Console | None = None) -> None:
    """Print a plan: the best recipe, the others, the frontier, what was rejected.

    Args:
        file: where the best recipe was written; None: nowhere.
        out: the console; None: standard output.
    """
    out = out or console()
    given = recipe_from(plan.given)
    if not plan.found:
        _nothing(out, plan, given)
    else:
        best = plan.found[0]
        out.print(describe(best.as_recipe()), style="bold green")
        rows(out, answer_lines(plan, best), "left", "wrap")
        if file is not None:
            # Training is deterministic unless told otherwise, which cuDNN's attention is not.
            flag = " --no-deterministic" if best.as_recipe().attention == "cudnn" else ""
            out.print(f"  written to {file}: trainfit train {file}{flag}", soft_wrap=True)
        if len(plan.found) > 1:
            heading(out, "Next best")
            rows(out, [_line(plan, one) for one in plan.found[1:]], "right", "right", "right", "wrap")
    notes(out, "Notes", (*config_notes(given), *random_base_notes([plan]), *plan.notes))
    heading(out, f"Memory against speed, of {plan.num_traced} traced recipes")
    rows(out, _frontier(out, plan), "right", "right", "left", "wrap")
    if plan.rejected:
        heading(out, "Not chosen")
        rows(out, [["-", f"{one.choice}: {reason_text(one)}"] for one in plan.rejected], "left", "wrap")
    out.print(f"\n{_basis(plan)}", style="dim")


def compare(plans: Sequence[Plan], *, out: Console | None = None) -> None:
    """Print the best recipe on each GPU and count, the cheapest first; those on which nothing fits last."""
    out = out or console()
    given = recipe_from(plans[0].given)
    out.print(
        f"{given.model.display_name}, {given.batch.seq} tokens: the fastest recipe on each", style="bold"
    )
    ordered = sorted(plans, key=_order)
    table = Table(_columns(plans), ordered, lambda one: one is ordered[0] and _dollars(one) is not None)
    out.print(table.fitted(out.width).rich(f"* {CHEAPEST}" if _dollars(ordered[0]) is not None else ""))
    heading(out, "Changes")
    rows(out, [[_hardware(one), ", ".join(one.found[0].changes) if one.found else _least(one)]
               for one in ordered], "left", "wrap")  # fmt: skip
    notes(out, "Notes", (*config_notes(given), *random_base_notes(plans), *search_notes(plans)))
    out.print("\nName one GPU and one count for the full plan and plan.yaml.", style="dim")


def random_base_notes(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return a warning where the best recipes train an adapter on random weights."""
    found = (note for plan in plans if plan.found for note in random_base_note(plan.found[0].as_recipe()))
    return tuple(dict.fromkeys(found))


def search_notes(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return what the searches themselves met."""
    return tuple(dict.fromkeys(note for plan in plans for note in plan.notes))


def _columns(plans: Sequence[Plan]) -> list[Column]:
    def of(form: Callable[[Found], str]) -> Callable[[Plan], str]:
        return lambda plan: form(plan.found[0]) if plan.found else NOTHING

    every = [
        Column("GPUs", _hardware, False),
        Column("verdict", lambda plan: "fits" if plan.found else "nothing fits", False,
               kind=lambda plan: "good" if plan.found else "bad"),
        Column("memory GiB", lambda plan: f"{of(_gib)(plan)} of {plan.limit_bytes / GIB:.1f}", False),
        Column("tokens/s predicted", of(lambda one: or_dash(one.estimate.tokens_per_s, "{:,.0f}"))),
        Column("MFU", of(lambda one: or_dash(one.estimate.mfu, "{:.1%}")), rank=2),
        Column("time", lambda plan: or_dash(_run_s(plan), format_seconds), rank=1),
        Column("cost $" if plans[0].run_tokens else "$ a million tokens",
               lambda plan: or_dash(_dollars(plan), amount if plan.run_tokens else "{:.4g}")),
    ]  # fmt: skip
    return list(Table(every, plans).filled().columns)


def _gib(one: Found) -> str:
    return f"{one.estimate.highest.device / GIB:.1f}"


def _hardware(plan: Plan) -> str:
    hardware = recipe_from(plan.given).hardware
    return f"{hardware.count} x {hardware.gpu}"


def _least(plan: Plan) -> str:
    least = plan.least
    if plan.over_host is not None:
        need = math.ceil(plan.over_host.estimate.host_bytes / GIB)
        return f"nothing fits; it would with --host-memory-gib {need}"
    return "nothing fits" + (f"; least: {format_bytes(least.estimate.highest.device)}" if least else "")


def _run_s(plan: Plan) -> float | None:
    speed = plan.found[0].estimate.tokens_per_s if plan.found else None
    return plan.run_tokens / speed if plan.run_tokens and speed else None


def _dollars(plan: Plan) -> float | None:
    """Return the run's dollars; without its tokens, those of a million."""
    money = plan.found[0].estimate.cost if plan.found else None
    if money is None or plan.run_tokens is None:
        return None if money is None else money.per_million_tokens
    run_s = _run_s(plan)
    return None if run_s is None else money.per_hour * run_s / 3600


def _order(plan: Plan) -> tuple[bool, bool, float]:
    dollars = _dollars(plan)
    return not plan.found, dollars is None, dollars or 0.0


def limit_text(plan: Plan) -> str:
    """Return the limit in words."""
    return (
        f"{format_bytes(plan.limit_bytes)} less a margin of {plan.margin:.1%}, "
        f"{format_bytes(plan.limit_bytes - plan.usable_bytes)}"
    )


def answer_lines(plan: Plan, best: Found) -> list[list[str]]:
    """Return lines of the best recipe: speed, memory, cost, precision, what it changes."""
    estimate, recipe = best.estimate, best.as_recipe()
    mfu = f", {estimate.mfu:.1%} MFU" if estimate.mfu else ""
    step_tokens = recipe.step_tokens
    every = " in all" * (estimate.num_gpus > 1)
    free = plan.limit_bytes - estimate.highest.device
    lines = [
        [
            "speed",
            f"{estimate.tokens_per_s:,.0f} tokens/s{every}{mfu}, {step_tokens:,} tokens in a step of "
            f"{format_seconds(estimate.step_s or 0)}",
        ],
        [
            "memory",
            f"{format_bytes(estimate.highest.device)} of {limit_text(plan)}; "
            f"{format_bytes(free)} ({free / plan.limit_bytes:.1%}) free{_expected(estimate)}",
        ],
    ]
    lines += [["compiling", text]] if (text := compiling(estimate)) else []
    if estimate.host_bytes:
        each = " for each GPU" * (estimate.num_gpus > 1)
        most = f"of at most {format_bytes(plan.host_limit_bytes)}{each}"
        lines.append(["host", f"{format_bytes(estimate.host_bytes)} of pinned memory {most}"])
    lines += [["cost", text]] if (text := _cost(plan, estimate.tokens_per_s, best)) else []
    if plan.largest is not None:
        most = plan.largest.as_recipe().batch.micro
        lines.append(["batch", f"fastest: batch.micro {recipe.batch.micro}; largest that fits: {most}"])
    if plan.accumulated is not None:
        more, tokens = plan.accumulated.estimate, plan.accumulated.as_recipe().step_tokens
        lines.append(
            [
                "batch",
                f"{tokens:,} tokens a step: {more.tokens_per_s:,.0f} tokens/s, "
                f"{format_bytes(more.highest.device)} ({', '.join(plan.accumulated.changes)})",
            ]
        )
    lines.append(["precision", meaning(recipe)])
    lines += (
        [["model", parameters(estimate)]] if estimate.active_params not in (None, estimate.params) else []
    )
    lines += [["warning", line] for line in estimate.warnings]
    lines += [["assumed", plan.assumed]] if plan.assumed else []
    lines.append(["changes", ", ".join(best.changes) or "none: the given recipe"])
    numerics = ", ".join(best.numerics)
    lines.append(
        ["numerics", f"changed: {numerics} (--keep-quality excludes this)" if numerics else "unchanged"]
    )
    return lines


def _expected(estimate: Estimate) -> str:
    """Return the lower of two peaks; the limit is compared with the higher one."""
    peaks = estimate.two_peaks
    return "" if peaks is None else f"; {format_bytes(peaks.expected.device)} are expected: {peaks.reason}"


def _cost(plan: Plan, tokens_per_s: float | None, one: Found) -> str:
    money = one.estimate.cost
    text = f"{money.per_million_tokens:.4g} $ a million tokens" if money and money.per_million_tokens else ""
    if plan.run_tokens and tokens_per_s:
        run_s = plan.run_tokens / tokens_per_s
        dollars = f", {money.per_hour * run_s / 3600:,.0f} $" if money else ""
        text += f"{'; ' * bool(text)}{format_count(plan.run_tokens)} tokens: {format_seconds(run_s)}{dollars}"
    return text


def _line(plan: Plan, one: Found) -> list[str]:
    estimate = one.estimate
    mark = " *" if one.numerics else ""
    return [
        f"{estimate.tokens_per_s:,.0f} tokens/s",
        f"{estimate.mfu:.1%} MFU" if estimate.mfu else "",
        format_bytes(estimate.highest.device),
        f"{differing(plan, one)}{mark}",
    ]


def words_of(one: Found) -> str:
    """Return a recipe's batch and techniques."""
    recipe = one.as_recipe()
    return f"batch {batch_text(recipe)}, {registry.describe(recipe)}"


def differing(plan: Plan, one: Found) -> str:
    """Return the fields in which a recipe differs from the best one."""
    if not plan.found:
        return words_of(one)
    return ", ".join(changed_fields(plan.found[0].as_recipe(), one.as_recipe())) or "the best"


def _frontier(out: Console, plan: Plan) -> list[list[str]]:
    """Return a line a recipe: its speed, memory, and a bar of both against the limit."""
    width = max(10, min(30, out.width - 60))
    whole = max(plan.limit_bytes, *(one.estimate.highest.device for one in plan.frontier))
    limit = round(plan.usable_bytes / whole * width)
    lines: list[list[str]] = []
    for one in plan.frontier:
        size = one.estimate.highest.device
        drawn = bar(size / whole, width, blocks=can_draw(out)).ljust(width + 1)
        mark = "│" if can_draw(out) else "|"
        drawn = (
            drawn[:limit]
            + (mark if len(drawn[:limit].rstrip()) < limit or size > plan.usable_bytes else "")
            + drawn[limit + 1 :]
        )
        lines.append(
            [
                f"{one.estimate.tokens_per_s:,.0f} tokens/s",
                format_bytes(size),
                drawn,
                f"{differing(plan, one)}{' *' * bool(one.numerics)}",
            ]
        )
    return lines


def reason_text(one: Rejection) -> str:
    """Return a reason on one line, cut where it is long."""
    text = " ".join(one.reason.split())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."


def _basis(plan: Plan) -> str:
    kept = " without a change of numerics" if plan.keep_quality else ""
    ranked = f"{plan.num_ranked:,} combinations{kept} ranked by a composed estimate, " * (plan.num_ranked > 0)
    return f"{ranked}{plan.num_traced} traced; * changes the numerics"


def _nothing(out: Console, plan: Plan, given: Recipe) -> None:
    if plan.over_host is not None:
        return _only_host(out, plan, plan.over_host, given)
    out.print(f"NOTHING FITS: {describe(given)}", style="bold red")
    least = plan.least
    lines = [["limit", limit_text(plan)], *([["assumed", plan.assumed]] if plan.assumed else [])]
    if least is not None:
        lines.append(["least", f"{format_bytes(least.estimate.highest.device)}: {words_of(least)}"])
    if given.adapter is None:
        lines.append(["try", "--tune lora or --tune qlora, more GPUs (--count), or a shorter --seq"])
    else:
        quantized = "" if given.quantize else "--tune qlora, "
        lines.append(["try", f"{quantized}more GPUs (--count), or a shorter --seq"])
    rows(out, lines, "left", "wrap")


def _only_host(out: Console, plan: Plan, one: Found, given: Recipe) -> None:
    """Print that the host's limit alone forbids what the device holds, and the option that lifts it."""
    estimate = one.estimate
    pinned, limit = format_bytes(estimate.host_bytes), format_bytes(plan.host_limit_bytes)
    gpu = given.hardware.gpu
    out.print(f"FITS ON {gpu}, BUT NOT IN {limit} OF HOST MEMORY: {describe(given)}", style="bold red")
    need = math.ceil(estimate.host_bytes / GIB)
    lines = [
        ["try", f"--host-memory-gib {need}, if the host has it: this pins {pinned} for each GPU, and at most "
                f"{limit} are allowed (by default as much as the GPU has)"],
        ["speed", f"{estimate.tokens_per_s:,.0f} tokens/s, with --host-memory-gib {need}"],
        ["memory", f"{format_bytes(estimate.highest.device)} of {limit_text(plan)}"],
        ["changes", ", ".join(one.changes)],
        *([["assumed", plan.assumed]] if plan.assumed else []),
    ]  # fmt: skip
    rows(out, lines, "left", "wrap")


def plotted(plan: Plan, form: Form) -> bytes:
    """Return the file of a plot: the frontier of memory against speed, with the limit."""
    given = recipe_from(plan.given)
    hardware = f"{given.hardware.count} x {given.hardware.gpu}"
    title = f"{given.model.display_name}, {given.batch.seq:,} tokens, {hardware}"
    return plot_file([frontier_panel(plan)], "plan", form, title=title, size=(9, 5))


def frontier_panel(plan: Plan) -> Panel:
    """Return the plot of memory against speed, as far as a little over the limit."""
    shown = [one for one in plan.frontier if one.estimate.highest.device <= ZOOM * plan.limit_bytes]
    shown = shown or list(plan.frontier[:3])
    name, unit = size_unit([plan.limit_bytes, *(one.estimate.highest.device for one in shown)])
    fit, over = ([one for one in shown if (one.estimate.highest.device <= plan.usable_bytes) == fits]
                 for fits in (True, False))  # fmt: skip
    groups: dict[str, tuple[list[Found], dict[str, Any]]] = {
        "numerics unchanged": ([one for one in fit if not one.numerics], {"color": PREDICTED}),
        "numerics changed": ([one for one in fit if one.numerics], {"color": MEASURED}),
        "over the limit": (over, {"color": WRONG, "is_hollow": True}),
    }
    labels = _labels(shown) if shown else {}
    series = [_series("frontier", shown, "step", unit, color=MUTED, marker=" ")]
    series += [
        _series(label, some, "scatter", unit, text=[labels[id(one)] for one in some], **looks)
        for label, (some, looks) in groups.items()
        if some
    ]
    series += [_series("chosen", plan.found[:1], "scatter", unit, color=INK, marker="*")] * bool(plan.found)
    usable = f"limit less {plan.margin:.1%}: {format_bytes(plan.usable_bytes)}"
    most = max([plan.limit_bytes, *(one.estimate.highest.device for one in shown)])
    left_out = len(plan.frontier) - len(shown)
    more = f"; {left_out} more are far over the limit" if left_out else ""
    return Panel(
        series,
        x_label=f"peak on the device, {name} (less is better{more})",
        y_label="tokens/s (more is better)",
        x_limits=(None, 1.06 * most / unit),
        limits={plan.usable_bytes / unit: usable},
    )


def _series(label: str, some: Sequence[Found], kind: Kind, unit: int, **looks: Any) -> Series:
    sizes = [one.estimate.highest.device / unit for one in some]
    return Series(label, [one.estimate.tokens_per_s for one in some], sizes, kind, **looks)


def _labels(some: Sequence[Found]) -> dict[int, str]:
    """Return what differs between the recipes, of each by its ``id``: the batch, and words not of all."""
    recipes = [one.as_recipe() for one in some]
    words = [registry.describe(recipe).split(", ") for recipe in recipes]
    common = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set(words[0])
    return {
        id(one): ", ".join([f"batch {recipe.batch.micro:,}", *(word for word in mine if word not in common)])
        for one, recipe, mine in zip(some, recipes, words, strict=True)
    }
