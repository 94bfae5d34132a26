"""Fused accumulation: the gradients, updates, FLOPs and bytes of a sum that products write themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_recipe import tiny_recipe
from trainfit.kernels.cross_entropy import fused as fused_loss
from trainfit.kernels.weight_gradient import op
from trainfit.measurement.run import measure
from trainfit.models.kept_gradients import KeptGradientEmbedding, KeptGradientLinear
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, Offload, Recipe
from trainfit.spec.recompute import Every, LayerRun, Layers
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trial_start import forked

CPU = torch.device("cpu")
MICRO_BATCHES = 3
CASES: dict[str, dict[str, Any]] = {
    "native": {},
    "hf": {"implementation": "hf"},
    "fused loss": {"loss": "fused"},
    "fused loss, hf": {"loss": "fused", "implementation": "hf"},
    "all recomputed": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "every second block": {"recompute": Every(every=2)},
    "by block": {"recompute": Layers(layers=(LayerRun(recompute="elementwise"), LayerRun(recompute="none")))},
    "compiled": {"compile": "block"},
    "compiled whole": {"compile": "model"},
    "compiled and recomputed": {"compile": "block", "recompute": "full"},
    "tied": {"ties": True},
    "tied, fused loss": {"ties": True, "loss": "fused"},
    "moments on the host": {"offload": Offload(optimizer=True)},
}


def recipe(
    accumulation: str = "fused", *, implementation: str = "native", ties: bool = False, **fields: Any
) -> Recipe:
    batch = Batch(micro=2, seq=16, accumulate=MICRO_BATCHES)
    made = tiny_recipe(implementation, **{"batch": batch, "accumulation": accumulation, **fields})
    config = {**dict(made.model.config), "tie_word_embeddings": ties}  # pyright: ignore
    return made.model_copy(update={"model": made.model.model_copy(update={"config": config})})


def step_of(wanted: Recipe) -> Step:
    return assemble(wanted, CPU, compiler=lambda module: module.compile(backend="aot_eager"))


def weights(step: Step) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", CASES)
def test_two_updates_are_those_of_gradients_added_apart(name: str) -> None:
    found = list[dict[str, Tensor]]()
    for accumulation in ("standard", "fused"):
        step = step_of(recipe(accumulation, **CASES[name]))
        for seed in range(2):
            step(step.random_batches(seed))
        found.append(weights(step))
        kept = [module for module in step.model.modules() if isinstance(module, KeptGradientLinear)]
        assert bool(kept) == (accumulation == "fused")
        embeddings = [one for one in step.model.modules() if isinstance(one, KeptGradientEmbedding)]
        assert len(embeddings) == (accumulation == "fused")
    for name_of_weight, expected in found[0].items():
        # AdamW's first updates are the gradients' signs times the rate, so that none may differ.
        torch.testing.assert_close(found[1][name_of_weight], expected, rtol=1e-5, atol=1e-7)


def test_a_sum_in_bf16_is_nearer_to_that_in_fp64() -> None:
    op.register()
    torch.manual_seed(0)
    pairs = [(torch.randn(64, 48).bfloat16(), torch.randn(64, 32).bfloat16()) for _ in range(16)]
    exact, apart = torch.zeros(48, 32, dtype=torch.float64), torch.zeros(48, 32, dtype=torch.bfloat16)
    kept = apart.clone()
    for gradient, x in pairs:
        exact += gradient.double().T @ x.double()
        apart += gradient.T @ x
        torch.ops.trainfit.add_weight_gradient_(kept, gradient, x)
    errors = [float((found.double() - exact).norm() / exact.norm()) for found in (kept, apart)]
    assert errors[0] < errors[1] < 0.02


def test_gradients_of_a_layer_are_those_in_fp64() -> None:
    op.register()
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((2, 8, 16), (24, 16), (24,)))
    kept, d = torch.ones(24, 16), torch.randn(2, 8, 24)
    op.linear(x, weight, bias, kept).backward(d)
    d_no, x_ni = d.double().flatten(0, 1), x.detach().double().flatten(0, 1)
    assert x.grad is not None
    assert bias.grad is not None
    assert weight.grad is None
    torch.testing.assert_close(kept.double(), 1 + d_no.T @ x_ni, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        x.grad.double().flatten(0, 1), d_no @ weight.detach().double(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(bias.grad.double(), d_no.sum(0), rtol=1e-5, atol=1e-5)


def test_gradients_begin_at_zero_and_are_kept() -> None:
    step = step_of(recipe())
    module = next(one for one in step.model.modules() if isinstance(one, KeptGradientLinear))
    for seed in range(2):
        assert module.weight.grad is module.kept
        assert not module.kept.any()
        step(step.random_batches(seed))


def test_gradients_that_are_set_to_none_between_steps_are_not_lost() -> None:
    found, plain = step_of(recipe()), step_of(recipe())
    for seed in range(2):
        for parameter in found.model.parameters():
            parameter.grad = None
        next(one for one in found.model.modules() if isinstance(one, KeptGradientLinear)).kept.fill_(1.0)
        assert found(found.random_batches(seed)) == plain(plain.random_batches(seed))
    for ours, theirs in zip(found.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("compiled", [False, "block"])
def test_a_ledger_has_the_same_flops_and_no_sums(compiled: Any) -> None:
    fields = {"compile": compiled, "precision": "bf16", "hardware": Hardware(gpu="h100-sxm")}
    plain, fused = (ledger_of(recipe(kind, layers=4, **fields)) for kind in ("standard", "fused"))
    flops = [sum(one.times(op) * op.causal_flops for op in one.steady_ops) for one in (plain, fused)]
    assert flops[0] == flops[1]

    def calls(ledger: Any, name: str) -> int:
        return sum(ledger.times(op) * op.calls for op in ledger.steady_ops if op.name.startswith(name))

    num_weights = 4 * 4  # qkv, output, gate-up and down of each block
    assert calls(fused, "trainfit.add_weight_gradient_") == MICRO_BATCHES * num_weights
    assert calls(fused, "trainfit.add_embedding_gradient_") == MICRO_BATCHES
    assert calls(fused, "aten.embedding_dense_backward") == 0
    removed = calls(plain, "aten.add_.Tensor") - calls(fused, "aten.add_.Tensor")
    assert removed == (MICRO_BATCHES - 1) * (num_weights + 1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seq", [16, 48])
def test_the_fused_loss_adds_the_output_layers_gradient_in_one_chunk(
    ties: bool, seq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 tokens are more than the 32 of the hidden size and the 32 of a chunk, 32 are not."""
    monkeypatch.setattr(fused_loss, "MIN_ROWS", 32)
    monkeypatch.setattr(fused_loss, "LOGITS_BYTES", 32 * 128 * 2)
    batch = Batch(micro=2, seq=seq, accumulate=MICRO_BATCHES)
    fields = {"precision": "bf16", "hardware": Hardware(gpu="h100-sxm"), "loss": "fused", "batch": batch}
    ledger = ledger_of(recipe(ties=ties, **fields))
    ops, is_one = ledger.steady_ops, seq == 16
    products = [op for op in ops if op.name.startswith("aten.addmm_") and op.shape[1:3] == (128, 32)]
    assert sum(ledger.times(op) * op.calls for op in products) == (0 if is_one else 3 * MICRO_BATCHES)
    num_bytes = 3 * 128 * 32 * 2
    adds = [op for op in ops if op.name.startswith("aten.add_.Tensor") and op.num_bytes == num_bytes]
    # The first micro-batch's gradient is the sum of an untied layer.
    expected = 0 if is_one else MICRO_BATCHES - (not ties)
    assert sum(ledger.times(op) * op.calls for op in adds) == expected


@pytest.mark.parametrize("kernels", ["standard", "triton"])
@pytest.mark.parametrize("recompute", ["full", "selective", Every(every=2)])
def test_what_is_recomputed_is_what_a_sum_apart_recomputes(recompute: Any, kernels: Any) -> None:
    """A block's last product is not run again: what its gradient needs is saved before it."""
    gpu = Hardware(gpu="h100-sxm")
    fields = {"recompute": recompute, "precision": "bf16", "hardware": gpu, "block_kernels": kernels}
    plain, fused = (predict(recipe(kind, layers=4, **fields)) for kind in ("standard", "fused"))
    assert fused.hardware_flops == plain.hardware_flops
    assert fused.peak_allocated_bytes <= plain.peak_allocated_bytes + 2 * plain.breakdown.gradients


@pytest.mark.parametrize(
    ("implementation", "fields"),
    [
        ("native", {}), ("hf", {}), ("native", {"recompute": "full"}), ("native", {"ties": True}),
        ("native", {"loss": "fused"}),
    ],
)  # fmt: skip
def test_predicted_and_measured_bytes_are_equal(implementation: str, fields: dict[str, Any]) -> None:
    on_cpu = recipe(implementation=implementation, hardware=Hardware(gpu="cpu"), **fields)
    predicted, measured = predict(on_cpu), measure(on_cpu, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases
    assert predicted.breakdown.gradients == measured.breakdown.gradients


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one micro-batch": ({"batch": Batch(micro=2, seq=16)}, "nothing to add to"),
    "autocast": ({"precision": "amp-bf16"}, "another dtype"),
    "torchao's fp8 layers": ({"precision": "fp8"}, "torchao's fp8 layers"),
    "several GPUs": ({"hardware": Hardware(count=2)}, "several ranks"),
    "an adapter": ({"adapter": Adapter(kind="lora")}, "no gradients"),
    "offload": ({"recompute": "full", "offload": Offload(activations=True)}, "to the host"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    fields, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        registry.check(recipe(**fields))
