"""``attention``: one head, batch 8, unmasked, as the published course results have it: written out, compiled, and ours.

Head size 16 to 128, sequence 256 to 16,384 and on until memory runs out; forward and backward apart, on the device's own clock.
"""

from collections.abc import Iterator

from trainfit.bench.attention import rows
from trainfit.bench.experiment import Bench, Experiment
from trainfit.bench.timing import Rule
from trainfit.spec.bench import BenchRow

BATCH = {"tiny": 2, "full": 8}
HEAD_SIZES = {"tiny": (64,), "full": (64, 128, 16, 32)}
SEQUENCES = {"tiny": (64, 128), "full": (256, 1024, 4096, 8192, 16384, 32768, 65536)}
DTYPES = {"tiny": ("fp32",), "full": ("fp32", "bf16")}
BODIES = {"tiny": ("eager", "ours"), "full": ("eager", "compiled", "ours")}
FULL = Rule(cap_s=0.6)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Every point; after a body ran out of memory, its longer sequences are left out."""
    rule = bench.rule if bench.tiny else FULL
    for dtype in DTYPES[bench.form]:
        for d in HEAD_SIZES[bench.form]:
            full_up: set[str] = set()
            for n in SEQUENCES[bench.form]:
                for name in BODIES[bench.form]:
                    if name in full_up:
                        continue
                    shape = (BATCH[bench.form], n, d)
                    point = {"dtype": dtype, "head": d, "seq": n, "body": name}
                    for row in rows(bench, point, name, shape, dtype, is_causal=False, rule=rule):
                        if row.status == "out-of-memory":
                            full_up.add(name)
                        yield row


EXPERIMENT = Experiment("attention", run, limit_s=300)
