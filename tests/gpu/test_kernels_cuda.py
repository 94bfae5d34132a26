"""The loss and block kernels on a real GPU: hard inputs, errors against fp64, and predicted peaks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from block_definitions import EPS, angles, gated, results, rms, turned
from driver_addresses import check_peaks
from trainfit.kernels.cross_entropy import fused as fused_cross_entropy
from trainfit.kernels.cross_entropy import gradients_in_forward
from trainfit.kernels.cross_entropy.terms import Terms
from trainfit.kernels.fp8_cast import op as fp8_cast
from trainfit.kernels.rms_norm import fp8 as rms_norm_fp8
from trainfit.kernels.rms_norm import op as rms_norm
from trainfit.kernels.rope import op as rope
from trainfit.kernels.swiglu import fp8 as swiglu_fp8
from trainfit.kernels.swiglu import op as swiglu
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAST_BIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
"""Half a step of rounding to nearest; of fp32, what sums of a hundred thousand exponentials may differ by."""


# -- the loss


@pytest.mark.parametrize("terms", [Terms(), Terms(0.1, 1e-4)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_certain_impossible_and_ignored_tokens(dtype: torch.dtype, softcap: float, terms: Terms):
    """One token has all the probability (as the target, and against it), one none; one row is constant."""
    torch.manual_seed(1)
    logits = (4 * torch.randn(6, 50257, device=CARD)).to(dtype)
    targets = torch.tensor([3, 4, 6, 7, -100, 50256], device=CARD)
    logits[0, 3] = logits[1, 3] = 6e4
    logits[2, 5], logits[3] = -6e4, 1.0
    exact, factor = logits.double(), torch.tensor(0.5, device=CARD)
    found = fused_cross_entropy.triton_cross_entropy(logits, targets, factor, 1.0, softcap, terms, True)
    wanted = fused_cross_entropy.plain_cross_entropy(
        exact, targets, factor.double(), 1.0, softcap, terms, True
    )
    assert found.isfinite().all()
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert found[4] == 0
    assert not logits[4].any()
    largest = exact.abs().amax(1, keepdim=True)
    assert ((logits.double() - exact).abs() <= LAST_BIT[dtype] * exact.abs() + 1e-5 * largest + 6e-8).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_other_than_the_expected_one_is_multiplied(dtype: torch.dtype):
    """By fp32's 0.3, rounded once; more elements than all programs take at once, no multiple of a block."""
    x = torch.randn(gradients_in_forward.PROGRAMS * gradients_in_forward.BLOCK + 4099, device=CARD).to(dtype)
    before = x.clone()
    gradients_in_forward.triton_multiply_unless_one(x, torch.tensor(1.0, device=CARD))
    assert torch.equal(x, before)
    ratio = torch.tensor(0.3, device=CARD)
    gradients_in_forward.triton_multiply_unless_one(x, ratio)
    # Not ``before * ratio``: of a number in one element CUDA takes bf16's 0.3.
    assert torch.equal(x, (before.float() * ratio).to(dtype))


# -- the blocks' kernels


ANGLES = [x.to(CARD) for x in angles(131, 24, torch.float32)] if torch.cuda.is_available() else []
KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "norm": (lambda x, w: rms_norm.rms_norm(x, w, EPS), rms, [(1031, 769), (769,)]),
    "norm of one": (lambda x, w: rms_norm.rms_norm(x, w, EPS), rms, [(3, 1), (1,)]),
    "norm of the longest": (
        lambda x, w: rms_norm.rms_norm(x, w, EPS), rms, [(37, rms_norm.MAX_SIZE), (rms_norm.MAX_SIZE,)]
    ),
    "gates": (swiglu.swiglu, gated, [(257, 1543), (257, 1543)]),
    "rotation": (
        lambda q, k: rope.rope(q, k, *ANGLES), lambda q, k: turned(q, k, *(x.double() for x in ANGLES)),
        [(2, 6, 131, 64), (2, 3, 131, 64)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_block_kernels_round_fp64s_answers_once(name: str, dtype: torch.dtype):
    ours, definition, shapes = KERNELS[name]
    torch.manual_seed(1)
    given = [torch.randn(shape, device=CARD).to(dtype) for shape in shapes]
    for got, want in results(ours, definition, given, dtype):
        assert got.dtype == dtype
        bound = LAST_BIT[dtype] * want.abs() + 2e-6 * want.abs().max().clamp(min=1.0)
        assert ((got.double() - want).abs() <= bound).all()


def assert_transposed(transposed: Tensor, codes: Tensor) -> None:
    assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())


def assert_nearest(codes: Tensor, transposed: Tensor, expected: Tensor) -> None:
    """The last bit of fp32 decides where a value lies in the middle of two codes."""
    assert_transposed(transposed, codes)
    steps = (codes.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert steps[expected.float() != 0].max() <= 1
    assert (steps != 0).float().mean() < 0.005


@pytest.mark.parametrize("shape", [(257, 1543), (260, 1543), (4096, 4864)], ids=str)
def test_swiglu_in_fp8_has_the_nearest_codes_in_both_layouts(shape: tuple[int, int]):
    n, f = shape
    torch.manual_seed(1)
    gate_up, gradient = (torch.randn(n, width, device=CARD).to(torch.bfloat16) for width in (2 * f, f))
    amax, d_amax = swiglu_fp8.triton_amax(gate_up), swiglu_fp8.triton_backward_amax(gradient, gate_up)
    torch.testing.assert_close(amax, swiglu_fp8.reference_amax(gate_up))
    torch.testing.assert_close(d_amax, swiglu_fp8.reference_backward_amax(gradient, gate_up))
    codes, scale = swiglu_fp8.triton_forward(gate_up, amax)
    expected, expected_scale = swiglu_fp8.reference_forward(gate_up, amax)
    d_given = (gradient, gate_up, scale, d_amax)
    d_codes, d_transposed, d_scale, transposed = swiglu_fp8.triton_backward(*d_given)
    d_expected, _, d_expected_scale, _ = swiglu_fp8.reference_backward_fp8(*d_given)
    torch.testing.assert_close((scale, d_scale), (expected_scale, d_expected_scale))
    assert_nearest(codes, transposed, expected)
    assert_nearest(d_codes, d_transposed, d_expected)


@pytest.mark.parametrize("before", [0.0, 0.25, 4.0])
def test_swiglu_in_fp8_by_the_step_befores_scale(before: float):
    """``before``: over the present largest magnitude; 0: none is known. The present one is noted."""
    torch.manual_seed(1)
    gate_up, gradient = (torch.randn(4096, f, device=CARD).to(torch.bfloat16) for f in (9728, 4864))
    none = torch.zeros(1, device=CARD)
    known = torch.cat((before * swiglu_fp8.reference_amax(gate_up), none))
    d_known = torch.cat((before * swiglu_fp8.reference_backward_amax(gradient, gate_up), none))
    noted, d_noted = known.clone(), d_known.clone()
    codes, scale = swiglu_fp8.triton_delayed(gate_up, noted)
    expected, expected_scale = swiglu_fp8.reference_delayed(gate_up, known)
    tensors = (gradient, gate_up, scale)
    d_codes, d_transposed, d_scale, transposed = swiglu_fp8.triton_backward_delayed(*tensors, d_noted)
    d_expected, _, d_expected_scale, _ = swiglu_fp8.reference_backward_delayed(*tensors, d_known)
    torch.testing.assert_close((noted, d_noted), (known, d_known))
    torch.testing.assert_close((scale, d_scale), (expected_scale, d_expected_scale))
    assert_nearest(codes, transposed, expected)
    assert_nearest(d_codes, d_transposed, d_expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_swiglu_in_fp8_does_not_hide_what_is_not_finite(value: float):
    """A gate of inf times 0 is NaN, too; products of such a part are NaN, as its scale is infinite."""
    gate_up, gradient = torch.zeros(256, 1024, device=CARD), torch.ones(256, 512, device=CARD)
    gate_up[3, 5] = value
    amax = swiglu_fp8.triton_amax(gate_up)
    assert not amax.isfinite().any()
    assert not swiglu_fp8.triton_backward_amax(gradient, gate_up).isfinite().any()
    codes, scale = swiglu_fp8.triton_forward(gate_up, amax)
    assert (codes.float() * scale).isnan().all()


@pytest.mark.parametrize("shape", [(257, 1543), (260, 1543), (4608, 3584)], ids=str)
def test_weights_in_fp8_have_the_nearest_codes_in_both_layouts(shape: tuple[int, int]):
    torch.manual_seed(1)
    x = torch.randn(shape, device=CARD).to(torch.bfloat16)
    amax = fp8_cast.magnitude(x).reshape(1)
    assert amax == x.abs().max()
    (wanted, scale), found = fp8_cast.rounded(x, amax, fp8_cast.E4M3), torch.empty_like(amax)
    expected = wanted.view(torch.uint8)
    for other in (torch.empty(shape[::-1], dtype=wanted.dtype, device=CARD), wanted.new_empty(0)):
        codes = torch.empty_like(wanted)
        fp8_cast.triton_cast(x, amax, codes, other, found)
        torch.testing.assert_close(found, scale)
        steps = (codes.view(torch.uint8).int() - expected.int()).abs()
        assert steps.max() <= 1
        assert (steps != 0).float().mean() < 0.005
        if other.numel():
            assert torch.equal(other.view(torch.uint8), codes.view(torch.uint8).t())


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("shape", [(257, 1543), (260, 1543), (4096, 3584)], ids=str)
def test_gradients_in_fp8_have_the_nearest_codes_in_both_layouts(shape: tuple[int, int], e5m2: bool):
    torch.manual_seed(1)
    x = torch.randn(shape, device=CARD).to(torch.bfloat16)
    codes, transposed, scale = fp8_cast.triton_cast_both(x, x.abs().max().float(), e5m2)
    expected, _, expected_scale = fp8_cast.reference_cast_both(x, x.abs().max().float(), e5m2)
    assert codes.dtype == expected.dtype
    torch.testing.assert_close(scale, expected_scale)
    assert_nearest(codes, transposed, expected)


NORMS = [(4096, 896), (4096, 1536), (4100, 2048), (2052, 3584), (1024, 5120), (257, 1543), (3, 16384), (1, 1)]


def given_norm(n: int, e: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x, a, gradient = (torch.randn(n, e, device=CARD).to(torch.bfloat16) for _ in range(3))
    return x, a, gradient, torch.randn(e, device=CARD).to(torch.bfloat16)


@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_norms_in_fp8_have_the_nearest_codes_in_both_layouts(shape: tuple[int, int]):
    """Sums are those of bf16; the largest magnitude too, but where the last bit of fp32 rounds it."""
    x, a, _, weight = given_norm(*shape)
    h, *of_sum = rms_norm_fp8.triton_add_amax(x, a, weight, EPS)
    assert torch.equal(h, x + a)
    for summed, (rstd, amax) in ((h, of_sum), (x, rms_norm_fp8.triton_amax(x, weight, EPS))):
        expected, of_norms = rms_norm_fp8.reference_amax(summed, weight, EPS)
        torch.testing.assert_close(rstd, expected, rtol=1e-6, atol=0)
        assert amax == amax.to(torch.bfloat16)
        torch.testing.assert_close(amax, of_norms, rtol=2**-7, atol=0)
        codes, scale = rms_norm_fp8.triton_rows(summed, weight, rstd, amax)
        transposed, _ = rms_norm_fp8.triton_transposed(summed, summed, weight, rstd, amax)
        nearest, of_codes = rms_norm_fp8.reference_rows(summed, weight, rstd, amax)
        torch.testing.assert_close(scale, of_codes)
        assert_nearest(codes, transposed, nearest)


@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_norms_backward_in_fp8_steps_rounds_fp64s_sum_once(shape: tuple[int, int]):
    x, added, gradient, weight = given_norm(*shape)
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    dx, dw = torch.autograd.grad(rms(*leaves), leaves, gradient.double())
    rstd, _ = rms_norm_fp8.triton_amax(x, weight, EPS)
    found, parts = rms_norm_fp8.triton_backward_add(gradient, x, weight, rstd, added)
    wanted = dx + added.double()
    bound = LAST_BIT[torch.bfloat16] * wanted.abs() + 2e-6 * (dx.abs().max() + rstd.max())
    assert ((found.double() - wanted).abs() <= bound).all()
    assert (parts.double().sum(0) - dw).abs().max() < 1e-5 * dw.abs().max()
    again = rms_norm_fp8.triton_backward_add(gradient, x, weight, rstd, added)
    assert all(map(torch.equal, again, (found, parts)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norms_in_fp8_do_not_hide_what_is_not_finite(value: float):
    x, a, _, weight = given_norm(1024, 1536)
    a[1023, 1535] = value
    h, rstd, amax = rms_norm_fp8.triton_add_amax(x, a, weight, EPS)
    assert amax.isinf().all()
    assert rms_norm_fp8.triton_amax(h, weight, EPS)[1].isinf().all()
    codes, scale = rms_norm_fp8.triton_rows(h, weight, rstd, amax)
    assert not (codes.float() * scale).isfinite().any()


# -- memory

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip
TERMS = {"label_smoothing": 0.1, "z_loss": 1e-4}
RECIPES: list[dict[str, Any]] = [
    {"loss": "fused", "loss_terms": TERMS, "model": {"implementation": "hf"}},
    {"loss": "fused", "block_kernels": "triton", "model": {"implementation": "native"}},
    {"block_kernels": "triton", "model": {"implementation": "hf"}},
    {"loss_terms": TERMS, "block_kernels": "triton", "model": {"implementation": "native"},
     "precision": "amp-bf16"},
    {"precision": "fp8", "block_kernels": "fp8", "model": {"implementation": "native"}},
    {"precision": "fp8", "block_kernels": "fp8", "fp8_weights": "codes",
     "model": {"implementation": "native"}},
    {"precision": "fp8", "block_kernels": "fp8", "fp8_weights": "both-layouts", "compile": "block",
     "model": {"implementation": "native"}},
    {"precision": "fp8", "block_kernels": "fp8", "fp8_weights": "scales", "fp8_scaling": "delayed",
     "compile": "block", "model": {"implementation": "native"}},
]  # fmt: skip


def recipe(fields: dict[str, Any]) -> Recipe:
    model = {"config": LLAMA, **fields["model"]}
    return recipe_from({"precision": "bf16", "batch": {"micro": 4, "seq": 512}, **fields, "model": model})


@pytest.mark.timeout(300)
def test_the_peak_is_the_predicted_one(tmp_path: Path):
    """To the byte in each phase, with segments where the driver put them; else within 1 %."""
    check_peaks([recipe(fields) for fields in RECIPES], tmp_path)
