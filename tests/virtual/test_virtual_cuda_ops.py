"""Operations that fall apart on the virtual GPU as on CUDA, not as on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.virtual.cuda.attention_backend import Query, attend, choose_backend
from trainfit.virtual.cuda.ops import cuda_ops


class Seen(TorchDispatchMode):
    """Operations that ran, and their results' dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        if isinstance(first, Tensor):
            self.names.append(func._schema.name)
            self.dtypes.append(first.dtype)
        return out


def seen_on_cuda(call: Callable[[], Any]) -> Seen:
    with cuda_ops((9, 0), prefers_cudnn=True), FakeTensorMode(), Seen() as seen:
        call()
    return seen


def test_a_bias_is_added_in_place() -> None:
    """aten/src/ATen/native/Linear.cpp: out of place only for subclasses, which fake tensors are."""
    x, weight, bias = torch.randn(4, 8, 16).transpose(0, 1), torch.randn(3, 16), torch.randn(3)
    call = lambda x: nn.functional.linear(x, torch.empty(3, 16), torch.empty(3))  # noqa: E731
    names = seen_on_cuda(lambda: call(torch.empty(4, 8, 16).transpose(0, 1))).names
    assert "aten::add_" in names
    assert "aten::add" not in names
    assert "aten::addmm" in seen_on_cuda(lambda: call(torch.empty(4, 8, 16))).names
    with cuda_ops((9, 0), prefers_cudnn=True):
        ours = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(ours, nn.functional.linear(x, weight, bias))


def test_autocast_leaves_alone_what_cuda_leaves_alone() -> None:
    """Cross-entropy of bf16 logits: log_softmax in bf16, as T5 showed on an H200; a CPU casts the logits
    first."""

    def run() -> None:
        logits = torch.empty(4, 8, dtype=torch.bfloat16)
        image = torch.empty(1, 1, 4, 4, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
            assert torch.cat([logits, logits.float()]).dtype == torch.float32
            assert nn.functional.interpolate(image, scale_factor=2).dtype == torch.float32

    seen = seen_on_cuda(run)
    dtypes = dict(zip(seen.names, seen.dtypes, strict=True))
    assert dtypes["aten::_log_softmax"] == torch.bfloat16
    assert dtypes["aten::nll_loss_forward"] == torch.float32


def test_a_mask_with_its_heads_innermost_goes_to_math() -> None:
    """check_last_dim_stride_equals_1_dense in sdp_utils; T5's learned bias on an H200."""
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.empty(1, 16, 16, 4, dtype=torch.bfloat16, requires_grad=True).permute(0, 3, 1, 2)
    chosen = [
        choose_backend(Query(q, q, q, m, 0.0, False, False), (9, 0), True) for m in (mask, mask.contiguous())
    ]
    assert chosen == ["math", "efficient"]


@pytest.mark.parametrize("scale", [None, 0.3, -0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_math_attention_is_pytorchs(scale: float | None, causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=torch.float64) for heads in (4, 2, 2))
    mask = None if causal else torch.rand(2, 1, 16, 16) > 0.3
    ours = attend(Query(q, k, v, mask, 0.0, causal, True), "math", scale)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=True
        )
    torch.testing.assert_close(ours, theirs)
