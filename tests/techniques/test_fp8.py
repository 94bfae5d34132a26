"""fp8 products: training, rounding, bytes, and what the virtual GPU's ledger holds.

Training is held against torchao's own conversion, the rounding against its definition, bytes against
measured ones.
"""

from typing import Any

import peft  # noqa: F401
import pytest
import torch
import transformers.optimization  # noqa: F401 - a few tensors are made while these two are imported, the first time
from torch import Tensor, nn

from tiny_recipe import TINY_LLAMA
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.measurement.run import measure
from trainfit.models.layers import layer_lists
from trainfit.prediction.estimate import estimate, matmul_dtype
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Offload, Optimizer, Recipe
from trainfit.spec.recompute import Layers
from trainfit.step import Step, assemble
from trainfit.techniques.precision.fp8 import gains
from trial_start import forked
from virtual_runs import PLAIN, recipe_of, steady, steady_sum, sums

CPU = torch.device("cpu")
LLAMA = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 4112, "num_hidden_layers": 2}
"""torchao's rule converts the MLP's layers (4112 outputs, then 4112 inputs); attention's are too small."""


def fp8_recipe(code: str = "hf", layers: int = 2, config: dict[str, Any] = LLAMA, **fields: Any) -> Recipe:
    wanted = {"precision": "fp8", "batch": Batch(micro=2, seq=16), **fields}
    return recipe_of(config | {"num_hidden_layers": layers}, code, **wanted)


def train(step: Step, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    losses = [step(step.random_batches(seed)).item() for seed in range(steps)]
    return losses, [parameter.detach().clone() for parameter in step.model.parameters()]


def converted(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


# -- on a CPU


@pytest.mark.parametrize("code", ["hf", "native"])
def test_it_trains_as_torchaos_own_conversion_bit_for_bit(code: str):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    by_hand = assemble(fp8_recipe(code, precision="bf16"), CPU)
    plain_losses, _ = train(assemble(fp8_recipe(code, precision="bf16"), CPU))
    for _, blocks in layer_lists(by_hand.model):
        convert_to_float8_training(
            blocks,
            config=Float8LinearConfig(emulate=True),
            module_filter_fn=_auto_filter_for_recipe("tensorwise", []),
        )
    step = assemble(fp8_recipe(code), CPU)
    assert converted(step.model).keys() == converted(by_hand.model).keys()
    assert len(converted(step.model)) == (6 if code == "hf" else 4)
    (losses, weights), (expected, expected_weights) = train(step), train(by_hand)
    assert losses == expected != plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value of an fp8 format whose largest stands for the tensor's largest magnitude, fp32."""
    scale = (torch.finfo(dtype).max / x.abs().max().double()).float()
    return (x.float() * scale).to(dtype).float() / scale


def test_operands_are_rounded_to_e4m3_and_gradients_to_e5m2():
    layer = next(iter(converted(assemble(fp8_recipe(layers=1), CPU).model).values()))
    weight: Tensor = layer.weight  # pyright: ignore[reportAssignmentType]
    torch.manual_seed(0)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(32, 4112, dtype=torch.bfloat16)
    y = layer(x)
    y.backward(gradient)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x8, weight8 = rounded(x.detach(), e4m3), rounded(weight.detach(), e4m3)
    gradient8, gradient32 = rounded(gradient, e5m2), gradient.float()
    assert x.grad is not None
    assert weight.grad is not None
    found = (y, x.grad, weight.grad)
    expected = (x8 @ weight8.T, gradient8 @ weight8, gradient8.T @ x8)
    unrounded = (x.float() @ weight.float().T, gradient32 @ weight.float(), gradient32.T @ x.float())
    for ours, fp8, exact in zip(found, expected, unrounded, strict=True):
        assert torch.equal(ours, fp8.to(torch.bfloat16))
        # e4m3 has 3 fraction bits, e5m2 2: a few percent off the unrounded product, where bf16 is 0.2 % off.
        off = (ours.float() - exact).norm() / exact.norm()
        assert 0.01 < off < 0.1


ON_CPU: dict[str, tuple[str, dict[str, Any]]] = {
    "accumulate-chunked": ("hf", {"batch": Batch(micro=2, seq=16, accumulate=2), "loss": "chunked"}),
    "recompute-in-backward": (
        "native", {"recompute": "full", "optimizer": Optimizer(name="adafactor", in_backward=True)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ON_CPU)
def test_predicted_and_measured_bytes_are_equal(case: str):
    code, fields = ON_CPU[case]
    recipe = fp8_recipe(code, hardware=Hardware(gpu="cpu"), **fields)
    predicted, measured = predict(recipe), measure(recipe, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


def test_what_saves_memory_changes_no_bit():
    plain, weights = train(assemble(fp8_recipe(), CPU))
    cases: list[dict[str, Any]] = [
        {"recompute": "full", "optimizer": Optimizer(in_backward=True)},
        {"recompute": "selective"},
        {"recompute": Layers.model_validate({"layers": [{"recompute": "elementwise", "count": 2}]})},
        {"recompute": "full", "offload": Offload(activations=True)},
    ]
    for fields in cases:
        found, found_weights = train(assemble(fp8_recipe(**fields), CPU))
        assert found == plain, fields
        assert all(torch.equal(a, b) for a, b in zip(found_weights, weights, strict=True))


def test_layers_with_a_forward_of_their_own_stay():
    class Router(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).softmax(-1)

    assert gains(nn.Linear(8192, 128, device="meta"))
    assert not gains(Router(8192, 128, device="meta"))
    assert not gains(nn.Linear(8192, 120, device="meta"))  # no multiple of 16
    assert not gains(nn.Linear(4096, 1024, device="meta"))  # too small to gain


# -- on a virtual H200


@pytest.fixture(scope="module")
def ledgers() -> dict[str, Ledger]:
    return {precision: trace(fp8_recipe(precision=precision), whole=True) for precision in ("bf16", "fp8")}


def test_products_are_fp8s_with_the_flops_of_bf16(ledgers: dict[str, Ledger]):
    ops = steady(ledgers["fp8"])
    products = [op for op in ops if op.name == "aten._scaled_mm.default"]
    phases = [ledgers["fp8"].segments[op.segment].phase for op in products]
    # 3 layers in each of 2 blocks; backward has two products a layer, the gradient the left factor.
    assert phases == ["forward"] * 6 + ["backward"] * 12
    assert [op.dtype for op in products] == ["float8_e4m3fn"] * 6 + ["float8_e5m2"] * 12
    assert {op.flops for op in products} == {2 * 32 * 64 * 4112}
    # Operands in 8 bits, two fp32 scales, a bf16 result.
    assert products[0].num_bytes == 32 * 64 + 64 * 4112 + 8 + 2 * 32 * 4112
    for quantity in ("flops", "causal_flops", "model_flops", "model_flops_full"):
        assert steady_sum(ledgers["fp8"], quantity) == steady_sum(ledgers["bf16"], quantity)
    assert ledgers["fp8"].ops_without_flops == ()


def test_it_saves_for_backward_what_bf16_saves(ledgers: dict[str, Ledger]):
    def saved(ledger: Ledger) -> list[int]:
        return sorted(s.num_bytes for s in ledger.storages if s.category == "activations")

    assert saved(ledgers["fp8"]) == saved(ledgers["bf16"])
    assert sums(ledgers["fp8"])["params"] == sums(ledgers["bf16"])["params"]


def test_a_weights_rounding_takes_nine_bytes_an_element_at_most(ledgers: dict[str, Ledger]):
    """Worked out from torchao's code and PyTorch's kernels: fp32 scaled, fp32 clamped, the codes.

    Before that: the copy that the maximum of a transposed tensor makes.
    """
    ledger, numel = ledgers["fp8"], 64 * 4112
    forward = next(i for i, s in enumerate(ledger.segments) if (s.step, s.phase) == ("steady", "forward"))
    product = next(
        i for i, op in enumerate(ledger.ops) if op.segment == forward and op.name == "aten._scaled_mm.default"
    )
    sizes: list[tuple[str, int]] = [
        (ledger.ops[s.op].name.split(".")[1], s.num_bytes // numel)
        for s in ledger.storages
        if 0 <= s.op < product and ledger.ops[s.op].segment == forward and s.num_bytes >= numel
    ]
    assert sizes == [("abs", 2), ("max", 2), ("_to_copy", 4), ("mul", 4), ("clamp", 4), ("_to_copy", 1)]


def test_utilisation_is_of_the_fp8_peak(ledgers: dict[str, Ledger]):
    h200 = gpu("h200")
    assert matmul_dtype(ledgers["fp8"]) == "fp8"
    found = estimate(fp8_recipe(), machine_with(h200), ledgers["fp8"])
    assert found.step_s is not None
    assert found.mfu == pytest.approx(found.model_flops / found.step_s / h200.peak_flops_per_s["fp8"])


def test_a_few_layers_stand_for_all():
    optimizer = Optimizer(stochastic_rounding=True)
    recipe = fp8_recipe("native", 4, recompute="selective", optimizer=optimizer)
    repeated, whole = trace(recipe), trace(recipe, whole=True)
    assert repeated.repeat > 1
    assert sums(repeated) == sums(whole)


@pytest.mark.slow
def test_compiled_by_block_the_products_are_the_same(ledgers: dict[str, Ledger]):
    config = PLAIN | {"hidden_size": 64, "intermediate_size": 4112}
    ledger = trace(fp8_recipe("native", 1, config=config, compile="block"), whole=True)
    products = [op for op in steady(ledger) if op.name.startswith("aten._scaled_mm")]
    assert [op.dtype for op in products] == ["float8_e4m3fn"] * 2 + ["float8_e5m2"] * 4
    assert sum(op.flops for op in products) == 3 * 2 * 32 * 64 * 2 * 4112
    assert not [op for op in steady(ledger) if op.name == "aten.clamp.default"]  # fused


# -- refusals


def test_a_model_of_which_no_layer_gains_is_refused():
    with pytest.raises(InputError, match=r"precision = 'fp8': no layer of the decoder blocks is converted"):
        trace(fp8_recipe(config=TINY_LLAMA))
