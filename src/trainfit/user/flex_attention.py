"""FlexAttention in user code: one kernel forward and one backward, as Inductor's templates allocate.

Forward: the output, and two fp32 values a query of which the log-sum-exp is kept. Backward: three gradients
and one fp32 value a query (torch/_inductor/kernel/flex/flex_attention.py). An eager call of
``flex_attention`` is modelled by the compiled kernel, too. Its time is that of PyTorch's flash kernels on the
pairs in blocks that the mask does not hide.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from trainfit.kernels.custom_op import declare
from trainfit.user.tracer import UserTracer
from trainfit.virtual.cuda.flops import OpFlops, attention, flop_rule
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import carried_values, on_host

UNKNOWN = "FlexAttention's mask depends on the data: all blocks are assumed visible"
SPEED = "FlexAttention: timed as PyTorch's flash kernels"


@contextmanager
def flex_attention(tracer: UserTracer) -> Iterator[None]:
    """Replace FlexAttention's operator, which PyTorch's function calls after its checks."""
    _declared()

    @torch._dynamo.disable  # In compiled code it ends a graph: Inductor's template needs a GPU.
    def run(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: tuple[Any, ...], *_: Any) -> Any:
        tracer.notes.add(SPEED)
        seen = _seen(q, k, mask)
        if seen is None:
            tracer.notes.add(UNKNOWN)
            seen = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        return _FlexAttention.apply(q, k, v, seen)

    with (
        replaced(flex, "flex_attention_hop", run),
        replaced(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        yield


def is_flex(function: Any) -> bool:
    """Return whether code compiles FlexAttention alone, which runs as its kernels without compiling."""
    return function is flex.flex_attention


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Any:
        out, lse, largest = torch.ops.trainfit.flex_attention(q, k, v, seen)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.seen = seen
        ctx.mark_non_differentiable(largest)
        return out, lse, largest

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch.ops.trainfit.flex_attention_backward(gradients[0], q, k, v, out, lse, ctx.seen)
        return (*grads[:3], None)


def _seen(q: Tensor, k: Tensor, mask: tuple[Any, ...]) -> int | None:
    """Return the query-key pairs in visible blocks, of all batches and heads; None: unknown."""
    numbers = [carried_values(t) for t in (mask[2], mask[4]) if t is not None]
    if any(one is None for one in numbers):
        return None
    *_, block_q, block_k, _ = mask
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    shared = batch * heads // (mask[2].shape[0] * mask[2].shape[1])  # A mask's batch or heads may be 1.
    blocks = sum(on_host(lambda one=one: int(one.sum()), (), {}) for one in numbers)
    pairs = blocks * min(block_q, queries) * min(block_k, keys)
    return min(shared * pairs, batch * heads * queries * keys)


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: int) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return out, lse, torch.empty_like(lse)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # The last one, of the products of outputs and gradients, is freed when the kernel returns.
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)


@cache
def _declared() -> None:
    kernel: Callable[..., str] = lambda *_, **__: "flash"  # noqa: E731
    declare("flex_attention", _forward, _forward, kernel=kernel)
    declare("flex_attention_backward", _backward, _backward, kernel=kernel)

    @flop_rule("trainfit::flex_attention")
    def forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
        return _counted(args[:3], args[3], backward=False)

    @flop_rule("trainfit::flex_attention_backward")
    def backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
        return _counted(args[1:4], args[6], backward=True)


def _counted(qkv: tuple[Any, ...], seen: int, *, backward: bool) -> OpFlops:
    q, k, v = qkv
    every = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return attention(1, seen, every, q.shape[3], v.shape[3], backward=backward)
