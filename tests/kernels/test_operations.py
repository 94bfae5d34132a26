"""Custom operators follow PyTorch's rules: declared mutations, and fake results like the real ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainfit.kernels.cross_entropy.chunked import Head, linear_cross_entropy
from trainfit.kernels.cross_entropy.fused import fused_linear_cross_entropy
from trainfit.kernels.flash_attention import op as flash_attention
from trainfit.kernels.rms_norm.op import rms_norm
from trainfit.kernels.rope.op import rope
from trainfit.kernels.stochastic_rounding import op as stochastic_rounding
from trainfit.kernels.swiglu.op import swiglu
from trainfit.optim import adafactor, adamw


def opcheck(name: str, *arguments: object) -> None:
    torch.library.opcheck(getattr(torch.ops.trainfit, name), arguments)


def test_optimizers_operations_say_what_they_write():
    adamw.register(), adafactor.register(), stochastic_rounding.register()
    p, g, m, v = (torch.rand(1, 6, 8, dtype=torch.bfloat16) for _ in range(4))
    opcheck("adamw_", p, g, m, v, [1e-3, 0.0, 0.1, 0.01, 1e-8, 0.1, 0.1], False, 1)
    opcheck("add_rounded_", p, g, 0.9, 0.1, 3)
    row, col, mean = torch.rand(1, 6), torch.rand(1, 8), torch.rand(1)
    opcheck("adafactor_squares", p, g)
    opcheck("adafactor_update_squares", g, row, col, mean)
    opcheck("adafactor_apply_", p, g, row, col, mean, torch.tensor(0.1), 1.0, False, 1)


def test_a_backward_that_needs_the_old_weight_says_so():
    """An update between forward and backward is a mistake of the step's; the gradients would be of another
    weight."""
    stochastic_rounding.register()
    weight = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = (x @ weight).sum()
    with torch.no_grad():
        stochastic_rounding.add_rounded(weight, torch.ones_like(weight), 1.0, 0.5, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


LABELS = torch.arange(4)
WITH_A_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: flash_attention.flash_attention(x[None], x[None], x[None], True),
    "its class": lambda x: flash_attention.FlashAttention.apply(x[None], x[None], x[None], True),
    "its reference": lambda x: flash_attention.TiledAttention.apply(x[None], x[None], x[None], True),
    "norm": lambda x: rms_norm(x, torch.ones(16), 1e-6),
    "gate": swiglu,
    "gate of two": lambda x: swiglu(x, x),
    "rotation": lambda x: rope(x[None, None], x[None, None], torch.ones(4, 8), torch.ones(4, 8))[0],
    "loss in chunks": lambda x: linear_cross_entropy(x, Head(torch.eye(16)), LABELS),
    "fused loss": lambda x: fused_linear_cross_entropy(x, Head(torch.eye(16)), LABELS),
}


@pytest.mark.parametrize("name", WITH_A_BACKWARD)
def test_a_second_derivative_is_refused(name: str):
    """Also where the gradient that comes in is a constant: autograd would take ours for one, too."""
    x = torch.rand(4, 16, requires_grad=True)
    (given,) = torch.autograd.grad(WITH_A_BACKWARD[name](x).sum(), x)
    assert given.any()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(WITH_A_BACKWARD[name](x).sum(), x, create_graph=True)
