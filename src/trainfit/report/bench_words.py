"""What the titles of a benchmark's tables mean, for the terminal; the docs' pages say it in their own prose."""

from trainfit.report.bench_table import DEVIATION, grids
from trainfit.spec.bench import BenchResult

WORDS: dict[str, dict[str, str]] = {
    "accumulation": {
        "cast": "whether each addend is cast to the sum's dtype before it is added",
        "relative error": "against the exactly rounded sum",
    },
    "attention": {
        "body": "eager is written out, compiled the same by torch.compile, ours is trainfit's FlashAttention",
    },
    "autocast": {
        "of fp32": "the output's dtype where the inputs are fp32",
        "of low": "the output's dtype where the inputs are autocast's dtype already",
    },
    "dataloader": {
        "step": "one step of the loop, data and computing together",
        "waiting": "share of a step beyond one whose batch is on the device already",
        "waits": "whether that is more than 5 %",
    },
    "flash": {
        "body": "ours is what attention: triton runs here, plain our kernel without Hopper's features, the others are PyTorch's",
    },
    "fusion": {
        "moved": "what the operations read and write",
        "least": "what any way must move; GB/s are of it",
        "of a copy": "its GB/s over those of a plain copy of as many bytes",
    },
    "kernels": {
        "busy": "the sum of the kernels' times, from one step under the profiler",
        "operations": "PyTorch's operations; a CPU has no kernels, and the profiler's own cost is in their times",
        "busy share": "busy over the median",
        "products": "matrix products; they, softmax and optimizer are shares of busy",
        "flops ratio": "FLOPs of attention's two products over softmax's; time ratio is that of their times",
    },
    "memory": {
        "before": "the built model, before any step",
        "first peak": "the peak of the very first step; the other columns are of a later one",
        "fits": "whether the prediction fits into this device",
        "off by": "the predicted peak less the measured one",
        "made at": "the model's line whose operation made it; in the backward the autograd node",
    },
    "streams": {
        "gain": "the time in one stream over the time in two",
        "at most": "the gain if the shorter of the two were hidden wholly",
    },
    "transformer": {
        "warm-up": "steps before the first one that counts",
    },
}  # fmt: skip
"""By experiment and title."""


def words(result: BenchResult) -> list[str]:
    """The meaning of each title and status that its tables have."""
    rows = result.rows
    titles = {title for grid in grids(rows) for title in (*grid.titles, *_named_above(grid.same))}
    found: list[str] = []
    if any(row.times for row in rows):
        found.append("median: of the samples")
        found.append("spread: from the samples' 10th to their 90th percentile, over the median")
    if any(name.endswith(DEVIATION) for row in rows for name in row.numbers):
        found.append("a ± b: mean and standard deviation of the samples")
    if any(row.status == "unsteady" for row in rows):
        found.append("unsteady: the time cap came before the median was known as well as the experiment asks")
    meanings = WORDS.get(result.experiment, {})
    return found + [f"{title}: {meaning}" for title, meaning in meanings.items() if title in titles]


def _named_above(same: str) -> list[str]:
    """Keys of a heading such as ``warm-up 5, compile false``."""
    return [part.rpartition(" ")[0] for part in same.split(", ")] if same else []
