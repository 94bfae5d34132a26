"""``flash``: causal FlashAttention, ours against PyTorch's, forward, backward, and both in one run.

First 16 heads at the lengths that training has, beside PyTorch's backends (what ``attention: best`` chooses by), the shapes of the
goals also beside FlexAttention and our plain kernels, and 131,072 tokens; then one head of 16 to 128, 128 to 65,536 tokens, the
published table of this exercise. ``--only dtype=`` and ``--only heads=`` share the work out.
"""

from collections.abc import Iterator

from trainfit.bench.harness.bench import Bench, Experiment
from trainfit.bench.workloads.attention import Case, rows, rule_of
from trainfit.spec.bench import BenchRow

HEADS = 16
GOALS = {"tiny": ((128, 100),), "full": ((128, 8192), (64, 16384), (128, 16384))}
"""Head size and sequence."""
GOAL_BODIES = {"tiny": ("flash", "ours"), "full": ("flash", "cudnn", "flex", "plain", "ours")}
TRAINING = {
    "tiny": (),
    "full": tuple(
        (d, n) for n in (4096, 2048, 1024, 8192, 32768) for d in (128, 64) if (d, n) != (128, 8192)
    ),
}
TRAINING_BODIES = ("flash", "cudnn", "ours")
TRAINING_FP32 = {"tiny": (), "full": ((64, 2048), (128, 2048))}
FP32_BODIES = ("pytorch", "ours")
LONGEST = {"tiny": (), "full": ((128, 131072), (64, 131072))}
TOKENS = {"tiny": 100, "full": 8192}
"""A batch holds as many sequences as make so many tokens, at least one."""
ONE_HEAD = {
    "tiny": (("fp32", 64),),
    "full": tuple((dtype, d) for dtype in ("bf16", "fp32") for d in (64, 128, 32, 16)),
}
SEQUENCES = {"tiny": (100, 128), "full": tuple(2**power for power in range(7, 17))}
ONE_HEAD_BODIES = ("ours", "pytorch")


def cases(form: str) -> Iterator[Case]:
    """Every case, the most important first, the bodies of a shape side by side, so that all see the same clocks."""
    plan = [("bf16", GOALS, GOAL_BODIES[form]), ("bf16", TRAINING, TRAINING_BODIES), ("bf16", LONGEST, ("ours",)),
            ("fp32", TRAINING_FP32, FP32_BODIES)]  # fmt: skip
    for dtype, shapes, bodies in plan:
        for d, n in shapes[form]:
            for name in bodies:
                yield Case(name, dtype, max(1, TOKENS[form] // n), HEADS, n, d, is_causal=True)
    for dtype, d in ONE_HEAD[form]:
        for n in SEQUENCES[form]:
            for name in ONE_HEAD_BODIES:
                yield Case(name, dtype, 1, 1, n, d, is_causal=True)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Rows of every case."""
    for case in cases(bench.form):
        yield from rows(bench, case, bench.rule if bench.tiny else rule_of(case))


EXPERIMENT = Experiment("flash", run, limit_s=400)
