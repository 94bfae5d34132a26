"""``attention``: one head, batch 8, unmasked, as in the course: written out, compiled, trainfit's kernels.

Head sizes 16 to 128 at sequences of 256 to 16,384, size 64 beyond until memory runs out; forward and backward
apart, by the device's clock. The compiled body runs every length of size 64, and the shortest and longest of
the others. The first rows time the forward wrongly on purpose: by the host's clock, without synchronization.

Last, 16 heads of 64, 128 and 256 by each of PyTorch's kernels, the rates that step-time prediction uses: with
a mask as a tensor (``--only mask=additive,boolean``), and causal without one (``--only mask=none``).
"""

from collections.abc import Iterator

from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.experiment import MEDIAN, Experiment, Plot
from trainfit.bench.workloads.attention import COLUMNS, Case, MaskKind, rows, unsynchronised
from trainfit.spec.bench import BenchRow

BATCH = {"tiny": 2, "full": 8}
PLAN = {
    "tiny": (("fp32", 64),),
    "full": tuple((dtype, d) for d in (64, 128, 32, 16) for dtype in ("fp32", "bf16")),
}
"""Dtypes and head sizes, the most important first: a time limit cuts from the end."""
WHOLE = 64  # The head size whose every length is compiled, and that continues until memory runs out
SEQUENCES = {"tiny": (64, 128), "full": (256, 1024, 4096, 8192, 16384)}
COMPILED = (256, 16384)
"""Lengths at which the other head sizes are compiled: each shape takes seconds to compile."""
BEYOND = (("bf16", 32768), ("fp32", 32768), ("bf16", 65536), ("fp32", 65536), ("bf16", 131072))
"""In full form, until the bodies that hold the scores are out of memory."""
BODIES = {"tiny": ("eager", "ours"), "full": ("eager", "compiled", "ours")}
HOLDS_NO_SCORES = "ours"
BEYOND_OURS = "bf16"  # In fp32 the kernels take seconds a run there

HEADS = {"tiny": 2, "full": 16}
TOKENS = {"tiny": 192, "full": 8192}  # A batch holds as many sequences as make this many tokens
KERNEL_SEQUENCES = (8192, 4096, 2048, 1024)
Plan = tuple[tuple[MaskKind, str, tuple[int, ...], tuple[int, ...], tuple[str, ...]], ...]
KERNEL_PLAN: dict[str, Plan] = {
    "tiny": tuple((kind, "fp32", (64,), (96,), ("pytorch",)) for kind in ("additive", "boolean", "none")),
    "full": (
        ("additive", "bf16", (128, 64, 256), KERNEL_SEQUENCES, ("cudnn", "efficient")),
        ("none", "bf16", (256,), KERNEL_SEQUENCES, ("cudnn", "flash", "efficient", "ours")),
        ("none", "bf16", (128, 64), KERNEL_SEQUENCES, ("efficient",)),
        ("additive", "fp32", (128, 64, 256), KERNEL_SEQUENCES, ("efficient",)),
        ("none", "fp32", (256,), KERNEL_SEQUENCES, ("efficient",)),
        ("boolean", "bf16", (128, 64, 256), (8192, 2048), ("cudnn", "efficient")),
    ),
}
"""Mask, dtype, head sizes, sequences and bodies, the most important first. A boolean mask adds its
conversion."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield every point; once a body is out of memory, its longer sequences are left out."""
    if bench.device.type == "cuda":  # On a CPU the host's clock is the right one.
        for name in BODIES[bench.form]:
            yield from unsynchronised(bench, _case(bench, "fp32", WHOLE, SEQUENCES[bench.form][-1], name))
    full_up: set[tuple[str, int, str]] = set()
    for dtype, d, n, bodies in _shapes(bench.form):
        left = [name for name in bodies if (dtype, d, name) not in full_up]
        if set(left) <= {HOLDS_NO_SCORES}:
            continue
        for name in left:
            for row in rows(bench, _case(bench, dtype, d, n, name)):
                if row.status == "out-of-memory":
                    full_up.add((dtype, d, name))
                yield row
    for case in kernel_cases(bench.form):
        yield from rows(bench, case)


def _shapes(form: str) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """Yield dtype, head size, length and bodies: one head size until memory runs out, then the others."""
    for dtype, d in PLAN[form]:
        if d == WHOLE:
            for n in SEQUENCES[form]:
                yield dtype, d, n, BODIES[form]
    if form == "full":
        for dtype, n in BEYOND:
            yield dtype, WHOLE, n, BODIES[form] if dtype == BEYOND_OURS else _without(HOLDS_NO_SCORES, form)
    for dtype, d in PLAN[form]:
        if d != WHOLE:
            for n in SEQUENCES[form]:
                yield dtype, d, n, BODIES[form] if n in COMPILED else _without("compiled", form)


def kernel_cases(form: str) -> Iterator[Case]:
    """Yield cases of several heads by each kernel; causal by ``is_causal`` where there is no mask."""
    for mask, dtype, head_sizes, lengths, bodies in KERNEL_PLAN[form]:
        for d in head_sizes:
            for n in lengths:
                for name in bodies:
                    batch = max(1, TOKENS[form] // n)
                    yield Case(name, dtype, batch, HEADS[form], n, d, is_causal=mask == "none", mask=mask)


def _without(body: str, form: str) -> tuple[str, ...]:
    return tuple(name for name in BODIES[form] if name != body)


def _case(bench: Bench, dtype: str, d: int, n: int, name: str) -> Case:
    return Case(name, dtype, BATCH[bench.form], 1, n, d, is_causal=False)


EXPERIMENT = Experiment(
    title="Attention: time and memory",
    question="What do attention written out, compiled and trainfit's kernels take, until memory runs out?",
    run=run,
    limit_s=420,
    columns=COLUMNS,
    plots=(
        Plot(
            x=("seq",), y=MEDIAN, series="body", panels=("dtype",), x_log=True, y_log=True, scale=1e3,
            where={"heads": (1,), "head": (64,), "pass": ("both",)}, order={"seq": ()},
            names={"eager": "written out", "ours": "trainfit"},
            title="Attention of one head of 64, unmasked: forward and backward",
            x_label="tokens in a sequence (1K is 1,024)", y_label="median, ms",
        ),
    ),
)  # fmt: skip
