"""Step time from a ledger: a lower bound, and the expected time. No torch here.

Each operation takes at least its FLOPs over the peak of its dtype and at least its bytes over the memory's
bandwidth. The expectation divides both by the share of the data sheet that such work sustains in training
steps (``SUSTAINED``) and adds a kernel's start and end (``KERNEL_S``). The host issues the operations one
after another while the GPU works; the step takes as long as the slower of the two.

Attention's rates are of its kernels alone (attention_time.py). The other constants are rates, found from 78
measured steps of eager recipes on one H200 (torch 2.11, driver 580, Python 3.12; the half of
docs/results/accuracy.md that may be learned from): least squares of relative errors, the four of the GPU on
the 59 steps that its work decides, the two of the host on the other 19, when attention had one rate, 0.33 of
the peak. Measured over expected: 0.81 to 1.54, median 1.00. The 66 steps held out: 0.75 to 1.67, median 0.97,
90 % of them 0.88 to 1.30 (docs/log.md).
"""

from dataclasses import dataclass

from trainfit.catalog.load import link
from trainfit.ledger.ledger import Ledger, Op
from trainfit.prediction import communication
from trainfit.prediction.attention_time import compute_share
from trainfit.spec.hardware import Gpu
from trainfit.spec.result import StepTime
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

PEAK_DTYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
SUSTAINED = {"matmul": 0.69, "fp8": 0.645, "memory": 0.59}
"""Shares of the data sheet that training steps sustain. Products alone reach 0.70 to 0.78 in bf16 when
rested, a plain copy 0.89 (docs/log.md): in a step the power limit holds the clocks down, and most
memory-bound kernels read strided, convert or reduce. Back to back for seconds under the power limit an H200
sustains 0.692 in bf16 and 0.645 in fp8 on the three products of an 8B model's layers (`trainfit bench gpu
--only sustained=bf16,fp8`). Attention's are of its kernel, dtype, head size, length and mask
(attention_time.py)."""
TRANSFERS_SUSTAINED = 0.87
"""Share of the link's rate that copies between the GPU and pinned host memory reach: 55 of 63 GB/s on one
H200 (docs/log.md)."""
KERNEL_S = 2.5e-6
"""Seconds that every kernel takes on top, to start and to drain the GPU."""
HOST_S_PER_OP = 19e-6
"""Seconds the host needs to issue one operation eagerly: Python, dispatch, autograd, views, launch."""
HOST_S_PER_RECOMPUTED_OP = 68e-6
"""The same within a recomputed block: transformers' checkpointing packs and unpacks every saved tensor in
Python and saves and restores the random state."""


@dataclass(frozen=True)
class Roofline:
    """Seconds of one steady step on one GPU."""

    expected: StepTime
    lowest_s: float
    """The longest of operations, copies and collectives at the data sheets' rates, the host infinitely fast:
    no run is faster."""
    num_ops: int
    """Operations issued, the recomputed among them."""
    num_recomputed_ops: float


def roofline(ledger: Ledger, gpu: Gpu) -> Roofline | None:
    """Time of the steady step; None where the GPU's rates are not known."""
    if gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
        return None
    matmul_s = memory_s = least_s = 0.0
    busy_s: dict[int, float] = {}
    copies_s: dict[int, dict[str, float]] = {}
    num_ops = 0
    for op in ledger.steady_ops:
        times = ledger.times(op)
        num_ops += times * op.calls
        if op.name in COPY_DIRECTIONS:
            both = copies_s.setdefault(op.segment, {"in": 0.0, "out": 0.0})
            both[COPY_DIRECTIONS[op.name]] += times * op.num_bytes / copy_bytes_per_s(gpu)
            continue
        least_s += times * max(_least_s(op, gpu))
        op_time_s = times * op_s(op, gpu)
        busy_s[op.segment] = busy_s.get(op.segment, 0.0) + op_time_s
        if op.causal_flops:
            matmul_s += op_time_s
        else:
            memory_s += op_time_s
    recomputed = _num_recomputed(ledger)
    issue_s = (num_ops - recomputed) * HOST_S_PER_OP + recomputed * HOST_S_PER_RECOMPUTED_OP
    # Copies overlap the computation of a forward or backward: only the excess counts.
    shown_s = sum(max(0.0, max(both.values()) - busy_s.get(at, 0.0)) for at, both in copies_s.items())
    moved = communication.collectives_s(ledger, gpu, op_s).values()
    waited_s = sum(exposed_s for _, exposed_s in moved)
    shown_s += waited_s
    host_s = max(0.0, issue_s - matmul_s - memory_s - shown_s)
    one_way_s = [sum(both[way] for both in copies_s.values()) for way in ("in", "out")]
    lowest_s = max(least_s, max(one_way_s) * TRANSFERS_SUSTAINED, communication.lowest_s(ledger, gpu))
    expected = StepTime(
        matmul_s=matmul_s,
        memory_s=memory_s,
        host_s=host_s,
        communication_s=shown_s,
        hidden_communication_s=max(0.0, round(sum(total_s for total_s, _ in moved) - waited_s, 12)),
    )
    return Roofline(expected, lowest_s, num_ops, recomputed)


def copy_bytes_per_s(gpu: Gpu) -> float:
    """Return the rate of copies between the GPU and pinned host memory, each way."""
    return link(gpu.host_link).bytes_per_s * TRANSFERS_SUSTAINED


def op_s(op: Op, gpu: Gpu) -> float:
    """Seconds that the GPU is expected to need for one operation, in one layer; its rates must be known."""
    compute_s, move_s = _least_s(op, gpu)
    if op.kernel:
        busy_s = max(compute_s / compute_share(op, gpu), move_s / SUSTAINED["memory"])
    else:
        kind = "fp8" if PEAK_DTYPE.get(op.dtype) == "fp8" else "matmul"
        busy_s = max(compute_s, move_s) / SUSTAINED[kind if compute_s > move_s else "memory"]
    return busy_s + op.calls * KERNEL_S


def _least_s(op: Op, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds at the data sheet's rates: to compute, and to move its bytes."""
    assert gpu.memory_bytes_per_s is not None
    peak = peak_flops_per_s(gpu, PEAK_DTYPE.get(op.dtype, "fp32"))
    return op.causal_flops / peak, op.num_bytes / gpu.memory_bytes_per_s


def _num_recomputed(ledger: Ledger) -> float:
    """Return the forward operations that the backward recomputes: their products count for no model FLOPs."""
    ops = ledger.steady_ops
    forward = [op for op in ops if ledger.segments[op.segment].phase == "forward"]
    num_forward = sum(ledger.times(op) * op.calls for op in forward)
    products = sum(ledger.times(op) for op in forward if op.causal_flops)
    again = sum(ledger.times(op) for op in ops if ledger.recomputes(op))
    return num_forward * again / products if products else 0.0


WIDER = {
    "fp8": ("fp8", "bf16", "fp16", "fp32"), "bf16": ("bf16", "fp32", "fp16"),
    "fp16": ("fp16", "fp32", "bf16"), "fp32": ("fp32", "bf16", "fp16"), "fp64": ("fp64", "fp32"),
}  # fmt: skip


def peak_flops_per_s(gpu: Gpu, dtype: str) -> float:
    """Return the dense peak of a dtype; where the data sheet has none, that of the next wider one it has."""
    peaks: dict[str, float] = {str(name): peak for name, peak in gpu.peak_flops_per_s.items()}
    for name in WIDER[dtype]:
        if name in peaks:
            return peaks[name]
    raise ValueError(f"{gpu.name}: peak_flops_per_s has no {dtype}: add it to the catalog's row")
