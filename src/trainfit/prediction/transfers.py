"""Time of copies between a GPU and pinned host memory. No torch here."""

from trainfit.catalog.load import link
from trainfit.ledger.ledger import Ledger, Op
from trainfit.spec.hardware import Gpu
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

SUSTAINED = 0.87
"""Share of the link's rate that pinned copies reach: 55 of 63 GB/s on one H200 (docs/log.md)."""


def is_transfer(op: Op) -> bool:
    """Return whether the operation copies between GPU and host."""
    return op.name in COPY_DIRECTIONS


def transfers_s(ledger: Ledger, ops: list[Op], gpu: Gpu) -> dict[int, dict[str, float]]:
    """For each segment, seconds that its copies ``in`` and ``out`` need if nothing holds them up."""
    rate = link(gpu.host_link).bytes_per_s * SUSTAINED
    found: dict[int, dict[str, float]] = {}
    for op in ops:
        if op.name in COPY_DIRECTIONS:
            both = found.setdefault(op.segment, {"in": 0.0, "out": 0.0})
            both[COPY_DIRECTIONS[op.name]] += ledger.times(op) * op.num_bytes / rate
    return found
