"""The timing harness: the one place where a benchmark's times come from.

Enters: something to run, and a rule. Leaves: a Timing, which has samples only if the run was clean.

Each sample: empty the cache, mark, run, mark, ask for the clocks until the device is done. Samples are taken until the median is
known well enough (``Rule.spread``), or the time cap. With ``Rule.hide`` the device first spins for 1.5 times as long as the host took to
ask for a whole run; a sample whose work the device came to before the host had asked for all of it is taken again. A sample in which the driver held the clocks down is thrown away; from then on
the device rests before every sample, longer with each one lost: work at full load draws more than the GPU may for long, and
without a rest every second sample would be lost. Where most samples are lost all the same, the run has no number.

The spread is that of the median, not of the samples: the 95 % confidence interval by order statistics, which needs no bell curve
(Le Boudec, Performance Evaluation, 2010, section 2.2; Hoefler and Belli, SC 2015, rule 5).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from trainfit.bench.harness.stopwatch import BUSY_S, Stopwatch
from trainfit.spec.bench import BenchStatus, Spread

Lap = Callable[[str], None]
"""Called by what is timed where a part of it begins."""
TOTAL = "total"
FIRST_REST_S, LONGEST_REST_S = 0.01, 1.0
SPIN = 1.5
"""Times the longest that the host took to ask for a run."""
MOST_EXPOSED = 6
"""Samples in a row that the device came to too early; with so many the work itself waits for the device (the spin, half as long again each time, stays short)."""
PATIENCE = 8
"""Samples lost after the longest rest; with so many, and more than were kept, the work itself is what holds the clocks down."""


@dataclass(frozen=True)
class Rule:
    """How many samples."""

    warmup: int = 3
    """Runs before the first sample."""
    min_samples: int = 10
    max_samples: int = 200
    spread: float = 0.02
    """Width of the median's confidence interval over the median, at which it is known well enough."""
    cap_s: float = 3.0
    """Seconds after which no further sample begins, resting included. The very first run always runs and is not counted: it may
    compile. As many seconds again for the warm-up."""
    flush: bool = True
    hide: bool = False
    """Keep the device busy until the host has asked for the whole sample, so that a short one is the device's time alone. Never
    where the host's time is part of the question."""
    rest_s: float = 0.0
    """The device rests so long before every sample, so that the power it draws on average stays below what it may."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError(
                f"min_samples = {self.min_samples}: must be 1 to max_samples ({self.max_samples})"
            )


@dataclass
class Timing:
    """Samples of one run; ``laps`` has the seconds of each part, ``total`` of the whole, in the order taken.

    ``host`` has the host's seconds of the same parts: how long it took to ask for them. ``runs`` counts the runs before each kept sample, warm-up and discarded ones included. ``reasons``: why any were discarded.
    """

    status: BenchStatus = "done"
    message: str = ""
    laps: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)
    discarded: int = 0
    reasons: tuple[str, ...] = ()

    def after(self, runs: int, num_samples: int) -> "Timing":
        """The first ``num_samples`` kept samples that at least ``runs`` runs went before; not judged.

        ``discarded`` are those among them; whether too many were is the whole series' matter.
        """
        kept = [index for index, before in enumerate(self.runs) if before >= runs][:num_samples]
        laps = {name: [samples[index] for index in kept] for name, samples in self.laps.items()}
        host = {name: [samples[index] for index in kept] for name, samples in self.host.items()}
        ran = [self.runs[index] for index in kept]
        lost = ran[-1] + 1 - runs - len(ran) if ran else 0
        return Timing(laps=laps, host=host, runs=ran, discarded=lost, reasons=self.reasons)

    def spread(self, lap: str = TOTAL) -> Spread | None:
        """The samples' summary; None where there is no number."""
        samples = self.laps.get(lap)
        return Spread.of(samples) if samples else None


def take(
    run: Callable[[Lap], object],
    stopwatch: Stopwatch,
    rule: Rule,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time ``run``. What it raises is the caller's.

    Args:
        run: is given a function to call with a part's name where that part begins; it need not call it.
        clock: seconds for the time cap.
    """
    count, asking_s, start = 0, 0.0, clock()
    while count < rule.warmup and (count == 0 or clock() - start <= rule.cap_s):
        begun = stopwatch.host_now()
        run(_no_lap)
        asking_s = stopwatch.host_now() - begun  # The last: the first may compile.
        stopwatch.wait()
        count += 1
    timing, rest_s, lost_rested, exposed, start = Timing(), rule.rest_s, 0, 0, clock()
    while len(timing.runs) < rule.max_samples:
        if rest_s:
            stopwatch.rest(rest_s)
        sample = _sample(run, stopwatch, rule, max(BUSY_S, SPIN * asking_s))
        exposed = exposed + 1 if sample.exposed else 0
        if sample.exposed:
            asking_s = max(asking_s, sample.host[TOTAL])
        elif sample.held:
            timing.discarded, timing.reasons = (
                timing.discarded + 1,
                tuple(sorted({*timing.reasons, *sample.held})),
            )
            lost_rested += rest_s >= LONGEST_REST_S
            rest_s = min(2 * rest_s or FIRST_REST_S, LONGEST_REST_S)
        else:
            _keep(timing, sample, count)
            stopwatch.kept()
        count += 1
        if count == 1:
            start = clock()
        if exposed == MOST_EXPOSED:
            return Timing("failed", f"the device came to each of {exposed} samples before the host had asked")
        if _enough(timing, rule) or _hopeless(timing, rule, lost_rested):
            break
        if clock() - start > rule.cap_s and _tried(timing, rule):
            break
    return judge(timing, rule)


def _no_lap(name: str) -> None:
    pass


@dataclass(frozen=True)
class _Sample:
    """One run: why the clocks were held, whether the device came to it too early, and the seconds of each part."""

    held: tuple[str, ...]
    exposed: bool
    laps: dict[str, float]
    host: dict[str, float]


def _keep(timing: Timing, sample: _Sample, runs_before: int) -> None:
    timing.runs.append(runs_before)
    for kept, parts in ((timing.laps, sample.laps), (timing.host, sample.host)):
        for name, seconds in parts.items():
            kept.setdefault(name, []).append(seconds)


def _sample(run: Callable[[Lap], object], stopwatch: Stopwatch, rule: Rule, busy_s: float) -> _Sample:
    """One run; the seconds of a part's name that comes twice are summed."""
    if rule.flush:
        stopwatch.flush()
    if rule.hide:
        stopwatch.busy(busy_s)
    marks: list[tuple[str, Any, float]] = []

    def mark(name: str) -> None:
        marks.append((name, stopwatch.mark(), stopwatch.host_now()))

    mark(TOTAL)
    result = run(mark)
    mark(TOTAL)
    exposed = rule.hide and stopwatch.reached(marks[0][1])
    held = stopwatch.held_until(marks[-1][1])
    stopwatch.wait()
    del result  # freed outside of what is timed
    laps = {TOTAL: stopwatch.between(marks[0][1], marks[-1][1])}
    host = {TOTAL: marks[-1][2] - marks[0][2]}
    for (name, begin, asked), (_, end, until) in pairwise(marks[1:]):
        laps[name] = laps.get(name, 0.0) + stopwatch.between(begin, end)
        host[name] = host.get(name, 0.0) + until - asked
    return _Sample(held, exposed, laps, host)


def _tried(timing: Timing, rule: Rule) -> bool:
    """Whether the time cap may end it: a sample was kept, or so many were lost that none will be."""
    return bool(timing.runs) or timing.discarded >= rule.min_samples


def _hopeless(timing: Timing, rule: Rule, lost_rested: int) -> bool:
    """Whether so many samples were lost, in spite of the rests, that most will be."""
    if lost_rested >= PATIENCE and timing.discarded > len(timing.runs):
        return True
    return timing.discarded >= 2 * max(rule.min_samples, len(timing.runs))


def _enough(timing: Timing, rule: Rule) -> bool:
    samples = timing.laps.get(TOTAL, [])
    return len(samples) >= rule.min_samples and spread_of_median(samples) <= rule.spread


def judge(timing: Timing, rule: Rule) -> Timing:
    """The timing with its status; without samples where most were lost to held clocks."""
    if timing.discarded > len(timing.runs):
        lost = f"{timing.discarded} of {timing.discarded + len(timing.runs)} samples"
        why = f"the clocks were held down ({', '.join(timing.reasons)}) in {lost}"
        return Timing("throttled", why, discarded=timing.discarded, reasons=timing.reasons)
    return steadied(timing, rule)


def steadied(timing: Timing, rule: Rule) -> Timing:
    """The timing, called unsteady where its median is not known as well as asked."""
    if not _enough(timing, rule):
        samples = timing.laps[TOTAL]
        width = spread_of_median(samples)
        known = "not known" if math.isinf(width) else f"known to {width:.1%}, not {rule.spread:.1%},"
        timing.status = "unsteady"
        timing.message = f"the median is {known} after {len(samples)} samples"
    return timing


def spread_of_median(samples: list[float]) -> float:
    """Width of the median's 95 % confidence interval over the median; infinite below six samples."""
    rank = _rank(len(samples))
    if rank == 0:
        return math.inf
    ordered = sorted(samples)
    median = Spread.of(samples).median
    return (ordered[-rank] - ordered[rank - 1]) / median if median > 0 else math.inf


@cache
def _rank(count: int) -> int:
    """The greatest k for which the k-th least and the k-th greatest of ``count`` samples hold the median with 95 %; 0: none.

    They miss it where fewer than k samples are on one side of it, which is a matter of coins: 2 P(Binomial(count, 1/2) < k).
    """
    rank, below = 0, 0.0
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if 2 * below > 0.05:
            break
        rank += 1
    return rank
