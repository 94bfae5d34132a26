"""Split the product of queries, keys and values into three tensors, of which queries and keys are rotated.

Shapes: qkv [b, n, (h + 2 k) d], heads of queries first, then of keys, then of values; cos and sin [n, d/2]
or [b, n, d/2]; results q [b, n, h, d], k and v [b, n, k, d]. The rotation is that of op.py. A compiler writes
the gradient of such a split as a concatenation in which every element computes each of its parts.

Saved for backward: cos and sin, which get no gradient. The gradient of qkv is one tensor.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative, triton_kernels
from trainfit.kernels.rope.op import rotated

PAIRS = 512
"""Pairs that a program rotates at a time: 8 a thread, 16 bytes of each half."""


def split_rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values. Call ``register`` before.

    Args:
        heads: of queries.
        groups: heads of keys, and of values.
    """
    return _Split.apply(qkv, cos, sin, heads, groups)  # pyright: ignore[reportReturnType]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int) -> Any:
        ctx.save_for_backward(cos, sin)
        return torch.ops.trainfit.split_rotated(qkv, cos, sin, heads, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()
        joined = torch.ops.trainfit.split_rotated_backward(*gradients, *ctx.saved_tensors)
        return joined, None, None, None, None


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.split_rotated`` and its backward."""
    declare("split_rotated", reference_forward, _fake_forward, triton=triton_forward)
    declare("split_rotated_backward", reference_backward, _fake_backward, triton=triton_backward)


def reference_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v."""
    q, k, v = _parts(qkv, heads, groups)
    q, k = (rotated(x.transpose(1, 2), cos, sin).transpose(1, 2).contiguous() for x in (q, k))
    return q, k, v.contiguous()


def reference_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of qkv from those of q, k and v."""
    dq, dk = (rotated(x.transpose(1, 2), cos, -sin).transpose(1, 2) for x in (dq, dk))
    return torch.cat((dq, dk, dv), 2).flatten(2)


def triton_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference_forward`` in one kernel."""
    out = _fake_forward(qkv, cos, sin, heads, groups)
    _launch(_parts(qkv, heads, groups), out, cos, sin, 1.0)
    return out


def triton_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute ``reference_backward`` in one kernel."""
    joined = _fake_backward(dq, dk, dv, cos, sin)
    _launch((dq, dk, dv), _parts(joined, dq.shape[2], dk.shape[2]), cos, sin, -1.0)
    return joined


def _launch(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, sign: float
) -> None:
    (b, n, heads, d), groups = inputs[0].shape, inputs[1].shape[2]
    cos, sin = (t.expand(b, n, d // 2) for t in (cos, sin))
    pairs = 1 << (d // 2 - 1).bit_length()
    strides = [stride for x in (*inputs, *outputs) for stride in x.stride()]
    if b * n:
        triton_kernels("kernels.rope.triton").split_kernel[(b * n,)](
            *inputs, *outputs, cos, sin, n, d // 2, heads, groups, sign,
            *strides, *cos.stride(), *sin.stride(),
            BLOCK_H=max(1, min(16, PAIRS // pairs)), BLOCK_D=pairs, num_warps=2,
        )  # fmt: skip


def _parts(qkv: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [b, n, heads, d] of queries, keys and values."""
    d = qkv.shape[-1] // (heads + 2 * groups)
    q, k, v = qkv.view(*qkv.shape[:2], -1, d).split([heads, groups, groups], 2)
    return q, k, v


def _fake_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    b, n, size = qkv.shape
    d = size // (heads + 2 * groups)
    return (
        qkv.new_empty(b, n, heads, d), qkv.new_empty(b, n, groups, d), qkv.new_empty(b, n, groups, d),
    )  # fmt: skip


def _fake_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, n, heads, d = dq.shape
    return dq.new_empty(b, n, (heads + 2 * dk.shape[2]) * d)
