"""Operations of ours keep PyTorch's rules: what they write into is said, and fake tensors know their results."""

import pytest
import torch

from trainfit.kernels import adafactor, adamw, stochastic_rounding


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
    """An update between forward and backward is a mistake of the step's; the gradients would be of another weight."""
    stochastic_rounding.register()
    weight = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = (x @ weight).sum()
    with torch.no_grad():
        stochastic_rounding.add_rounded(weight, torch.ones_like(weight), 1.0, 0.5, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
