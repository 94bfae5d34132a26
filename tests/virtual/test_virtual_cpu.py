"""The virtual CPU against this machine's: predicted and measured bytes of every phase are equal.

``measure`` follows the real storages of a real step; nothing is shared with the prediction but the step
itself.
"""

from typing import Any

import peft  # noqa: F401
import pytest
import transformers.optimization  # noqa: F401 - importing these two allocates a few tensors

from kernel_runs import interpreted_loops
from tiny_recipe import TINY_LLAMA
from trainfit.measurement.run import measure
from trainfit.prediction.predict import predict
from trainfit.spec.recipe import Adapter, Batch, Hardware, Optimizer, Recipe
from trial_start import forked
from virtual_runs import recipe_of, with_layers

LLAMA = TINY_LLAMA | {
    "hidden_size": 64, "intermediate_size": 160, "vocab_size": 512, "num_hidden_layers": 5,
    "max_position_embeddings": 256,
}  # fmt: skip
GPT2 = with_layers("gpt2", 5) | {
    "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MIXTRAL = with_layers("mixtral-8x7b", 4) | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}  # fmt: skip
GEMMA3 = with_layers("gemma-3-270m", 8) | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512, "sliding_window": 16,
}  # fmt: skip
GEMMA2 = with_layers("gemma-2-2b", 4) | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512, "sliding_window": 16,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "fp32": (LLAMA, "hf", {"precision": "fp32"}),
    "bf16-native": (LLAMA, "native", {}),
    "accumulate": (
        LLAMA, "hf",
        {"batch": Batch(micro=2, seq=64, accumulate=3), "optimizer": Optimizer(implementation="foreach")},
    ),
    "in-backward": (LLAMA, "hf", {"optimizer": Optimizer(in_backward=True)}),
    "math-adafactor": (LLAMA, "hf", {"attention": "math", "optimizer": Optimizer(name="adafactor")}),
    "lora-recompute": (LLAMA, "hf", {"adapter": Adapter(kind="lora", rank=4), "recompute": "full"}),
    "triton-native": (LLAMA, "native", {"attention": "triton", "precision": "amp-bf16"}),
    "gpt2": (GPT2, "hf", {"precision": "fp32"}),
    "gpt2-amp": (GPT2, "hf", {"precision": "amp-bf16"}),
    "experts-amp-fp16": (MIXTRAL, "hf", {"precision": "amp-fp16"}),
    "fp16-master": (LLAMA, "native", {"precision": "fp16-master"}),
    "fp16-pure-clipped": (LLAMA, "hf", {"precision": "fp16-pure", "optimizer": Optimizer(clip_norm=1.0)}),
    "sliding-window-sgd": (
        GEMMA3,
        "hf",
        {"attention": "eager", "optimizer": Optimizer(name="sgd", momentum=0.9, implementation="foreach")},
    ),
    "capped-scores-recompute": (GEMMA2, "hf", {"precision": "fp32", "recompute": "full"}),
}  # fmt: skip


def on_cpu(case: str) -> Recipe:
    config, implementation, fields = CASES[case]
    return recipe_of(
        config, implementation, **{"batch": Batch(micro=2, seq=64), **fields, "hardware": Hardware(gpu="cpu")}
    )


BREAKDOWNS = ("fp32", "bf16-native", "accumulate", "in-backward", "gpt2-amp")
"""Cases whose breakdown is compared; with recomputation ``measure`` cannot separate activations and
scratch."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=interpreted_loops) if case.startswith("triton") else case for case in CASES],
)
def test_every_phase_to_the_byte(case: str) -> None:
    recipe = on_cpu(case)
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert measured.phases is not None
    assert predicted.phases == measured.phases
    assert predicted.peak_allocated_bytes == measured.peak_allocated_bytes
    assert (predicted.params, predicted.trainable_params) == (measured.params, measured.trainable_params)
    if case in BREAKDOWNS:
        assert predicted.breakdown == measured.breakdown


def test_what_data_decides_stays_within_two_blocks() -> None:
    """transformers' Adafactor keeps a scalar if a weight's mean is above a bound: a block of 512 bytes,
    unknowable."""
    config, implementation, _ = CASES["fp32"]
    optimizer = Optimizer(name="adafactor", momentum=0.9)
    recipe = recipe_of(config, implementation, optimizer=optimizer, hardware=Hardware(gpu="cpu"))
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.phases is not None
    for step in ("first", "steady"):
        ours, theirs = getattr(predicted.phases, step), getattr(measured.phases, step)
        for phase in ("forward", "backward", "optimizer"):
            assert abs(getattr(ours, phase) - getattr(theirs, phase)) <= 2 * 512, (step, phase)
