"""The operations of PyTorch's published list of autocast dtypes for CUDA, and others that models use.

The list is https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior"; RMSNorm and SDPA came
to autocast_mode.h later.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Published = Literal["low", "fp32", "widest", "error", "not listed"]
"""low: runs in autocast's dtype. fp32: runs in fp32, or returns fp32. widest: in the widest of its operands'.
error: autocast refuses it. not listed: as without autocast, or by what it calls."""
SIZE = 16
ERROR = "error"


class Operands:
    """Operands of an operation: ``first`` in one dtype, ``other`` in another, both on one device.

    Values lie between 0 and 1, where every operation is defined.
    """

    def __init__(self, device: torch.device, first: torch.dtype, other: torch.dtype):
        self.device, self._first, self._other = device, first, other

    def first(self, *shape: int) -> Tensor:
        """Return the leading operand; by default [SIZE, SIZE]."""
        return self._filled(shape, self._first)

    def other(self, *shape: int) -> Tensor:
        """Return a further operand."""
        return self._filled(shape, self._other)

    def _filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape or (SIZE, SIZE), 0.5, dtype=dtype, device=self.device)

    def labels(self, *shape: int) -> Tensor:
        """Return class indices, all 0."""
        return torch.zeros(shape or (SIZE,), dtype=torch.long, device=self.device)

    def signs(self) -> Tensor:
        """Return targets of 1 in fp32."""
        return torch.ones(SIZE, device=self.device)


class Operation(NamedTuple):
    """One operation, and what the list says of it."""

    published: Published
    run: Callable[[Operands], Tensor]
    num_operands: int = 1  # Floating operands: with two or more, mixed dtypes are tried


def _in(published: Published, num: int, **runs: Callable[[Operands], Tensor]) -> dict[str, Operation]:
    return {name: Operation(published, run, num) for name, run in runs.items()}


def _cell(kind: type[torch.nn.Module]) -> Callable[[Operands], Tensor]:
    def run(o: Operands) -> Tensor:
        cell = kind(SIZE, SIZE, device=o.device)
        out = cell(o.first())
        return out[0] if isinstance(out, tuple) else out

    return run


OPERATIONS: dict[str, Operation] = {
    # -- to the low precision: products, and what is made of them
    **_in(
        "low", 2,
        __matmul__=lambda o: o.first() @ o.other(),
        addbmm=lambda o: torch.addbmm(o.first(), o.other(2, SIZE, SIZE), o.other(2, SIZE, SIZE)),
        addmm=lambda o: torch.addmm(o.first(), o.other(), o.other()),
        addmv=lambda o: torch.addmv(o.first(SIZE), o.other(), o.other(SIZE)),
        addr=lambda o: torch.addr(o.first(), o.other(SIZE), o.other(SIZE)),
        baddbmm=lambda o: torch.baddbmm(
            o.first(2, SIZE, SIZE), o.other(2, SIZE, SIZE), o.other(2, SIZE, SIZE)
        ),
        bmm=lambda o: torch.bmm(o.first(2, SIZE, SIZE), o.other(2, SIZE, SIZE)),
        chain_matmul=lambda o: torch.chain_matmul(o.first(), o.other(), o.other()),
        multi_dot=lambda o: torch.linalg.multi_dot([o.first(), o.other(), o.other()]),
        conv1d=lambda o: F.conv1d(o.first(1, 4, SIZE), o.other(4, 4, 3)),
        conv2d=lambda o: F.conv2d(o.first(1, 4, SIZE, SIZE), o.other(4, 4, 3, 3)),
        conv3d=lambda o: F.conv3d(o.first(1, 4, 8, 8, 8), o.other(4, 4, 3, 3, 3)),
        conv_transpose1d=lambda o: F.conv_transpose1d(o.first(1, 4, SIZE), o.other(4, 4, 3)),
        conv_transpose2d=lambda o: F.conv_transpose2d(o.first(1, 4, SIZE, SIZE), o.other(4, 4, 3, 3)),
        conv_transpose3d=lambda o: F.conv_transpose3d(o.first(1, 4, 8, 8, 8), o.other(4, 4, 3, 3, 3)),
        linear=lambda o: F.linear(o.first(), o.other()),
        matmul=lambda o: torch.matmul(o.first(), o.other()),
        mm=lambda o: torch.mm(o.first(), o.other()),
        mv=lambda o: torch.mv(o.first(), o.other(SIZE)),
        prelu=lambda o: F.prelu(o.first(), o.other(1)),
        einsum=lambda o: torch.einsum("ij,jk->ik", o.first(), o.other()),
        vecdot=lambda o: torch.linalg.vecdot(o.first(), o.other()),
        scaled_dot_product_attention=lambda o: F.scaled_dot_product_attention(
            o.first(1, 2, SIZE, SIZE), o.other(1, 2, SIZE, SIZE), o.other(1, 2, SIZE, SIZE)
        ),
    ),
    **_in(
        "low", 1,
        GRUCell=_cell(torch.nn.GRUCell), LSTMCell=_cell(torch.nn.LSTMCell), RNNCell=_cell(torch.nn.RNNCell),
    ),
    # -- to fp32: transcendental functions, reductions, norms
    **_in(
        "fp32", 1,
        __pow__=lambda o: o.first() ** 2,
        __rdiv__=lambda o: 1.0 / o.first(),
        __rpow__=lambda o: 2.0 ** o.first(),
        __rtruediv__=lambda o: o.first().__rtruediv__(1.0),
        acos=lambda o: torch.acos(o.first()), asin=lambda o: torch.asin(o.first()),
        cosh=lambda o: torch.cosh(o.first()), erfinv=lambda o: torch.erfinv(o.first()),
        exp=lambda o: torch.exp(o.first()), expm1=lambda o: torch.expm1(o.first()),
        log=lambda o: torch.log(o.first()), log10=lambda o: torch.log10(o.first()),
        log1p=lambda o: torch.log1p(o.first()), log2=lambda o: torch.log2(o.first()),
        pow=lambda o: torch.pow(o.first(), 2), reciprocal=lambda o: torch.reciprocal(o.first()),
        rsqrt=lambda o: torch.rsqrt(o.first()), sinh=lambda o: torch.sinh(o.first()),
        tan=lambda o: torch.tan(o.first()), softplus=lambda o: F.softplus(o.first()),
        cumprod=lambda o: torch.cumprod(o.first(), 0), cumsum=lambda o: torch.cumsum(o.first(), 0),
        prod=lambda o: torch.prod(o.first()), sum=lambda o: torch.sum(o.first()),
        softmax=lambda o: torch.softmax(o.first(), -1), softmin=lambda o: F.softmin(o.first(), -1),
        log_softmax=lambda o: torch.log_softmax(o.first(), -1),
        logsumexp=lambda o: torch.logsumexp(o.first(), -1),
        norm=lambda o: torch.norm(o.first()), normalize=lambda o: F.normalize(o.first()),
        vector_norm=lambda o: torch.linalg.vector_norm(o.first()),
        matrix_norm=lambda o: torch.linalg.matrix_norm(o.first()),
        renorm=lambda o: torch.renorm(o.first(), 2, 0, 1.0),
        layer_norm=lambda o: F.layer_norm(o.first(), (SIZE,)),
        group_norm=lambda o: F.group_norm(o.first(2, 4, SIZE), 2),
        rms_norm=lambda o: F.rms_norm(o.first(), (SIZE,)),
        pdist=lambda o: F.pdist(o.first()),
        interpolate=lambda o: F.interpolate(o.first(1, 4, SIZE, SIZE), scale_factor=2),
    ),
    # -- to fp32: distances and losses
    **_in(
        "fp32", 1,
        cross_entropy=lambda o: F.cross_entropy(o.first(), o.labels()),
        nll_loss=lambda o: F.nll_loss(o.first(), o.labels()),
        multi_margin_loss=lambda o: F.multi_margin_loss(o.first(), o.labels()),
        multilabel_margin_loss=lambda o: F.multilabel_margin_loss(o.first(), o.labels(SIZE, SIZE)),
        soft_margin_loss=lambda o: F.soft_margin_loss(o.first(SIZE), o.signs()),
        hinge_embedding_loss=lambda o: F.hinge_embedding_loss(o.first(SIZE), o.signs()),
    ),
    **_in(
        "fp32", 2,
        binary_cross_entropy_with_logits=lambda o: F.binary_cross_entropy_with_logits(o.first(), o.other()),
        cosine_embedding_loss=lambda o: F.cosine_embedding_loss(o.first(), o.other(), o.signs()),
        cdist=lambda o: torch.cdist(o.first(), o.other()),
        cosine_similarity=lambda o: F.cosine_similarity(o.first(), o.other()),
        dist=lambda o: torch.dist(o.first(), o.other()),
        kl_div=lambda o: F.kl_div(o.first(), o.other(), reduction="batchmean"),
        l1_loss=lambda o: F.l1_loss(o.first(), o.other()),
        margin_ranking_loss=lambda o: F.margin_ranking_loss(o.first(SIZE), o.other(SIZE), o.signs()),
        mse_loss=lambda o: F.mse_loss(o.first(), o.other()),
        poisson_nll_loss=lambda o: F.poisson_nll_loss(o.first(), o.other()),
        smooth_l1_loss=lambda o: F.smooth_l1_loss(o.first(), o.other()),
        huber_loss=lambda o: F.huber_loss(o.first(), o.other()),
        triplet_margin_loss=lambda o: F.triplet_margin_loss(o.first(), o.other(), o.other()),
    ),
    # -- to the widest operand
    **_in(
        "widest", 2,
        addcdiv=lambda o: torch.addcdiv(o.first(), o.other(), o.other()),
        addcmul=lambda o: torch.addcmul(o.first(), o.other(), o.other()),
        atan2=lambda o: torch.atan2(o.first(), o.other()),
        bilinear=lambda o: F.bilinear(o.first(), o.other(), o.other(SIZE, SIZE, SIZE)),
        cross=lambda o: torch.cross(o.first(4, 3), o.other(4, 3), dim=1),
        dot=lambda o: torch.dot(o.first(SIZE), o.other(SIZE)),
        grid_sample=lambda o: F.grid_sample(
            o.first(1, 4, SIZE, SIZE), o.other(1, SIZE, SIZE, 2), align_corners=False
        ),
        index_put=lambda o: torch.index_put(o.first(), (o.labels(),), o.other()),
        scatter_add=lambda o: torch.scatter_add(o.first(), 0, o.labels(SIZE, SIZE), o.other()),
        tensordot=lambda o: torch.tensordot(o.first(), o.other()),
    ),
    **_in("error", 2, binary_cross_entropy=lambda o: F.binary_cross_entropy(o.first(), o.other())),
    # -- others: their operands' dtype, promoted as without autocast
    **_in(
        "not listed", 2,
        add=lambda o: o.first() + o.other(), mul=lambda o: o.first() * o.other(),
        div=lambda o: o.first() / o.other(), where=lambda o: torch.where(o.first() > 0, o.first(), o.other()),
        cat=lambda o: torch.cat([o.first(), o.other()]), stack=lambda o: torch.stack([o.first(), o.other()]),
    ),
    **_in(
        "not listed", 1,
        mean=lambda o: torch.mean(o.first()), max=lambda o: torch.amax(o.first()),
        relu=lambda o: torch.relu(o.first()), gelu=lambda o: F.gelu(o.first()),
        silu=lambda o: F.silu(o.first()),
        tanh=lambda o: torch.tanh(o.first()), sigmoid=lambda o: torch.sigmoid(o.first()),
        sin=lambda o: torch.sin(o.first()), cos=lambda o: torch.cos(o.first()),
        sqrt=lambda o: torch.sqrt(o.first()), dropout=lambda o: F.dropout(o.first()),
        embedding=lambda o: F.embedding(o.labels(), o.first()),
        batch_norm=lambda o: F.batch_norm(o.first(2, 4, SIZE), None, None, training=True),
        max_pool2d=lambda o: F.max_pool2d(o.first(1, 4, SIZE, SIZE), 2),
        avg_pool2d=lambda o: F.avg_pool2d(o.first(1, 4, SIZE, SIZE), 2),
    ),
}  # fmt: skip


def dtypes(operation: Operation, device: torch.device, low: torch.dtype) -> dict[str, str]:
    """Return the output's dtype under autocast to ``low`` for each combination of operands' dtypes.

    ``of_fp32``, ``of_low``, and, where there are several operands, ``of_mixed``: the first in ``low``, the
    others in fp32. ``error`` where PyTorch refuses these dtypes.
    """
    wide = torch.float32
    cases = {"of_fp32": (wide, wide), "of_low": (low, low), "of_mixed": (low, wide)}
    found = {}
    for name in _cases(operation):
        with torch.autocast(device.type, dtype=low):
            try:
                found[name] = name_of(operation.run(Operands(device, *cases[name])).dtype)
            except RuntimeError:
                found[name] = ERROR
    return found


def published_dtypes(operation: Operation, low: torch.dtype) -> dict[str, str]:
    """Return what the list says of the same cases; empty for an operation that it does not have."""
    wide, narrow = "fp32", name_of(low)
    found = {
        "low": (narrow, narrow, narrow), "fp32": (wide, wide, wide), "widest": (wide, narrow, wide),
        "error": (ERROR, ERROR, ERROR),
    }.get(operation.published)  # fmt: skip
    return {} if found is None else dict(zip(_cases(operation), found, strict=False))


def _cases(operation: Operation) -> tuple[str, ...]:
    return ("of_fp32", "of_low", "of_mixed")[: 2 + (operation.num_operands > 1)]


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's short name."""
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return short.get(dtype, str(dtype))
