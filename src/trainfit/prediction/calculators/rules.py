"""Rules of thumb that people quote for memory and FLOPs, each a pure function of a few numbers."""

from typing import Annotated, Literal

from pydantic import Field

from trainfit.spec.value import PositiveInt, Value

Positive = Annotated[int, Field(ge=1)]
ParamBytes = Annotated[float, Field(gt=0)]


class ParamsSpec(Value):
    """A model that is only its parameters."""

    params: Positive
    bytes_per_param: ParamBytes = 2
    """Bytes of one weight: 4 in fp32, 2 in bf16 or fp16."""


def four_times(spec: ParamsSpec) -> float:
    """Training memory in bytes as four times the weights: weights, gradients and Adam's two moments.

    Source: the rule of thumb of Hugging Face's memory estimator ("training with Adam: about 4x the model"),
    https://huggingface.co/docs/accelerate/usage_guides/model_size_estimator. It leaves out every activation.
    """
    return 4.0 * spec.params * spec.bytes_per_param


def sixteen_bytes(spec: ParamsSpec) -> float:
    """Model states of mixed-precision Adam in bytes: (2 + 2 + 12) N.

    Source: ZeRO, https://arxiv.org/abs/1910.02054, section 3.1: 16-bit weights and gradients, and fp32
    weights, momentum and variance. Activations and temporary buffers are outside it.
    """
    return 16.0 * spec.params


class LayersSpec(Value):
    """A stack of GPT layers in 16-bit: a heads, b sequences of s tokens, h hidden.

    T tensor-parallel ranks.
    """

    a: PositiveInt
    b: PositiveInt
    s: PositiveInt
    h: PositiveInt
    layers: PositiveInt
    t: PositiveInt = 1
    recomputation: Literal["none", "selective", "full"] = "none"


def korthikanti_activations(spec: LayersSpec) -> float:
    """Activation bytes of the layers: L s b h (10 + 24/t + 5 a s / (h t)); selective: no last term; full: 2.

    Source: Korthikanti et al., https://arxiv.org/abs/2205.05198, equation 2 and table 2 (tensor parallel,
    without sequence parallel). For h_ff = 4 h, GELU, three dropouts, 16-bit, no GQA, attention that keeps its
    scores.
    """
    width = spec.s * spec.b * spec.h
    if spec.recomputation == "full":
        return 2.0 * width * spec.layers
    scores = 0.0 if spec.recomputation == "selective" else 5 * spec.a * spec.s / (spec.h * spec.t)
    return spec.layers * width * (10 + 24 / spec.t + scores)


class TokensSpec(Value):
    """A model that is only its parameters, over a number of tokens."""

    params: Positive
    tokens: Positive


def six_n(spec: TokensSpec) -> float:
    """Training FLOPs: 6 N a token.

    Source: Kaplan et al., https://arxiv.org/abs/2001.08361, section 2.1: 2N forward, 4N backward. It leaves
    out attention scores, recomputation and frozen weights, and counts embeddings that are only looked up.
    """
    return 6.0 * spec.params * spec.tokens
