"""``attention: triton`` on a real GPU: gradients against fp64, determinism, and predicted peaks."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_runs import RESULTS, computed, wrong_results
from driver_addresses import Run, differences, measured_runs, predictions
from trainfit.catalog.load import gpu_of_device
from trainfit.kernels.flash_attention.op import flash_attention
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Record
from trainfit.step import assemble

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    torch._dynamo.reset()


# -- numbers


def tensors(d: int, dtype: torch.dtype, layout: str) -> list[Tensor]:
    """q, k, v and a gradient of two sequences of 333 tokens, 4 heads and 2 key heads, in models' layouts."""
    torch.manual_seed(d)
    if layout == "qkv":
        whole = torch.randn(2, 333, 8 * d, device=CARD, dtype=dtype)
        parts = [part.unflatten(2, (-1, d)) for part in whole.split([4 * d, 2 * d, 2 * d], dim=2)]
    else:
        parts = [torch.randn(2, 333, heads, d, device=CARD, dtype=dtype) for heads in (4, 2, 2)]
    gradient = torch.randn(2, 333, 4, d, device=CARD, dtype=dtype)
    return [x.transpose(1, 2) for x in (*parts, gradient)]


@pytest.mark.parametrize("layout", ["bshd", "qkv"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("d", "dtype"), [(128, BF16), (64, BF16), (64, FP16), (80, BF16), (64, FP32)])
def test_gradients_are_as_near_to_fp64_as_written_out_ones(
    d: int, dtype: torch.dtype, deterministic: bool, layout: str
) -> None:
    given = tensors(d, dtype, layout)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        wrong = wrong_results(flash_attention, given, True, slack=1e-5)
        found, again = (computed(flash_attention, given, True, dtype) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not wrong, "\n".join(wrong)
    for name, ours, twice in zip(RESULTS, found, again, strict=True):
        assert not deterministic or torch.equal(ours, twice), f"{name} differs from run to run"


@pytest.mark.parametrize("code", ["native", "hf"])
@pytest.mark.parametrize("compiled", [False, "block"])
def test_a_step_learns_as_with_attention_written_out(code: str, compiled: Any) -> None:
    """Three steps on one batch, with a rate at which its loss falls (at 0.05 it rises)."""
    optimizer = {"lr": 0.005}
    reference = assemble(recipe(code, 128, attention="eager", optimizer=optimizer), CARD)
    step = assemble(recipe(code, 128, compile=compiled, optimizer=optimizer), CARD)
    step.model.load_state_dict(reference.model.state_dict())
    batches = step.random_batches()
    found, expected = ([each(batches).item() for _ in range(3)] for each in (step, reference))
    assert found == pytest.approx(expected, rel=5e-3)
    assert found[2] < found[1] < found[0]


# -- memory

LLAMA = {
    "model_type": "llama", "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 4096,
}  # fmt: skip
"""A small vocabulary and narrow feed-forward parts: the peak is in the backward of attention."""
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Gluon 128": ("native", 128, {}),
    "Gluon 64, recomputed": ("native", 64, {"precision": "amp-fp16", "recompute": "full"}),
    "hf, selective": ("hf", 128, {"recompute": "selective", "batch": {"accumulate": 2}}),
    "plain 80": ("native", 80, {"batch": {"seq": 777}}),
    "plain fp32": ("hf", 64, {"precision": "fp32"}),
    "compiled": ("native", 64, {"compile": "block"}),
}
"""Implementation, head size, and fields of the recipe."""


def recipe(code: str, d: int, **fields: Any) -> Recipe:
    """bf16, 2 x 1000 tokens, fused SGD."""
    base: dict[str, Any] = {
        "model": {"config": {**LLAMA, "hidden_size": 8 * d, "head_dim": d}, "implementation": code},
        "batch": {"micro": 2, "seq": 1000},
        "attention": "triton",
        "optimizer": {"name": "sgd", "implementation": "fused", "lr": 0.05},
    }
    return recipe_from(merge(base, fields))


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    """By name, for the GPU here: a compiler's trial runs first allocate as much as its L2 cache holds."""
    here = {"hardware": {"gpu": gpu_of_device(torch.cuda.get_device_name(CARD)).name}}
    return {name: recipe(code, d, **here, **fields) for name, (code, d, fields) in CASES.items()}


@pytest.fixture(scope="module")
def predicted(recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """By the recipe's id, from processes that see no GPU."""
    return predictions(recipes.values(), tmp_path_factory.mktemp("predicted"))


@pytest.fixture(scope="module")
def measured(recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """By the recipe's id, each from a new process."""
    return measured_runs(recipes.values(), tmp_path_factory.mktemp("measured"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_the_predicted_one(
    name: str, recipes: dict[str, Recipe], predicted: dict[str, Record], measured: dict[str, Run]
) -> None:
    """To the byte in each phase, with segments where the driver put them; else within 1 %."""
    chosen = recipes[name]
    run, estimate = measured[chosen.id], predicted[chosen.id].estimate
    assert differences(chosen, run) == {}
    assert estimate is not None
    assert run.measurement.peak_allocated_bytes == pytest.approx(estimate.peak_allocated_bytes, rel=0.01)
