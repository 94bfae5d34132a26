"""Attention backends: which kernel computes scaled dot-product attention.

``sdpa``: PyTorch's choice. ``flash``, ``cudnn``, ``efficient``, ``math``: that backend of
``torch.nn.functional.scaled_dot_product_attention``. ``eager``: matrix products and softmax. ``triton``:
trainfit's kernel (kernels/flash_attention), which keeps head sizes that are no power of two unpadded on
Hopper. ``best``: the fastest by the catalog's measurements on this GPU, chosen by
``planning/attention.py``.

Not supported by ``triton``: masks (a sliding window shorter than the sequence, ALiBi), attention dropout,
capped scores, sinks, heads over 256 or of two sizes, transformers models whose attention is not in the
registry. ``efficient`` has no grouped-query form.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_old_gpu
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
"""The recipe's word -> the name in ``torch.nn.attention.SDPBackend``."""
HALF_ONLY = ("flash", "cudnn")
"""Kernels that take fp16 and bf16 only."""
CUDA_ONLY = ("cudnn", "efficient")


def check(recipe: Recipe) -> None:
    """Refuse precisions and GPUs that a kernel does not support; ``best`` must be resolved before."""
    if recipe.attention == "best":
        raise InputError(
            "a step is built from a kernel that has been chosen",
            "choose it with trainfit.planning.attention.choose, as the commands do, or write one out",
            field="attention",
            value=recipe.attention,
        )
    if recipe.attention in HALF_ONLY and recipe.precision == "fp32":
        raise InputError(
            "this kernel takes fp16 and bf16 only, and precision is fp32",
            "use efficient, math or sdpa, or precision: bf16 or amp-bf16",
            field="attention",
            value=recipe.attention,
        )
    if recipe.attention == "triton":
        refuse_old_gpu(recipe, "attention", "triton", "attention: sdpa")


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse kernels that a real device lacks."""
    if device_type == "cpu" and recipe.attention in CUDA_ONLY:
        raise InputError(
            "this kernel runs on CUDA only",
            "use sdpa, flash, math or eager on a CPU",
            field="attention",
            value=recipe.attention,
        )
    if recipe.attention == "triton":
        from trainfit.kernels.custom_op import require_triton

        require_triton(device_type, "attention", "triton", "attention: sdpa")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Enter the backend's context around forward, and around backward for recomputation.

    The model itself selects ``triton``; here only transformers' masks of packed sequences are disabled for
    a compiled model.
    """
    if recipe.attention == "triton":
        if recipe.compile == "model" and recipe.model.implementation == "hf":
            from trainfit.models.hf_attention import no_packed_sequences

            draft.around_forward.append(no_packed_sequences)
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, BACKENDS[recipe.attention])
    draft.around_forward.append(lambda: sdpa_kernel(backend))
    draft.around_backward.append(lambda: sdpa_kernel(backend))


def _describe(recipe: Recipe) -> str:
    return "" if recipe.attention == "sdpa" else f"{recipe.attention} attention"


TECHNIQUE = Technique(
    name="attention",
    order=200,
    title="Attention backends",
    fields=("attention",),
    covers={"attention": ("sdpa", "flash", "cudnn", "efficient", "math", "eager", "triton", "best")},
    check=check,
    check_device=check_device,
    apply=apply,
    when=lambda recipe: recipe.attention in (*BACKENDS, "triton", "best"),
    describe=_describe,
    variants=(
        {"attention": "flash"},
        {"attention": "efficient"},
        {"attention": "math"},
        {"attention": "triton"},
    ),
    examples=({"attention": "cudnn"}, {"attention": "triton"}, {"attention": "eager"}),
    draw=Draw(
        weights={"attention": {"sdpa": 8, "eager": 1, "math": 1, "flash": 1, "efficient": 1, "cudnn": 1}}
    ),
)
