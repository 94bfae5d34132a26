"""Recipes drawn by a seed for ``attention: triton``, a value newer than the measured techniques' suites.

Draws of their own, so that those of ``truth_techniques`` stay what they were. Small enough for a GPU that
others use too.
"""

import random
from collections.abc import Callable
from typing import Any

Data = dict[str, Any]

MOST_BYTES = 20 * 10**9
"""Predicted peak of a drawn recipe."""
HF = {
    64: ("llama-3.2-1b", "smollm-135m", "pythia-160m", "pythia-410m", "opt-125m", "qwen2.5-0.5b"),
    128: ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-1.7b"),
    80: ("pythia-2.8b", "phi-2", "opt-2.7b"),
    256: ("pythia-1b",),
}
NATIVE = {
    64: ("small", "medium", "llama-3.2-1b", "qwen2.5-0.5b"),
    128: ("qwen3-0.6b", "qwen3-1.7b", "qwen2.5-1.5b"),
    80: ("2.7b",),
}
"""Head size -> models, with grouped key heads and without."""
PRECISIONS = ("bf16",) * 3 + ("amp-bf16", "amp-fp16", "fp32")
RECOMPUTE: tuple[Any, ...] = (
    "none",
    "full",
    "selective",
    {"selective": {"save": ["attention"]}},
    {"every": 2},
)
OPTIMIZERS: tuple[Data, ...] = (
    {"name": "sgd", "implementation": "fused"},
    {"name": "adamw", "implementation": "fused"},
    {"name": "adafactor"},
)


def draw_triton(chance: random.Random, gpu: str, *, combined: bool) -> Data:
    """Draw one recipe with ``attention: triton``.

    Combined: compiled, recomputed, accumulated or with an adapter as well.
    """
    implementation = chance.choice(("hf", "native"))
    models = HF if implementation == "hf" else NATIVE
    d = chance.choice((*models, 128, 80, 80))  # Many of 80 turn out to be too large.
    data: Data = {
        "model": {"config": chance.choice(models[d]), "implementation": implementation},
        "batch": {"micro": chance.choice((1, 2, 3, 4)), "seq": _length(chance)},
        "precision": chance.choice(PRECISIONS),
        "attention": "triton",
        "optimizer": chance.choice(OPTIMIZERS),
        "hardware": {"gpu": gpu},
    }
    if combined:
        data["batch"]["accumulate"] = chance.choice((1, 1, 2))
        data["recompute"] = chance.choice(RECOMPUTE)
        data["compile"] = chance.choice((False, "block", "block"))
        if chance.random() < 0.25:
            data["adapter"] = {"kind": "lora", "rank": 16, "dtype": chance.choice(("fp32", "base"))}
    return data


def _length(chance: random.Random) -> int:
    """Powers of two, and lengths that no tile divides."""
    return chance.choice((512, 1024, 2048)) - chance.choice(
        (0, 0, 8 * chance.randint(1, 15), chance.randint(1, 127))
    )


DRAWS: dict[str, Callable[..., Data]] = {"attention_triton": draw_triton}
"""What ``--technique`` calls it -> one draw of it."""
