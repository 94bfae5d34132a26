"""Which attention kernel a CUDA GPU would run, and what it keeps for the backward pass.

The expected choices are read off PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, except where
an H200 with torch 2.11 was seen to choose otherwise.
"""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainfit.kernels.determinism import deterministic_kernels
from trainfit.ledger.ledger import MIDDLE, Ledger
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware
from trainfit.virtual.cuda.attention_backend import Query, choose_backend
from virtual_runs import recipe_of, steady, with_layers

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
T4, A100, RTX_3090, RTX_4090, H100, B200 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)


def query(
    dtype: torch.dtype = BF16, dim: int = 128, *, heads: int = 8, kv_heads: int = 8, seq: int = 64,
    keys: int | None = None,
    value_dim: int | None = None, mask: Any = None, dropout: float = 0.0, causal: bool = False,
    trains: bool = True,
) -> Query:  # fmt: skip
    def made(num_heads: int, length: int, size: int) -> torch.Tensor:
        return torch.empty(2, num_heads, length, size, dtype=dtype, device="meta", requires_grad=trains)

    keys = seq if keys is None else keys
    k, v = made(kv_heads, keys, dim), made(kv_heads, keys, value_dim or dim)
    return Query(made(heads, seq, dim), k, v, mask, dropout, causal, heads != kv_heads)


MASK = torch.empty(1, 1, 64, 64, dtype=torch.bool, device="meta")
CHOICES: list[tuple[str, Query, tuple[int, int], str]] = [
    ("plain on Ampere", query(), A100, "flash"),
    ("fp16 on Ampere", query(FP16), A100, "flash"),
    ("fp32 never flash", query(FP32), A100, "efficient"),
    ("Turing has no flash", query(FP16), T4, "efficient"),
    ("Turing has no bf16", query(BF16), T4, "math"),
    ("a mask", query(mask=MASK), A100, "efficient"),
    ("grouped heads", query(kv_heads=2), A100, "flash"),
    ("grouped heads in fp32", query(FP32, kv_heads=2), A100, "math"),
    ("grouped heads and a mask", query(kv_heads=2, mask=MASK), A100, "math"),
    ("dropout", query(dropout=0.1), A100, "flash"),
    ("head size padded to a multiple of 8", query(dim=100), A100, "flash"),
    ("head size 256", query(dim=256), A100, "flash"),
    ("head size over 256", query(dim=320), A100, "efficient"),
    ("values of another head size", query(dim=192, value_dim=128), A100, "efficient"),
    ("fp32 head size no multiple of 4", query(FP32, dim=66), A100, "math"),
    ("half head size no multiple of 8, masked", query(dim=68, mask=MASK), A100, "math"),
    ("consumer GPU, training, head size 224", query(dim=224), RTX_4090, "efficient"),
    ("consumer GPU, inference, head size 224", query(dim=224, trains=False), RTX_4090, "flash"),
    ("consumer GPU, training, head size 256", query(dim=256), RTX_3090, "flash"),
    ("consumer GPU, training, head size 256, dropout", query(dim=256, dropout=0.1), RTX_3090, "efficient"),
    ("consumer GPU, head size 192", query(dim=192), RTX_4090, "flash"),
    ("causal with more keys than queries", query(keys=128, causal=True), A100, "efficient"),
    ("causal, square", query(causal=True), A100, "flash"),
    ("plain on Hopper", query(), H100, "cudnn"),
    ("grouped heads on Hopper", query(kv_heads=2), H100, "cudnn"),
    ("a mask on Hopper", query(mask=MASK), H100, "cudnn"),
    ("fp32 on Hopper", query(FP32), H100, "efficient"),
    ("head size 256 on Hopper", query(dim=256), H100, "cudnn"),
    ("head size over 256 on Hopper", query(dim=320), H100, "efficient"),
    ("head size 192 with values of 128", query(dim=192, value_dim=128), H100, "cudnn"),
    ("head size no multiple of 8", query(dim=100), H100, "flash"),
    ("dropout on Hopper", query(dropout=0.1), H100, "cudnn"),
    ("one key", query(seq=1, keys=1), B200, "flash"),
]
"""On an H200 Gemma's head size of 256 and GPT-2's dropout ran through cuDNN."""


@pytest.mark.parametrize(
    ("case", "requested", "capability", "backend"), CHOICES, ids=[case for case, *_ in CHOICES]
)
def test_choice(case: str, requested: Query, capability: tuple[int, int], backend: str) -> None:
    assert choose_backend(requested, capability, prefers_cudnn=capability in (H100, B200)) == backend


def test_cudnn_has_no_deterministic_attention() -> None:
    """Whether its backward would run or not; a warning alone changes nothing (check_cudnn_deterministic)."""
    for trains in (True, False):
        with deterministic_kernels():
            assert choose_backend(query(trains=trains), H100, prefers_cudnn=True) == "flash"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert choose_backend(query(), H100, prefers_cudnn=True) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)
    only_cudnn = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    refused = pytest.raises(InputError, match="with deterministic algorithms.*or no deterministic algorithms")
    with deterministic_kernels(), only_cudnn, refused:
        choose_backend(query(), H100, prefers_cudnn=True)


def test_switches_are_obeyed() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert choose_backend(query(), A100, False) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choose_backend(query(), A100, False) == "efficient"
    refused = pytest.raises(InputError, match="attention: sdpa or math")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), refused as error:
        choose_backend(query(FP32), A100, False)
    assert "\n" not in str(error.value)
    assert choose_backend(query(), A100, False) == "flash"


def attention_ops(ledger: Ledger) -> set[str]:
    names = {op.name for op in steady(ledger) if "attention" in op.name}
    return {name.removeprefix("aten._scaled_dot_product_").split("_attention")[0] for name in names}


@pytest.mark.parametrize(
    ("name", "gpu", "fields", "ops"),
    [
        ("llama-3.2-1b", "rtx-4090", {"precision": "amp-fp16"}, {"flash"}),
        ("llama-3.2-1b", "h200", {"attention": "cudnn"}, {"cudnn"}),
        ("gpt2", "a100-sxm4-80gb", {"precision": "fp32"}, {"efficient"}),
        ("gemma-2-2b", "a100-sxm4-80gb", {"attention": "eager"}, set()),
    ],
)
def test_ops_of_a_traced_step(name: str, gpu: str, fields: dict[str, Any], ops: set[str]) -> None:
    ledger = trace(recipe_of(with_layers(name, 2), hardware=Hardware(gpu=gpu), **fields))
    assert attention_ops(ledger) == ops


def kept_bytes(attention: Any, seq: int) -> int:
    """Activations of the middle layer of Llama-3.2-1B that are alive as the backward begins."""
    ledger = trace(
        recipe_of(with_layers("llama-3.2-1b", 4), attention=attention, batch=Batch(micro=2, seq=seq),
                  hardware=Hardware(gpu="a100-sxm4-80gb")),
    )  # fmt: skip
    forward = next(i for i, s in enumerate(ledger.segments) if s == ("steady", "forward"))
    live: set[int] = set()
    for event in ledger.events:
        if event.segment > forward:
            break
        live.add(event.storage) if event.kind else live.discard(event.storage)
    kept = [ledger.storages[i] for i in live]
    return sum(s.num_bytes for s in kept if (s.category, s.group) == ("activations", MIDDLE))


def test_what_each_backend_keeps() -> None:
    """Llama-3.2-1B: 32 query heads on 8 key heads of 64, bf16, 2 sequences of 256.

    Math computes bf16 in fp32: it keeps fp32 probabilities and fp32 copies of q, and of k and v for every
    query head. Flash keeps q, k, v as they are, the output (as math does) and an fp32 logsumexp. Eager keeps
    probabilities twice, in fp32 (softmax's result) and in bf16 (what multiplies v).
    """
    batch, heads, kv_heads, seq, dim = 2, 32, 8, 256, 64
    math, flash, eager = (kept_bytes(backend, seq) for backend in ("math", "flash", "eager"))
    # Doubling the sequence doubles what is linear in it and quadruples what is quadratic.
    quadratic = {
        backend: (kept_bytes(backend, 2 * seq) - 2 * kept) // 2
        for backend, kept in (("math", math), ("flash", flash), ("eager", eager))
    }
    probabilities = batch * heads * seq * seq
    assert quadratic["math"] == 4 * probabilities
    assert quadratic["eager"] == (4 + 2) * probabilities
    assert abs(quadratic["flash"]) <= 64
    token = batch * seq
    more = 3 * token * heads * dim * 4 - (token * (heads + 2 * kv_heads) * dim * 2 + token * heads * 4)
    assert math - quadratic["math"] - flash == pytest.approx(
        more, abs=64
    )  # the random generator's state: bytes
