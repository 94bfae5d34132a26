"""GPU and device checks of the techniques whose CUDA kernels are written in Triton."""

from trainfit.spec.hardware import LEAST_FOR_TRITON, Gpu
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import refusal, value_at


def check_device(recipe: Recipe, device_type: str, *, field: str) -> None:
    """Refuse a real GPU without Triton, where the field's value runs Triton kernels."""
    from trainfit.kernels.custom_op import require_triton

    instead = f"{field}: {Recipe.model_fields[field].default}"
    require_triton(device_type, field, value_at(recipe, field), instead)


def refuse_older(recipe: Recipe, gpu: Gpu, field: str, instead: str) -> None:
    """Refuse an NVIDIA GPU older than Triton supports, where an optimizer's update is a Triton kernel."""
    capability, least = gpu.compute_capability, LEAST_FOR_TRITON
    if capability is not None and capability < least:
        has = f"{gpu.title} has compute capability {capability[0]}.{capability[1]}"
        problem = f"{has}, and Triton, in which the update is written, supports {least[0]}.0 and later"
        raise refusal(recipe, field, problem, f"{instead}, or a newer GPU")
