"""FLOPs of an operation by the field's convention: matrix products and attention count, elementwise work is 0.

A multiplication and an addition are 2 FLOPs. Attention counts scores as if nothing were masked (``full``) and with
the masked pairs left out (``causal``): of a sequence of s tokens s(s+1)/2 pairs are seen. What a fused backward
recomputes (the scores; where it is two passes of ours, scores and their gradient once more) the device executes and the
mathematics does not need. Ours agree with ``torch.utils.flop_counter`` where both know an op of PyTorch's (tests/virtual/test_flops.py).
"""

from collections.abc import Callable
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from trainfit.virtual.cuda.op_kinds import does_no_matrix_work


class OpFlops(NamedTuple):
    """FLOPs of one operation.

    ``full``, ``causal``: what the device executes, all pairs and unmasked pairs of attention.
    ``model_full``, ``model_causal``: the same without what a fused backward computes a second time.
    """

    full: int
    causal: int
    model_full: int
    model_causal: int


NONE = OpFlops(0, 0, 0, 0)
Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], OpFlops | None]
_RULES: dict[str, Rule] = {}


def flop_rule(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: the function counts these ops, named with their namespace (``aten::mm``).

    Raises:
        ValueError: an op has a rule already.
    """

    def add(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"{name} has a FLOP rule already")
            _RULES[name] = rule
        return rule

    return add


def count(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, kernel: str = ""
) -> OpFlops | None:
    """FLOPs of one call; zeros for an op that does no matrix work, None for an op that might and has no rule.

    Args:
        kernel: which of our kernels computes attention (virtual/cuda/attention_kernel.py).
    """
    rule = _RULES.get(func._schema.name)
    if rule is None:
        return NONE if does_no_matrix_work(func) else None
    counted = rule(args, kwargs, out)
    return _in_two_passes(counted) if counted and is_in_two_passes(func, kernel) else counted


def plain(flops: int) -> OpFlops:
    """FLOPs of an op in which nothing is masked or computed twice."""
    return OpFlops(flops, flops, flops, flops)


def visible_only(counted: OpFlops, share: Fraction) -> OpFlops:
    """The same executed, and of the model's FLOPs the share of the pairs that a mask leaves."""
    return counted._replace(model_causal=min(counted.model_causal, int(counted.model_full * share)))


# -- matrix products ----------------------------------------------------------------------------------------------


@flop_rule(
    "aten::mm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm", "aten::_weight_int8pack_mm"
)
def mm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """[m, k] @ [k, n]: 2mkn."""
    return plain(2 * args[0].shape[0] * args[0].shape[1] * out.shape[1])


@flop_rule("aten::addmm", "aten::addmm_", "aten::_addmm_activation")
def addmm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """bias + [m, k] @ [k, n]: 2mkn; the addition is not counted."""
    return plain(2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1])


@flop_rule("aten::bmm")
def bmm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """[b, m, k] @ [b, k, n]: 2bmkn."""
    return plain(2 * args[0].numel() * args[1].shape[2])


@flop_rule("aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addbmm_")
def baddbmm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """bias + bmm: 2bmkn."""
    return plain(2 * args[1].numel() * args[2].shape[2])


@flop_rule("aten::mv")
def mv(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """[m, k] @ [k]: 2mk."""
    return plain(2 * args[0].numel())


@flop_rule("aten::addmv", "aten::addmv_")
def addmv(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """bias + mv: 2mk."""
    return plain(2 * args[1].numel())


@flop_rule("aten::dot", "aten::vdot")
def dot(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """[k] . [k]: 2k."""
    return plain(2 * args[0].numel())


@flop_rule("aten::addr", "aten::addr_", "aten::ger")
def outer(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """An outer product [m] x [n]: 2mn."""
    return plain(2 * out.numel())


@flop_rule("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2")
def grouped_mm(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Experts' products: every row (or column, or slice of the inner dimension) belongs to one group.

    [t, k] x [g, k, n] and [g, m, k] x [k, t] are one product of all tokens; [m, t] x [t, n] gives one [m, n] a
    group, the tokens shared out; [g, m, k] x [g, k, n] is a batch. Rows that no group owns count too.
    """
    a, b = args[0], args[1]
    return plain(2 * a.numel() * b.shape[-1])


# -- convolutions -------------------------------------------------------------------------------------------------


@flop_rule("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
def convolution(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Each output point takes one filter over its group's channels; transposed, each input point gives one."""
    x, weight, transposed = args[0], args[1], args[6]
    return plain(_convolved(x.shape, weight.shape, out.shape, transposed))


@flop_rule("aten::cudnn_convolution")
def cudnn_convolution(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """As convolution, never transposed."""
    return plain(_convolved(args[0].shape, args[1].shape, out.shape, False))


@flop_rule("aten::convolution_backward")
def convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """The forward's count once for each of the input's and the weight's gradient that is wanted."""
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return plain(_convolved(x.shape, weight.shape, grad.shape, transposed) * (bool(mask[0]) + bool(mask[1])))


def _convolved(x: Any, weight: Any, out: Any, transposed: bool) -> int:
    """2 x batch x points x filter elements; the weight's second dimension is already one group's channels."""
    return 2 * x[0] * prod((x if transposed else out)[2:]) * prod(weight)


# -- attention ----------------------------------------------------------------------------------------------------


def pairs(seq_q: int, seq_k: int, causal: bool, window: int | None = None) -> int:
    """Query-key pairs that are seen: query i sees keys 0 to i, and with a window the last ``window`` before itself."""
    if not causal:
        return seq_q * seq_k
    reach = min(seq_k, seq_q)
    seen = reach * (reach + 1) // 2 + max(0, seq_q - seq_k) * seq_k
    if window is None or window < 0 or window + 1 >= reach:
        return seen
    hidden = reach - window - 1
    return seen - hidden * (hidden + 1) // 2 - max(0, seq_q - seq_k) * hidden


def attention(batch_heads: int, seen: int, every: int, dim_qk: int, dim_v: int, *, backward: bool) -> OpFlops:
    """Forward: scores and their product with v. Backward: both gradients of each, and the scores once more.

    Args:
        seen, every: pairs that the mask leaves, and all pairs.
        dim_qk, dim_v: head sizes of q and k, and of v.
    """
    score, weighted = 2 * batch_heads * dim_qk, 2 * batch_heads * dim_v
    needed = 2 * (score + weighted) if backward else score + weighted
    executed = needed + score if backward else needed
    return OpFlops(executed * every, executed * seen, needed * every, needed * seen)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, backward: bool) -> OpFlops:
    """Tensors [batch, heads, seq, head_dim]; grouped key heads serve all their queries."""
    batch, heads, seq_q, dim = q.shape
    seq_k = k.shape[2]
    seen, every = pairs(seq_q, seq_k, causal), seq_q * seq_k
    return attention(batch * heads, seen, every, dim, v.shape[3], backward=backward)


def _arg(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if position < len(args) else kwargs.get(name, default)


def _forward_rule(causal_at: int) -> Rule:
    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
        q, k, v = args[:3]
        return _sdpa(q, k, v, bool(_arg(args, kwargs, causal_at, "is_causal", False)), backward=False)

    return rule


def _backward_rule(causal_at: int) -> Rule:
    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
        q, k, v = args[1:4]
        return _sdpa(q, k, v, bool(_arg(args, kwargs, causal_at, "is_causal", False)), backward=True)

    return rule


for _name, _position in {
    "flash_attention": 4, "flash_attention_for_cpu": 4, "efficient_attention": 6, "cudnn_attention": 6,
    "fused_attention_overrideable": 5,
}.items():  # fmt: skip
    flop_rule(f"aten::_scaled_dot_product_{_name}")(_forward_rule(_position))
for _name, _position in {
    "flash_attention_backward": 11, "flash_attention_for_cpu_backward": 7, "efficient_attention_backward": 11,
    "cudnn_attention_backward": 14,
}.items():  # fmt: skip
    flop_rule(f"aten::_scaled_dot_product_{_name}")(_backward_rule(_position))


@flop_rule("trainfit::flash_attention")
def own_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """Ours (kernels/flash_attention/op.py): as ``_sdpa``, but causal means that the last query sees every key."""
    q, k, v, causal = args[:4]
    return _own(q, k, v, causal, backward=False)


@flop_rule("trainfit::flash_attention_backward")
def own_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops:
    """As the forward's rule; five products. ``count`` makes them seven where the kernels of two passes run."""
    q, k, v = args[1:4]
    return _own(q, k, v, args[6], backward=True)


def is_in_two_passes(func: Any, kernel: str) -> bool:
    """Our plain backward (kernels/flash_attention/triton_launch.py): dK and dV in one pass, dQ in another."""
    return kernel == "plain" and func._schema.name == "trainfit::flash_attention_backward"


def _in_two_passes(once: OpFlops) -> OpFlops:
    """The device makes the scores and the gradient of the weights in both passes: seven products for five, of one head size."""
    return once._replace(full=once.full // 5 * 7, causal=once.causal // 5 * 7)


def _own(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, backward: bool) -> OpFlops:
    (batch, heads, seq_q, dim), seq_k = q.shape, k.shape[2]
    # Counted from the last pair on, keys and queries change places in ``pairs``.
    seen = pairs(seq_k, seq_q, causal)
    return attention(batch * heads, seen, seq_q * seq_k, dim, v.shape[3], backward=backward)


@flop_rule("aten::_flash_attention_forward")
def flash_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops | None:
    """Tensors [batch, seq, heads, head_dim]. None for packed sequences, whose lengths are on the device."""
    if args[3] is not None:
        return None
    return _flash(args[0], args[1], args[2], bool(args[8]), kwargs.get("window_size_left"), backward=False)


@flop_rule("aten::_flash_attention_backward")
def flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops | None:
    """As the forward's rule."""
    if isinstance(args[6], Tensor) and args[6].numel():
        return None
    return _flash(args[1], args[2], args[3], bool(args[11]), kwargs.get("window_size_left"), backward=True)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, *, backward: bool) -> OpFlops:
    batch, seq_q, heads, dim = q.shape
    seq_k = k.shape[1]
    seen = pairs(seq_q, seq_k, causal, window)
    return attention(batch * heads, seen, seq_q * seq_k, dim, v.shape[3], backward=backward)


@flop_rule("aten::_efficient_attention_forward")
def efficient_forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops | None:
    """Tensors [batch, seq, heads, head_dim]; mask types 1 and 2 are causal. None for packed sequences."""
    return (
        None if args[4] is not None else _flash(args[0], args[1], args[2], args[9] > 0, None, backward=False)
    )


@flop_rule("aten::_efficient_attention_backward")
def efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpFlops | None:
    """As the forward's rule."""
    return (
        None if args[6] is not None else _flash(args[1], args[2], args[3], args[14] > 0, None, backward=True)
    )
