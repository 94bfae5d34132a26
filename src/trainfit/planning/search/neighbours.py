"""Recipes that differ from traced ones in the batch alone, estimated by these traces.

Of a structure far from the start the composed estimate (ranking.py) may be some percent off. Of Qwen2.5 7B in
fp8 on an H100 with a margin of 1 %, so a limit of 78.4 GiB, it is 79.1 GiB with four sequences; by the trace
with three they take 76.6, and 77.6 by their own.
"""

from collections.abc import Iterator

from trainfit.planning.search.candidate import MIX, Key, Traced
from trainfit.planning.search.plan import TIE, best_of, discounted
from trainfit.planning.search.ranking import Ranking
from trainfit.planning.search.sizes import sizes_of_traced

NEAR = 1.04
"""Multiple of the limit below which, by the trace of a larger batch, a smaller one may fit: free memory that
the allocator holds shrinks with the batch too, by no rule."""
GAIN = 0.02
"""Least gain of speed over the best, as a share, for which a smaller batch of a faster recipe is traced."""


def larger_than_best(ranking: Ranking) -> list[Key]:
    """Return the best recipe with the next larger batch that is faster and fits, and with the largest."""
    best = best_of(ranking.combinations)
    if best is None:
        return []
    found = [
        key
        for key, rate, device_bytes in _other_batches(ranking, best)
        if key[2] > best.candidate.micro
        and device_bytes <= ranking.combinations.usable_bytes
        and rate > (1 + TIE) * best.rate
    ]
    return list(dict.fromkeys((found[0], found[-1]))) if found else []


def smaller_than_faster(ranking: Ranking) -> list[Key]:
    """Return recipes that are faster than the best, but too large, with a smaller batch; fastest first.

    Not those that pin too much of the host's memory: what they pin is mostly states and weights.
    """
    combinations, best = ranking.combinations, best_of(ranking.combinations)
    if best is None:
        return []
    least = (1 + GAIN) * discounted(best.rate, best.candidate.options)
    rates = dict[Key, float]()
    for one in combinations.traced.values():
        estimate = one.result.estimate
        if estimate is None or estimate.host_bytes > combinations.host_bytes:
            continue
        if combinations.fits(one) or discounted(one.rate, one.candidate.options) < least:
            continue
        fitting = [
            (discounted(rate, key[0]), key)
            for key, rate, device_bytes in _other_batches(ranking, one)
            if key[2] < one.candidate.micro and device_bytes <= NEAR * combinations.usable_bytes
        ]
        rate, key = max(fitting, key=lambda each: each[0], default=(0.0, one.candidate.key))
        if rate >= least:
            rates[key] = rate
    return sorted(rates, key=lambda key: -rates[key])


def _other_batches(ranking: Ranking, one: Traced) -> Iterator[tuple[Key, float, float]]:
    """Yield a traced recipe with each other batch that is not traced: its speed and its device memory."""
    options, level, at, accumulate = one.candidate.key
    if level == MIX:
        return  # Another batch has another mix.
    own, grown = sizes_of_traced(one), ranking.growth(options)
    tokens_s = one.rate * own.step_s(accumulate) / (at * accumulate)
    for micro, count in ranking.combinations.batches(options):
        key = (options, level, micro, count)
        if key not in ranking.combinations.traced:
            sizes = grown.moved(own, at, micro)
            yield key, tokens_s * micro * count / sizes.step_s(count), sizes.device_bytes
