"""Bytes a parameter of a recipe's precision: weights, master weights, the optimizer's moments.

Not counted: scales of low-bit storage, fp32 moments of tensors that are too small for low bits, and buffers.
"""

from typing import NamedTuple

from trainfit.spec.recipe import Recipe
from trainfit.techniques.registry import optimizer_facts

BASE_BYTES = {"nf4": 0.5, "int8": 1.0, "fp8": 1.0}
"""Of a quantised base's linear layers; its embeddings and head keep the weights' dtype."""
PRODUCTS = {
    "amp-bf16": "; products in bf16 by autocast, as with the Trainer's bf16=True",
    "amp-fp16": "; products in fp16 by autocast with a loss scaler, as with the Trainer's fp16=True",
    "fp16-master": "; with a loss scaler, as with DeepSpeed's fp16",
    "fp16-pure": "; with a loss scaler; the squares of small gradients are 0 in fp16 moments",
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
    built = float(recipe.weight_bytes)
    adapter = recipe.adapter
    weight = built if adapter is None or adapter.dtype == "base" else 4.0
    facts = optimizer_facts(recipe.optimizer.name)
    moments = facts.moments(recipe, weight) if facts else ()
    frozen = BASE_BYTES[recipe.base.kind] if recipe.base else built
    return Storage(weight, moments, None if adapter is None else frozen)


def meaning(recipe: Recipe) -> str:
    """One line: ``bf16: weights 2 B, no fp32 master weights, AdamW moments 2 + 2 B a parameter``."""
    held, usual = storage(recipe), ""
    if recipe.precision in ("bf16-master", "fp16-master"):
        return _of_master(recipe, held)
    weights = "weights 4 B (fp32 master weights)"
    if held.frozen is not None:
        how = f" in {recipe.quantize}" if recipe.quantize else ""
        weights = f"frozen base {held.frozen:g} B{how} a parameter, adapter {held.weight:g} B"
    elif held.weight == 2.0:
        weights = "weights 2 B, no fp32 master weights"
        if not recipe.optimizer.stochastic_rounding:
            usual = f"; pretraining usually has some: --precision {_with_master(recipe)}"
    trained = "a trained parameter" if recipe.adapter else "a parameter"
    rounding = "; stochastic rounding keeps small updates on average"
    more = PRODUCTS.get(recipe.precision, "") + rounding * recipe.optimizer.stochastic_rounding
    return f"{recipe.precision}: {weights}, {_moment_words(recipe, held)} {trained}{more}{usual}"


def _of_master(recipe: Recipe, held: Storage) -> str:
    """Return the line of a precision with master weights, whose total counts the gradients too."""
    precision, kind = recipe.precision, recipe.precision.removesuffix("-master")
    if recipe.optimizer_keeps_master:
        parts, num_masters = "weights 2 B, gradients 2 B, master weights 4 B", 1
    else:
        parts, num_masters = "fp32 shards 4 B, gathered in bf16, gradients 4 B", 0
    total = 2 * held.weight + held.moment
    wide = " and moments" * all(size == 4 for size in held.moments[num_masters:])
    what = f"{kind} weights, fp32 master{wide}, {total:g} B a parameter"
    return f"{precision}: {what}: {parts}, {_moment_words(recipe, held)}{PRODUCTS.get(precision, '')}"


def _with_master(recipe: Recipe) -> str:
    """Return the precision that adds master weights to the recipe's."""
    return "fp16-master" if recipe.precision == "fp16-pure" else "bf16-master"


def _moment_words(recipe: Recipe, held: Storage) -> str:
    name = recipe.optimizer.name
    facts = optimizer_facts(name)
    if facts is None:  # Of another package, whose technique states nothing of its state.
        return name
    if facts.describe is not None:
        return facts.describe(recipe, held.weight)
    return f"{name} state {' + '.join(f'{size:g}' for size in held.moments) or 0} B"
