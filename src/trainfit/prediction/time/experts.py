"""What products of experts' tokens cost beyond their FLOPs: PyTorch's ``_grouped_mm``. No torch here.

In bf16 one kernel has all groups: each group's last tile is padded. In other dtypes the groups are a loop of
products, for which the host first reads how many tokens each group has.
"""

import math

from trainfit.catalog.constants import constants
from trainfit.ledger.ledger import Op
from trainfit.spec.calibration import OpTime


def is_looped(op: Op | OpTime) -> bool:
    """Return whether an operation is a product of several groups that PyTorch computes one after another."""
    name = op.op if isinstance(op, OpTime) else op.name
    return "grouped_mm" in name and op.dtype in ("float32", "float16")


def num_groups(op: Op | OpTime) -> int:
    """Return the number of a product's groups; a sum over tokens shows it by the bytes that it writes."""
    batch, m, n, k = op.shape
    if batch > 1:
        return batch
    elements = op.num_bytes // (4 if op.dtype == "float32" else 2)
    return max(1, round((elements - k * (m + n)) / (m * n)))


def padding(op: Op | OpTime) -> float:
    """Return how much more the kernel of all groups computes than their FLOPs.

    Tokens are spread over the groups geometrically, as routers spread them at random weights.
    """
    (batch, m, _, k), known = op.shape, constants().experts
    if batch == 1:
        return 1 + known.epilogue * num_groups(op) / k
    tokens = m / batch
    rows = known.rows_if_few if tokens <= known.few else known.rows
    return rows / tokens / -math.expm1(-rows / tokens)


def one_group(op: Op) -> Op:
    """Return the product of a mean group of a loop."""
    batch, m, n, k = op.shape
    groups = num_groups(op)
    shape = (1, max(1, m // groups), n, k) if batch > 1 else (1, m, n, max(1, k // groups))
    return op._replace(
        name="aten.mm.default", shape=shape, flops=op.flops / groups, causal_flops=op.causal_flops / groups,
        num_bytes=op.num_bytes // groups,
    )  # fmt: skip
