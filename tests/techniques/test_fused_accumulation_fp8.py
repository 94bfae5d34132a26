"""Fused accumulation of products in fp8: gradients, ledgers, and cuBLASLt's descriptors on the host."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tiny_recipe import TINY_LLAMA
from trainfit.kernels.weight_gradient import cublaslt, op
from trainfit.prediction.predict import ledger_of
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques.fused_accumulation import TECHNIQUE
from virtual_runs import recipe_of

CPU = torch.device("cpu")
LLAMA = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 4112, "num_hidden_layers": 2}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MICRO_BATCHES = 3
CASES: dict[str, dict[str, Any]] = {
    "feed-forward part": {},
    "weights kept": {"block_kernels": "standard", "fp8_weights": "scales"},
    "all": {"fp8_weights": "scales", "fp8_scaling": "delayed"},
    "compiled": {"fp8_weights": "scales", "fp8_scaling": "delayed", "compile": "block"},
    "recomputed": {"fp8_weights": "scales", "recompute": "full"},
    "compiled and recomputed": {
        "fp8_weights": "scales",
        "fp8_scaling": "delayed",
        "compile": "block",
        "recompute": "full",
    },
}


def recipe(accumulation: str, **fields: Any) -> Recipe:
    batch = Batch(micro=2, seq=16, accumulate=MICRO_BATCHES)
    wanted = {"precision": "fp8", "block_kernels": "fp8", "batch": batch, "accumulation": accumulation}
    return recipe_of(LLAMA, "native", **{**wanted, **fields})


def gradients(accumulation: str, fields: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses of two steps, and the gradients that the first update reads."""
    step: Step = assemble(
        recipe(accumulation, **fields), CPU, compiler=lambda module: module.compile(backend="aot_eager")
    )
    found = dict[str, Tensor]()

    def note(*_: Any) -> None:
        for name, parameter in step.model.named_parameters():
            if parameter.grad is not None:
                found.setdefault(name, parameter.grad.clone())

    handle = register_optimizer_step_pre_hook(note)
    try:
        losses = [step(step.random_batches(seed)) for seed in range(2)]
    finally:
        handle.remove()
    return losses, found


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_added_apart(name: str) -> None:
    (losses, apart), (fused_losses, fused) = (gradients(one, CASES[name]) for one in ("standard", "fused"))
    assert losses[0] == fused_losses[0]
    assert float(fused_losses[1]) == pytest.approx(float(losses[1]), rel=1e-2)
    assert apart.keys() == fused.keys()
    for weight, expected in apart.items():
        error = (fused[weight].double() - expected.double()).norm() / expected.double().norm()
        assert error < 2**-7, weight  # A rounding to bf16 of each micro-batch more
        assert float(expected.norm())


def test_a_sum_is_rounded_once() -> None:
    op.register_fp8()
    torch.manual_seed(0)
    d, x = torch.randn(48, 64).to(E5M2), torch.randn(32, 64).to(E4M3)
    scales = torch.tensor([0.5]), torch.tensor([0.25])
    kept = torch.randn(48, 32).bfloat16()
    expected = kept.double() + 0.125 * d.double() @ x.double().T
    version = kept._version
    torch.ops.trainfit.add_fp8_weight_gradient_(d, scales[0], x, scales[1], kept)
    assert kept._version > version
    torch.testing.assert_close(kept.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, "block"])
def test_a_ledger_has_the_same_flops_and_no_sums(compiled: Any) -> None:
    fields = {
        "compile": compiled, "fp8_weights": "scales", "fp8_scaling": "delayed",
        "hardware": Hardware(gpu="h100-sxm"),
    }  # fmt: skip
    plain, fused = (ledger_of(recipe(kind, **fields)) for kind in ("standard", "fused"))
    flops = [sum(one.times(op) * op.causal_flops for op in one.steady_ops) for one in (plain, fused)]
    assert flops[0] == flops[1]

    def calls(ledger: Any, name: str) -> int:
        return sum(ledger.times(op) * op.calls for op in ledger.steady_ops if op.name.startswith(name))

    num_fp8, num_blocks = calls(fused, "trainfit.add_fp8_weight_gradient_"), 2
    assert num_fp8 == MICRO_BATCHES * num_blocks * 2  # gate-up and down; the attention's gain nothing
    num_kept = 4 * num_blocks + 1  # The embedding's
    removed = calls(plain, "aten.add_.Tensor") - calls(fused, "aten.add_.Tensor")
    assert removed == (MICRO_BATCHES - 1) * num_kept
    products = [one for one in fused.steady_ops if one.name.startswith("trainfit.add_fp8_weight_gradient_")]
    assert {one.dtype for one in products} == {"float8_e5m2"}


def test_descriptors_of_cublaslt_are_as_set() -> None:
    try:
        cublaslt.library()
    except InputError:
        pytest.skip("torch has no libcublasLt")
    shape = cublaslt.Shape(512, 256, 128, 256, E5M2, E4M3, torch.bfloat16, True, (16, 256, 256))
    product = cublaslt.Product(shape)
    product.set_scales(1 << 16, 1 << 17)
    kinds = {
        0: (ctypes.c_int32, cublaslt.COMPUTE_32F), 1: (ctypes.c_int32, 0), 3: (ctypes.c_int32, 1),
        4: (ctypes.c_int32, 0), 17: (ctypes.c_void_p, 1 << 16), 18: (ctypes.c_void_p, 1 << 17),
        25: (ctypes.c_int8, 1),
    }  # fmt: skip
    for attribute, (kind, expected) in kinds.items():
        assert product.get(attribute, kind) == expected


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InputError, match="libcublasLt"):
        cublaslt.library.__wrapped__()


def test_without_the_library_a_gpu_is_refused_before_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise InputError("libcublasLt is not loaded", "use accumulation: standard", field="accumulation")

    monkeypatch.setattr(cublaslt, "library", missing)
    fused = recipe("fused")
    TECHNIQUE.check_device(fused, "cpu")
    with pytest.raises(InputError, match="libcublasLt"):
        TECHNIQUE.check_device(fused, "cuda")
