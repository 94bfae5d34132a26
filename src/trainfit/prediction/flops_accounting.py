"""FLOPs and utilisation in closed form, and GPU-hours as money: arithmetic only, no torch.

Enters: a config.json mapping, a parameter count, a batch, a time. Leaves: FLOPs, MFU and HFU, dollars. The
ledger of the virtual GPU counts operations one by one; these closed forms stand beside it as a check and
serve where only a model's name, its batch and a step's time are known.

Conventions, all stated with a result:

- A multiply-add is two FLOPs. Forward of a matrix costs 2 a parameter and token, its backward 4: 2 for the
  gradient of its input, 2 for the gradient of its weight. Sum 6N (PaLM, https://arxiv.org/abs/2204.02311,
  appendix B).
- These are the published conventions: N is all parameters of the model, tables that are only looked up too,
  and windows are not followed. ``product_flops.py`` counts what is multiplied, as the virtual GPU does.
- Frozen weights need no gradient: adapters cost 4N (QLoRA-style training; the adapter's own few FLOPs are
  left out).
- Attention has no weights: 12 L H Q T a token, H heads of size Q, T tokens seen, forward and backward (PaLM,
  same place). "causal" halves it, because a token sees half of the sequence on average; "full" is the paper's
  own.
- MFU counts what the mathematics needs; HFU also counts what is recomputed. Recomputing everything adds one
  forward: 2 on 6, so HFU = 4/3 MFU.
"""

from typing import Any, Literal

from trainfit.prediction.shape import Shape, shape_of
from trainfit.spec.value import Flops, Share, Value

AttentionCount = Literal["causal", "full", "none"]
Trained = Literal["all", "adapter"]
Recomputed = Literal["none", "full"]


class StepFlops(Value):
    """FLOPs of one optimizer step over all its tokens, and the convention they are counted by."""

    model_flops: Flops
    hardware_flops: Flops
    convention: str


class Utilization(Value):
    """Shares of the peak of all GPUs together; 0.45 is 45 %."""

    mfu: Share
    hfu: Share


def active_params(config: dict[str, Any], params: int) -> int:
    """Parameters that one token meets: all of a dense model; of a mixture, without the experts not chosen."""
    shape = shape_of(config)
    if not shape.experts:
        return params
    idle = (shape.layers - shape.dense_layers) * (shape.experts - shape.experts_per_token)
    return params - idle * 3 * shape.hidden * shape.expert_feed_forward


def attention_flops_per_token(shape: Shape, seq: int, attention: AttentionCount) -> float:
    """Forward and backward FLOPs of scores and weighted values for one token: 6 L H (Q + V) T, Q = V in most.

    Every layer counts as seeing the whole sequence; sliding windows are not followed.
    """
    seen = {"full": 1.0, "causal": 0.5, "none": 0.0}[attention] * seq
    return 6.0 * shape.layers * shape.heads * (shape.head_dim + shape.value_dim) * seen


def step_flops(
    config: dict[str, Any],
    params: int,
    *,
    batch: int,
    seq: int,
    attention: AttentionCount = "causal",
    trained: Trained = "all",
    recomputed: Recomputed = "none",
) -> StepFlops:
    """FLOPs of a step of ``batch`` sequences of ``seq`` tokens, in closed form.

    Args:
        params: the base model's parameters, N. A mixture's idle experts are taken off here.
        attention: which part of the scores counts.
        trained: ``all`` weights (6N) or an ``adapter`` on frozen ones (4N).
        recomputed: ``full`` adds one more forward to the hardware's FLOPs.
    """
    tokens = batch * seq
    active = active_params(config, params)
    scores = attention_flops_per_token(shape_of(config), seq, attention) * tokens
    per_param = 6 if trained == "all" else 4
    model = per_param * active * tokens + scores
    extra = 2 * active * tokens + scores / 3 if recomputed == "full" else 0.0
    count = "N" if active == params else "N active"
    convention = (
        f"{per_param}{count} + {attention} attention a token, N = {active:,} parameters, embedding included"
    )
    return StepFlops(model_flops=model, hardware_flops=model + extra, convention=convention)


def utilization(
    model_flops: float, hardware_flops: float, *, step_s: float, num_gpus: int, peak_flops_per_s: float
) -> Utilization:
    """MFU and HFU of a step whose FLOPs are those of all GPUs together.

    Args:
        peak_flops_per_s: dense peak of one GPU in the dtype of the matrix products.

    Raises:
        ValueError: a time, count or peak that is not positive.
    """
    for name, value in (("step_s", step_s), ("num_gpus", num_gpus), ("peak_flops_per_s", peak_flops_per_s)):
        if value <= 0:
            raise ValueError(f"{name} = {value}: not positive; write a number above 0")
    available = step_s * num_gpus * peak_flops_per_s
    return Utilization(mfu=model_flops / available, hfu=hardware_flops / available)


def step_seconds(model_flops: float, *, mfu: float, num_gpus: int, peak_flops_per_s: float) -> float:
    """Time of a step at a given MFU."""
    return model_flops / (mfu * num_gpus * peak_flops_per_s)


def gpu_hours(*, num_gpus: int, seconds: float) -> float:
    """GPUs times wall time, in hours."""
    return num_gpus * seconds / 3600


def dollars(hours: float, price_per_gpu_hour: float) -> float:
    """GPU-hours as US dollars."""
    return hours * price_per_gpu_hour
