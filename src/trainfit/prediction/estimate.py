"""Ledger -> Estimate: replay it in memory and in time, and sum it up. No torch here."""

import os
from collections.abc import Callable, Sequence

from trainfit.ledger.allocator import CachingAllocator, OutOfMemory
from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import Peaks, Replay, UncachedAllocator, replay
from trainfit.prediction import communication, kept_peaks
from trainfit.prediction.bounds import bounds
from trainfit.prediction.compilation import compilation
from trainfit.prediction.device_overhead import capacities, overhead_bytes
from trainfit.prediction.machine import Machine
from trainfit.prediction.time import attention_time
from trainfit.prediction.time.peaks import PEAK_DTYPE, peak_flops_per_s
from trainfit.prediction.time.roofline import Roofline, roofline, without_rows
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import HELD_BUCKETS, PADDED_COPIES, Cost, Estimate, Peak, TwoPeaks
from trainfit.spec.units import format_bytes

CONVENTION = (
    "matrix products and attention, 2 FLOPs a multiply-add; masked attention scores not counted, in "
    "hardware FLOPs those that a kernel skips; model FLOPs leave out what is recomputed; MFU and HFU are of "
    "the dense peak of the matrix products' dtype"
)

MORE_STEPS = 8
"""Steady steps replayed at most beyond the traced one. Of 10 recipes within 3 % of an H200's memory that ran
out of it, four did so in the third step or later; five of 62 compiled ones take new segments in their third
step (four of them to the byte)."""


def estimate(recipe: Recipe, machine: Machine, ledger: Ledger) -> Estimate:
    """Return the Estimate of a recipe's ledger on its machine."""
    gpu = machine.gpu
    found = kept_peaks.load(ledger, gpu)
    if found is None:
        found = of_both_peaks(ledger, lambda one: replay_on(gpu, one))
        kept_peaks.keep(ledger, gpu, found)
    peaks, fits = found
    time = roofline(ledger, machine)
    return of_recipe(recipe, machine, ledger, summary(gpu, ledger, peaks, time, fits=fits), time)


def of_recipe(
    recipe: Recipe, machine: Machine, ledger: Ledger, found: Estimate, time: Roofline | None
) -> Estimate:
    """Return the Estimate with what the recipe adds: tokens a second, cost, assumptions and bounds."""
    tokens = recipe.step_tokens
    tokens_per_s = tokens / found.step_s if found.step_s else None
    return found.model_copy(
        update={
            "recipe_id": recipe.id,
            "num_gpus": recipe.hardware.count,
            "tokens_per_s": tokens_per_s,
            "cost": cost(recipe, machine.price_per_hour, tokens_per_s),
            "assumptions": (
                *ledger.assumptions,
                *_assumptions(recipe, machine, ledger, timed=time is not None),
            ),
            "bounds": bounds(time, machine, recipe),
            "warnings": (
                *found.warnings,
                *communication.large_hosts(machine),
                *(_emulated(recipe, machine.gpu) if time else ()),
                *(attention_time.far_behind(ledger, machine.gpu) if time and _is_forced(recipe) else ()),
            ),
        }
    )


def of_both_peaks(
    ledger: Ledger, replayed: Callable[[Ledger], tuple[Replay, bool]]
) -> tuple[list[Replay], bool]:
    """Return the replays of a ledger with its lower and its higher peak, and whether both fit.

    The first is expected, the second possible. Where the two have equal peaks there is one.
    """
    ledgers = filter(None, (ledger.with_lower_peak(), ledger.with_higher_peak()))
    replays, fit = zip(*map(replayed, ledgers), strict=True)
    peaks = {(one.peak_allocated_bytes, one.peak_reserved_bytes) for one in replays}
    return list(replays[: len(peaks)]), all(fit)


def summary(
    gpu: Gpu, ledger: Ledger, replays: Sequence[Peaks], time: Roofline | None, *, fits: bool
) -> Estimate:
    """Return the part of an Estimate that the ledger alone decides: memory, FLOPs, time and utilisation.

    Args:
        replays: the ledger's replay through the caching allocator, then one with a higher peak if there is.
        time: the steady step's roofline; None: the GPU's speed is not known.
        fits: whether the replay stays within the GPU's memory.
    """
    model_flops, hardware_flops = ledger.steady_sum("model_flops"), ledger.steady_sum("causal_flops")
    step_s = time.expected.total if time else None
    peak = peak_flops_per_s(gpu, matmul_dtype(ledger)) if time else None
    replayed, *others = replays
    outside = overhead_bytes(gpu, ledger)
    found = Estimate(
        recipe_id=None,
        phases=replayed.phases,
        breakdown=replayed.breakdown,
        peak_phase=replayed.peak_phase,
        peak_allocated_bytes=replayed.peak_allocated_bytes,
        peak_reserved_bytes=replayed.peak_reserved_bytes,
        peak_device_bytes=replayed.peak_reserved_bytes + outside,
        two_peaks=two_peaks(ledger, replayed, others[0], outside) if others else None,
        device_bytes=gpu.usable_bytes,
        host_bytes=ledger.host_bytes,
        fits=fits,
        params=ledger.params,
        trainable_params=ledger.trainable_params,
        active_params=ledger.active_params or ledger.params,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        flops_convention=CONVENTION,
        step_s=step_s,
        time=time.expected if time else None,
        tokens_per_s=None,
        mfu=model_flops / step_s / peak if step_s and peak else None,
        hfu=hardware_flops / step_s / peak if step_s and peak else None,
        cost=None,
        compilation=compilation(ledger, gpu),
        traffic=communication.traffic(ledger, gpu),
        assumptions=ledger.assumptions,
        ops_without_flops=ledger.ops_without_flops,
        versions=ledger.versions,
        gpu=gpu.name,
    )
    return found.model_copy(update={"warnings": (*_little_headroom(gpu, found), *ledger.warnings)})


def two_peaks(ledger: Ledger, expected: Peaks, possible: Peaks, outside: int) -> TwoPeaks:
    """Return the peaks of two replays of a ledger.

    Args:
        outside: bytes on the device outside the allocator.
    """

    def peak(allocated: int, reserved: int) -> Peak:
        return Peak(allocated=allocated, reserved=reserved, device=reserved + outside)

    return TwoPeaks(
        expected=peak(expected.peak_allocated_bytes, expected.peak_reserved_bytes),
        possible=peak(
            max(expected.peak_allocated_bytes, possible.peak_allocated_bytes),
            max(expected.peak_reserved_bytes, possible.peak_reserved_bytes),
        ),
        possible_phases=possible.phases,
        reason="; ".join([HELD_BUCKETS] * bool(ledger.held) + [PADDED_COPIES] * bool(ledger.optional)),
    )


def replay_on(gpu: Gpu, ledger: Ledger) -> tuple[Replay, bool]:
    """Replay without a limit; if that is too much, within the GPU's memory, which may still succeed.

    The allocator is set as this environment's PYTORCH_ALLOC_CONF says.

    Returns:
        the replay within the limit if that succeeds, else the unlimited one; and whether it fits.
    """
    if gpu.vendor == "host":
        uncached = replay(ledger, UncachedAllocator(), empty_cache_after_init=True)
        return uncached, uncached.peak_allocated_bytes <= gpu.usable_bytes
    expandable = allocator_settings(os.environ).expandable_segments

    def within(capacity: int | None) -> Replay:
        allocator = CachingAllocator(capacity, expandable)
        return replay(ledger, allocator, empty_cache_after_init=True, more_steps=MORE_STEPS)

    free = within(None)
    capacity, *larger = capacities(gpu, ledger)
    most_reserved = max(free.peak_reserved_bytes, free.init_reserved_bytes)
    if most_reserved <= capacity or free.peak_allocated_bytes > capacity:
        return free, most_reserved <= capacity
    try:
        # Where the cache has to be given back, a few MiB decide how memory is cut up: with more of it a run
        # may fail that succeeds with less. It fits only if it always does.
        found = within(capacity)
        for size in larger:
            # A limit that is not reached changes nothing, but that an expandable segment spans 9/8 of it.
            if size < most_reserved or expandable:
                within(size)
    except OutOfMemory:
        return free, False
    return found, True


def matmul_dtype(ledger: Ledger) -> str:
    """Dtype, as the catalog names it, in which most FLOPs of the steady step are done."""
    totals: dict[str, float] = {}
    for op in ledger.steady_ops:
        if op.causal_flops:
            dtype = PEAK_DTYPE.get(op.dtype, "fp32")
            totals[dtype] = totals.get(dtype, 0.0) + ledger.times(op) * op.causal_flops
    return max(totals, key=lambda name: totals[name]) if totals else "fp32"


def cost(recipe: Recipe, price: float | None, tokens_per_s: float | None) -> Cost | None:
    """Return the cost of a recipe's GPUs at a speed; None: the price or the speed is not known.

    Args:
        price: US dollars for one GPU and one hour.
    """
    count = recipe.hardware.count
    if price is None or not tokens_per_s:
        return None
    return Cost(
        price_per_gpu_hour=price,
        num_gpus=count,
        per_hour=price * count,
        per_million_tokens=price * count / 3600 / tokens_per_s * 1e6,
    )


def _assumptions(recipe: Recipe, machine: Machine, ledger: Ledger, *, timed: bool) -> tuple[str, ...]:
    gpu = machine.gpu
    num_layers = " and ".join(str(times) for times in ledger.repeats)
    repeated = (f"{num_layers} identical layers traced once",) if ledger.repeat > 1 else ()
    if ledger.traced_whole:
        repeated = (f"every layer traced: {ledger.traced_whole}",)
    if gpu.vendor != "host":
        repeated += allocator_settings(os.environ).assumptions
    if not timed:
        return (*repeated, f"no step time, MFU or cost: the speed of {gpu.name} is not known")
    if recipe.empty_cache_every is not None:
        repeated += ("the driver's time to take memory back and to allocate it again is not counted",)
    rates = (
        *attention_time.assumptions(ledger, gpu, machine.known.times),
        *without_rows(ledger, machine),
        *communication.assumptions(ledger, gpu),
    )
    return (
        *repeated,
        *_emulated(recipe, gpu),
        *rates,
        timed_by(machine),
    )


def timed_by(machine: Machine) -> str:
    """Return what the step time rests on."""
    gpu, known = machine.gpu, machine.known
    if gpu.name == known.gpu.name:
        return f"step time: {known.origin}; a recipe's own host may be slower"
    ratio = "the data sheets" if gpu.sustained is None else "what both sustain"
    return f"step time: {known.origin}, by the ratio of {ratio}; not calibrated on {gpu.name}"


def _little_headroom(gpu: Gpu, found: Estimate) -> tuple[str, ...]:
    if not found.fits or found.headroom_bytes >= gpu.least_headroom * gpu.usable_bytes:
        return ()
    return (
        f"less than {gpu.least_headroom:.0%} of the device is free, {format_bytes(found.headroom_bytes)}: "
        "another process on it, or a longer batch, is enough to run out of memory",
    )


def _is_forced(recipe: Recipe) -> bool:
    """Return whether the recipe names one kernel of attention."""
    return recipe.attention not in ("sdpa", "eager", "math")


def _emulated(recipe: Recipe, gpu: Gpu) -> tuple[str, ...]:
    """Return a warning for bf16 on an NVIDIA GPU older than Ampere, which has no bf16 tensor cores."""
    if gpu.vendor != "nvidia" or "bf16" in gpu.peak_flops_per_s or "bf16" not in recipe.precision:
        return ()
    peak = peak_flops_per_s(gpu, "bf16") / 1e12
    return (
        f"{gpu.name} has no bf16 tensor cores: bf16 is emulated and slow, its products timed "
        f"at the fp32 peak, "
        f"{peak:,.3g} TFLOP/s; precision: amp-fp16 uses the tensor cores it has",
    )
