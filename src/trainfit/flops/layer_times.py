"""Compute and communication time of one layer in closed form: data parallel, FSDP, tensor parallel, both.

The layer is two linears, D x F and F x D, in bf16, on a mesh of X x Y devices: X shares the batch of B tokens
(data parallel or FSDP), Y splits each matrix (tensor parallel). Layers are counted with rings that send a
tensor whole, without their factor (n - 1) / n, so communication is slightly overestimated.
docs/internals/communication.md derives the formulas, which are those of "How to Scale Your Model",
https://jax-ml.github.io/scaling-book/training/.
"""

import math
from collections.abc import Iterable
from typing import Literal

from trainfit.spec.value import PositiveInt, Value

BYTES = 2
"""Of one element of weights, gradients and activations on the links: bf16."""
STATE_BYTES = 16
"""A parameter's master weight, accumulated gradient and two Adam moments in fp32."""


class Layers(Value):
    """Blocks of two linears each: ``hidden`` x ``feed_forward`` and back, and nothing else."""

    hidden: PositiveInt
    feed_forward: PositiveInt
    blocks: PositiveInt = 1
    recomputed: bool = False
    """The backward computes each block again, so that only the block's input is kept."""

    @property
    def params(self) -> int:
        return 2 * self.hidden * self.feed_forward * self.blocks

    @property
    def state_bytes(self) -> int:
        return STATE_BYTES * self.params

    @property
    def saved_bytes_per_token(self) -> int:
        """Return the bytes kept for the backward: the inputs of both linears, or of each block alone."""
        return BYTES * (self.hidden + self.feed_forward * (not self.recomputed)) * self.blocks


class Mesh(Value):
    """Devices by kind of parallelism, a device's dense peak, and what it sends to each kind's group."""

    data: PositiveInt = 1  # X: FSDP shards or replicas
    tensor: PositiveInt = 1  # Y
    flops_per_s: float  # C
    data_bytes_per_s: float  # Along M axes of a torus, M times the rate W of one axis
    tensor_bytes_per_s: float

    @property
    def devices(self) -> int:
        return self.data * self.tensor


class LayerTime(Value):
    """Seconds of one layer's forward."""

    compute_s: float
    data_s: float  # FSDP: the all-gather of its weights
    tensor_s: float  # Tensor parallel: the all-gather of its input, the reduce-scatter of its output


def devices_to_hold(num_bytes: float, device_bytes: float) -> int:
    """Return how many devices hold ``num_bytes`` sharded evenly."""
    return math.ceil(num_bytes / device_bytes)


def layer_time(layers: Layers, mesh: Mesh, tokens: float, weight_bytes: float = BYTES) -> LayerTime:
    """Return one layer's forward for a global batch of ``tokens``; the backward needs twice each part.

    Args:
        weight_bytes: of an element of the weights, as FSDP sends it: the mean of what the backward gathers
            and reduces.
    """
    weights = 2 * layers.hidden * layers.feed_forward
    activations = 2 * tokens * layers.hidden  # The input and the output
    data_s = weight_bytes * weights / mesh.tensor / mesh.data_bytes_per_s
    tensor_s = BYTES * activations / mesh.data / mesh.tensor_bytes_per_s
    return LayerTime(
        compute_s=2 * tokens * weights / (mesh.devices * mesh.flops_per_s),
        data_s=data_s if mesh.data > 1 else 0.0,
        tensor_s=tensor_s if mesh.tensor > 1 else 0.0,
    )


def compute_bound_tokens(
    layers: Layers, mesh: Mesh, *, overlapped: bool = False, weight_bytes: float = BYTES
) -> float:
    """Return the smallest global batch, in tokens, whose computation takes as long as its communication.

    FSDP's traffic does not depend on the batch; tensor parallel's grows with it as the computation does.

    Args:
        overlapped: FSDP's and tensor parallel's traffic run at the same time, on links of their own; else one
            after the other. Both overlap the computation.
        weight_bytes: as ``layer_time`` takes it.

    Returns:
        0 if every batch is compute-bound, infinity if none is.
    """
    one = layer_time(layers, mesh, 1.0, weight_bytes)
    spare_s = one.compute_s - one.tensor_s  # A token's
    if spare_s <= 0:
        return math.inf
    return one.data_s / (one.compute_s if overlapped else spare_s)


def most_tensor_ranks(layers: Layers, mesh: Mesh) -> float:
    """Return the tensor-parallel ranks up to which their traffic takes no longer than the computation.

    F W M / C, whatever the batch.
    """
    return layers.feed_forward * mesh.tensor_bytes_per_s / mesh.flops_per_s


Change = Literal["mesh", "overlap", "gather in 8 bits", "twice the links", "two pipeline stages"]


class Way(Value):
    """A change that lowers the smallest compute-bound batch, and the batch with it, in tokens."""

    change: Change
    mesh: Mesh
    tokens: float


def ways_to_lower(layers: Layers, mesh: Mesh, others: Iterable[Mesh] = ()) -> list[Way]:
    """Return the changes that lower the smallest compute-bound batch, the smallest first.

    - mesh: the best of ``others``, other splits of the same devices into FSDP and tensor parallel.
    - overlap: FSDP's and tensor parallel's traffic at the same time, on links of their own.
    - gather in 8 bits: FSDP gathers half the bytes; products still run at the bf16 peak. The backward
      decides, which also reduces gradients in bf16: 1 + 2 bytes an element instead of 2 + 2.
    - twice the links: of both groups.
    - two pipeline stages: half of the FSDP ranks each, and weights that are gathered once a step, not once a
      micro-batch. The pipeline is idle for 1 / (m + 1) of a step of m micro-batches.
    """
    twice = {"data_bytes_per_s": 2 * mesh.data_bytes_per_s, "tensor_bytes_per_s": 2 * mesh.tensor_bytes_per_s}
    faster = mesh.model_copy(update=twice)
    bounds: list[tuple[Change, Mesh, float]] = [
        ("overlap", mesh, compute_bound_tokens(layers, mesh, overlapped=True)),
        ("gather in 8 bits", mesh, compute_bound_tokens(layers, mesh, weight_bytes=(1 + BYTES) / 2)),
        ("twice the links", faster, compute_bound_tokens(layers, faster)),
    ]
    if mesh.data % 2 == 0:
        half = mesh.model_copy(update={"data": mesh.data // 2})
        # Each device computes as long as before, and gathers half as many layers.
        bounds.append(("two pipeline stages", mesh, compute_bound_tokens(layers, half)))
    of_mesh = [(compute_bound_tokens(layers, other), other) for other in others]
    if of_mesh:
        tokens, best = min(of_mesh, key=lambda found: found[0])
        bounds.append(("mesh", best, tokens))
    now = compute_bound_tokens(layers, mesh)
    ways = [Way(change=change, mesh=of, tokens=tokens) for change, of, tokens in bounds if tokens < now]
    return sorted(ways, key=lambda way: way.tokens)
