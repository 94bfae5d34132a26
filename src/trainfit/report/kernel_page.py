"""The page of the loss, block and update kernels: errors and times beside eager PyTorch, its compiler and cuBLAS.

``python -m trainfit.report.kernel_page results/kernels/h200.jsonl [--into docs/results/kernels.md]``

Enters: the JSON Lines of ``python -m benchmarks.kernels.loss_and_blocks``, of one run. Leaves: the Markdown page. The same rows give the
same bytes. A way that failed is told as failed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainfit.report.table import NOTHING, markdown_cell, markdown_grid
from trainfit.spec.errors import EXIT_BAD_INPUT, InputError
from trainfit.spec.printable import say

MADE_BY = "python -m trainfit.report.kernel_page results/kernels/h200.jsonl --into docs/results/kernels.md"
MEASURED_BY = "python -m benchmarks.kernels.loss_and_blocks results/kernels/h200.jsonl"
GOAL_TFLOPS, GOAL_BYTES, GOAL_ERROR = 600.0, 1.5e9, 2.0
OURS = {"loss": "ours fused", "norm": "ours", "gates": "ours", "rotation": "ours", "update": "ours"}
"""Of each case the way that models take."""
Row = dict[str, Any]

STORIES: dict[str, tuple[str, str]] = {
    "loss": (
        "Linear cross-entropy",
        "Hidden states and the output layer's weight to loss and both gradients (`loss: fused`, `loss: chunked`), every 13th token "
        "ignored. TFLOP/s count the three products of 2 n v e that the mathematics needs. N chunks: the tokens in N parts.",
    ),
    "norm": ("RMSNorm", "`block_kernels: triton`; GB/s count x, its gradients and the result once."),
    "gates": ("SwiGLU", "`block_kernels: triton`, gate and up halves of one tensor."),
    "rotation": ("Rotary embedding", "`block_kernels: triton`, queries and keys as products lay them down."),
    "update": (
        "AdamW of bf16 weights",
        "One weight with bf16 moments, in place, GB/s of 14 bytes a weight. `eager`, `compiled` and `ours` round at random "
        "(`optimizer.stochastic_rounding: true`), the others to nearest.",
    ),
    "products": ("The loss's products alone", "What no loss that is built on cuBLAS can beat, at once and in chunks."),
    "tilings": ("Tilings of the cross-entropy kernel", "One chunk of logits, written over; GB/s count one read and one write."),
    "gate tilings": ("Tilings of SwiGLU's forward", "The kernel alone."),
    "gate tilings, backward": ("Tilings of SwiGLU's backward", "The kernel alone."),
}  # fmt: skip
"""Case -> heading and what it is."""


def main(arguments: list[str] | None = None) -> int:
    """Write or print the page; exit code 0, or 65 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m trainfit.report.kernel_page", description="Write the page of the loss and block kernels."
    )  # fmt: skip
    parser.add_argument("file", type=Path, help="rows of the kernels' benchmark (JSON Lines)")
    parser.add_argument("--into", type=Path, help="Markdown page to write")
    options = parser.parse_args(arguments)
    try:
        text = page(read_rows(options.file))
    except (InputError, FileNotFoundError) as error:
        say(f"trainfit: {error}", err=True)
        return EXIT_BAD_INPUT
    if options.into is None:
        say(text, end="")
    else:
        options.into.write_text(text, encoding="utf-8")
    return 0


def read_rows(path: Path) -> list[Row]:
    """The benchmark's rows.

    Raises:
        InputError: a line is no row of it.
    """
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not {"gpu", "torch", "case", "way", "part"} <= row.keys():
            raise InputError(
                "no row of the kernels' benchmark", f"make it anew: {MEASURED_BY}", file=f"{path}:{number}"
            )
        rows.append(row)
    return rows


def page(rows: Sequence[Row]) -> str:
    """The Markdown.

    Raises:
        InputError: no rows, rows of several runs or of no GPU, or of a case without words here.
    """
    machine = _machine(rows)
    cases = list(dict.fromkeys(row["case"] for row in rows if row["part"] != "errors"))
    for case in cases:
        if case not in STORIES:
            raise InputError("no words for this case", "add them to STORIES", field="case", value=case)
    parts = [
        "# The loss, block and update kernels",
        f"Made by `{MADE_BY}` from the rows of `{MEASURED_BY}`; do not edit.",
        f"{machine} bf16. Times are between events on the device, the caches emptied before each: median, and the spread from the "
        f"10th to the 90th percentile. {_watched(rows)} Extra: the allocator's peak over inputs and results. Eager and compiled: the same function in PyTorch, "
        "as it is and by `torch.compile`. How the kernels work stands in `src/trainfit/kernels/`; how a recipe asks for them in "
        "[recipe.md](../reference/recipe.md).",
        "## What was asked",
        _goals(rows),
        "## Errors",
        "The norm of the difference from fp64 by the norm, of results and gradients in turn, at small odd sizes, from the same bf16 inputs; "
        "against eager PyTorch's in bf16, the largest ratio.",
        _errors([row for row in rows if row["part"] == "errors"]),
    ]  # fmt: skip
    for case in cases:
        parts += _case(case, [row for row in rows if row["case"] == case and row["part"] != "errors"])
    return "\n\n".join(parts) + "\n"


def _machine(rows: Sequence[Row]) -> str:
    runs = {(row["gpu"], row["torch"], row.get("commit")) for row in rows}
    if len(runs) != 1:
        raise InputError(f"rows of {len(runs)} runs", "give the file of one run of the benchmark")
    ((gpu, torch_version, commit),) = runs
    if gpu == "cpu":
        raise InputError("rows of a CPU", "run the benchmark on a GPU", field="gpu", value=gpu)
    days = sorted({row["made_at"][:10] for row in rows if "made_at" in row})
    made = f", commit {commit[:12]}" if commit else ""
    return f"{gpu}, torch {torch_version}{made}{', ' + days[0] if days else ''}."


def _watched(rows: Sequence[Row]) -> str:
    """What was done about held clocks; rows from before the harness say nothing of it."""
    if all("discarded" in row for row in rows if "ms" in row):
        return (
            "The device rests before each sample, 0.3 s before matrix products, so these are times at full clocks; back to back the power cap holds them down. "
            "Samples in which the driver held the clocks down are thrown away; where most were, there is no number."
        )
    return "The clocks were not watched in this run."


def _goals(rows: Sequence[Row]) -> str:
    lines: list[list[str]] = []
    fused = _timed(rows, "loss", OURS["loss"], "both")
    if fused is not None:
        speed, extra = fused["tflops"], fused["extra_bytes"]
        lines += [
            ["linear cross-entropy, forward and backward: at least 600 TFLOP/s", f"{speed:.1f}", _met(speed >= GOAL_TFLOPS)],
            ["with less than 1.5 GB of extra memory", f"{extra / 1e9:.3f} GB", _met(extra < GOAL_BYTES)],
        ]  # fmt: skip
    elif any(row["case"] == "loss" for row in rows):
        lines.append(["linear cross-entropy, forward and backward", "no number: see below", "**missed**"])
    told = [row for row in rows if row["part"] == "errors"]
    if told:
        worst = max(told, key=lambda row: row["of_eager"])
        shown = f"{worst['of_eager']:.2f} ({worst['case']}, {worst['way']})"
        lines.append(["no error over twice eager PyTorch's", shown, _met(worst["of_eager"] <= GOAL_ERROR)])
    for case, way in OURS.items():
        if case == "loss":
            lines += _beside_compiled(rows, way)  # It has goals of its own.
            continue
        for part in ("forward", "both"):
            ours, theirs = (_timed(rows, case, one, part) for one in (way, "compiled"))
            if ours is not None and theirs is not None:
                what = f"{STORIES[case][0]}{'' if case == 'update' else ', ' + _PARTS[part]}: faster than compiled"
                shown = f"{ours['ms']:.3f} against {theirs['ms']:.3f} ms"
                lines.append([what, shown, _faster(ours["ms"], theirs["ms"])])
    return markdown_grid(["goal", "measured", ""], lines, num_text=3)


def _beside_compiled(rows: Sequence[Row], way: str) -> list[list[str]]:
    """The loss's time and memory beside the compiler's; less time was not asked for."""
    ours, theirs = (_timed(rows, "loss", one, "both") for one in (way, "compiled"))
    if ours is None or theirs is None:
        return []
    memory = [f"{each['extra_bytes'] / 1e9:.2f}" for each in (ours, theirs)]
    shown = f"{ours['ms']:.1f} against {theirs['ms']:.1f} ms, {memory[0]} against {memory[1]} GB"
    return [["linear cross-entropy beside the compiled one", shown, ""]]


_PARTS = {"forward": "forward", "both": "forward and backward"}


TIE = 0.005
"""Two medians this near each other are called equal: their spread is as wide."""


def _faster(ours_ms: float, theirs_ms: float) -> str:
    return "equal" if abs(ours_ms / theirs_ms - 1) < TIE else _met(ours_ms < theirs_ms)


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def _timed(rows: Sequence[Row], case: str, way: str, part: str) -> Row | None:
    """The row of a way's time; None: it has none, which the case's own part of the page explains."""
    return next((row for row in rows if (row["case"], row["way"], row["part"]) == (case, way, part)), None)


def _errors(rows: Sequence[Row]) -> str:
    lines = [
        [row["case"], row["way"], _shares(row["error"]), _shares(row.get("eager", ())), _of_eager(row)]
        for row in rows
    ]
    return markdown_grid(["case", "way", "error", "eager's", "ratio"], lines, num_text=2)


def _of_eager(row: Row) -> str:
    """The ratio; nothing where eager PyTorch was not run: what stands in its place then is the rounding of bf16."""
    return f"{row['of_eager']:.2f}" if row.get("eager") else NOTHING


def _shares(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.4g} %" for value in values) or NOTHING


def _case(case: str, rows: Sequence[Row]) -> list[str]:
    """Heading, words, table."""
    heading, words = STORIES[case]
    sizes = {row["size"] for row in rows if row.get("size")}
    done, failed = ([row for row in rows if ("ms" in row) is timed] for timed in (True, False))
    columns = [column for column in COLUMNS if any(column[1](row) != NOTHING for row in done)]
    lines = [[column[1](row) for column in columns] for row in done]
    text = [f"## {heading}", f"{words}{' Size: ' + '; '.join(sorted(sizes)) + '.' if sizes else ''}"]
    if done:
        text.append(markdown_grid([title for title, _ in columns], lines, num_text=2))
    if failed:
        text.append("\n".join(f"- {row['way']} failed: {markdown_cell(row['message'])}" for row in failed))
    return text


def _number(key: str, digits: int, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: NOTHING if row.get(key) is None else f"{row[key] * scale:,.{digits}f}"


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("way", lambda row: row["way"]),
    ("part", lambda row: _PARTS[row["part"]]),
    ("ms", _number("ms", 3)),
    ("spread", lambda row: f"{100 * (row['ms_p90'] - row['ms_p10']) / row['ms']:.1f} %"),
    ("TFLOP/s", _number("tflops", 1)),
    ("GB/s", _number("gb_per_s", 0)),
    ("extra GB", _number("extra_bytes", 3, 1e-9)),
    ("samples", _number("samples", 0)),
    ("thrown away", _number("discarded", 0)),
)


if __name__ == "__main__":
    sys.exit(main())
