"""Attention backends: which kernel runs ``scaled_dot_product_attention``.

``sdpa`` leaves the choice to PyTorch; flash, cudnn, efficient and math allow that one only, so a shape or device that
it cannot do is an error, not a silent detour. ``eager`` (softmax(QK^T)V written out) and ``triton`` (our own
FlashAttention kernels, kernels/flash_attention/op.py) are chosen where the model is built, ``triton`` in transformers' models
through their registry of attention functions. ``best`` is the fastest of them that is right for the model, by what ``trainfit bench
flash`` measured on this GPU: the commands say which it became, and where nothing is measured it is ``sdpa``.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html

Helps where sequences are long: ``flash``, ``cudnn``, ``efficient`` and ``triton`` never hold the s x s scores that ``eager`` and
``math`` save for the backward. On Hopper cuDNN's kernel is the fastest of PyTorch's for long sequences; ``triton`` has fast
kernels for 16-bit heads of 64 and 128 there, and plain ones for all else, fp32 and any head size up to 256 included. In fp32 those multiply
without tensor cores unless torch allows TF32: on an H200 with heads of 128 they take 17 to 30 times as long as ``sdpa``, of 64 about 4
times, of 32 up to 2.4 times (docs/results/kernels.md); ``best`` takes ``sdpa`` there.

Costs no quality: all compute the same attention, in another order of sums. The last bits of ``triton``'s gradients differ from
run to run unless ``torch.use_deterministic_algorithms`` is on, when it takes slower kernels. Those and the plain ones make the backward
in two passes: seven matrix products on the device instead of five.

Refuses, on the GPU and the virtual one alike, what the kernel cannot do: ``efficient`` has no grouped-query form, so models
with fewer key-value heads than query heads fail with it ("No available kernel"); ``triton`` takes no mask (a sliding window
shorter than the sequence, ALiBi), no attention dropout, no capped scores or sinks, no heads over 256 or of two sizes, and no
transformers model with attention outside the registry; and it runs on NVIDIA GPUs from compute capability 8.0 on, as Triton does.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_old_gpu
from trainfit.techniques.base import Draft

COVERS = {"attention": ("sdpa", "flash", "cudnn", "efficient", "math", "eager", "triton", "best")}

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


def applies(recipe: Recipe) -> bool:
    return recipe.attention in (*BACKENDS, "triton", "best")


def check(recipe: Recipe) -> None:
    """Flash and cuDNN attention compute in 16 bits, ours needs a GPU that Triton supports; ``best`` is chosen before a step is built."""
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
    """Refuse kernels that a real device lacks. The virtual GPU does not ask: it stands for CUDA."""
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
    """The backend's context around forward, and around backward, where recomputation runs forward again.

    Of ``triton`` the model knows itself; only masks that transformers makes when it is compiled whole are kept away.
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
