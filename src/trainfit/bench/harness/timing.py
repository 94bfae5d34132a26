"""Take the samples of one run: the only code from which a benchmark's times come.

Each sample: overwrite the cache, mark, run, mark, and read the clocks until the device is done. Samples are
taken until the median is known well enough (``Rule.spread``) or the time cap comes. With ``Rule.hide`` the
device first spins for 1.5 times as long as the host took to issue a run, and a sample whose work the device
reached before the host had issued all of it is repeated. A sample in which the driver held the clocks down is
discarded. From then on the device rests before every sample, longer with each one lost, because full load
draws more power than the limit allows for long. Where most samples are lost all the same, the run has no
number.

The spread is that of the median: the 95 % confidence interval by order statistics, which assumes no
distribution (Le Boudec, Performance Evaluation, 2010, section 2.2; Hoefler and Belli, SC 2015, rule 5).
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from trainfit.bench.harness.stopwatch import BUSY_S, Stopwatch
from trainfit.spec.bench import BenchStatus, Spread

Lap = Callable[[str], None]  # Called by the timed function where a part of it begins
TOTAL = "total"
FIRST_REST_S, LONGEST_REST_S = 0.01, 1.0
SPIN = 1.5  # Multiple of the longest time that the host took to issue a run
MOST_EXPOSED = 6
"""Samples in a row that the device reached too early; with so many the work itself waits for the device."""
PATIENCE = 8
"""Samples lost after the longest rest; with so many, and more than were kept, the work itself throttles."""


@dataclass(frozen=True)
class Rule:
    """Rule for the number of samples.

    Attributes:
        cap_s: seconds after which no further sample begins, rests included. The very first run is not
            counted, because it may compile. The warm-up has as many seconds again.
        hide: keep the device busy until the host has issued the whole sample, so that a short one is the
            device's time alone. Never where the host's time is part of the question.
    """

    warmup: int = 3  # Runs before the first sample
    min_samples: int = 10
    max_samples: int = 200
    spread: float = 0.02  # Width of the median's confidence interval over the median at which sampling ends
    cap_s: float = 3.0
    flush: bool = True
    hide: bool = False
    rest_s: float = 0.0  # Rest before every sample, which keeps the average power below the limit

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            limits = f"must be 1 to max_samples ({self.max_samples})"
            raise ValueError(f"min_samples = {self.min_samples}: {limits}")


@dataclass
class Timing:
    """Samples of one run, empty unless the run was clean.

    Attributes:
        laps: seconds of each part in the order taken; ``total``: of the whole.
        runs: runs before each kept sample, warm-up and discarded ones included.
    """

    status: BenchStatus = "done"
    message: str = ""
    laps: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)  # Host seconds to issue the same parts
    runs: list[int] = field(default_factory=list)
    discarded: int = 0
    reasons: tuple[str, ...] = ()  # Why samples were discarded

    def keep(self, runs_before: int, laps: Mapping[str, float], host: Mapping[str, float]) -> None:
        """Add one sample: the seconds of its parts, and those that the host took to issue them."""
        self.runs.append(runs_before)
        for kept, parts in ((self.laps, laps), (self.host, host)):
            for name, seconds in parts.items():
                kept.setdefault(name, []).append(seconds)

    def after(self, runs: int, num_samples: int) -> "Timing":
        """Return the first ``num_samples`` kept samples after at least ``runs`` runs, not judged.

        ``discarded`` counts those among them; whether too many were is judged of the whole series.
        """
        kept = [index for index, before in enumerate(self.runs) if before >= runs][:num_samples]
        laps, host = (
            {name: [samples[index] for index in kept] for name, samples in parts.items()}
            for parts in (self.laps, self.host)
        )
        ran = [self.runs[index] for index in kept]
        lost = ran[-1] + 1 - runs - len(ran) if ran else 0
        return Timing(laps=laps, host=host, runs=ran, discarded=lost, reasons=self.reasons)

    def spread(self, lap: str = TOTAL) -> Spread | None:
        """Return the summary of the samples; None where there are none."""
        samples = self.laps.get(lap)
        return Spread.of(samples) if samples else None


def take(
    run: Callable[[Lap], object],
    stopwatch: Stopwatch,
    rule: Rule,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time ``run``; its exceptions pass through.

    Args:
        run: receives a function that it may call with a part's name where that part begins.
        clock: seconds for the time cap.
    """
    count, issue_s, start = 0, 0.0, clock()
    while count < rule.warmup and (count == 0 or clock() - start <= rule.cap_s):
        begun = stopwatch.host_now()
        run(lambda name: None)
        issue_s = stopwatch.host_now() - begun  # Of the last run: the first may compile.
        stopwatch.wait()
        count += 1
    timing, rest_s, lost_rested, exposed, start = Timing(), rule.rest_s, 0, 0, clock()
    while len(timing.runs) < rule.max_samples:
        if rest_s:
            stopwatch.rest(rest_s)
        sample = _sample(run, stopwatch, rule, max(BUSY_S, SPIN * issue_s))
        exposed = exposed + 1 if sample.exposed else 0
        if sample.exposed:
            issue_s = max(issue_s, sample.host[TOTAL])
        elif sample.held:
            timing.discarded += 1
            timing.reasons = tuple(sorted({*timing.reasons, *sample.held}))
            lost_rested += rest_s >= LONGEST_REST_S
            rest_s = min(2 * rest_s or FIRST_REST_S, LONGEST_REST_S)
        else:
            timing.keep(count, sample.laps, sample.host)
            stopwatch.kept()
        count += 1
        if count == 1:
            start = clock()
        if exposed == MOST_EXPOSED:
            why = f"the device reached each of {exposed} samples before the host had issued it"
            return Timing("failed", why)
        if _enough(timing, rule) or _hopeless(timing, rule, lost_rested):
            break
        # The time cap ends the run once a sample was kept, or too many were lost.
        if clock() - start > rule.cap_s and (timing.runs or timing.discarded >= rule.min_samples):
            break
    return judge(timing, rule)


@dataclass(frozen=True)
class _Sample:
    """One run: why its clocks were held, whether the device reached it too early, seconds of each part."""

    held: tuple[str, ...]
    exposed: bool
    laps: dict[str, float]
    host: dict[str, float]


def _sample(run: Callable[[Lap], object], stopwatch: Stopwatch, rule: Rule, busy_s: float) -> _Sample:
    if rule.flush:
        stopwatch.flush()
    if rule.hide:
        stopwatch.busy(busy_s)
    marks: list[tuple[str, Any]] = []
    issued: list[tuple[str, float]] = []

    def mark(name: str) -> None:
        marks.append((name, stopwatch.mark()))
        issued.append((name, stopwatch.host_now()))

    mark(TOTAL)
    result = run(mark)
    mark(TOTAL)
    exposed = rule.hide and stopwatch.reached(marks[0][1])
    held = stopwatch.held_until(marks[-1][1])
    stopwatch.wait()
    del result  # Freed outside the timed interval.
    host = lap_seconds(issued, lambda start, end: end - start)
    return _Sample(held, exposed, lap_seconds(marks, stopwatch.between), host)


def lap_seconds(marks: Sequence[tuple[str, Any]], between: Callable[[Any, Any], float]) -> dict[str, float]:
    """Return the seconds of the whole and of each part, from its mark to the next; repeated ones summed."""
    seconds = {TOTAL: between(marks[0][1], marks[-1][1])}
    for (name, begin), (_, end) in pairwise(marks):
        if name != TOTAL:
            seconds[name] = seconds.get(name, 0.0) + between(begin, end)
    return seconds


def _hopeless(timing: Timing, rule: Rule, lost_rested: int) -> bool:
    """Return whether so many samples were lost in spite of the rests that most will be."""
    if lost_rested >= PATIENCE and timing.discarded > len(timing.runs):
        return True
    return timing.discarded >= 2 * max(rule.min_samples, len(timing.runs))


def _enough(timing: Timing, rule: Rule) -> bool:
    samples = timing.laps.get(TOTAL, [])
    return len(samples) >= rule.min_samples and spread_of_median(samples) <= rule.spread


def judge(timing: Timing, rule: Rule) -> Timing:
    """Return the timing with its status, without samples where most were lost to throttling."""
    if timing.discarded > len(timing.runs):
        lost = f"{timing.discarded} of {timing.discarded + len(timing.runs)} samples"
        why = f"the clocks were held down ({', '.join(timing.reasons)}) in {lost}"
        return Timing("throttled", why, discarded=timing.discarded, reasons=timing.reasons)
    return steadied(timing, rule)


def steadied(timing: Timing, rule: Rule) -> Timing:
    """Return the timing, marked unsteady where its median is not known as well as the rule requires."""
    if not _enough(timing, rule):
        samples = timing.laps[TOTAL]
        width = spread_of_median(samples)
        known = "not known" if math.isinf(width) else f"known to {width:.1%}, not {rule.spread:.1%},"
        timing.status = "unsteady"
        timing.message = f"the median is {known} after {len(samples)} samples"
    return timing


def spread_of_median(samples: list[float]) -> float:
    """Return the width of the median's 95 % confidence interval over it; infinite below six samples."""
    rank = _rank(len(samples))
    if rank == 0:
        return math.inf
    ordered = sorted(samples)
    median = statistics.median(samples)
    return (ordered[-rank] - ordered[rank - 1]) / median if median > 0 else math.inf


@cache
def _rank(count: int) -> int:
    """Return the greatest k for which the k-th least and k-th greatest samples enclose the median.

    They miss it with probability 2 P(Binomial(count, 1/2) < k), which is at most 5 %; 0: no k does.
    """
    rank, below = 0, 0.0
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if 2 * below > 0.05:
            break
        rank += 1
    return rank
