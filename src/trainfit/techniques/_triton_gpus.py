"""Device check of the techniques whose CUDA kernels are written in Triton."""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import value_at


def check_device(recipe: Recipe, device_type: str, *, field: str) -> None:
    """Refuse a real GPU without Triton, where the field's value runs Triton kernels."""
    from trainfit.kernels.custom_op import require_triton

    instead = f"{field}: {Recipe.model_fields[field].default}"
    require_triton(device_type, field, value_at(recipe, field), instead)
