"""Parts of a recipe's memory and time, and how they change with the batch and with recomputation."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainfit.planning.search.candidate import Traced
from trainfit.spec.result import Estimate

GROWN = 1.02
"""Least ratio of the forward's and backward's peak to the update's at which the peak depends on the batch."""
HOST_DECIDES = 0.9
"""Least share of a step that the host works of which it decides the step's time."""


class Sizes(NamedTuple):
    """Parts of one recipe's memory (bytes) and time (seconds); those of different options add up."""

    fixed_bytes: float
    """Weights and optimizer state, and whole gradients where micro-batches accumulate."""
    batch_bytes: float
    """The rest of the forward's and backward's peak."""
    update_bytes: float
    """Peak of the update and of initialization."""
    other_bytes: float
    """Device memory beyond the allocated."""
    update_s: float
    micro_s: float
    """The GPU's forward and backward of one micro-batch."""
    host_s: float = 0.0
    """The host's time of one micro-batch and its share of the update, whatever the micro-batch's size."""

    @property
    def device_bytes(self) -> float:
        """Peak of the device's memory."""
        return max(self.fixed_bytes + self.batch_bytes, self.update_bytes) + self.other_bytes

    @property
    def grows_with_batch(self) -> bool:
        """Whether a larger batch raises the peak: it is the backward's, not the update's."""
        return self.fixed_bytes + self.batch_bytes > GROWN * self.update_bytes

    def step_s(self, accumulate: int) -> float:
        """Return the seconds of a step."""
        return max(self.update_s + accumulate * self.micro_s, accumulate * self.host_s)

    def plus(self, other: "Sizes", minus: "Sizes") -> "Sizes":
        """Return these sizes with the difference of two others added; none becomes negative."""
        return Sizes(*(max(0.0, a + b - c) for a, b, c in zip(self, other, minus, strict=True)))

    def times(self, other: "Sizes", before: "Sizes") -> "Sizes":
        """Return these sizes with the ratio of two others, of one micro-batch and of the update."""
        return Sizes(*(a * b / max(c, 1e-12) for a, b, c in zip(self, other, before, strict=True)))

    def mixed(self, other: "Sizes", share: float) -> "Sizes":
        """Return the sizes of a model of which ``share`` of the blocks are as in ``other``."""
        return Sizes(*(a + share * (b - a) for a, b in zip(self, other, strict=True)))


def sizes_of(estimate: Estimate, update_s: float, accumulate: int) -> Sizes:
    """Return the parts of a traced recipe; ``update_s``: seconds of its optimizer's phase."""
    first, steady = estimate.phases.first, estimate.phases.steady
    at_peak = estimate.breakdown
    fixed = at_peak.weights + at_peak.optimizer + (at_peak.gradients if accumulate > 1 else 0)
    fixed += at_peak.kv_cache
    # Of a policy: what it generates with does not depend on the micro-batch of its updates.
    memory = () if estimate.loop is None else estimate.loop.memory
    rollout = max((one.peak_allocated_bytes for one in memory if one.phase == "rollout"), default=0)
    peak = max(first.forward, first.backward, steady.forward, steady.backward)
    step_s, time = estimate.step_s or 0.0, estimate.time
    host_s = time.issue_s if time else 0.0
    gpu_s = step_s
    if time and host_s > HOST_DECIDES * step_s:
        # The GPU waits for the host, so that more work of the GPU takes no longer at first.
        gpu_s, host_s = step_s - time.host_s, step_s
    update_s = min(update_s, gpu_s)
    return Sizes(
        fixed_bytes=min(fixed, peak),
        batch_bytes=max(0, peak - fixed),
        update_bytes=max(first.optimizer, steady.optimizer, estimate.phases.after_init, rollout),
        other_bytes=estimate.highest.device - estimate.peak_allocated_bytes,
        update_s=update_s,
        micro_s=(gpu_s - update_s) / accumulate,
        host_s=host_s / accumulate,
    )


def sizes_of_traced(one: Traced) -> Sizes:
    """Return the parts of a traced combination's memory and time."""
    assert one.result.estimate is not None
    return sizes_of(one.result.estimate, one.result.update_s, one.candidate.accumulate)


def at_batch(points: Mapping[int, float], batch: int) -> float:
    """Return the value at a micro-batch, linear between and beyond the traced ones."""
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]] * batch / known[0]
    right = min(max(bisect_left(known, batch), 1), len(known) - 1)
    a, b = known[right - 1], known[right]
    value = points[a] + (points[b] - points[a]) * (batch - a) / (b - a)
    return max(value, 0.0)


class Batches(NamedTuple):
    """How memory and time of a micro-batch grow with it, from the start's traces."""

    batch_bytes: dict[int, float]
    micro_s: dict[int, float]

    @classmethod
    def of(cls, traced: Mapping[int, Sizes]) -> "Batches":
        """Return the growth that traces of one structure, by micro-batch, show."""
        # Where the peak is that of whole gradients, as of small batches, it says nothing about activations.
        growing = {b: one for b, one in traced.items() if one.grows_with_batch} or traced
        # A larger batch takes no longer for a sample: its products may have been timed at lower clocks.
        least_s, micro_s = 0.0, dict[int, float]()
        for b in sorted(traced, reverse=True):
            least_s = max(least_s, traced[b].micro_s / b)
            micro_s[b] = b * least_s
        return cls({b: one.batch_bytes for b, one in growing.items()}, micro_s)

    def moved(self, sizes: Sizes, before: int, after: int) -> Sizes:
        """Return the sizes of a recipe traced at one micro-batch, at another."""
        known_bytes, now_bytes = (at_batch(self.batch_bytes, batch) for batch in (before, after))
        known_s, now_s = (at_batch(self.micro_s, batch) for batch in (before, after))
        share = sizes.batch_bytes / max(known_bytes, 1e-12)
        if after > before and not sizes.grows_with_batch:
            share = min(share, 1.0)  # More than that are whole gradients, which do not grow.
        return sizes._replace(
            batch_bytes=share * now_bytes, micro_s=sizes.micro_s * now_s / max(known_s, 1e-12)
        )


def within(levels: Sequence[Sizes], limit_bytes: float) -> Sizes | None:
    """Return the fastest mix of two levels of recomputation within a limit; None: no mix is."""
    fitting = [one for one in levels if one.device_bytes <= limit_bytes]
    if not fitting:
        return None
    best = min(fitting, key=lambda one: one.step_s(1))
    for over in levels:
        if over.device_bytes <= limit_bytes or over.step_s(1) >= best.step_s(1):
            continue
        for small in fitting:
            share = (over.device_bytes - limit_bytes) / max(over.device_bytes - small.device_bytes, 1.0)
            mix = over.mixed(small, share)
            best = mix if mix.step_s(1) < best.step_s(1) else best
    return best
