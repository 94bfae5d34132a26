"""Device memory outside the caching allocator: the CUDA context and the libraries' kernels. No torch here.

The bytes are columns of the catalog (``device_memory``): the GPU's own, else those of its reference.
"""

from typing import Any

from trainfit.catalog.constants import constants
from trainfit.catalog.load import device_memory
from trainfit.ledger.ledger import Ledger
from trainfit.spec.hardware import Gpu


def overhead_bytes(gpu: Gpu, ledger: Ledger) -> int:
    """Bytes on the device that no allocator statistic shows; 0 on a CPU."""
    if gpu.vendor == "host":
        return 0
    known = device_memory(gpu)
    cudnn_bytes = (
        known.cudnn_bytes if any("cudnn" in op.name or op.kernel == "cudnn" for op in ledger.ops) else 0
    )
    offloaded = offload_bytes(gpu, ledger.host_bytes)
    return known.context_bytes + cudnn_bytes + offloaded + nccl_bytes(gpu, ledger) + ledger.peer_bytes


def offload_bytes(gpu: Gpu, host_bytes: Any) -> Any:
    """Return the device memory that offload takes for so much pinned host memory, one number or an array."""
    known = device_memory(gpu)
    return known.copy_bytes * (host_bytes > 0) + host_bytes // known.page_table_ratio


def group_bytes(gpu: Gpu) -> int:
    """Return the device memory of NCCL and the communicator of one group."""
    known = device_memory(gpu)
    return known.nccl_bytes + known.communicator_bytes


def nccl_bytes(gpu: Gpu, ledger: Ledger) -> int:
    """Return the device memory of NCCL; groups of as many ranks and as wide a span count as one."""
    communicators = {(one.num_ranks, one.span) for one in ledger.collectives if not one.kind.by_copy_engines}
    exchanging = {(one.num_ranks, one.span) for one in ledger.collectives if one.kind.pattern == "exchange"}
    if not communicators:
        return 0
    known = device_memory(gpu)
    of_groups = len(communicators) * known.communicator_bytes + len(exchanging) * known.exchange_bytes
    return known.nccl_bytes + of_groups


def capacities(gpu: Gpu, ledger: Ledger) -> tuple[int, ...]:
    """Return the allocator's limits on this GPU with the margin, half of it, and none, smallest first."""
    margin = constants().memory.margin
    most = gpu.usable_bytes - overhead_bytes(gpu, ledger)
    return tuple(most - int(gpu.usable_bytes * share) for share in (margin, margin / 2, 0))
