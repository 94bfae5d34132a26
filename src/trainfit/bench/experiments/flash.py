"""``flash``: causal FlashAttention, trainfit's kernels against PyTorch's, forward and backward.

First 16 heads at the lengths of training, against PyTorch's backends (the source of ``attention: best``);
three shapes also against FlexAttention and the Triton kernels without Hopper's features; then 131,072 tokens.
Last, one head of 16 to 128 at 128 to 65,536 tokens, the course's published table.
"""

from collections.abc import Iterator

from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.experiment import Experiment, Plot
from trainfit.bench.workloads.attention import COLUMNS, Case, rows
from trainfit.spec.bench import BenchRow

HEADS = 16
COMPARED = {"tiny": ((128, 100),), "full": ((128, 8192), (64, 16384), (128, 16384))}
"""Head size and sequence of the shapes that all bodies run."""
COMPARED_BODIES = {"tiny": ("flash", "ours"), "full": ("flash", "cudnn", "flex", "plain", "ours")}
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
TOKENS = {"tiny": 100, "full": 8192}  # A batch holds as many sequences as make this many tokens, at least one
ONE_HEAD = {
    "tiny": (("fp32", 64),),
    "full": tuple((dtype, d) for dtype in ("bf16", "fp32") for d in (64, 128, 32, 16)),
}
SEQUENCES = {"tiny": (100, 128), "full": tuple(2**power for power in range(7, 17))}
ONE_HEAD_BODIES = ("ours", "pytorch")


def cases(form: str) -> Iterator[Case]:
    """Yield every case, the most important first; bodies of a shape follow each other."""
    plan = [("bf16", COMPARED, COMPARED_BODIES[form]), ("bf16", TRAINING, TRAINING_BODIES),
            ("bf16", LONGEST, ("ours",)), ("fp32", TRAINING_FP32, FP32_BODIES)]  # fmt: skip
    for dtype, shapes, bodies in plan:
        for d, n in shapes[form]:
            for name in bodies:
                yield Case(name, dtype, max(1, TOKENS[form] // n), HEADS, n, d, is_causal=True)
    for dtype, d in ONE_HEAD[form]:
        for n in SEQUENCES[form]:
            for name in ONE_HEAD_BODIES:
                yield Case(name, dtype, 1, 1, n, d, is_causal=True)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield rows of every case."""
    for case in cases(bench.form):
        yield from rows(bench, case)


EXPERIMENT = Experiment(
    title="FlashAttention against PyTorch",
    question="How fast is causal attention: trainfit's kernels, flash, cuDNN and FlexAttention?",
    run=run,
    limit_s=400,
    columns=COLUMNS,
    plots=(
        Plot(
            x=("seq",), y="tflops_per_s", series="body", panels=("head",), x_log=True,
            where={"dtype": ("bf16",), "heads": (16,), "pass": ("both",)},
            order={"head": (128, 64), "body": ("ours", "cudnn", "flash", "flex", "plain"), "seq": ()},
            names={
                128: "head size 128", 64: "head size 64", "cudnn": "cuDNN", "flash": "PyTorch's flash",
                "flex": "FlexAttention", "ours": "trainfit", "plain": "trainfit, plain Triton",
            },
            title="Causal attention, 16 heads, bf16: forward and backward",
            x_label="tokens in a sequence (1K is 1,024)", y_label="TFLOP/s",
        ),
    ),
)  # fmt: skip
