"""``attention``: one head, batch 8, unmasked, as the published course results have it: written out, compiled, and ours.

Head size 16 to 128, sequence 256 to 16,384 and on until memory runs out; forward and backward apart, on the device's own clock.
First the published mistake: the same forward by the host's clock, without waiting for the GPU.
"""

from collections.abc import Iterator

from trainfit.bench.attention import Case, rows, unsynchronised
from trainfit.bench.experiment import Bench, Experiment
from trainfit.bench.timing import Rule
from trainfit.spec.bench import BenchRow

BATCH = {"tiny": 2, "full": 8}
PLAN = {
    "tiny": (("fp32", 64),),
    "full": (("fp32", 64), ("bf16", 64), ("fp32", 128), ("bf16", 128), ("fp32", 16), ("fp32", 32)),
}  # fmt: skip
"""Dtypes and head sizes, the most telling first: the time limit cuts from behind."""
SEQUENCES = {"tiny": (64, 128), "full": (256, 1024, 4096, 8192, 16384)}
BEYOND = {"tiny": (), "full": (32768, 65536, 131072)}
"""Until those that hold the scores are out of memory."""
BODIES = {"tiny": ("eager", "ours"), "full": ("eager", "compiled", "ours")}
FULL = Rule(warmup=2, min_samples=6, max_samples=60, cap_s=0.5)
HOLDS_NO_SCORES = "ours"


def run(bench: Bench) -> Iterator[BenchRow]:
    """Every point, the bodies of a shape side by side; once a body is out of memory or time, its longer sequences are left out."""
    if bench.device.type == "cuda":  # On a CPU the host's clock is the right one.
        for name in BODIES[bench.form]:
            yield from unsynchronised(bench, _case(bench, "fp32", 64, SEQUENCES[bench.form][-1], name))
    full_up: set[tuple[str, int, str]] = set()
    for lengths in (SEQUENCES, BEYOND):
        for dtype, d in PLAN[bench.form]:
            for n in lengths[bench.form]:
                left = [name for name in BODIES[bench.form] if (dtype, d, name) not in full_up]
                if lengths is BEYOND and set(left) <= {HOLDS_NO_SCORES}:
                    break
                for name in left:
                    for row in _rows(bench, _case(bench, dtype, d, n, name)):
                        if row.status in ("out-of-memory", "not-run"):
                            full_up.add((dtype, d, name))
                        yield row


def _case(bench: Bench, dtype: str, d: int, n: int, name: str) -> Case:
    return Case(name, dtype, BATCH[bench.form], 1, n, d, is_causal=False)


def _rows(bench: Bench, case: Case) -> Iterator[BenchRow]:
    yield from rows(bench, case, bench.rule if bench.tiny else FULL)


EXPERIMENT = Experiment("attention", run, limit_s=200)
