"""``attention``: one head, batch 8, unmasked, as the published course results have it: written out, compiled, and ours.

Head size 64 at sequences of 256 to 16,384 and on until memory runs out, 16, 32 and 128 at three of them; forward and backward apart, on
the device's own clock.
First the published mistake: the same forward by the host's clock, without waiting for the GPU.
"""

from collections.abc import Iterator

from trainfit.bench.attention import Case, rows, rule_of, unsynchronised
from trainfit.bench.experiment import Bench, Experiment
from trainfit.spec.bench import BenchRow

BATCH = {"tiny": 2, "full": 8}
PLAN = {
    "tiny": (("fp32", 64),),
    "full": (("fp32", 64), ("bf16", 64), ("fp32", 128), ("bf16", 128), ("fp32", 16), ("fp32", 32)),
}  # fmt: skip
"""Dtypes and head sizes, the most telling first: the time limit cuts from behind."""
WHOLE = 64
"""The head size that has every length; each length is compiled anew, so the others have three."""
SEQUENCES = {"tiny": (64, 128), "full": (256, 1024, 4096, 8192, 16384)}
NARROW = 32
"""Up to this head size the compiled body is left out: each of its shapes takes seconds to compile."""
THINNED = {"tiny": (), "full": (256, 4096, 8192)}
BEYOND = (("bf16", 32768), ("fp32", 32768), ("bf16", 65536), ("fp32", 65536), ("bf16", 131072))
"""In full form, until those that hold the scores are out of memory."""
BODIES = {"tiny": ("eager", "ours"), "full": ("eager", "compiled", "ours")}
HOLDS_NO_SCORES = "ours"
BEYOND_OURS = "bf16"
"""In fp32 our kernels take seconds a run there."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Every point, the bodies of a shape side by side; once a body is out of memory or time, its longer sequences are left out."""
    if bench.device.type == "cuda":  # On a CPU the host's clock is the right one.
        for name in BODIES[bench.form]:
            yield from unsynchronised(bench, _case(bench, "fp32", WHOLE, SEQUENCES[bench.form][-1], name))
    full_up: set[tuple[str, int, str]] = set()
    for dtype, d, n, bodies in _shapes(bench.form):
        left = [name for name in bodies if (dtype, d, name) not in full_up]
        if set(left) <= {HOLDS_NO_SCORES}:
            continue
        for name in left:
            for row in _rows(bench, _case(bench, dtype, d, n, name)):
                if row.status in ("out-of-memory", "not-run"):
                    full_up.add((dtype, d, name))
                yield row


def _shapes(form: str) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """Dtype, head size, length and bodies: the whole head size and on until memory runs out, then the others."""
    for whole in (True, False):
        for dtype, d in PLAN[form]:
            if (d == WHOLE) is whole:
                for n in (SEQUENCES if whole else THINNED)[form]:
                    yield dtype, d, n, _without("compiled", form) if d <= NARROW else BODIES[form]
        if whole and form == "full":
            for dtype, n in BEYOND:
                yield (
                    dtype,
                    WHOLE,
                    n,
                    BODIES[form] if dtype == BEYOND_OURS else _without(HOLDS_NO_SCORES, form),
                )


def _without(body: str, form: str) -> tuple[str, ...]:
    return tuple(name for name in BODIES[form] if name != body)


def _case(bench: Bench, dtype: str, d: int, n: int, name: str) -> Case:
    return Case(name, dtype, BATCH[bench.form], 1, n, d, is_causal=False)


def _rows(bench: Bench, case: Case) -> Iterator[BenchRow]:
    yield from rows(bench, case, bench.rule if bench.tiny else rule_of(case))


EXPERIMENT = Experiment("attention", run, limit_s=140)
