"""An embedding whose backward adds its gradient where it is kept: only the rows of the batch's tokens move.

Autograd's gradient has a row for each token of the vocabulary, nearly all zero: it is filled with zeros, and
added by a kernel that reads two such tensors and writes one. Here the rows of equal tokens are summed in fp32
(fp64 for fp64) in the order of their positions, and each sum is rounded once, as it is added to its row. The
result is the same in every run.

Shapes: n tokens, e hidden size, v vocabulary. No shape depends on the tokens: they are sorted, and a program
that does not start a run of equal ones ends.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative, triton_kernels

NO_PADDING = -1
ROWS, COLUMNS = 16, 256  # Of the gradient, which a program adds at a time


def embedding(tokens: Tensor, weight: Tensor, kept: Tensor, padding_index: int | None = None) -> Tensor:
    """Return the rows of ``weight``; the backward adds their gradient to ``kept`` and gives autograd none.

    Call ``register`` before.

    Args:
        tokens: int64, of any shape.
        weight: [v, e].
        kept: [v, e], of the same dtype; the sum of gradients so far.
        padding_index: token without a gradient.
    """
    padding = NO_PADDING if padding_index is None else padding_index
    return _Embedding.apply(tokens, weight, kept, padding)  # pyright: ignore[reportReturnType]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, kept: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.kept, ctx.padding = kept, padding  # Not saved: other backwards change it before.
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        (tokens,) = ctx.saved_tensors
        in_order, positions = torch.sort(tokens.flatten(), stable=True)
        gradient_ne = gradients[0].reshape(-1, gradients[0].shape[-1]).contiguous()
        torch.ops.trainfit.add_embedding_gradient_(ctx.kept, gradient_ne, in_order, positions, ctx.padding)
        return None, None, None, None


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.add_embedding_gradient_``.

    It adds to ``kept`` the rows of a gradient [n, e] that belong to sorted tokens [n], at ``positions`` [n].
    """
    declare("add_embedding_gradient_", plain_add, lambda *_: None, triton=triton_add, mutates=("kept",))


def plain_add(kept: Tensor, gradient: Tensor, tokens: Tensor, positions: Tensor, padding: int) -> None:
    """Add them in PyTorch."""
    wide = torch.promote_types(torch.float32, gradient.dtype)
    rows, runs = torch.unique_consecutive(tokens, return_inverse=True)
    sums = gradient.new_zeros(len(rows), gradient.shape[1], dtype=wide)
    sums.index_add_(0, runs, gradient[positions].to(wide))
    sums.masked_fill_((rows == padding)[:, None], 0.0)
    kept[rows] = sums.add_(kept[rows]).to(kept.dtype)


def triton_add(kept: Tensor, gradient: Tensor, tokens: Tensor, positions: Tensor, padding: int) -> None:
    """Add them in one kernel, a program for each token and COLUMNS columns."""
    assert gradient.stride(1) == kept.stride(1) == 1, "the kernel takes contiguous rows"
    num_tokens, width = gradient.shape
    if num_tokens and width:
        grid = (num_tokens, -(-width // COLUMNS))
        triton_kernels("kernels.embedding.triton").add_rows_kernel[grid](
            kept, gradient, tokens, positions, num_tokens, width, kept.stride(0), gradient.stride(0), padding,
            ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
