"""An Accuracy as text for the terminal, and as the Markdown page.

Enters: an Accuracy. Leaves: text. Errors are predicted minus measured, over measured.
"""

from collections.abc import Callable, Sequence

from trainfit.report.accuracy_figures import Accuracy, Errors, Group, Outlier
from trainfit.report.accuracy_plots import HISTOGRAM, SCATTER, TIMES
from trainfit.report.accuracy_summary import NAMED, NEAR
from trainfit.report.table import NOTHING, markdown_cell, markdown_grid
from trainfit.spec.units import MIB

FEWEST = 8
"""Recipes that each technique should have been held against."""


def share(value: float, *, signed: bool = False) -> str:
    """A share as per cent: two decimals, four below 0.1 %, and a plain 0 only for what is 0."""
    size = abs(value)
    if size == 0:
        return "0 %"
    sign = "-" if value < 0 else "+" if signed else ""
    if size < 1e-6:
        return "< 0.0001 %"  # of either sign
    return f"{sign}{size * 100:.{2 if size >= 1e-3 else 4}f} %"


def text(accuracy: Accuracy) -> str:
    """The summary in plain lines."""
    lines = []
    for group in accuracy.groups:
        lines.append(f"{group.name}: {group.num_recipes} recipes ({_statuses(group)})")
        for name, errors in _quantities(group).items():
            if errors is not None:
                lines.append(
                    f"  {name:18} median {share(errors.median)}, 95th percentile {share(errors.percentile_95)}, "
                    f"worst {share(errors.worst, signed=True)}, exact {errors.num_exact} of {errors.num_recipes}"
                )
        if group.times is not None:
            lines.append(f"  {'step time':18} {_times_sentence(group)}")
    lines += [f"verdict: {_verdict_sentence(accuracy)}", f"families: {_families(accuracy)}"]
    lines += [f"worst {name}: {_outlier(one)}" for name, worst in accuracy.worst.items() for one in worst[:3]]
    lines += [f"{one.status}: {one.recipe_id} {one.recipe}: {one.message}" for one in accuracy.unfinished]
    lines += [f"measured but not predicted: {one}" for one in accuracy.not_predicted]
    lines.append(f"predicted but not measured: {len(accuracy.not_measured)}")
    return "\n".join(lines)


def page(accuracy: Accuracy) -> str:
    """The Markdown page."""
    whole = accuracy.groups[0]
    parts = [
        "# How good the predictions are",
        "Made from the records by `python -m trainfit.report.accuracy results/*.jsonl --into docs/results/accuracy.md`; do not "
        "edit. An error is predicted minus measured, over measured. Median and 95th percentile are of the errors' "
        "sizes; the worst has its sign. *Exact*: equal to the byte.",
        f"{whole.num_recipes} recipes have a prediction, which needs no GPU, and a measurement ({_statuses(whole)}). A "
        "hash of the recipe puts each into one of two halves: rules may be learned from the one, the other judges them. Not "
        "blindly in every case: two rules (one more steady step is replayed; what must stay free to say *fits*) were kept "
        "after errors of both halves had been seen (docs/log.md). Most recipes are drawn by seeds, some were chosen: "
        f"{_origins(accuracy)}.",
        "## Peak allocated memory",
        _table(
            accuracy.groups,
            ("allocated", lambda group: group.allocated), ("after init", lambda group: group.after_init),
        ),
        f"![Predicted against measured peak, both logarithmic](plots/{SCATTER})",
        f"![Sizes of the errors](plots/{HISTOGRAM})",
        "## By technique",
        "The recipes that ask for each, alone or with others (techniques/): a recipe stands in as many rows as it has techniques.",
        _table(
            accuracy.by_technique,
            ("allocated", lambda group: group.allocated), ("reserved", lambda group: group.reserved),
        ),
        _few_recipes(accuracy),
        "## Each phase's peak",
        _phase_table(accuracy),
        _phase_misses(accuracy),
        "## Reserved by the allocator, and used on the device (nvidia-smi)",
        _table(
            accuracy.groups, ("reserved", lambda group: group.reserved), ("device", lambda group: group.device)
        ),
        "## Does it fit?",
        _verdict_sentence(accuracy) + "".join(f"\n- {markdown_cell(one)}" for one in accuracy.verdicts.wrong),
        "## Step time: measured over expected",
        _without_times(whole),
        _time_table(accuracy),
        f"![Measured over expected step time](plots/{TIMES})",
        *(part for name, worst in accuracy.worst.items() for part in _worst_parts(name, worst)),
        "## Families",
        _families(accuracy) + ".",
        "## Trials without a result",
        _unfinished(accuracy),
        "## Records",
        "\n".join(f"- {markdown_cell(source)}" for source in accuracy.sources),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _few_recipes(accuracy: Accuracy) -> str:
    few = [
        f"{group.name} ({group.num_recipes})" for group in accuracy.by_technique if group.num_recipes < FEWEST
    ]
    return f"Fewer than {FEWEST} recipes: {', '.join(few)}." if few else f"At least {FEWEST} recipes of each."


def _without_times(whole: Group) -> str:
    """Of recipes that shared the GPU with others no times were kept: which techniques' speed is held elsewhere."""
    missing = whole.statuses.get("done", 0) - (whole.times.num_recipes if whole.times else 0)
    if not missing:
        return ""
    return (
        f"{missing} recipes shared their GPU with others when they were measured and have no times: those drawn for the newer techniques, whose "
        "speed is held against what is predicted on [their own pages](techniques/README.md) and in "
        "[the peak-memory experiment](peak-memory.md)."
    )


def _quantities(group: Group) -> dict[str, Errors | None]:
    plain = {
        "allocated": group.allocated, "after init": group.after_init, "reserved": group.reserved,
        "device": group.device,
    }  # fmt: skip
    return plain | group.phases


def _table(groups: Sequence[Group], *columns: tuple[str, Callable[[Group], Errors | None]]) -> str:
    heads = ["recipes", "n"]
    for title, _ in columns:
        heads += [f"{title}: median", "95th percentile", "worst", "exact"]
    rows = []
    for group in groups:
        found = [of(group) for _, of in columns]
        count = max((errors.num_recipes for errors in found if errors), default=0)
        rows.append([group.name, str(count), *(cell for errors in found for cell in _cells(errors))])
    return markdown_grid(heads, rows)


def _cells(errors: Errors | None) -> list[str]:
    if errors is None:
        return [NOTHING] * 4
    worst = share(errors.worst, signed=True)
    return [share(errors.median), share(errors.percentile_95), worst, str(errors.num_exact)]


def _phase_table(accuracy: Accuracy) -> str:
    names = list(accuracy.groups[0].phases)
    rows = [
        [group.name, *(_median_and_worst(group.phases.get(name)) for name in names)]
        for group in accuracy.groups
    ]
    return "Median, and the worst.\n\n" + markdown_grid(
        ["recipes", *(name.replace(".", ", ") for name in names)], rows
    )


def _median_and_worst(errors: Errors | None) -> str:
    return NOTHING if errors is None else f"{share(errors.median)}, {share(errors.worst, signed=True)}"


def _time_table(accuracy: Accuracy) -> str:
    heads = [
        "recipes",
        "n",
        "lowest",
        "5th percentile",
        "median",
        "95th percentile",
        "highest",
        "inside the bounds",
    ]
    rows = [
        [group.name, str(times.num_recipes)]
        + [
            f"{x:.2f}"
            for x in (times.lowest, times.percentile_5, times.median, times.percentile_95, times.highest)
        ]
        + [str(times.num_inside)]
        for group in accuracy.groups
        if (times := group.times) is not None
    ]
    return markdown_grid(heads, rows)


def _times_sentence(group: Group) -> str:
    times = group.times
    assert times is not None
    return (
        f"measured over expected: median {times.median:.2f}, 5th to 95th percentile {times.percentile_5:.2f} to "
        f"{times.percentile_95:.2f}, all {times.lowest:.2f} to {times.highest:.2f}; inside the bounds "
        f"{times.num_inside} of {times.num_recipes}"
    )


def _statuses(group: Group) -> str:
    return ", ".join(f"{count} {status}" for status, count in group.statuses.items())


def _verdict_sentence(accuracy: Accuracy) -> str:
    verdicts = accuracy.verdicts
    return (
        f"Predicted to fit: {verdicts.fits_and_ran} ran, {verdicts.fits_but_out_of_memory} ran out of memory. "
        f"Predicted not to fit: {verdicts.too_large_and_out_of_memory} ran out of memory, "
        f"{verdicts.too_large_but_ran} ran. Of the {verdicts.near_and_ran + verdicts.near_and_out_of_memory} whose predicted use "
        f"is within {NEAR:.0%} of the card's size {verdicts.near_and_ran} ran and {verdicts.near_and_out_of_memory} ran out of memory. "
        f"{len(verdicts.wrong)} were judged wrongly."
    )


def _phase_misses(accuracy: Accuracy) -> str:
    rows = [
        (markdown_cell(one.recipe), f"`{one.recipe_id}`", one.phase.replace(".", ", "), markdown_cell(one.cause), share(one.error, signed=True))
        for one in accuracy.phase_misses
    ]  # fmt: skip
    if not rows:
        return f"No phase is off by more than {NAMED:.1%}."
    return f"Off by more than {NAMED:.1%}:\n\n" + markdown_grid(
        ["recipe", "id", "phase", "cause", "error"], rows, num_text=4
    )


def _origins(accuracy: Accuracy) -> str:
    return ", ".join(f"{count} {name}" for name, count in accuracy.origins.items())


def _families(accuracy: Accuracy) -> str:
    return ", ".join(f"{markdown_cell(name)} {count}" for name, count in accuracy.families.items())


def _outlier(one: Outlier) -> str:
    return f"{share(one.error, signed=True)} ({one.error_bytes / MIB:+.1f} MiB) {one.recipe_id} {one.recipe}; cause: {one.cause}"


def _worst_parts(name: str, worst: tuple[Outlier, ...]) -> tuple[str, str]:
    rows = [
        (
            markdown_cell(one.recipe), f"`{one.recipe_id}`", markdown_cell(one.cause),
            share(one.error, signed=True), f"{one.error_bytes / MIB:+.1f}",
        )
        for one in worst
    ]  # fmt: skip
    return f"## The worst: {name} memory", markdown_grid(
        ["recipe", "id", "cause", "error", "MiB"], rows, num_text=3
    )


def _unfinished(accuracy: Accuracy) -> str:
    rows = [
        [markdown_cell(cell) for cell in (one.recipe, one.recipe_id, one.status, one.message, one.cause)]
        for one in accuracy.unfinished
    ]
    table = (
        markdown_grid(["recipe", "id", "status", "message", "cause"], rows, num_text=5) if rows else "None."
    )
    missing = "".join(f"\n- {markdown_cell(one)}" for one in accuracy.not_predicted)
    missing += "".join(f"\n- {markdown_cell(one)} (not measured)" for one in accuracy.not_measured)
    counts = f"Measured but not predicted: {len(accuracy.not_predicted)}. Predicted but not measured: {len(accuracy.not_measured)}."
    return f"{table}\n\n{counts}{missing}"
