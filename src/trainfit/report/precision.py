"""Bytes a parameter of a recipe's precision: weights, master weights, the optimizer's moments.

Not counted: scales of low-bit storage, fp32 moments of tensors that are too small for low bits, and buffers.
"""

from typing import NamedTuple

from trainfit.spec.recipe import Recipe

BASE_BYTES = {"nf4": 0.5, "int8": 1.0, "fp8": 1.0}
"""Of a quantised base's linear layers; its embeddings and head keep the weights' dtype."""
NAMES = {
    "adamw": "AdamW", "adamw8bit": "8-bit AdamW", "adamw4bit": "4-bit AdamW", "adafactor": "Adafactor",
    "sgd": "SGD", "muon": "Muon",
}  # fmt: skip
PRODUCTS = {
    "amp-bf16": "; products in bf16 by autocast",
    "amp-fp16": "; products in fp16 by autocast with a loss scaler",
    "fp8": "; the blocks' large linear layers multiply in fp8",
}


class Storage(NamedTuple):
    """Bytes of each parameter, its gradient not counted."""

    weight: float  # Of what is trained
    moments: tuple[float, ...]  # Of each optimizer state that is as large as the weights
    frozen: float | None = None  # Of a frozen base; None: all is trained

    @property
    def moment(self) -> float:
        """Of all moments together."""
        return sum(self.moments)


def storage(recipe: Recipe) -> Storage:
    """Return the bytes of each parameter; of Muon the blocks' matrices count."""
    built = 2.0 if recipe.precision in ("bf16", "fp8") else 4.0
    adapter, optimizer = recipe.adapter, recipe.optimizer
    weight = built if adapter is None or adapter.dtype == "base" else 4.0
    moments = {
        "adamw8bit": (1.0, 1.0), "adamw4bit": (0.5, 0.5), "adamw": (weight, weight), "muon": (weight,),
        "adafactor": (4.0,) if optimizer.momentum else (), "sgd": (weight,) if optimizer.momentum else (),
    }.get(optimizer.name, ())  # fmt: skip
    frozen = BASE_BYTES[recipe.base.kind] if recipe.base else built
    return Storage(weight, moments, None if adapter is None else frozen)


def meaning(recipe: Recipe) -> str:
    """One line: ``bf16: weights 2 B, no fp32 master weights, AdamW moments 2 + 2 B a parameter``."""
    held, usual = storage(recipe), ""
    weights = "weights 4 B (fp32 master weights)"
    if held.frozen is not None:
        how = f" in {recipe.quantize}" if recipe.quantize else ""
        weights = f"frozen base {held.frozen:g} B{how} a parameter, adapter {held.weight:g} B"
    elif held.weight == 2.0:
        weights = "weights 2 B, no fp32 master weights"
        if not recipe.optimizer.stochastic_rounding:
            usual = "; pretraining usually has some: --precision amp-bf16"
    trained = "a trained parameter" if recipe.adapter else "a parameter"
    rounding = "; stochastic rounding keeps small updates on average"
    more = PRODUCTS.get(recipe.precision, "") + rounding * recipe.optimizer.stochastic_rounding
    return f"{recipe.precision}: {weights}, {_moment_words(recipe, held)} {trained}{more}{usual}"


def _moment_words(recipe: Recipe, held: Storage) -> str:
    if recipe.optimizer.name not in NAMES:  # An optimizer that was added from outside.
        return recipe.optimizer.name
    name, moments = NAMES[recipe.optimizer.name], " + ".join(f"{size:g}" for size in held.moments)
    if name == "Muon":
        elsewhere = f"AdamW moments {held.weight:g} + {held.weight:g} B elsewhere"
        return f"Muon momentum {moments} B (blocks' matrices; {elsewhere})"
    if name == "Adafactor":
        momentum = f"momentum {moments} B and " if moments else ""
        return f"Adafactor {momentum}rows and columns of the second moment, under 0.1 B"
    word = "momentum" if name == "SGD" else "moments"
    return f"{name} {word} {moments} B" if moments else f"{name} without moments, 0 B"
