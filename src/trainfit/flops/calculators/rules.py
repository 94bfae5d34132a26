"""Rules of thumb for memory and FLOPs, each a pure function of a few numbers."""

from typing import Literal


def four_times(params: int, *, bytes_per_param: float = 2) -> float:
    """Return training memory in bytes as four times the weights: weights, gradients, Adam's two moments.

    Source: Hugging Face's memory estimator ("training with Adam: about 4x the model"),
    https://huggingface.co/docs/accelerate/usage_guides/model_size_estimator. It leaves out every activation.

    Args:
        bytes_per_param: of one weight: 4 in fp32, 2 in bf16 or fp16.
    """
    return 4.0 * params * bytes_per_param


def sixteen_bytes(params: int) -> float:
    """Return the model states of mixed-precision Adam in bytes: (2 + 2 + 12) N.

    Source: ZeRO, https://arxiv.org/abs/1910.02054, section 3.1: 16-bit weights and gradients, and fp32
    weights, momentum and variance. Activations and temporary buffers are outside it.
    """
    return 16.0 * params


def korthikanti_activations(
    *, a: int, b: int, s: int, h: int, layers: int, t: int = 1,
    recomputation: Literal["none", "selective", "full"] = "none",
) -> float:  # fmt: skip
    """Return activation bytes of the layers: L s b h (10 + 24/t + 5 a s / (h t)).

    a heads, b sequences of s tokens, h hidden, t tensor-parallel ranks; selective: no last term; full: 2.
    Source: Korthikanti et al., https://arxiv.org/abs/2205.05198, equation 2 and table 2 (without sequence
    parallel). For h_ff = 4 h, GELU, three dropouts, 16-bit, no GQA, attention that keeps its scores.
    """
    width = s * b * h
    if recomputation == "full":
        return 2.0 * width * layers
    scores = 0.0 if recomputation == "selective" else 5 * a * s / (h * t)
    return layers * width * (10 + 24 / t + scores)


def six_n(params: int, tokens: int) -> float:
    """Return training FLOPs: 6 N a token.

    Source: Kaplan et al., https://arxiv.org/abs/2001.08361, section 2.1: 2N forward, 4N backward. It leaves
    out attention scores, recomputation and frozen weights, and counts embeddings that are only looked up.
    """
    return 6.0 * params * tokens
