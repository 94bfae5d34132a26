"""Attention backends: which kernel computes scaled dot-product attention.

``sdpa``: PyTorch's choice. ``flash``, ``cudnn``, ``efficient``, ``math``: that backend of
``torch.nn.functional.scaled_dot_product_attention``. ``eager``: matrix products and softmax. ``triton``:
kernels/flash_attention. ``best``: the fastest by the catalog's measurements on this GPU, which
``planning/attention.py`` chooses.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques import _triton_gpus
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
"""The recipe's word -> the name in ``torch.nn.attention.SDPBackend``."""


def check(recipe: Recipe) -> None:
    """Refuse fp32 in kernels of fp16 and bf16; ``best`` must be resolved before."""
    if recipe.attention == "best":
        problem = "best is not a kernel: it must be resolved to one before a step is built"
        remedy = "name a kernel, or resolve it as the commands do: trainfit.planning.attention.choose(recipe)"
        raise refusal(recipe, "attention", problem, remedy)
    if recipe.attention in ("flash", "cudnn") and recipe.precision == "fp32":
        problem = "this kernel takes fp16 and bf16 only, and precision is fp32"
        remedy = "use efficient, math or sdpa, or precision: bf16 or amp-bf16"
        raise refusal(recipe, "attention", problem, remedy)


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse kernels that a real device lacks."""
    if device_type == "cpu" and recipe.attention in ("cudnn", "efficient"):
        remedy = "use sdpa, flash, math or eager on a CPU"
        raise refusal(recipe, "attention", "this kernel runs on CUDA only", remedy)
    if recipe.attention == "triton":
        _triton_gpus.check_device(recipe, device_type, field="attention")


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


def expected(recipe: Recipe) -> Expected:
    """Return the expected effect of a fused kernel, which saves no scores."""
    return Expected(activations=0.5) if recipe.attention == "eager" else Expected()


TECHNIQUE = Technique(
    name="attention",
    order=200,
    title="Attention backends",
    covers={"attention": ("sdpa", "flash", "cudnn", "efficient", "math", "eager", "triton", "best")},
    triton={"attention": ("triton",)},
    check=check,
    check_device=check_device,
    apply=apply,
    when=lambda recipe: recipe.attention in (*BACKENDS, "triton", "best"),
    describe=_describe,
    variants=tuple({"attention": kernel} for kernel in ("flash", "efficient", "math", "triton")),
    examples=({"attention": "cudnn"}, {"attention": "triton"}, {"attention": "eager"}),
    draw=Draw(
        weights={"attention": {"sdpa": 8, "eager": 1, "math": 1, "flash": 1, "efficient": 1, "cudnn": 1}}
    ),
    offers=lambda recipe: (Offer({"attention": "best"}, expected(recipe), is_start=True),),
)
