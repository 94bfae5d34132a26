"""Device memory outside the caching allocator: the CUDA context and the libraries' kernels. No torch here.

Measured on an H200 (driver 580, CUDA 13.0, torch 2.11; results/h200-measured.jsonl): nvidia-smi's use less
the allocator's reserved bytes was the same to the byte in every recipe that offloads nothing. On other GPUs
it is an assumption, listed in the estimate.
"""

from typing import Any

from trainfit.ledger.ledger import COPIED, Ledger
from trainfit.spec.hardware import Gpu
from trainfit.spec.units import MIB

CONTEXT_BYTES = 12013 * MIB // 16
"""CUDA context with PyTorch's and cuBLAS's kernels: 750.8125 MiB."""
CUDNN_BYTES = 16 * MIB
"""More, once cuDNN's attention has run."""
COPY_BYTES, PAGE_TABLE_SHARE = 69 * MIB, 512
"""More, once pinned host memory is copied on streams of its own, and the part of that memory that its entries
in the GPU's page tables take: 8 bytes for 4 KiB. All 136 measured runs that offload (results/plan-choices)
are within 4.1 MiB of it."""
NCCL_BYTES, COMMUNICATOR_BYTES = 358 * MIB, 486 * MIB
"""NCCL's kernels, and the channels and buffers of each communicator that is used: groups of two H200s over
NVLink, NCCL 2.28.9, NVLink multicast off (docs/log.md, 2026-11-22). Larger groups are assumed alike."""
EXCHANGE_BYTES = 446 * MIB
"""More for each communicator of an all-to-all (results/several-gpus/experts-measured.jsonl)."""


def overhead_bytes(gpu: Gpu, ledger: Ledger) -> int:
    """Bytes on the device that no allocator statistic shows; 0 on a CPU."""
    if gpu.vendor == "host":
        return 0
    uses_cudnn = any("cudnn" in op.name for op in ledger.ops)
    cudnn = CUDNN_BYTES if uses_cudnn else 0
    return CONTEXT_BYTES + cudnn + offload_bytes(ledger.host_bytes) + nccl_bytes(ledger) + ledger.peer_bytes


def offload_bytes(host_bytes: Any) -> Any:
    """Return the device memory that offload takes for so much pinned host memory, one number or an array."""
    return COPY_BYTES * (host_bytes > 0) + host_bytes // PAGE_TABLE_SHARE


def nccl_bytes(ledger: Ledger) -> int:
    """Return the device memory of NCCL; groups of as many ranks and as wide a span count as one."""
    communicators = {(one.num_ranks, one.span) for one in ledger.collectives if one.name not in COPIED}
    exchanging = {(one.num_ranks, one.span) for one in ledger.collectives if one.name == "all_to_all"}
    if not communicators:
        return 0
    return NCCL_BYTES + len(communicators) * COMMUNICATOR_BYTES + len(exchanging) * EXCHANGE_BYTES


MARGIN = 1 / 2048
"""Share of the card that a recipe must leave free to fit: 70 MiB of an H200's 139.8 GiB. Kernels
that are loaded late took up to 18 MiB more than the above (results/h200-measured.jsonl, tag near-card)."""


def capacities(gpu: Gpu, ledger: Ledger) -> tuple[int, ...]:
    """Return the allocator's limits on this GPU with the margin, half of it, and none, smallest first."""
    most = gpu.usable_bytes - overhead_bytes(gpu, ledger)
    return tuple(most - int(gpu.usable_bytes * share) for share in (MARGIN, MARGIN / 2, 0))
