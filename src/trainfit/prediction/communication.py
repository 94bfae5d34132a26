"""Traffic and time of a step's collectives. No torch here.

A ring over n ranks sends (n - 1) / n of an all-gather's or a reduce-scatter's whole tensor through each GPU's
link, and twice that for an all-reduce.
"""

from trainfit.catalog.load import link
from trainfit.ledger.ledger import Collective, Ledger
from trainfit.spec.hardware import Gpu
from trainfit.spec.result import Traffic

SUSTAINED = 0.75
"""Share of a link's rate that NCCL reaches: all-reduce 329 to 353 of 450 GB/s between H200s, torch 2.11."""
HOST_LINK = "ib-ndr"
"""Between hosts, one a GPU; an assumption, listed in the estimate."""
BUS_SHARE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1}
"""Multiples of (n - 1) / n of the tensor that pass through each GPU's link."""


def traffic(ledger: Ledger, gpu: Gpu) -> tuple[Traffic, ...]:
    """Return what one rank sends in a steady step, by kind of collective and size of the group."""
    found: dict[tuple[str, int, bool], list[Collective]] = {}
    for one in _steady(ledger):
        found.setdefault((one.name, one.num_ranks, _leaves_host(one, gpu)), []).append(one)
    return tuple(
        Traffic(
            kind=name,
            num_ranks=num_ranks,
            between_hosts=between_hosts,
            calls=sum(ledger.times(one) for one in some),
            bytes_sent=sum(ledger.times(one) * sent_bytes(one) for one in some),
        )
        for (name, num_ranks, between_hosts), some in found.items()
    )


def sent_bytes(one: Collective) -> int:
    """Return the bytes that a ring sends through each GPU's link."""
    return round(BUS_SHARE[one.name] * one.num_bytes * (one.num_ranks - 1) / one.num_ranks)


def collectives_s(ledger: Ledger, gpu: Gpu) -> dict[int, tuple[float, float]]:
    """Return, for each segment of the steady step, the seconds of all its collectives and of the first."""
    found: dict[int, tuple[float, float]] = {}
    for one in _steady(ledger):
        used = link(HOST_LINK if _leaves_host(one, gpu) else gpu.link)
        seconds = sent_bytes(one) / (used.bytes_per_s * SUSTAINED) + (one.num_ranks - 1) * used.latency_s
        total, first = found.get(one.segment, (0.0, seconds))
        found[one.segment] = total + ledger.times(one) * seconds, first
    return found


def assumptions(ledger: Ledger, gpu: Gpu) -> tuple[str, ...]:
    """Return what the time of the collectives rests on; empty for one GPU."""
    if not ledger.collectives:
        return ()
    hosts = any(_leaves_host(one, gpu) for one in ledger.collectives)
    between = f", {gpu.gpus_per_host} GPUs a host and {HOST_LINK} for each GPU between hosts" if hosts else ""
    repeated = (
        ("FSDP2 with layers traced once: within 0.03 % (allocated) of all traced, for llama-3.1-70b over 64",)
        if ledger.repeat > 1
        else ()
    )
    return (
        *repeated,
        f"collectives: rings at {SUSTAINED:.0%} of the rate of {gpu.link}{between}; "
        "they overlap the computation except for each phase's first",
        "memory is that of rank 0, whose shards are the largest; NCCL's own buffers are not counted",
    )


def _leaves_host(one: Collective, gpu: Gpu) -> bool:
    return one.span > gpu.gpus_per_host


def _steady(ledger: Ledger) -> list[Collective]:
    return [one for one in ledger.collectives if ledger.segments[one.segment].step == "steady"]
