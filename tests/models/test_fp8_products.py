"""Products in fp8 of a frozen base: errors against exact products, what is kept, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_recipe import tiny_recipe
from tiny_step import aot_eager, learned, trajectory
from trainfit.catalog.load import gpu
from trainfit.models.quantized_linear import QuantizedLinear
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.quantize import Quantized
from trainfit.spec.recipe import Adapter, Batch, Optimizer, Recipe
from trainfit.techniques import registry

IN_FP8 = Quantized(kind="fp8", compute="fp8")
LORA = Adapter(kind="lora", rank=4)
ROUNDED = 0.0265
"""Error of a normal number in e4m3, relative, root mean square: three bits after the first."""


def layer(device: str = "cpu", dtype: torch.dtype = torch.float32) -> QuantizedLinear:
    torch.manual_seed(0)
    made = QuantizedLinear(512, 256, True, IN_FP8, dtype, device)
    made.emulates_fp8 = device == "cpu"
    made.load(torch.randn(256, 512, device=device), torch.randn(256, device=device))
    return made


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def recipe(**fields: Any) -> Recipe:
    """Return the tiny Llama with sizes that fp8 products take."""
    tiny = tiny_recipe("native", **{"quantize": IN_FP8, "adapter": LORA, **fields})
    config = {**dict(tiny.model.config), "hidden_size": 64}  # pyright: ignore
    return tiny.model_copy(update={"model": tiny.model.model_copy(update={"config": config})})


def test_one_operand_is_rounded_in_the_forward_and_in_the_backward() -> None:
    made = layer()
    weight, bias = made.dequantize(torch.float64), made.bias
    assert bias is not None
    x = torch.randn(4, 96, 512, requires_grad=True)
    gradient = torch.randn(4, 96, 256)
    out = made(x)
    out.backward(gradient)
    assert x.grad is not None
    exact = x.detach().double() @ weight.t()
    assert relative(out.detach() - bias, exact) == pytest.approx(ROUNDED, rel=0.05)
    assert relative(x.grad, gradient.double() @ weight) == pytest.approx(ROUNDED, rel=0.05)


def test_tokens_of_zeros_and_of_one_large_value_stay_finite() -> None:
    made = layer()
    x = torch.zeros(3, 512)
    x[1], x[2, 5] = 1e30, 6e4
    out = made(x)
    assert torch.equal(out[0], made.bias)
    assert torch.isfinite(out).all()
    assert relative(out[1] - made.bias, 1e30 * made.dequantize(torch.float64).sum(1)) < 1e-3


def test_an_adapter_learns_over_products_in_fp8() -> None:
    _, losses = learned(recipe(optimizer=Optimizer(lr=1e-2)))
    assert losses[-1] < losses[0] - 0.05
    _, exact = learned(recipe(optimizer=Optimizer(lr=1e-2), quantize="fp8"))
    assert losses == pytest.approx(exact, abs=0.02)


def test_compiled_equals_eager_and_keeps_no_transposed_weight(fresh_compiler: None) -> None:
    # 3 x 16 tokens: no activation has a weight's shape.
    one = recipe(batch=Batch(micro=3, seq=16))
    expected = trajectory(one, 2)[1]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compiled = one.model_copy(update={"compile": "block"})
        found = trajectory(compiled, 2, compiler=aot_eager)[1]
    assert found == pytest.approx(expected, rel=1e-4)
    transposed = {(64, 128), (64, 64)}  # Of qkv and up, and of down; out is square
    codes = [t for t in kept if t.dtype == torch.float8_e4m3fn]
    assert codes
    assert not [t for t in codes if tuple(t.shape) in transposed - {(64, 64)}]


def test_the_virtual_gpu_multiplies_in_fp8() -> None:
    ledger = trace(recipe(precision="bf16", batch=Batch(micro=1, seq=32)))
    products = [one for one in ledger.ops if one.name == "aten._scaled_mm.default"]
    # Four layers of each block; the first block's first layer has no gradient of its input.
    steady = [one for one in products if ledger.segments[one.segment].step == "steady"]
    counts = [sum(ledger.times(one) for one in steady if (one.dtype == "float8_e4m3fn"))]
    assert counts == [2 * 4 + 2 * 4 - 1]
    assert not ledger.ops_without_flops


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantize": {"kind": "int8", "compute": "fp8"}}, "multiply codes in fp8"),
        ({"hardware": {"gpu": "a100-80gb"}}, "no fp8 tensor cores"),
        ({"hardware": {"gpu": "mi300x"}}, "not modelled"),
    ],
)
def test_what_has_no_products_in_fp8_is_refused(fields: dict[str, Any], message: str) -> None:
    data = recipe().content() | fields
    with pytest.raises(InputError, match=f"quantize.compute.*{message}"):
        registry.check(recipe_from(data))


def test_sizes_that_fp8_products_do_not_take_are_refused() -> None:
    with pytest.raises(InputError, match="multiples of 16 here, and layers.0.attention.qkv is"):
        trace(tiny_recipe("native", quantize=IN_FP8, adapter=LORA).model_copy(update={"model": odd().model}))


def odd() -> Recipe:
    tiny = tiny_recipe("native")
    config = {**dict(tiny.model.config), "hidden_size": 40, "head_dim": 8}  # pyright: ignore
    return tiny.model_copy(update={"model": tiny.model.model_copy(update={"config": config})})


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs fp8"
)
def test_a_gpus_products_equal_emulated_ones() -> None:
    assert gpu("h200").compute_capability == (9, 0)
    made, emulated = layer("cuda", torch.bfloat16), layer("cuda", torch.bfloat16)
    emulated.emulates_fp8 = True
    x = torch.randn(2, 320, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    out, expected = made(x), emulated(twin)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    assert relative(out.detach(), expected.detach()) < 5e-3
    assert relative(x.grad, twin.grad) < 5e-3  # pyright: ignore
