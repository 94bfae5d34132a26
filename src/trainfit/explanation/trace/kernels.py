"""Kinds of CUDA kernels, by their names as a profiler records them."""

import re

COMMUNICATION, COPIES = "communication", "copies and fills"

KINDS: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"nccl|nvshmem|rccl|all_?reduce|all_?gather|reduce_?scatter|mscclpp|symm_mem"),
    ("attention",
     r"flash|fmha|attention|attn|cudnn.*sdpa|sdpa|softmax_warp_.*qk|dot_do_o|convert_dq|"
     r"^(?:(?:forward|backward)_gluon|prepare_tma|(?:key|query)_gradient(?:_tma)?|scale_by_thread)_kernel"),
    ("convolutions", r"conv(?!ert)|winograd|wgrad|dgrad|implicit_gemm|im2col|col2im|nchwToNhwc|nhwcToNchw"),
    ("matrix products",
     r"gemm|nvjet|cutlass|xmma|s\d+16816|ampere_|hopper_|_mm_|\bmm\b|matmul|gemv|splitk|cublas|Kernel2|"
     r"triton_tem|Cijk_|wmma|dot_kernel"),
    ("optimizer", r"multi_tensor|fused_?adam|adam|lamb|sgd|FusedOptimizer|foreach|muon"),
    ("softmax and loss", r"softmax|nll|cross_entropy|logsumexp"),
    ("norms", r"norm|rms"),
    ("embeddings and indexing", r"embedding|index|gather|scatter|masked|where"),
    ("reductions", r"reduce|triton_red|triton_per|\bsum\b|mean|argmax"),
    ("sorts", r"sort|topk|scan|cub::"),
    ("random numbers", r"dropout|distribution|random|philox|bernoulli"),
    ("elementwise", r"elementwise|vectorized|unrolled|triton_poi|CatArray|copy_kernel|fill|cast|triton"),
)  # fmt: skip
"""Kind -> pattern; the first that matches counts. cuBLAS's products are named nvjet, gemm, xmma, cutlass; the
second line of attention's has helpers of cuDNN's, the third trainfit's kernels (kernels/flash_attention)."""
OTHER = "other"
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS)
LONGEST_NAME = 400


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel."""
    name = name[:LONGEST_NAME]
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)
