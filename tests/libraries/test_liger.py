"""Liger's modules and losses under ``trainfit.trace``: their Triton kernels are recorded, not launched."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainfit.catalog.load import gpu
from trainfit.user import user_gpu

BATCH, SEQ, WIDTH, VOCAB = 2, 64, 128, 512
CONFIG = SimpleNamespace(hidden_size=WIDTH, intermediate_size=256, hidden_act="silu")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def hidden() -> Tensor:
    return random(BATCH, SEQ, WIDTH)


def labels(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, device="cuda")


def logits() -> Tensor:
    return random(BATCH * SEQ, VOCAB, dtype=torch.float32)


def dpo(chunked: Any) -> Tensor:
    """It compiles its chunks with sizes that vary."""
    loss: Any = chunked.LigerFusedLinearDPOLoss()
    weight, x, reference = random(VOCAB, WIDTH), random(4, SEQ, WIDTH), random(4, SEQ, WIDTH)
    return loss(weight, x, labels(4, SEQ), ref_input=reference, ref_weight=weight)[0]


CODE: dict[str, Callable[[Any, Any], Tensor]] = {
    "rms_norm": lambda liger, _: liger.LigerRMSNorm(WIDTH).to("cuda", torch.bfloat16)(hidden()),
    "layer_norm": lambda liger, _: liger.LigerLayerNorm(WIDTH).to("cuda", torch.bfloat16)(hidden()),
    "swiglu": lambda liger, _: liger.LigerSwiGLUMLP(CONFIG).to("cuda", torch.bfloat16)(hidden()),
    "cross_entropy": lambda liger, _: liger.LigerCrossEntropyLoss()(logits(), labels(BATCH * SEQ)),
    "kl_div": lambda liger, _: liger.LigerKLDIVLoss()(logits(), logits().detach()),
    "fused_linear_cross_entropy": lambda liger, _: liger.LigerFusedLinearCrossEntropyLoss()(
        random(VOCAB, WIDTH), random(BATCH * SEQ, WIDTH), labels(BATCH * SEQ)
    ),
    "dpo": lambda _, chunked: dpo(chunked),
}


@pytest.mark.parametrize("name", CODE)
def test_module_forward_and_backward(name: str) -> None:
    with user_gpu(gpu("h200"), prefers_cudnn=False, max_steps=1) as virtual:
        import liger_kernel.chunked_loss as chunked
        import liger_kernel.transformers as liger

        CODE[name](liger, chunked).sum().backward()
        ledger = virtual.tracer.finish()
    launched = [op for op in ledger.ops if op.name.startswith("triton.")]
    assert launched or name == "dpo"
    assert all(op.num_bytes for op in launched)


def test_cross_entropy_keeps_no_gradient_of_its_own() -> None:
    """The kernel writes the gradient over the logits; multiplied by 1, it is not copied."""
    with user_gpu(gpu("h200"), prefers_cudnn=False, max_steps=1) as virtual:
        import liger_kernel.transformers as liger

        CODE["cross_entropy"](liger, None).backward()
        ledger = virtual.tracer.finish()
    size = BATCH * SEQ * VOCAB * 4
    assert [s.num_bytes for s in ledger.storages].count(size) == 1
    kernel = next(op for op in ledger.ops if op.name == "triton.liger_cross_entropy_kernel")
    assert 2 * size < kernel.num_bytes < 2.2 * size
