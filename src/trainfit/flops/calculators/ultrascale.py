"""The memory widget of the Ultrascale Playbook, in compatible form: its inputs, its numbers.

Source: https://huggingface.co/spaces/nanotron/ultrascale-playbook (the page's memory calculator). Its
activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198, equations 1 and 2, table 2); its parameters and optimizer follow ZeRO
(https://arxiv.org/abs/1910.02054, section 3.1). Letters as in its page: a heads, b micro-batch, h hidden,
h_ff feed-forward, L layers, s tokens, v vocabulary, k optimizer bytes a parameter, t tensor-parallel, d
data-parallel.

Its published example is at L = 32, h = 4096, b = 100, s = 1024: activations 2.09 TB, total 2.15 TB. What is
not activations is N (8 + k) bytes of N = 6.58e9 parameters, in fp32 (4 + 4 + k) as in mixed precision
(2 + 2 + 4 + k), so that 0.06 TB are k = 2. No other k of the slider gives both figures with v = 30522, the
page's own, or 32000.

Nothing here is corrected: docs/reference/calculators.md lists what it leaves out.
"""

from typing import Annotated, Literal

from pydantic import Field

from trainfit.spec.value import PositiveInt, Value

MASK_BYTES = 1
"""A dropout mask's element."""
FF_TENSORS = {"relu": 1, "gelu": 2, "swiglu": 4}
"""Tensors of h_ff elements a token that a feed-forward block keeps: product inputs and activation inputs."""


class WidgetSpec(Value):
    """The widget's inputs; defaults are those of its presets."""

    a: PositiveInt
    b: PositiveInt
    h: PositiveInt
    h_ff: PositiveInt
    layers: PositiveInt
    """L."""
    s: PositiveInt
    v: PositiveInt
    k: Annotated[int, Field(ge=0)] = 8
    t: PositiveInt = 1
    d: PositiveInt = 1
    zero: Literal[0, 1, 2, 3] = 0
    mixed: bool = True
    recomputation: Literal["none", "selective", "full"] = "none"
    ff_activation: Literal["relu", "gelu", "swiglu"] = "relu"
    sequence_parallel: bool = False


class WidgetMemory(Value):
    """Bytes, as the widget shows them (its GB is 2**30 bytes). Not whole numbers where a share is divided."""

    activations: float
    parameters: float
    gradients: float
    optimizer: float

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.activations + self.states


OPENED = WidgetSpec(a=8, b=32, h=512, h_ff=2048, layers=12, s=128, v=30522, t=8)
"""The sliders as the page opens."""
PRESETS = {
    "Llama 3 Tiny": WidgetSpec(a=16, b=3, h=1024, h_ff=4096, layers=1, s=7, v=30522, zero=1,
                                 ff_activation="gelu"),
    "Llama 3 8B": WidgetSpec(a=32, b=32, h=4096, h_ff=16384, layers=32, s=256, v=30522, zero=1,
                               ff_activation="swiglu"),
    "Llama 3 70B": WidgetSpec(
        a=64, b=32, h=8192, h_ff=32768, layers=80, s=256, v=30522, t=8, d=8, zero=1, ff_activation="swiglu"
    ),
    "Llama 3 405B": WidgetSpec(
        a=128, b=32, h=16384, h_ff=65536, layers=126, s=256, v=30522, t=8, d=8, zero=1, ff_activation="swiglu"
    ),
}  # fmt: skip
"""The page's own presets. Their h_ff, v and missing GQA are not those of the models they are named after."""


def memory(spec: WidgetSpec) -> WidgetMemory:
    """All that the widget adds up."""
    parameters, gradients, optimizer = state_bytes(spec)
    return WidgetMemory(
        activations=activation_bytes(spec), parameters=parameters, gradients=gradients, optimizer=optimizer
    )


def activation_bytes(spec: WidgetSpec) -> float:
    """Kept activations of one micro-batch.

    A layer keeps its attention (equation 1), its feed-forward block and two norm inputs; with full
    recomputation only its input. Once: a dropout mask, a norm input, the output projection's input, and fp32
    logits.
    """
    tokens = spec.s * spec.b
    width = tokens * spec.h
    shared = spec.t if spec.sequence_parallel else 1
    norm = width * _value_bytes(spec) / shared
    once = width * MASK_BYTES / shared + 2 * norm + tokens * spec.v * 4 / shared
    if spec.recomputation == "full":
        return width * _value_bytes(spec) * spec.layers + once
    return spec.layers * (_attention_bytes(spec) + _feed_forward_bytes(spec) + 2 * norm) + once


def _attention_bytes(spec: WidgetSpec) -> float:
    """Input, Q, K, V and the output projection's input, one mask.

    Then scores, softmax and its mask, unless selective.
    """
    width, value = spec.s * spec.b * spec.h, _value_bytes(spec)
    if spec.sequence_parallel:
        kept = width / spec.t * (5 * value + MASK_BYTES)
    else:
        kept = width * (4 * value / spec.t + value + MASK_BYTES)
    if spec.recomputation == "selective":
        return kept
    # The page does not divide the scores by t when sequence parallelism is on; kept so.
    split = 1 if spec.sequence_parallel else spec.t
    return kept + (2 * value + MASK_BYTES) * spec.a * spec.s**2 * spec.b / split


def _feed_forward_bytes(spec: WidgetSpec) -> float:
    width, value = spec.s * spec.b * spec.h, _value_bytes(spec)
    shared = spec.t if spec.sequence_parallel else 1
    inner = FF_TENSORS[spec.ff_activation] * spec.s * spec.b * spec.h_ff * value / spec.t
    return width * (value + MASK_BYTES) / shared + inner


def parameters(spec: WidgetSpec) -> int:
    """Return the parameters as the widget counts them.

    GPT-2's, learned positions, biases, h_ff = 4 h, no GQA.
    """
    return spec.h * (spec.v + spec.s) + spec.layers * (12 * spec.h**2 + 13 * spec.h) + 2 * spec.h


def state_bytes(spec: WidgetSpec) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer) bytes of one data-parallel rank; t does not divide them.

    ``mixed`` adds an fp32 copy of the weights, 4 bytes, to the optimizer's k.
    """
    count, value = parameters(spec), _value_bytes(spec)
    optimizer = (spec.k + (4 if spec.mixed else 0)) * count

    def sharded(size: float, from_stage: int) -> float:
        return size / spec.d if spec.zero >= from_stage else size

    return sharded(value * count, 3), sharded(value * count, 2), sharded(optimizer, 1)


def _value_bytes(spec: WidgetSpec) -> int:
    return 2 if spec.mixed else 4
