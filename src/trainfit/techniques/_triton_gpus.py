"""Check for techniques whose CUDA kernels are written in Triton."""

from trainfit.catalog.load import gpu as find_gpu
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import LEAST_FOR_TRITON
from trainfit.spec.recipe import Recipe


def refuse_old_gpu(recipe: Recipe, field: str, value: str, instead: str) -> None:
    """Refuse an NVIDIA GPU older than Triton supports.

    Raises:
        InputError: such a GPU, or one that the catalog does not have.
    """
    gpu = find_gpu(recipe.hardware.gpu)
    capability = gpu.compute_capability
    if capability is not None and capability < LEAST_FOR_TRITON:
        (major, minor), (least, _) = capability, LEAST_FOR_TRITON
        raise InputError(
            f"{gpu.title} has compute capability {major}.{minor}, and Triton supports {least}.0 and later",
            f"use {instead}, or a newer GPU",
            field=field,
            value=value,
        )
