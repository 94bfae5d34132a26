"""The feed-forward part in fp8: against products in fp64 of operands rounded alone, torchao's, and bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_recipe import TINY_LLAMA
from trainfit.measurement.run import measure
from trainfit.models.fp8_block import Fp8FeedForward
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Recipe
from trainfit.step import Step, assemble
from trial_start import forked
from virtual_runs import recipe_of

CPU = torch.device("cpu")
LLAMA = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 4112, "num_hidden_layers": 2}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def recipe(config: dict[str, Any] = LLAMA, **fields: Any) -> Recipe:
    wanted = {"precision": "fp8", "block_kernels": "fp8", "batch": Batch(micro=2, seq=16), **fields}
    return recipe_of(config, "native", **wanted)


def part_of(step: Step) -> Fp8FeedForward:
    return next(module for module in step.model.modules() if isinstance(module, Fp8FeedForward))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest values of an fp8 format whose largest stands for the tensor's largest, in fp64."""
    scale = x.abs().max().double() / torch.finfo(dtype).max
    return (x.double() / scale).float().to(dtype).double() * scale


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_outputs_and_gradients_are_those_of_operands_rounded_alone() -> None:
    part = part_of(assemble(recipe(), CPU))
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    d = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    w_up, w_down = (layer.weight.detach().double() for layer in (part.up, part.down))
    y = part(x)
    y.backward(d)
    x_ne, d_ne = x.detach().flatten(0, 1), d.flatten(0, 1)
    x8, d8, up8, down8 = rounded(x_ne, E4M3), rounded(d_ne, E5M2), rounded(w_up, E4M3), rounded(w_down, E4M3)
    gate, up = (x8 @ up8.T).to(torch.bfloat16).double().chunk(2, 1)
    hidden = rounded(gate * gate.sigmoid() * up, E4M3)
    d_hidden, s = (d8 @ down8).to(torch.bfloat16).double(), gate.sigmoid()
    both = torch.cat((d_hidden * up * s * (1 + gate * (1 - s)), d_hidden * gate * s), 1)
    both = rounded(both, E5M2)
    assert x.grad is not None
    assert part.up.weight.grad is not None
    assert part.down.weight.grad is not None
    pairs = (
        (y, hidden @ down8.T), (x.grad, both @ up8), (part.up.weight.grad, both.T @ x8),
        (part.down.weight.grad, d8.T @ hidden),
    )  # fmt: skip
    for found, expected in pairs:
        assert off(found.flatten(0, -2), expected) < 0.01


def losses(step: Step, steps: int = 4) -> list[float]:
    return [step(step.random_batches(0)).item() for _ in range(steps)]


def test_it_trains_as_products_in_fp8_do() -> None:
    fused, plain = (losses(assemble(recipe(block_kernels=one), CPU)) for one in ("fp8", "standard"))
    assert fused != plain
    assert fused == pytest.approx(plain, rel=2e-3)
    assert fused[-1] < fused[0]


def test_recomputation_changes_no_bit() -> None:
    assert losses(assemble(recipe(recompute="full"), CPU)) == losses(assemble(recipe(), CPU))


def test_predicted_and_measured_bytes_are_equal() -> None:
    on_cpu = recipe(hardware=Hardware(gpu="cpu"))
    predicted, measured = predict(on_cpu), measure(on_cpu, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


@pytest.mark.parametrize("compiled", [False, "block"])
def test_on_a_virtual_gpu_both_layouts_are_written_once(compiled: bool | str) -> None:
    batch, hidden = Batch(micro=2, seq=64), 4112
    ledger = ledger_of(recipe(batch=batch, compile=compiled, hardware=Hardware(gpu="h100-sxm")))
    numel = 128 * hidden
    moved = {
        "trainfit.swiglu_amax.default": 4 * numel + 4, "trainfit.swiglu_fp8.default": 6 * numel + 8,
        "trainfit.swiglu_backward_amax.default": 6 * numel + 4,
        "trainfit.swiglu_backward_fp8.default": 10 * numel + 8,
    }  # fmt: skip
    found = [(op, ledger.times(op)) for op in ledger.steady_ops if op.name in moved]
    assert sum(times for _, times in found) == 4 * LLAMA["num_hidden_layers"]
    assert {op.name: op.num_bytes for op, _ in found} == moved
    products = [op for op in ledger.steady_ops if "_scaled_mm" in op.name and "triton_" not in op.name]
    assert sum(map(ledger.times, products)) == 6 * LLAMA["num_hidden_layers"]
    if compiled:
        names = [op.name for op in ledger.steady_ops if op.name.startswith("triton_")]
        assert not any("silu" in name for name in names)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({"precision": "bf16"}, "the kernels write fp8"),
    "gelu": ({"config": LLAMA | {"hidden_act": "gelu"}}, "silu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    fields, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        assemble(recipe(**fields), CPU)


def test_transformers_models_are_refused() -> None:
    with pytest.raises(InputError, match="native decoder"):
        assemble(recipe_of(LLAMA, "hf", precision="fp8", block_kernels="fp8"), CPU)
