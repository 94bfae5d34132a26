"""FLOPs of an operation: matrix products and attention; elementwise work counts as 0.

A multiplication and an addition are 2 FLOPs. Attention counts all query-key pairs (``full``) or only those
that the kernel does not skip (``causal``). A fused backward recomputes the scores, which model FLOPs leave
out. Rules agree with ``torch.utils.flop_counter`` where both know an operation (tests/virtual/test_flops.py).
"""

from collections.abc import Callable
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from trainfit.virtual.cuda.op_kinds import does_no_matrix_work


class OpFlops(NamedTuple):
    """FLOPs for all pairs and for the unmasked pairs of attention; ``model_``: without recomputation."""

    full: int
    causal: int
    model_full: int
    model_causal: int


NONE = OpFlops(0, 0, 0, 0)
Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], OpFlops | None]
"""Takes an operation's args, kwargs and result."""
_RULES: dict[str, Rule] = {}


def flop_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the FLOP rule of operations (``aten::mm``); a second rule is a ValueError."""

    def add(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"{name} has a FLOP rule already")
            _RULES[name] = rule
        return rule

    return add


PRODUCTS_IN_PASSES = {"plain": 7, "passes": 8}
"""Products of trainfit's backward where several kernels compute the scores (and the weights' gradient) again:
plain two kernels (kernels/flash_attention/triton_launch.py), passes three (triton_tma.py)."""


def count(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, kernel: str = ""
) -> OpFlops | None:
    """Return the FLOPs of one call; None for an operation that may multiply matrices and has no rule.

    ``kernel``: the kernel that computes attention (virtual/cuda/attention_kernel.py).
    """
    rule = _RULES.get(func._schema.name)
    if rule is None:
        return NONE if does_no_matrix_work(func) else None
    counted = rule(args, kwargs, out)
    products = PRODUCTS_IN_PASSES.get(kernel)
    if counted and products and func._schema.name == "trainfit::flash_attention_backward":
        return counted._replace(full=counted.full // 5 * products, causal=counted.causal // 5 * products)
    return counted


def plain(flops: int) -> OpFlops:
    """Return the FLOPs of an operation without masking and recomputation."""
    return OpFlops(flops, flops, flops, flops)


def visible_only(counted: OpFlops, share: Fraction) -> OpFlops:
    """Limit the model FLOPs to the visible share of the query-key pairs."""
    return counted._replace(model_causal=min(counted.model_causal, int(counted.model_full * share)))


# [m, k] @ [k, n]: 2mkn; batched 2bmkn; [m, k] @ [k]: 2mk; [k] . [k]: 2k; outer product 2mn. Adding a bias is
# 0.
_PRODUCTS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "mm _scaled_mm _scaled_mm_v2 _int_mm _weight_int8pack_mm": lambda a, out: 2 * a[0].numel() * out.shape[1],
    "addmm addmm_ _addmm_activation": lambda a, out: 2 * a[1].numel() * a[2].shape[1],
    "bmm": lambda a, out: 2 * a[0].numel() * a[1].shape[2],
    "baddbmm baddbmm_ addbmm addbmm_": lambda a, out: 2 * a[1].numel() * a[2].shape[2],
    "mv dot vdot": lambda a, out: 2 * a[0].numel(),
    "addmv addmv_": lambda a, out: 2 * a[1].numel(),
    "addr addr_ ger": lambda a, out: 2 * out.numel(),
    # Grouped products of experts: each row, column or slice of the inner dimension is in one group. [t, k] x
    # [g, k, n] and [g, m, k] x [k, t] are one product of all tokens, [m, t] x [t, n] shares the tokens among
    # the groups, and [g, m, k] x [g, k, n] is a batch. Rows without a group count too.
    "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2": lambda a, out: 2 * a[0].numel() * a[1].shape[-1],
}
_PRODUCTS["linalg_solve_triangular"] = lambda a, out: a[0].shape[-1] * out.numel()  # n x n, half of it zeros
for _names, _count in _PRODUCTS.items():
    flop_rule(*(f"aten::{_name}" for _name in _names.split()))(
        lambda args, kwargs, out, count=_count: plain(count(args, out))
    )


@flop_rule("trainfit::add_weight_gradient_")
def weight_gradient(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count gradient^T x, of [n, o] and [n, i] (kernels/weight_gradient/op.py)."""
    return plain(2 * args[1].numel() * args[2].shape[1])


@flop_rule("trainfit::add_fp8_weight_gradient_")
def fp8_weight_gradient(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count the product of codes [o, n] and [i, n], each followed by its scale."""
    return plain(2 * args[0].numel() * args[2].shape[0])


@flop_rule("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
def convolution(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count one filter over its group's channels per output point (transposed: per input point)."""
    return plain(_convolved(args[0].shape, args[1].shape, out.shape, args[6]))


@flop_rule("aten::cudnn_convolution")
def cudnn_convolution(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count as ``convolution``, never transposed."""
    return plain(_convolved(args[0].shape, args[1].shape, out.shape, False))


@flop_rule("aten::convolution_backward")
def convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count the forward's FLOPs for each gradient of input and weight that is needed."""
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return plain(_convolved(x.shape, weight.shape, grad.shape, transposed) * (bool(mask[0]) + bool(mask[1])))


def _convolved(x: Any, weight: Any, out: Any, transposed: bool) -> int:
    """2 x batch x points x filter elements; the weight's second dimension is one group's channels."""
    return 2 * x[0] * prod((x if transposed else out)[2:]) * prod(weight)


def pairs(seq_q: int, seq_k: int, causal: bool, window: int | None = None) -> int:
    """Return the visible query-key pairs: query i sees keys 0 to i, or the last ``window`` + 1 of them."""
    if not causal:
        return seq_q * seq_k
    reach = min(seq_k, seq_q)
    seen = reach * (reach + 1) // 2 + max(0, seq_q - seq_k) * seq_k
    if window is None or window < 0 or window + 1 >= reach:
        return seen
    hidden = reach - window - 1
    return seen - hidden * (hidden + 1) // 2 - max(0, seq_q - seq_k) * hidden


def attention(batch_heads: int, seen: int, every: int, dim_qk: int, dim_v: int, *, backward: bool) -> OpFlops:
    """Count the scores and their product with v, of ``seen`` visible and of ``every`` pair.

    The backward has two gradients of each product, and the scores again.
    """
    score, weighted = 2 * batch_heads * dim_qk, 2 * batch_heads * dim_v
    needed = 2 * (score + weighted) if backward else score + weighted
    executed = needed + score if backward else needed
    return OpFlops(executed * every, executed * seen, needed * every, needed * seen)


def _heads_first(qkv: tuple[Any, ...], causal: bool, *, backward: bool, last: bool = False) -> OpFlops:
    """Count tensors [batch, heads, seq, head_dim]; ``last``: if causal, the last query sees every key."""
    q, k, v = qkv
    (batch, heads, seq_q, dim), seq_k = q.shape, k.shape[2]
    # Counted from the last pair, queries and keys are swapped.
    seen = pairs(seq_k, seq_q, causal) if last else pairs(seq_q, seq_k, causal)
    return attention(batch * heads, seen, seq_q * seq_k, dim, v.shape[3], backward=backward)


def _sdpa_rule(causal_at: int, *, backward: bool) -> Rule:
    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
        causal = args[causal_at] if causal_at < len(args) else kwargs.get("is_causal", False)
        return _heads_first(args[1:4] if backward else args[:3], bool(causal), backward=backward)

    return rule


for _name, _position in {
    "flash_attention": 4, "flash_attention_for_cpu": 4, "efficient_attention": 6, "cudnn_attention": 6,
    "fused_attention_overrideable": 5, "flash_attention_backward": 11, "flash_attention_for_cpu_backward": 7,
    "efficient_attention_backward": 11, "cudnn_attention_backward": 14,
}.items():  # fmt: skip
    flop_rule(f"aten::_scaled_dot_product_{_name}")(_sdpa_rule(_position, backward="backward" in _name))


@flop_rule("trainfit::flash_attention")
def own_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count the forward of trainfit's attention (kernels/flash_attention/op.py)."""
    return _heads_first(args[:3], args[3], backward=False, last=True)


@flop_rule("trainfit::flash_attention_backward")
def own_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count trainfit's backward as five products; ``count`` makes them more for several passes."""
    return _heads_first(args[1:4], args[6], backward=True, last=True)


@flop_rule("trainfit::decode_attention")
def decode_attention(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Count one query a sequence over all positions of the cache (kernels/decode_attention/op.py)."""
    batch, heads, dim = args[0].shape
    positions = args[1].shape[2]
    return attention(batch * heads, positions, positions, dim, dim, backward=False)


def _unpacked_rule(packed_at: int, causal_at: int, *, backward: bool) -> Rule:
    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops | None:
        packed = args[packed_at]
        if packed is not None and not (isinstance(packed, Tensor) and not packed.numel()):
            return None  # Packed sequences, of unknown lengths.
        qkv = args[1:4] if backward else args[:3]
        # Mask types 1 and 2 of the efficient kernel are causal.
        return _seq_first(qkv, args[causal_at] > 0, kwargs.get("window_size_left"), backward=backward)

    return rule


for _name, _packed_at, _position in (
    ("flash_attention_forward", 3, 8), ("flash_attention_backward", 6, 11),
    ("efficient_attention_forward", 4, 9), ("efficient_attention_backward", 6, 14),
):  # fmt: skip
    flop_rule(f"aten::_{_name}")(_unpacked_rule(_packed_at, _position, backward="backward" in _name))


def _seq_first(qkv: tuple[Any, ...], causal: bool, window: int | None, *, backward: bool) -> OpFlops:
    q, k, v = qkv
    batch, seq_q, heads, dim = q.shape
    seen = pairs(seq_q, k.shape[1], causal, window)
    return attention(batch * heads, seen, seq_q * k.shape[1], dim, v.shape[3], backward=backward)
