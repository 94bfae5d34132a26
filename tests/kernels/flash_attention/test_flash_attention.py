"""FlashAttention's implementations against softmax(QK^T)V in fp64, on shapes that do not fit tiles.

Triton runs in its interpreter (fp32 and fp16: its bf16 products are wrong), and on a GPU in the marked tests.
"""

import math
import os

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.attention_candidates import candidates
from benchmarks.kernels.error_location import where_wrong
from trainfit.kernels.flash_attention import op as flash
from trainfit.kernels.flash_attention import reference as tiled
from trainfit.kernels.flash_attention.dispatch import BACKWARD, FORWARD
from trainfit.kernels.flash_attention.hopper import launch as hopper
from trainfit.kernels.flash_attention.triton_launch import Tiles, triton_backward, triton_forward
from trainfit.spec.errors import InputError

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
RESULTS = ("out", "dq", "dk", "dv")


def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Compute softmax(QK^T / sqrt d) V with all scores; rows without keys give zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        n, m = scores.shape[-2:]
        seen = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def inputs(
    b: int, h: int, k: int, n: int, m: int, d: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    torch.manual_seed(n * 1000 + d)
    shapes = ((b, h, n, d), (b, k, m, d), (b, k, m, d), (b, h, n, d))
    return [torch.randn(shape, dtype=torch.float64, device=device).to(dtype) for shape in shapes]


def computed(run, tensors: list[Tensor], is_causal: bool, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of q, k and v, computed in ``dtype``."""
    *leaves, gradient = (x.detach().to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = run(*leaves, is_causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def errors(run, tensors: list[Tensor], is_causal: bool) -> list[float]:
    """Largest differences of output and gradients from fp64."""
    wanted = computed(plain, tensors, is_causal, torch.float64)
    found = computed(run, tensors, is_causal, tensors[0].dtype)
    return [(a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]


def wrong_results(run, tensors: list[Tensor], is_causal: bool, names: tuple[str, ...] = RESULTS) -> list[str]:
    """Where which results err by more than twice what the same written out in their dtype does, against
    fp64."""
    dtype = tensors[0].dtype
    exact = computed(plain, tensors, is_causal, torch.float64)
    eager, found = (computed(each, tensors, is_causal, dtype) for each in (plain, run))
    lines = []
    for name, ours, theirs, right in zip(RESULTS, found, eager, exact, strict=True):
        allowed = 2 * (theirs.double() - right).abs().max().item() + 1e-6
        if name in names and (line := where_wrong(name, ours, right, allowed)):
            worst = (ours.double() - right).abs().max().item()
            lines.append(
                f"{list(tensors[0].shape)} by {list(tensors[1].shape)} {dtype}: off by {worst:.3g}; {line}"
            )
    return lines


SHAPES = [
    (1, 1, 1, 1, 1, 16),
    (2, 2, 2, 37, 37, 16),
    (1, 4, 2, 131, 131, 40),
    (1, 2, 1, 64, 200, 64),
    (1, 2, 2, 200, 64, 32),
    (1, 1, 1, 257, 257, 80),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiled_body_is_attention(shape, is_causal) -> None:
    assert max(errors(flash.TiledAttention.apply, inputs(*shape, torch.float64), is_causal)) < 1e-12
    assert max(errors(flash.TiledAttention.apply, inputs(*shape, torch.float32), is_causal)) < 2e-5


def test_gradients_of_the_tiled_body() -> None:
    tensors = [x.requires_grad_() for x in inputs(1, 2, 1, 9, 11, 4, torch.float64)[:3]]
    for is_causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda q, k, v, c=is_causal: flash.TiledAttention.apply(q, k, v, c), tensors
        )


class Interpreted(flash.TiledAttention):
    """The Triton kernels in the interpreter."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, scale=None):
        return flash._forward(ctx, q, k, v, is_causal, scale, triton_forward)

    @staticmethod
    def backward(ctx, *gradients):
        return flash._backward(ctx, gradients[0], triton_backward)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels run for real, in the tests below"
)
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, FP32) for shape in SHAPES), (SHAPES[1], FP16), (SHAPES[3], FP16)], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_in_the_interpreter(shape, dtype, is_causal) -> None:
    assert max(errors(Interpreted.apply, inputs(*shape, dtype), is_causal)) < (
        1e-5 if dtype == FP32 else 2e-2
    )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_kernels_with_a_scale_that_is_not_positive(scale: float) -> None:
    q, k, v, gradient = inputs(1, 2, 1, 40, 37, 16, torch.float32)
    out, lse = triton_forward(q, k, v, True, scale)
    wanted, wanted_lse = tiled.tiled_forward(q, k, v, True, scale)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse), atol=1e-5, rtol=1e-5)
    for found, exact in zip(
        triton_backward(gradient, q, k, v, out, lse, True, scale),
        tiled.tiled_backward(gradient, q, k, v, wanted, wanted_lse, True, scale),
        strict=True,
    ):
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


WIDE_ROWS, WIDE_KEYS = Tiles(64, 32, 4, 2, 3), Tiles(32, 64, 4, 2, 2)
"""The heads are no multiple of the heads at once."""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4], (1, 6, 2, 70, 70, 16)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tiles", [WIDE_ROWS, WIDE_KEYS], ids=["wide rows", "wide keys"])
def test_tiles_in_the_interpreter(shape, is_causal, tiles) -> None:

    class Interpreted(flash.TiledAttention):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False, scale=None):
            return flash._forward(ctx, q, k, v, is_causal, scale, lambda *each: triton_forward(*each, tiles))

        @staticmethod
        def backward(ctx, *gradients):
            how = (tiles, tiles)
            return flash._backward(ctx, gradients[0], lambda *each: triton_backward(*each, how))

    assert max(errors(Interpreted.apply, inputs(*shape, torch.float16), is_causal)) < 5e-3


def test_candidates_have_names_of_their_own() -> None:
    names = [each.name for each in candidates()]
    assert len(names) == len(set(names))
    assert {each.d for each in candidates()} == {64, 128}


def growing(tensors: list[Tensor]) -> list[Tensor]:
    """Scale earlier keys up, so maxima grow repeatedly while a kernel processes keys backwards."""
    q, k, v, gradient = tensors
    return [q, k * torch.linspace(8, 0.25, k.shape[2], dtype=k.dtype, device=k.device)[:, None], v, gradient]


GROUPED = [(2, 4, 2, 777, 777), (1, 2, 1, 520, 200), (1, 6, 2, 200, 520)]
ON_HOPPER = [*GROUPED, (1, 2, 2, 37, 131), (3, 20, 20, 1000, 1000), (1, 4, 4, 2048, 2048)]
"""b, h, k, n, m: grouped heads, odd lengths, rows without keys, tiles of several turns, heads that fill no
whole set."""
FAST = [
    (64, BF16, False, ON_HOPPER), (64, BF16, True, ON_HOPPER), (128, BF16, True, ON_HOPPER), (128, BF16,
    False, GROUPED),
    (64, FP16, True, GROUPED),
]  # fmt: skip
"""Triton compiles separately for sizes and groups of 1 and for multiples of 16, seconds each."""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="Hopper's instructions",
)
@pytest.mark.parametrize(("d", "dtype", "is_causal", "shapes"), FAST, ids=str)
def test_gluon_kernels_on_hopper(d: int, dtype: torch.dtype, is_causal: bool, shapes: list) -> None:
    """The chosen ones: at most twice the error of softmax(QK^T)V written out in the same dtype, against
    fp64."""

    class Fast(flash.TiledAttention):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False, scale=None):
            return flash._forward(
                ctx, q, k, v, is_causal, scale, lambda *each: hopper.gluon_forward(*each, FORWARD[d])
            )

        @staticmethod
        def backward(ctx, *gradients):
            return flash._backward(ctx, gradients[0], lambda *each: hopper.backward(*each, BACKWARD[d]))

    wrong = []
    for shape in shapes:
        given = [x.cuda() for x in inputs(*shape, d, dtype)]
        wrong += wrong_results(Fast.apply, given, is_causal)
        # Gradients of scores so far apart are all but zeros.
        wrong += [
            f"growing {line}" for line in wrong_results(Fast.apply, growing(given), is_causal, ("out",))
        ]
    assert not wrong, "\n".join(wrong)


def test_three_dimensions_and_refusals() -> None:
    q, k, v, _ = (x[:, 0] for x in inputs(2, 1, 1, 20, 20, 8, torch.float32))
    out = flash.flash_attention(q, k, v, True)
    assert out.shape == q.shape
    torch.testing.assert_close(out, plain(q[:, None], k[:, None], v[:, None], True)[:, 0])
    with pytest.raises(InputError, match="head size 512"):
        flash.flash_attention(*(torch.zeros(1, 4, 512) for _ in range(3)))
    with pytest.raises(InputError, match="no multiple"):
        flash.flash_attention(torch.zeros(1, 3, 4, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))


def test_nothing_of_size_n_by_n_is_kept() -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(1, 1, 1, 300, 300, 8, torch.float32))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        flash.flash_attention(q, k, v, True)
    assert sorted(t.numel() for t in kept) == [300, 2400, 2400, 2400, 2400]


WIDE = (1, 2, 2, 513, 513, 256)
ON_A_GPU = [
    (BF16, True, SHAPES[0]), (BF16, False, SHAPES[1]), (BF16, True, SHAPES[2]), (BF16, False, SHAPES[4]),
    (BF16, True, SHAPES[5]),
    (BF16, False, WIDE), (FP16, True, SHAPES[1]), (FP32, False, SHAPES[1]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((FP32, True, SHAPES[2]), (FP32, True, WIDE),
    (FP16, True, WIDE))), ]  # fmt: skip
"""What trains (bf16) in every shape; of the others each set of tiles.

Every case compiles four kernels of its own: Triton makes another for each alignment of sizes and strides.
That takes seconds, but fp32's products are unrolled into single multiplications, and a head of 64 or more
takes ten times as long. Head size 64 in 16 bits is Gluon's (the tests above), the others are the plain
kernels'.
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "is_causal", "shape"), ON_A_GPU, ids=str)
def test_kernels_on_a_gpu(dtype: torch.dtype, is_causal: bool, shape: tuple[int, ...]) -> None:
    """At most twice the error of softmax(QK^T)V written out in the same dtype, against fp64."""
    wrong = wrong_results(flash.flash_attention, inputs(*shape, dtype, "cuda"), is_causal)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
def test_the_plain_kernels_are_repeatable() -> None:
    """With deterministic algorithms, at a head size whose backward otherwise accumulates in any order."""
    tensors = inputs(2, 4, 2, 777, 777, 64, BF16, "cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runs = [computed(flash.flash_attention, tensors, True, BF16) for _ in range(3)]
        wrong = wrong_results(flash.flash_attention, tensors, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not wrong, "\n".join(wrong)
    for name, first, *later in zip(RESULTS, *runs, strict=True):
        assert all(torch.equal(first, each) for each in later), f"{name} differs from run to run"
