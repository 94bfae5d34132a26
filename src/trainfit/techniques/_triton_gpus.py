"""Checks of the techniques whose CUDA kernels are written in Triton (``Technique.triton``)."""

from collections.abc import Iterator

from trainfit.catalog.load import gpu as find_gpu
from trainfit.spec.hardware import LEAST_FOR_TRITON
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Technique, refusal, value_at


def refuse_old_gpu(technique: Technique, recipe: Recipe) -> None:
    """Refuse an NVIDIA GPU older than Triton supports."""
    for field, instead in _fields(technique, recipe):
        gpu = find_gpu(recipe.hardware.gpu)
        if gpu.compute_capability is not None and gpu.compute_capability < LEAST_FOR_TRITON:
            (major, minor), (least, _) = gpu.compute_capability, LEAST_FOR_TRITON
            problem = (
                f"{gpu.title} has compute capability {major}.{minor}, and Triton supports {least}.0 and later"
            )
            raise refusal(recipe, field, problem, f"use {instead}, or a newer GPU")


def check_device(technique: Technique, recipe: Recipe, device_type: str) -> None:
    """Refuse a real GPU without Triton."""
    for field, instead in _fields(technique, recipe):
        from trainfit.kernels.custom_op import require_triton

        require_triton(device_type, field, value_at(recipe, field), instead)


def _fields(technique: Technique, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the fields whose values run Triton kernels, and what to use instead: their defaults."""
    for field, values in technique.triton.items():
        if value_at(recipe, field) in values:
            yield field, f"{field}: {Recipe.model_fields[field].default}"
