"""``flash``: one head, batch 1, causal, sequence 128 to 65,536: our FlashAttention against PyTorch's kernel and written out.

The same question as the published table of this exercise; forward, backward, and both in one run.
"""

from collections.abc import Iterator

from trainfit.bench.attention import rows
from trainfit.bench.experiment import Bench, Experiment
from trainfit.bench.timing import Rule
from trainfit.spec.bench import BenchRow

HEAD_SIZES = {"tiny": (64,), "full": (64, 128, 16, 32)}
SEQUENCES = {"tiny": (100, 128), "full": tuple(2**power for power in range(7, 17))}
DTYPES = {"tiny": ("fp32",), "full": ("bf16", "fp32")}
BODIES = ("ours", "pytorch", "eager")
FULL = Rule(cap_s=0.4)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Every point; side by side, so that the three see the same clocks."""
    rule = bench.rule if bench.tiny else FULL
    for dtype in DTYPES[bench.form]:
        for d in HEAD_SIZES[bench.form]:
            for n in SEQUENCES[bench.form]:
                for name in BODIES:
                    point = {"dtype": dtype, "head": d, "seq": n, "body": name}
                    yield from rows(bench, point, name, (1, n, d), dtype, is_causal=True, rule=rule)


EXPERIMENT = Experiment("flash", run, limit_s=300)
