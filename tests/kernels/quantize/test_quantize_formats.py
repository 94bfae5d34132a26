"""Formats of quantised weights against published numbers, and their kernels against their references."""

import statistics

import pytest
import torch

from kernel_runs import interpreted
from tiny_step import KINDS
from trainfit.kernels.quantize import nf4
from trainfit.kernels.quantize import rowwise as rows
from trainfit.kernels.quantize.codebook import levels
from trainfit.models.quantized_linear import QuantizedLinear


def test_normal_floats_are_the_papers():
    """Section 3: quantiles of N(0, 1), half from either side; the outermost is that of their code."""
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    quantile = statistics.NormalDist().inv_cdf
    positive = [quantile(outermost + (0.5 - outermost) * i / 8) for i in range(8)]
    negative = [-quantile(outermost + (0.5 - outermost) * i / 7) for i in range(7)]
    expected = sorted([*negative, 0.0, *positive])
    assert pytest.approx([value / expected[-1] for value in expected], abs=1e-6) == nf4.LEVELS


def test_bytes_are_floats_with_more_digits_near_one():
    """bitsandbytes' map has the same count, ends and finest step, 0.9 / 64 of the uppermost decade."""
    values = levels(8, signed=True)
    assert len(set(values)) == 256
    assert values == sorted(values)
    assert values[0] == pytest.approx(-0.99296875)
    assert values[-2:] == pytest.approx([0.99296875, 1.0])
    assert values[127] == 0.0
    assert values[128] == pytest.approx(0.55e-6)
    assert values[254] - values[253] == pytest.approx(0.9 / 64)


def test_errors_on_normal_weights_are_the_known_ones():
    """nf4: 0.0728 and 20.3 % in bitsandbytes' tests (test_4bit_quant, block 64); int8: a step / sqrt(12)."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024)
    error = (nf4.reference_dequantize(weight, *nf4.quantize_nf4(weight), 1024, 1024) - weight).abs()
    assert error.mean().item() == pytest.approx(0.0728, rel=5e-3)
    assert (error / (weight.abs() + 1e-8)).mean().item() == pytest.approx(0.203, rel=1e-2)
    step = weight.abs().amax(1, keepdim=True) / 127
    error = rows.reference_dequantize(weight, *rows.quantize_rows(weight, torch.int8)) - weight
    assert (error / step).pow(2).mean().sqrt().item() == pytest.approx(12**-0.5, rel=1e-3)
    # e4m3 keeps three bits after the first: half a step is 1/16 of the lower end of a binade.
    error = rows.reference_dequantize(weight, *rows.quantize_rows(weight, torch.float8_e4m3fn)) - weight
    assert (error.abs() / weight.abs()).quantile(0.9).item() < 1 / 16


def test_larger_blocks_err_more_and_exact_magnitudes_less():
    """Mean errors by block as in bitsandbytes' tests (test_4bit_quant), whose magnitudes are fp32."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024)
    for block, expected in ((64, 0.072792), (256, 0.080326), (4096, 0.092537)):
        parts = nf4.quantize_nf4(weight, block, double=False)
        assert sum(part.nbytes for part in parts) == 2**19 + 4 * 2**20 // block + 4 * 16
        error = (nf4.reference_dequantize(weight, *parts, 1024, 1024) - weight).abs()
        assert error.mean().item() == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_codes_come_back_bit_for_bit(kind: str):
    torch.manual_seed(1)
    if kind == "nf4":
        picks = torch.randint(0, 16, (6, 128))
        picks[:, ::64] = 15
        weight = torch.tensor(nf4.LEVELS)[picks] * 0.25
    elif kind == "int8":
        weight = torch.randint(-127, 128, (6, 128)).float() * 2.0**-9
        weight[:, 7] = -127 * 2.0**-9
    else:
        weight = torch.randn(6, 128).to(torch.float8_e4m3fn).float() * 2.0**-9
        weight[:, 7] = 448 * 2.0**-9
    made = QuantizedLinear(128, 6, False, kind, torch.float32, "cpu")
    made.load(weight, None)
    assert torch.equal(made.dequantize(torch.float32), weight)
    again = QuantizedLinear(128, 6, False, kind, torch.float32, "cpu")
    again.load(made.dequantize(torch.float32), None)
    assert all(torch.equal(a, b) for a, b in zip(made.buffers(), again.buffers(), strict=True))
    made.load(torch.zeros(6, 128), None)
    assert torch.equal(made.dequantize(torch.bfloat16), torch.zeros(6, 128, dtype=torch.bfloat16))


# -- the kernels

LAYOUTS = [(64, False), (32, True), (4096, False)]
"""Weights of a magnitude, and whether the magnitudes are quantised."""
SHAPES = [(64, 128), (7, 33), (132, 268), (130, 257), (1, 1)]


def kernels_agree(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Bit for bit: codes, magnitudes and weights."""
    torch.manual_seed(shape[1])
    weight = torch.randn(shape).to(dtype).to(device)
    weight[0, : shape[1] // 2] = 0
    found = nf4.quantize_nf4(weight.cpu())
    on_device = nf4.Nf4(*(part.to(device) for part in found))
    codes, magnitudes = nf4.triton_quantize_blocks(weight, on_device.levels)
    expected_codes, expected = nf4.reference_quantize_blocks(weight.cpu(), found.levels)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(magnitudes.cpu(), expected)
    like = torch.empty(0, dtype=dtype)
    made = nf4.triton_dequantize(like, *on_device, *shape).cpu()
    assert torch.equal(made, nf4.reference_dequantize(like, *found, *shape))
    for block, double in LAYOUTS:
        found = nf4.quantize_nf4(weight.cpu(), block, double=double)
        assert [part.shape for part in nf4.empty_nf4(weight.numel(), "cpu", block, double=double)] == [
            part.shape for part in found
        ]
        levels = found.levels.to(device)
        codes, magnitudes = nf4.triton_quantize_blocks(weight, levels, block)
        assert torch.equal(codes.cpu(), found.codes)
        assert double or torch.equal(magnitudes.cpu(), found.block_codes)
        made = nf4.triton_dequantize(like, *(part.to(device) for part in found), *shape).cpu()
        assert torch.equal(made, nf4.reference_dequantize(like, *found, *shape))
    for code in rows.LARGEST:
        codes, scales = rows.quantize_rows(weight, code)
        made = rows.triton_dequantize(like, codes, scales).cpu()
        assert torch.equal(made, rows.reference_dequantize(like, codes.cpu(), scales.cpu()))
        transposed = rows.triton_transpose(like, codes).view(torch.uint8)
        assert torch.equal(transposed, codes.view(torch.uint8).t())
        assert transposed.is_contiguous()


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_in_the_interpreter(shape: tuple[int, int], dtype: torch.dtype):
    kernels_agree(shape, dtype, "cpu")


@interpreted
def test_every_fp8_code_in_the_interpreter():
    """Subnormal ones too; two of 256 are not numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    made = rows.triton_dequantize(torch.empty(0), codes, torch.ones(1))
    assert (made == codes.float()).sum() == 254


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 11008)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype):
    kernels_agree(shape, dtype, "cuda")
