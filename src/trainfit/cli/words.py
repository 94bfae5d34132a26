"""A recipe and its numbers in words: what every verb prints alike."""

from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_bytes, format_flops, format_seconds


def describe(recipe: Recipe) -> str:
    """One line: model, what the step does, and the hardware; what has its plain value goes unsaid."""
    batch, optimizer = recipe.batch, recipe.optimizer
    size = f"batch {batch.micro} x {batch.seq}" + (f" x {batch.accumulate} accumulated" if batch.accumulate > 1 else "")
    parts = [recipe.model.display_name, recipe.precision, size, f"{optimizer.name} {optimizer.implementation}"]
    if recipe.model.implementation != "hf":
        parts.append(recipe.model.implementation)
    if recipe.attention != "sdpa":
        parts.append(f"{recipe.attention} attention")
    if recipe.loss != "standard":
        parts.append(f"{recipe.loss} loss")
    if recipe.recompute != "none":
        chosen = recipe.recompute
        parts.append(f"recompute {chosen}" if isinstance(chosen, str) else f"recompute {_pairs(chosen.model_dump())}")
    if recipe.compile:
        parts.append(f"compile {recipe.compile}")
    if optimizer.in_backward:
        parts.append("optimizer in backward")
    if recipe.adapter is not None:
        parts.append(f"{recipe.adapter.kind} rank {recipe.adapter.rank}")
    if recipe.quantize:
        parts.append(f"{recipe.quantize} base")
    parts.append(f"{recipe.hardware.count} x {recipe.hardware.gpu}")
    return " · ".join(parts)


def _pairs(data: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in data.items())


def quantity(name: str, value: float) -> str:
    """A number printed in the unit that its field's name says."""
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_per_s"):
        return f"{value:,.0f}"
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_flops"):
        return format_flops(value)
    if name in {"mfu", "hfu"}:
        return f"{value:.1%}"
    return f"{value:.4g}"
