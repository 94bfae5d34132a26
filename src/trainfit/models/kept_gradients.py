"""Layers whose weights' gradients are added where they are kept.

Linear layers of a model's blocks add by the product that computes the gradient, embeddings by the rows of a
micro-batch's tokens, the output layer by the fused loss where one chunk has all tokens. The gradients' memory
is kept from step to step, and is zero when a step begins: the first micro-batch adds to it too. Tied weights
have one sum, to which autograd may add the output layer's gradient.
"""

import torch
from torch import Tensor, nn

from trainfit.kernels.embedding import op as rows
from trainfit.kernels.weight_gradient import op
from trainfit.models.fp8_block import HeldLinear
from trainfit.models.fp8_weights import Fp8Linear
from trainfit.models.layers import require_blocks

FP8 = (Fp8Linear, HeldLinear)
"""Layers whose weights' gradients are products in fp8 of our own."""


class KeptGradientLinear(nn.Linear):
    """A linear layer that adds to ``kept``, its weight's gradient."""

    kept: Tensor
    saves_first: bool

    def forward(self, input: Tensor) -> Tensor:
        return op.linear(input, self.weight, self.bias, self.kept, saves_first=self.saves_first)


class KeptGradientEmbedding(nn.Embedding):
    """An embedding that adds to ``kept``, its weight's gradient."""

    kept: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return rows.embedding(input, self.weight, self.kept, self.padding_idx)


class KeptGradients:
    """Memory of the gradients of layers' weights.

    Args:
        modules: layers whose forward is replaced.
        saves_first: as ``op.linear`` takes it.
        head: output layer whose weight's gradient the loss adds; its forward stays.
    """

    def __init__(self, modules: list[nn.Linear | nn.Embedding], *, saves_first: bool, head: nn.Linear | None):
        of_weight: dict[Tensor, Tensor] = {}
        for module in (*modules, *([] if head is None else [head])):
            weight = module.weight
            if weight not in of_weight:
                of_weight[weight] = torch.zeros_like(weight, requires_grad=False)
            if module is head:
                pass
            elif isinstance(module, nn.Embedding):
                module.__class__ = KeptGradientEmbedding
            elif not isinstance(module, FP8):  # Those take ``kept`` as they are.
                module.__class__ = KeptGradientLinear
                module.saves_first = saves_first  # pyright: ignore
            module.kept = of_weight[weight]  # pyright: ignore
        self._of_weight = of_weight
        self._attach()

    def end_step(self) -> None:
        """Set the gradients to zero after an update, and give them back to weights that have lost them."""
        for kept in self._of_weight.values():
            kept.zero_()
        self._attach()

    def begin_batch(self, _is_last: bool) -> None:
        """Begin at zero where a weight has lost its gradient otherwise: sums would be lost too."""
        for weight, kept in self._of_weight.items():
            if weight.grad is not kept:
                kept.zero_()
                weight.grad = kept

    def _attach(self) -> None:
        for weight, kept in self._of_weight.items():
            weight.grad = kept


def keep_gradients(
    model: nn.Module, *, recomputed: bool, embeddings: bool, head: nn.Linear | None
) -> KeptGradients:
    """Replace the forward of trained linear layers of the model's blocks, and of its trained embeddings.

    Other layers keep autograd's sum. Layers that multiply in fp8 add by a product in fp8; torchao's keep
    autograd's.

    Args:
        recomputed: the backward recomputes blocks, or parts of them.
        embeddings: False leaves embeddings as they are.
        head: as of ``KeptGradients``.

    Raises:
        InputError: the model has no repeated blocks.
    """
    op.register()  # torch.compile cannot trace this.
    op.register_fp8()
    rows.register()
    blocks = require_blocks(model, "accumulation", "fused", "use accumulation: standard")
    modules = [module for block in blocks for module in block.modules() if _adds(module)]
    if embeddings:
        modules += [module for module in model.modules() if _adds_rows(module)]
    return KeptGradients(modules, saves_first=recomputed, head=head)  # pyright: ignore


def _adds(module: nn.Module) -> bool:
    """Return whether a module is a trained linear layer with nn.Linear's own forward, or one in fp8."""
    if not isinstance(module, nn.Linear):
        return False
    is_known = isinstance(module, FP8) or type(module).forward is nn.Linear.forward
    return is_known and module.weight.requires_grad


def _adds_rows(module: nn.Module) -> bool:
    """Return whether a module is a trained embedding with nn.Embedding's own forward and gradient."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_plain and module.weight.requires_grad
