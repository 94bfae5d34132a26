"""FlashAttention's implementations against softmax(QK^T)V in fp64, on shapes that do not fit tiles.

Triton runs in its interpreter (fp32 and fp16: its bf16 products are wrong), and on a GPU in the marked tests.
More than 2^31 elements: test_beyond_32_bits.py.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_runs import computed, inputs, largest_error, plain, wrong_results
from evidence.scripts.kernels.attention_candidates import candidates
from kernel_runs import interpreted_loops
from trainfit.kernels.flash_attention import op as flash
from trainfit.kernels.flash_attention import reference as tiled
from trainfit.kernels.flash_attention import triton_launch
from trainfit.kernels.flash_attention.dispatch import IN_PASSES, SHORT, backward_groups, forward_groups
from trainfit.kernels.flash_attention.hopper import launch as hopper
from trainfit.kernels.flash_attention.triton_launch import Passes, Tiles, triton_backward, triton_forward
from trainfit.spec.errors import InputError

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
CLASSES = [flash.FlashAttention, flash.TiledAttention]


def attention_by(forward: Any, backward: Any) -> Any:
    """Return attention with these launchers."""

    class Attention(flash.TiledAttention):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False, scale=None):
            return flash._forward(ctx, q, k, v, is_causal, scale, forward)

        @staticmethod
        def backward(ctx, *gradients):
            return flash._backward(ctx, gradients[0], backward)

    return Attention.apply


by_triton = attention_by(triton_forward, triton_backward)


# -- shapes

SHAPES = [
    (1, 1, 1, 1, 1, 16), (2, 2, 2, 37, 37, 16), (1, 4, 2, 131, 131, 40), (1, 2, 1, 64, 200, 64),
    (1, 2, 2, 200, 64, 32), (1, 1, 1, 257, 257, 80),
]  # fmt: skip
"""b, h, k, n, m, d"""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_in_pytorch(shape: Any, is_causal: bool) -> None:
    assert largest_error(flash.TiledAttention.apply, inputs(*shape, torch.float64), is_causal) < 1e-12
    assert largest_error(flash.TiledAttention.apply, inputs(*shape, FP32), is_causal) < 2e-5


def test_gradients_are_differences() -> None:
    tensors = [x.requires_grad_() for x in inputs(1, 2, 1, 9, 11, 4, torch.float64)[:3]]
    for is_causal in (False, True):
        run = lambda q, k, v, c=is_causal: flash.TiledAttention.apply(q, k, v, c)  # noqa: E731
        assert torch.autograd.gradcheck(run, tensors)


@interpreted_loops
@pytest.mark.parametrize(
    ("shape", "dtype", "is_causal"),
    [*((shape, FP32, True) for shape in SHAPES), (SHAPES[3], FP32, False), (SHAPES[4], FP32, False),
     (SHAPES[1], FP16, True), (SHAPES[3], FP16, False), ((1, 2, 1, 37, 50, 320), FP16, True)],
    ids=str,
)  # fmt: skip
def test_kernels_in_the_interpreter(shape: Any, dtype: torch.dtype, is_causal: bool) -> None:
    assert largest_error(by_triton, inputs(*shape, dtype), is_causal) < (1e-5 if dtype == FP32 else 2e-2)


@interpreted_loops
@pytest.mark.parametrize(("dtype", "atol"), [(FP32, 1e-5), (BF16, 2e-2)], ids=str)
def test_the_class_runs_its_kernels_in_the_interpreter(
    dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with bf16, of which the interpreter's own products are wrong."""
    launched = []
    kernels = triton_launch._kernels()
    monkeypatch.setattr(triton_launch, "_kernels", lambda: launched.append(1) or kernels)
    given = inputs(1, 2, 1, 40, 37, 16, dtype)
    assert largest_error(flash.FlashAttention.apply, given, True) < atol
    assert len(launched) == 4  # The forward, and the backward's three.
    assert largest_error(flash.FlashAttention.apply, inputs(1, 1, 1, 9, 9, 4, torch.float64), True) < 1e-12
    assert len(launched) == 4  # No kernel computes in fp64.


@interpreted_loops
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_kernels_with_a_scale_that_is_not_positive(scale: float) -> None:
    q, k, v, gradient = inputs(1, 2, 1, 40, 37, 16, FP32)
    out, lse = triton_forward(q, k, v, True, scale)
    wanted, wanted_lse = tiled.tiled_forward(q, k, v, True, scale)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse), atol=1e-5, rtol=1e-5)
    found = triton_backward(gradient, q, k, v, out, lse, True, scale)
    exact = tiled.tiled_backward(gradient, q, k, v, wanted, wanted_lse, True, scale)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@interpreted_loops
@pytest.mark.parametrize(
    ("shape", "is_causal"),
    [(SHAPES[0], True), (SHAPES[3], False), (SHAPES[4], True), ((1, 6, 2, 70, 70, 16), True)],
    ids=str,
)
@pytest.mark.parametrize("tiles", [Tiles(64, 32, 4, 2, 3), Tiles(32, 64, 4, 2, 2)], ids=["rows", "keys"])
def test_wide_tiles_in_the_interpreter(shape: Any, is_causal: bool, tiles: Tiles) -> None:
    """The heads are no multiple of the heads at once."""
    run = attention_by(
        lambda *each: triton_forward(*each, tiles), lambda *each: triton_backward(*each, (tiles, tiles))
    )
    assert largest_error(run, inputs(*shape, FP16), is_causal) < 5e-3


def test_candidates_have_unique_names() -> None:
    names = [each.name for each in candidates()]
    assert len(names) == len(set(names))
    assert {each.d for each in candidates()} == {64, 128}


def growing(tensors: list[Tensor]) -> list[Tensor]:
    """Scale earlier keys up, so maxima grow repeatedly while a kernel processes keys backwards."""
    q, k, v, gradient = tensors
    return [q, k * torch.linspace(8, 0.25, k.shape[2], dtype=k.dtype, device=k.device)[:, None], v, gradient]


GROUPED = [(2, 4, 2, 777, 777), (1, 2, 1, 520, 200), (1, 6, 2, 200, 520)]
ON_HOPPER = [*GROUPED, (1, 2, 2, 37, 131), (3, 20, 20, 1000, 1000), (1, 4, 4, 2048, 2048)]
"""b, h, k, n, m: grouped heads, odd lengths, rows without keys, several turns, a partial set of heads."""
FAST = [
    (64, BF16, False, ON_HOPPER), (64, BF16, True, ON_HOPPER), (128, BF16, True, ON_HOPPER),
    (128, BF16, False, GROUPED), (64, FP16, True, GROUPED), (256, BF16, True, ON_HOPPER),
    (256, BF16, False, GROUPED),
]  # fmt: skip
"""Triton compiles separately for sizes and groups of 1 and for multiples of 16, seconds each."""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="Hopper's instructions",
)
@pytest.mark.parametrize(("d", "dtype", "is_causal", "shapes"), FAST, ids=str)
def test_gluon_kernels_on_hopper(d: int, dtype: torch.dtype, is_causal: bool, shapes: list) -> None:
    """With the configuration of short sequences and that of long ones."""
    wrong = []
    for n in (SHORT - 1, SHORT):
        how = forward_groups(d, n, 4)
        backward = partial(triton_launch.backward_in_passes, how=IN_PASSES[256])
        if d <= 128:
            backward = partial(hopper.backward, how=backward_groups(d, n, 4))
        run = attention_by(partial(hopper.gluon_forward, how=how), backward)
        for shape in shapes:
            given = inputs(*shape, d, dtype, "cuda")
            wrong += wrong_results(run, given, is_causal)
            # Gradients of scores so far apart are all but zeros.
            wrong += [f"growing {line}" for line in wrong_results(run, growing(given), is_causal, ("out",))]
    assert not wrong, "\n".join(wrong)


WIDE = (1, 2, 2, 513, 513, 256)
PLAIN_KERNELS = [
    (BF16, True, SHAPES[0]), (BF16, False, SHAPES[1]), (BF16, True, SHAPES[2]), (BF16, False, SHAPES[4]),
    (BF16, True, SHAPES[5]), (BF16, False, WIDE), (FP16, True, SHAPES[1]), (FP32, False, SHAPES[1]),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in ((FP32, True, SHAPES[2]), (FP32, True, WIDE), (FP16, True, WIDE))),
]  # fmt: skip
"""Every shape in bf16, each set of tiles in the other dtypes: each case compiles four kernels for seconds."""


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "is_causal", "shape"), PLAIN_KERNELS, ids=str)
def test_kernels_on_a_gpu(dtype: torch.dtype, is_causal: bool, shape: tuple[int, ...]) -> None:
    wrong = wrong_results(flash.flash_attention, inputs(*shape, dtype, "cuda"), is_causal)
    assert not wrong, "\n".join(wrong)


PASSES = Passes(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1))


@interpreted_loops
@pytest.mark.parametrize("shape", [*SHAPES[1:5], (1, 4, 1, 70, 90, 72)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_passes_in_the_interpreter(shape: Any, is_causal: bool) -> None:
    """Tiles by descriptors: rows outside are zeros, and a group of heads shares its keys."""
    run = attention_by(triton_forward, partial(triton_launch.backward_in_passes, how=PASSES))
    assert largest_error(run, inputs(*shape, FP16), is_causal) < 2e-2


# -- the interface


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_class_is_an_adapter_of_cs336(kind: Any, is_causal: bool, device: str) -> None:
    """The public tests of Stanford's CS336, assignment 2: ``.apply`` of [b, n, d] tensors and gradients.

    Exactly one saved tensor has the shape (b, n): the log-sum-exp.
    """
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(4, 128, 64, device=device) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = kind.apply(q, k, v, is_causal)
    (lse,) = (x for x in out.grad_fn.saved_tensors if x.shape == (4, 128))
    scores = q @ k.mT / math.sqrt(64)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    wanted = scores.softmax(-1) @ v
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(out, leaves, gradient)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaves, gradient), rtol=1e-3, atol=1e-3)


def test_the_class_compiles_into_one_graph(fresh_compiler: None) -> None:
    flash.register()
    *leaves, gradient = (x[:, 0] for x in inputs(2, 1, 1, 40, 40, 16, FP32))
    leaves = [x.requires_grad_() for x in leaves]
    apply, runs = flash.FlashAttention.apply, []
    for call in (apply, torch.compile(apply, backend="aot_eager", fullgraph=True)):
        out = call(*leaves, True)
        runs.append([out, *torch.autograd.grad(out, leaves, gradient)])
    for found, wanted in zip(*runs, strict=True):
        assert torch.equal(found, wanted)


def test_three_dimensions_and_refusals() -> None:
    q, k, v, _ = (x[:, 0] for x in inputs(2, 1, 1, 20, 20, 8, FP32))
    out = flash.flash_attention(q, k, v, True)
    assert out.shape == q.shape
    torch.testing.assert_close(out, plain(q[:, None], k[:, None], v[:, None], True)[:, 0])
    with pytest.raises(InputError, match="head size 513"):
        flash.flash_attention(*(torch.zeros(1, 4, 513) for _ in range(3)))
    with pytest.raises(InputError, match="no multiple"):
        flash.flash_attention(torch.zeros(1, 3, 4, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))


@pytest.mark.parametrize("run", [flash.flash_attention, *(kind.apply for kind in CLASSES)])
def test_nothing_of_size_n_by_m_is_saved(run: Any) -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(2, 4, 2, 300, 250, 16, FP32))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(q, k, v)
    assert [x.shape for x in saved] == [q.shape, k.shape, v.shape, q.shape, (2, 4, 300)]


# -- stride 0


def ones_expanded(tensors: list[Tensor]) -> list[Tensor]:
    """Expand one number to the gradient, as ``out.sum().backward()`` does."""
    q, k, v, gradient = tensors
    return [q, k, v, torch.ones((), dtype=q.dtype, device=q.device).expand_as(gradient)]


def shared_keys(tensors: list[Tensor]) -> list[Tensor]:
    """Share one head's keys among all, and one sequence's values among the batch."""
    q, k, v, gradient = tensors
    return [q, k[:, :1].expand_as(k), v[:1].expand_as(v), gradient]


@pytest.mark.parametrize("given", [ones_expanded, shared_keys])
@pytest.mark.parametrize(
    ("run", "sizes", "dtype", "device"),
    [
        (flash.flash_attention, (2, 4, 2, 77, 77, 16), FP32, "cpu"),
        (flash.TiledAttention.apply, (2, 4, 2, 77, 77, 16), FP32, "cpu"),
        pytest.param(by_triton, (1, 4, 2, 40, 40, 16), FP32, "cpu", marks=interpreted_loops),
        *(
            pytest.param(flash.flash_attention, (2, 4, 2, 77, 77, d), dtype, "cuda", marks=pytest.mark.gpu)
            for d, dtype in ((64, BF16), (128, BF16), (80, FP16))
        ),
    ],
)
def test_stride_0(run: Any, sizes: Any, dtype: torch.dtype, device: str, given: Callable[..., Any]) -> None:
    wrong = wrong_results(run, given(inputs(*sizes, dtype, device)), True)
    assert not wrong, "\n".join(wrong)


# -- hard scores


def certain(tensors: list[Tensor]) -> list[Tensor]:
    """Give each row's own key all the probability: keys of +-1, queries 16 times those."""
    q, k, v, gradient = tensors
    k = k.sign()
    return [(16 * k).repeat_interleave(q.shape[1] // k.shape[1], 1), k, v, gradient]


@pytest.mark.parametrize(
    ("run", "sizes", "dtype", "device", "is_causal"),
    [
        (flash.flash_attention, (1, 4, 2, 60, 60, 64), FP32, "cpu", False),
        (flash.flash_attention, (1, 4, 2, 60, 60, 64), FP32, "cpu", True),
        pytest.param(by_triton, (1, 4, 2, 40, 40, 64), FP32, "cpu", True, marks=interpreted_loops),
        *(
            pytest.param(
                flash.flash_attention, (1, 4, 2, 331, 331, d), dtype, "cuda", True, marks=pytest.mark.gpu
            )
            for d, dtype in ((64, BF16), (128, BF16), (128, FP16), (80, BF16))
        ),
    ],
)
def test_certain_keys(run: Any, sizes: Any, dtype: torch.dtype, device: str, is_causal: bool) -> None:
    """The gradients of q and k are differences of equal sums: 0 up to rounding."""
    tensors = certain(inputs(*sizes, dtype, device))
    out, dq, dk, _ = computed(run, tensors, is_causal, dtype)
    torch.testing.assert_close(out, tensors[2].repeat_interleave(2, 1), rtol=1e-2, atol=1e-4)
    assert max(dq.abs().max().item(), dk.abs().max().item()) < 1e-3
    wrong = wrong_results(run, tensors, is_causal, ("out", "dv"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_rows_without_keys_are_zeros(device: str) -> None:
    """No key at all, and under a causal mask the rows before the first key; their gradients, too."""
    flash.register()
    dtype = FP32 if device == "cpu" else BF16
    q, k, v, gradient = (x.requires_grad_() for x in inputs(1, 2, 1, 70, 50, 64, dtype, device))
    for keys, rows in ((0, 70), (50, 20)):
        for run in (torch.ops.trainfit.flash_attention, *([triton_forward] if device == "cuda" else [])):
            out, lse = run(q, k[:, :, :keys], v[:, :, :keys], True, 0.1)
            assert not out[:, :, :rows].any()
            assert (lse[:, :, :rows] == -math.inf).all()
            assert lse[:, :, rows:].isfinite().all()
        out = flash.flash_attention(q, k[:, :, :keys], v[:, :, :keys], True)
        dq, dk = torch.autograd.grad(out, (q, k), gradient)
        assert not dq[:, :, :rows].any()
        assert dk.isfinite().all()
        assert dk.any() == (keys > 0)
