"""Traffic and time of a step's collectives. No torch here.

A ring over n ranks sends (n - 1) / n of an all-gather's or a reduce-scatter's whole tensor through each GPU's
link, and twice that for an all-reduce. An all-to-all sends 1 / n of a rank's tensor to each other rank: with
g ranks in each host, (g - 1) / n through the link inside it and (n - g) / n through the GPU's own port.
"""

from typing import NamedTuple

from trainfit.catalog.collectives import share_of
from trainfit.catalog.load import device_memory, link, reference, transfers
from trainfit.ledger.ledger import Collective, Ledger
from trainfit.prediction.machine import Machine
from trainfit.spec.hardware import Gpu
from trainfit.spec.result import Traffic
from trainfit.spec.units import MIB


class Ring(NamedTuple):
    """The slowest link of a group's ring, as each GPU sees it."""

    bytes_per_s: float
    latency_s: float
    between_hosts: bool


def ring(num_ranks: int, span: int, gpu: Gpu) -> Ring:
    """Return the rate of a ring over ``num_ranks`` whose first and last are ``span`` ranks apart.

    Between hosts NCCL builds a ring through every network port, so all ports of a host whose GPUs are in the
    group carry its traffic, up to the rate inside the host.
    """
    inside = link(gpu.link)
    if span <= gpu.gpus_per_host or inside.kind == "ici":
        return Ring(inside.bytes_per_s / inside.axes, inside.latency_s, between_hosts=False)
    in_host, network = _in_host(num_ranks, span, gpu), link(gpu.network)
    return Ring(min(in_host * network.bytes_per_s, inside.bytes_per_s), network.latency_s, between_hosts=True)


def large_hosts(machine: Machine) -> tuple[str, ...]:
    """Return a warning where a host is to have more GPUs than those that are sold with it."""
    gpu, sold = machine.gpu, machine.row.gpus_per_host
    if gpu.gpus_per_host <= sold:
        return ()
    return (
        f"{gpu.gpus_per_host} GPUs in a host, and hosts of {gpu.name} have {sold}: "
        f"{gpu.link} between all of them is assumed; set the number of nodes",
    )


def traffic(ledger: Ledger, gpu: Gpu) -> tuple[Traffic, ...]:
    """Return what one rank sends in a steady step, by kind of collective and size of the group."""
    found: dict[tuple[str, int, bool], list[tuple[int, int]]] = {}
    for one in _steady(ledger):
        for used, num_bytes in sent(one, gpu):
            key = one.name, one.num_ranks, used.between_hosts
            found.setdefault(key, []).append((ledger.times(one), num_bytes))
    return tuple(
        Traffic(
            kind=name,
            num_ranks=num_ranks,
            between_hosts=between_hosts,
            calls=sum(times for times, _ in some),
            bytes_sent=sum(times * num_bytes for times, num_bytes in some),
        )
        for (name, num_ranks, between_hosts), some in found.items()
    )


def sent(one: Collective, gpu: Gpu) -> list[tuple[Ring, int]]:
    """Return the links that a collective uses at the same time, and the bytes through each GPU's."""
    used = ring(one.num_ranks, one.span, gpu)
    if one.kind.pattern != "exchange" or not used.between_hosts:
        return [(used, round(one.kind.passes * one.num_bytes * (one.num_ranks - 1) / one.num_ranks))]
    in_host, port, to_each = (
        _in_host(one.num_ranks, one.span, gpu),
        link(gpu.network),
        one.num_bytes / one.num_ranks,
    )
    outside = Ring(port.bytes_per_s, port.latency_s, between_hosts=True), one.num_ranks - in_host
    ways = [outside] if in_host == 1 else [(ring(in_host, in_host, gpu), in_host - 1), outside]
    return [(way, round(peers * to_each)) for way, peers in ways]


def _in_host(num_ranks: int, span: int, gpu: Gpu) -> int:
    """Return the ranks of a group in one host, of a group that leaves it."""
    return max(1, gpu.gpus_per_host // ((span - 1) // (num_ranks - 1)))


def collective_s(one: Collective, gpu: Gpu) -> float:
    """Return the seconds of a collective alone."""
    # A ring's bytes pass from rank to rank, an all-to-all's all at once.
    turns, start_s = 1 if one.kind.pattern == "exchange" else one.num_ranks - 1, transfers(gpu).start_s
    return max(
        (one.num_bytes if one.kind.pattern == "chain" else num_bytes)
        / sustained_bytes_per_s(one.name, used, gpu)
        + turns * used.latency_s
        + start_s
        for used, num_bytes in sent(one, gpu)
    )


def sustained_bytes_per_s(name: str, used: Ring, gpu: Gpu) -> float:
    """Return the rate that a kind of collective reaches on a link of a GPU."""
    known = transfers(gpu)
    return used.bytes_per_s * (known.between_hosts if used.between_hosts else share_of(name, known))


def load(one: Collective, gpu: Gpu) -> float:
    """Return a collective's rate over the one of its kind inside a host, at most 1.

    What it takes from the computation, SMs and bandwidth, is in proportion to the bytes that it moves.
    """
    inside = link(gpu.link).bytes_per_s * share_of(one.name, transfers(gpu))
    return min(1.0, max(sustained_bytes_per_s(one.name, used, gpu) for used, _ in sent(one, gpu)) / inside)


def all_s(ledger: Ledger, gpu: Gpu) -> float:
    """Return the seconds of the steady step's collectives, one after another."""
    return sum(ledger.times(one) * collective_s(one, gpu) for one in _steady(ledger))


def lowest_s(ledger: Ledger, gpu: Gpu) -> float:
    """Return the least seconds of the steady step's collectives: each kind of link busy at its full rate.

    Links inside and between hosts may be busy at the same time. A switch that reduces sends an all-reduce's
    tensor through each link once, not twice as a ring does.
    """
    found = {False: 0.0, True: 0.0}
    for one in _steady(ledger):
        for used, num_bytes in sent(one, gpu):
            least = min(num_bytes, one.num_bytes)
            found[used.between_hosts] += ledger.times(one) * least / used.bytes_per_s
    return max(found.values())


def assumptions(ledger: Ledger, gpu: Gpu) -> tuple[str, ...]:
    """Return what the time of the collectives rests on; empty for one GPU."""
    if not ledger.collectives:
        return ()
    hosts = any(ring(one.num_ranks, one.span, gpu).between_hosts for one in ledger.collectives)
    between = (
        f", {gpu.gpus_per_host} GPUs a host and {gpu.network} for each GPU between hosts" if hosts else ""
    )
    exchanges = any(one.kind.pattern == "exchange" for one in ledger.collectives)
    repeated = (
        ("FSDP2 with layers traced once: within 0.03 % (allocated) of all traced, for llama-3.1-70b over 64",)
        if ledger.repeat > 1 and not all(one.is_synchronous for one in ledger.collectives)
        else ()
    )
    copied = all(one.kind.by_copy_engines for one in ledger.collectives)
    known, measured_on = device_memory(gpu), gpu if gpu.device_memory else reference(gpu)
    nccl = (
        f"NCCL takes what it does for two {measured_on.name.upper()}s: {known.nccl_bytes // MIB} MiB, "
        f"and {known.communicator_bytes // MIB} MiB for each group"
    )
    exchanged = f", {known.exchange_bytes // MIB} MiB more where it exchanges tokens" * exchanges
    by_nccl = () if copied else (nccl + exchanged,)
    shares = {one.name: f"{share_of(one.name, transfers(gpu)):.0%}" for one in ledger.collectives}
    rate = ", ".join(f"{name.replace('_', '-')} {share}" for name, share in sorted(shares.items()))
    return (
        *repeated,
        f"collectives: rings{', all-to-alls' * exchanges}, at the rate of {gpu.link}: {rate}{between}; "
        "each begins as soon as its data is ready, and the computation waits where the code does",
        *by_nccl,
    )


def _steady(ledger: Ledger) -> list[Collective]:
    return [one for one in ledger.collectives if ledger.segments[one.segment].step == "steady"]
