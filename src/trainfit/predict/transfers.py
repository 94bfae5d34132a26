"""Time of copies between a GPU and pinned host memory, beside the computation. No torch here."""

from trainfit.catalog.load import link
from trainfit.spec.hardware import Gpu, Link
from trainfit.virtual.ledger import Ledger, Op

DIRECTIONS = {"trainfit.copy_to_host_.default": "out", "trainfit.copy_to_device_.default": "in"}
"""Name of the operation -> which way it copies; the two ways do not share their bytes per second."""
SUSTAINED = 0.87
"""Share of the link's rate that pinned copies reach: 55 of 63 GB/s on one H200 (facts of the project, docs/log.md)."""


def is_transfer(op: Op) -> bool:
    """Whether the operation copies between GPU and host."""
    return op.name in DIRECTIONS


def host_link(gpu: Gpu) -> Link:
    """PCI Express of the GPU's generation: NVIDIA's has 3.0 until Turing, 4.0 from Ampere, 5.0 from Hopper; others 4.0."""
    major = 8 if gpu.compute_capability is None else gpu.compute_capability[0]
    return link("pcie3-x16" if major < 8 else "pcie4-x16" if major < 9 else "pcie5-x16")


def transfer_s(ledger: Ledger, ops: list[Op], gpu: Gpu) -> float:
    """Seconds that the copies of one step need if nothing holds them up: the longer of the two directions."""
    totals = {"in": 0.0, "out": 0.0}
    for op in ops:
        if op.name in DIRECTIONS:
            totals[DIRECTIONS[op.name]] += ledger.times(op) * op.num_bytes
    return max(totals.values()) / (host_link(gpu).bytes_per_s * SUSTAINED) if any(totals.values()) else 0.0
