"""Bytes a parameter of a recipe's precision: weights, master weights, the optimizer's moments.

Not counted: scales of low-bit storage, fp32 moments of tensors that are too small for low bits, and buffers.
"""

from typing import NamedTuple

from trainfit.spec.recipe import Recipe

BASE_BYTES = {"nf4": 0.5, "int8": 1.0, "fp8": 1.0}
"""Of a quantised base's linear layers; its embeddings and head keep the weights' dtype."""
NAMES = {
    "adamw": "AdamW",
    "adamw8bit": "8-bit AdamW",
    "adamw4bit": "4-bit AdamW",
    "adafactor": "Adafactor",
    "sgd": "SGD",
    "muon": "Muon",
}
PRODUCTS = {
    "amp-bf16": "products in bf16 by autocast",
    "amp-fp16": "products in fp16 by autocast with a loss scaler",
    "fp8": "the blocks' large linear layers multiply in fp8",
}


class Storage(NamedTuple):
    """Bytes a parameter: of what is trained, and of a frozen base (None: all is trained)."""

    weight: float
    moments: tuple[float, ...]
    frozen: float | None = None

    @property
    def moment(self) -> float:
        """Of all moments together."""
        return sum(self.moments)


def storage(recipe: Recipe) -> Storage:
    """Return the bytes of each parameter without its gradient; of Muon the blocks' matrices count."""
    built = 2.0 if recipe.precision in ("bf16", "fp8") else 4.0
    adapter = recipe.adapter
    if adapter is None:
        return Storage(built, _moments(recipe, built))
    weight = built if adapter.dtype == "base" else 4.0
    frozen = BASE_BYTES[recipe.quantize] if recipe.quantize else built
    return Storage(weight, _moments(recipe, weight), frozen)


def _moments(recipe: Recipe, weight: float) -> tuple[float, ...]:
    """Return bytes a parameter of each state tensor that is as large as the weights."""
    optimizer = recipe.optimizer
    if optimizer.name == "adafactor":
        return (4.0,) if optimizer.momentum else ()
    if optimizer.name == "sgd":
        return (weight,) if optimizer.momentum else ()
    low = {"adamw8bit": 1.0, "adamw4bit": 0.5, "adamw": weight}
    if optimizer.name in low:
        return (low[optimizer.name],) * 2
    return (weight,) if optimizer.name == "muon" else ()


def meaning(recipe: Recipe) -> str:
    """One line: ``bf16: weights 2 B, no fp32 master weights, AdamW moments 2 + 2 B a parameter``."""
    held = storage(recipe)
    parts = [_weights(recipe, held), _moment_words(recipe, held)]
    trained = "a trained parameter" if recipe.adapter else "a parameter"
    more = [PRODUCTS[recipe.precision]] if recipe.precision in PRODUCTS else []
    if recipe.optimizer.stochastic_rounding:
        more.append("updates rounded at random, so that small ones are kept on average")
    return "; ".join([f"{recipe.precision}: {', '.join(parts)} {trained}", *more])


def _weights(recipe: Recipe, held: Storage) -> str:
    if held.frozen is not None:
        how = f" in {recipe.quantize}" if recipe.quantize else ""
        return f"frozen base {held.frozen:g} B{how} a parameter, adapter {held.weight:g} B"
    if held.weight == 2.0:
        return "weights 2 B, no fp32 master weights"
    return "weights 4 B (fp32 master weights)"


def _moment_words(recipe: Recipe, held: Storage) -> str:
    if recipe.optimizer.name not in NAMES:  # An optimizer that was added from outside.
        return recipe.optimizer.name
    name = NAMES[recipe.optimizer.name]
    if recipe.optimizer.name == "muon":
        elsewhere = f"AdamW moments {held.weight:g} + {held.weight:g} B elsewhere"
        return f"Muon momentum {held.moment:g} B (blocks' matrices; {elsewhere})"
    if recipe.optimizer.name == "adafactor":
        momentum = f"momentum {held.moment:g} B and " if held.moments else ""
        return f"Adafactor {momentum}rows and columns of the second moment, under 0.1 B"
    if not held.moments:
        return f"{name} without moments, 0 B"
    word = "momentum" if recipe.optimizer.name == "sgd" else "moments"
    return f"{name} {word} {' + '.join(f'{size:g}' for size in held.moments)} B"
