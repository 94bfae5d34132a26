"""Recipes drawn by a seed for one technique: half of them with it alone, half with it and whatever else is drawn.

Enters: a technique's name (its file in ``techniques/``), a seed. Leaves: recipes as plain data, which the truth suite checks
and predicts like its own. What a technique is asked with is drawn too, so a suite covers its variants.
"""

import random
from collections.abc import Callable
from typing import Any

from trainfit.catalog.load import model_config
from trainfit.spec.recipe_file import merge
from trainfit.verification.draws import FAMILIES, draw

Data = dict[str, Any]
Asking = Callable[[random.Random, Data], Data]
"""(chance, the recipe so far) -> the fields that ask for a technique."""

NATIVE_SHARE = 0.35
"""Of the draws: one family of nineteen would be too few for what native does by code of its own."""
LONGEST_STEP_S = 1.5
"""A suite for every technique must end."""
NUM_BLOCKS = ("num_hidden_layers", "n_layer", "num_layers")


def _every(chance: random.Random, _: Data) -> Data:
    return {"recompute": {"every": chance.choice((2, 2, 3, 4))}}


def _selective(chance: random.Random, _: Data) -> Data:
    lists = (
        "selective",
        "selective",
        {"selective": {"save": ["attention"]}},
        {"selective": {"save": ["mm"]}},
    )
    return {"recompute": chance.choice(lists)}


def _share(chance: random.Random, _: Data) -> Data:
    budget = chance.choice((0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95))
    return {"compile": chance.choice(("block", "block", "model")), "recompute": {"budget": budget}}


def _layers(chance: random.Random, data: Data) -> Data:
    """A plan of up to four runs over the model's blocks; where it is compiled, of none and full alone."""
    blocks, runs = num_blocks(data), []
    cuts = sorted(chance.sample(range(1, blocks), min(blocks - 1, chance.randint(0, 3))))
    for begin, end in zip([0, *cuts], [*cuts, blocks], strict=True):
        run: Data = {"recompute": chance.choice(("none", "full")), "count": end - begin}
        if not data.get("compile"):
            run["recompute"] = chance.choice(("none", "elementwise", "elementwise", "full"))
            run["offload"] = chance.choice((0.0, 0.0, 0.25, 0.5, 1.0))
            run["every"] = chance.choice((1, 1, 2))
        runs.append(run)
    return {"recompute": {"layers": runs}}


def _offload_activations(chance: random.Random, _: Data) -> Data:
    return {"recompute": "full", "offload": {"activations": True}}


def _offload_weights(chance: random.Random, data: Data) -> Data:
    asked: Data = {
        "recompute": "full",
        "offload": {"weights": True, "activations": chance.choice((False, True))},
    }
    if not data.get("adapter"):
        asked["optimizer"] = {"in_backward": chance.choice((True, "block"))}
        asked["batch"] = {"accumulate": 1}
    return asked


def _chunked(chance: random.Random, _: Data) -> Data:
    return {"loss": "chunked"}


def _fused_loss(chance: random.Random, data: Data) -> Data:
    """Gemma 2 more often than its share: its logits are soft-capped."""
    asked: Data = {"loss": "fused"}
    if data["model"]["implementation"] == "hf" and chance.random() < 0.3:
        asked["model"] = {"config": chance.choice(FAMILIES["gemma2"])}
    return asked


def _loss_terms(chance: random.Random, _: Data) -> Data:
    terms = chance.choice(
        ({"label_smoothing": 0.1}, {"z_loss": 1e-4}, {"label_smoothing": 0.1, "z_loss": 1e-4})
    )
    return {"loss": chance.choice(("standard", "fused")), "loss_terms": terms}


def _block_kernels(chance: random.Random, data: Data) -> Data:
    """Of models of Llama's form: others are refused, but only once they are built."""
    asked: Data = {"block_kernels": "triton"}
    if data["model"]["implementation"] == "hf":
        family = chance.choice(("llama", "mistral", "qwen2", "qwen3"))
        asked["model"] = {"config": chance.choice(FAMILIES[family])}
    return asked


def _low_bit(chance: random.Random, _: Data) -> Data:
    return {"optimizer": {"name": chance.choice(("adamw8bit", "adamw4bit"))}}


def _muon(chance: random.Random, _: Data) -> Data:
    return {"optimizer": {"name": "muon"}}


def _rounding(chance: random.Random, _: Data) -> Data:
    name = chance.choice(("adamw", "adamw", "adafactor", "sgd", "adamw8bit", "muon"))
    optimizer: Data = {"name": name, "stochastic_rounding": True}
    if name != "muon":
        optimizer["implementation"] = "fused"
    return {"precision": "bf16", "optimizer": optimizer}


def _fused_adafactor(chance: random.Random, _: Data) -> Data:
    return {"optimizer": {"name": "adafactor", "implementation": "fused"}}


def _by_block(chance: random.Random, data: Data) -> Data:
    return {"optimizer": {"in_backward": "block"}, "batch": {"accumulate": 1}}


def _clipped(chance: random.Random, _: Data) -> Data:
    return {"optimizer": {"clip_norm": 1.0, "in_backward": False}}


def _soft_prompt(chance: random.Random, _: Data) -> Data:
    kind = chance.choice(("prompt", "p-tuning"))
    return {"adapter": {"kind": kind, "tokens": chance.choice((8, 20, 64))}}


def _prefix(chance: random.Random, _: Data) -> Data:
    return {"adapter": {"kind": "prefix", "tokens": chance.choice((8, 20, 64))}}


def _quantized(chance: random.Random, _: Data) -> Data:
    adapter = {"kind": "lora", "rank": chance.choice((8, 16, 64)), "dtype": chance.choice(("fp32", "base"))}
    return {"quantize": chance.choice(("nf4", "nf4", "int8", "fp8")), "adapter": adapter, "precision": "bf16"}


def _fp8(chance: random.Random, _: Data) -> Data:
    return {"precision": "fp8", "compile": chance.choice((False, "block", "block"))}


def _loader(chance: random.Random, _: Data) -> Data:
    workers, pinned = chance.choice(
        ((0, False), (1, True), (2, True), (2, False))
    )  # (0, True) is the default
    return {"loader": {"workers": workers, "pin_memory": pinned}}


def _empty_cache(chance: random.Random, _: Data) -> Data:
    return {"empty_cache_every": chance.choice((1, 1, 2, 3))}


TECHNIQUES: dict[str, Asking] = {
    "recompute_every": _every,
    "recompute_selective": _selective,
    "recompute_budget": _share,
    "recompute_layers": _layers,
    "offload_activations": _offload_activations,
    "offload_weights": _offload_weights,
    "chunked_loss": _chunked,
    "adamw_low_bit": _low_bit,
    "muon": _muon,
    "stochastic_rounding": _rounding,
    "adafactor": _fused_adafactor,
    "optimizer_in_backward": _by_block,
    "gradient_clipping": _clipped,
    "soft_prompts": _soft_prompt,
    "prefix_tuning": _prefix,
    "quantize": _quantized,
    "fp8": _fp8,
    "loader": _loader,
    "empty_cache": _empty_cache,
    "fused_loss": _fused_loss,
    "loss_terms": _loss_terms,
    "block_kernels": _block_kernels,
}
"""A technique's file -> what asks for it (of ``adafactor`` and ``optimizer_in_backward``: what they got since)."""

LATER = ("fused_loss", "loss_terms", "block_kernels")
"""Of these, such as came when suites had been measured: no other technique's partners, so that older seeds draw what they drew."""


def draw_for(technique: str, chance: random.Random, gpu: str, *, combined: bool) -> Data:
    """One recipe as plain data that asks for the technique; it may turn out not to be allowed.

    Args:
        combined: with everything else as drawn, and one other technique besides.
    """
    data = draw(chance, gpu, 0.25 if combined else 0.0)
    if data.get("compile") == "model":
        # Minutes each to predict, and in the first suite already; ``recompute_budget`` asks for it itself.
        data["compile"] = "block"
    if chance.random() < NATIVE_SHARE:
        data["model"] = {"config": chance.choice(FAMILIES["native"]), "implementation": "native"}
    if combined:
        partner = chance.choice([name for name in TECHNIQUES if name not in (technique, *LATER)])
        data = asked_for(partner, chance, data)
    else:
        data = _plain(chance, data)
    return asked_for(technique, chance, data)


def asked_for(technique: str, chance: random.Random, data: Data) -> Data:
    """``data`` with the technique asked for; another optimizer or adapter replaces the one that was there."""
    asked = TECHNIQUES[technique](chance, data)
    kept = {
        key: value
        for key, value in data.items()
        if not (key == "adapter" and "adapter" in asked)
        and not (key == "optimizer" and "name" in asked.get("optimizer", {}))
    }
    return merge(kept, asked)


def _plain(chance: random.Random, data: Data) -> Data:
    """The same model and batch, with nothing else asked for."""
    kept = {key: data[key] for key in ("model", "batch", "hardware")}
    kept["batch"] = {**kept["batch"], "accumulate": 1}
    return {**kept, "precision": chance.choice(("bf16", "bf16", "bf16", "amp-bf16", "fp32"))}


def num_blocks(data: Data) -> int:
    """Decoder blocks of the drawn model, as its config says."""
    config = model_config(data["model"]["config"])
    return next(int(config[key]) for key in NUM_BLOCKS if key in config)
