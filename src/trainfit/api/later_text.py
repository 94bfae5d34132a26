"""What changes of a recipe would save, and what comes later in a run, as text for a terminal."""

from rich.console import Console

from trainfit.report.console import heading, rows
from trainfit.spec.explanation import Later, LengthsRun, Savings
from trainfit.spec.units import format_bytes


def show_savings(out: Console, found: Savings) -> None:
    """Print what each change would save, the most first, and what it takes."""
    heading(out, f"What each change would save of {format_bytes(found.peak_device_bytes)} on the device")
    lines = [["saves", "left", "time", "fits", "change"]]
    for one in found.changes:
        time = "" if one.time_ratio is None else f"{one.time_ratio - 1:+.0%}"
        numerics = f" (changes the numerics: {one.numerics})" if one.numerics else ""
        fits = "yes" if one.fits else "no"
        saved = _signed(-one.saved_bytes)
        lines.append([saved, format_bytes(one.peak_device_bytes), time, fits, one.change + numerics])
    rows(out, lines, "right", "right", "right", "left", "wrap")
    if not found.is_complete:
        rows(out, [["the time was over before every change had been predicted: run it again"]], "wrap")


def show_later(out: Console, found: Later) -> None:
    """Print the spikes, and the run of varied lengths."""
    heading(out, "Later in the run, allocated bytes against the step's own peak")
    lines = [["", "peak", "more", "fits", ""]]
    for one in found.spikes:
        size, fits = format_bytes(one.peak_allocated_bytes), "yes" if one.fits else "NO"
        lines.append([one.name, size, _signed(one.more_bytes), fits, one.what])
    rows(out, lines, "left", "right", "right", "left", "wrap")
    if found.lengths is not None:
        _lengths(out, found.lengths)
    for note in found.notes:
        rows(out, [[note]], "wrap")


def _lengths(out: Console, found: LengthsRun) -> None:
    low, middle, high = found.lengths
    heading(
        out,
        f"{found.num_steps:,} steps of varied lengths ({low:,} to {high:,} tokens, median {middle:,})",
    )
    lines = [["reserved where every step is the longest", format_bytes(found.longest_alone_bytes)]]
    for number, size in found.reserved_bytes.items():
        name = f"reserved after {number:,} step{'s' * (number > 1)}"
        lines.append([name, format_bytes(size)])
    lines.append([f"with expandable_segments:True after {found.num_steps:,}",
                  format_bytes(found.expandable_bytes)])  # fmt: skip
    rows(out, lines, "left", "right")
    notes = [f"{found.num_lengths} distinct lengths, each predicted"]
    if found.num_retries:
        notes.append(f"the cache was emptied {found.num_retries:,} times to make room")
    for failed, how in (
        (found.failed, ""),
        (found.expandable_failed, " with expandable_segments:True too"),
    ):
        if failed is not None:
            notes.append(f"OUT OF MEMORY in step {failed:,}{how}")
    notes.append(_late(found))
    rows(out, [[note] for note in notes], "wrap")


def _late(found: LengthsRun) -> str:
    what = f"a batch of {found.late_length:,} tokens a sequence"
    if found.late_fits:
        reserved = format_bytes(found.late_reserved_bytes)
        return f"{what} after {found.late_after:,} steps fits: {reserved} reserved"
    line = f"the first step fits, and {what} RUNS OUT OF MEMORY after {found.late_after:,} steps"
    if found.late_alone_fits:
        line += "; as the first step it fits"
    other = "fits" if found.late_expandable_fits else "does not fit either"
    return f"{line}; with expandable_segments:True it {other}"


def _signed(num_bytes: int) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"
