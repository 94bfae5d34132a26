"""What cannot be assembled is refused before torch is imported, in one line: field, value, remedy."""

import subprocess
import sys
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, Optimizer, Parallel, Recipe
from trainfit.spec.recompute import BudgetGib
from trainfit.techniques import registry

LORA = Adapter(kind="lora", rank=4)
BF16 = {"precision": "bf16"}


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"recompute": BudgetGib(budget_gib=20)}, "recompute.budget_gib = 20", "planning.recompute.resolve"),
        (
            {"parallel": Parallel(shard=2), "hardware": Hardware(count=2)},
            "parallel.shard = 2",
            "there is now: 1",
        ),
        (
            {"parallel": Parallel(tensor=4), "hardware": Hardware(count=4)},
            "parallel.tensor = 4",
            "there is now: 1",
        ),
        (
            {"optimizer": Optimizer(name="adafactor", implementation="fused", momentum=0.9)},
            "optimizer.implementation = 'fused'",
            "use forloop",
        ),
        (
            {"optimizer": Optimizer(name="adafactor", implementation="foreach", momentum=0.9)},
            "optimizer.implementation = 'foreach'",
            "use forloop",
        ),
        ({"optimizer": Optimizer(momentum=0.9)}, "optimizer.momentum = 0.9", "sgd or adafactor"),
        (
            {"optimizer": Optimizer(in_backward=True), "batch": Batch(accumulate=2)},
            "optimizer.in_backward = true",
            "batch.accumulate: 1",
        ),
        (
            {"optimizer": Optimizer(in_backward=True), "precision": "amp-fp16"},
            "optimizer.in_backward = true",
            "amp-bf16",
        ),
        ({"attention": "flash"}, "attention = 'flash'", "precision: bf16"),
        ({"attention": "cudnn"}, "attention = 'cudnn'", "precision: bf16"),
    ],
    ids=str,
)
def test_refused_by_name(fields: dict[str, Any], field: str, remedy: str):
    with pytest.raises(InputError) as caught:
        registry.check(tiny_recipe(**fields))
    text = str(caught.value)
    assert text.startswith(field)
    assert remedy in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer": Optimizer(name="adafactor")},
        {"optimizer": Optimizer(name="adafactor", implementation="foreach")},
        {"optimizer": Optimizer(name="adafactor", momentum=0.9)},
        {"optimizer": Optimizer(in_backward=True), "adapter": LORA, "precision": "amp-bf16"},
        {"attention": "flash", "precision": "amp-fp16", "recompute": "full", "compile": "block"},
        {"attention": "cudnn", **BF16},
        {"attention": "efficient"},
    ],
    ids=str,
)
def test_what_is_there_passes(fields: dict[str, Any]):
    registry.check(tiny_recipe(**fields))


@pytest.mark.parametrize("attention", ["cudnn", "efficient"])
def test_a_cpu_lacks_some_kernels(attention: Any):
    recipe = tiny_recipe(attention=attention, **BF16)
    registry.check_device(recipe, "cuda")
    with pytest.raises(InputError, match="CUDA only"):
        registry.check_device(recipe, "cpu")


def test_lora_without_peft_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'trainfit\[peft\]'"):
        registry.check(tiny_recipe(adapter=LORA))


def test_every_value_of_every_covered_field_is_a_known_or_a_refused_one():
    """A misspelt field in ``covers`` cannot go unnoticed."""
    recipe = tiny_recipe(adapter=LORA)
    for field in registry.covered():
        owner: Any = recipe
        *parents, last = field.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        assert last in type(owner).model_fields, field


def test_the_order_of_application() -> None:
    assert [technique.name for technique in registry.in_order()] == [
        "block_kernels", "quantize", "lora", "soft_prompts", "prefix_tuning", "fp8", "recompute_full",
        "recompute_every", "recompute_selective", "recompute_budget", "recompute_layers", "chunked_loss",
        "fused_loss", "loss_terms", "compile_block", "compile_model", "offload_weights",
        "offload_activations", "precision", "attention", "accumulation", "loader", "empty_cache",
        "adamw", "adamw_low_bit", "sgd", "adafactor", "muon", "stochastic_rounding", "optimizer_in_backward",
        "gradient_clipping",
    ]  # fmt: skip


def test_a_recipe_is_refused_without_torch():
    code = (
        "import sys, json\n"
        "from trainfit.spec.recipe import Recipe\n"
        "from trainfit.techniques import registry\n"
        "recipe = Recipe.model_validate_json(sys.argv[1])\n"
        "registry.check(recipe)\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules), sorted(sys.modules)\n"
    )
    recipe: Recipe = tiny_recipe(adapter=LORA, compile="block", recompute="full")
    done = subprocess.run(
        [sys.executable, "-c", code, recipe.model_dump_json()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_adafactors_implementation_is_filled_in_and_does_not_change_the_id():
    written = tiny_recipe(optimizer=Optimizer(name="adafactor", implementation="forloop"))
    assert tiny_recipe(optimizer=Optimizer(name="adafactor")).id == written.id
    assert Optimizer(name="adamw").implementation == Optimizer(name="sgd").implementation == "fused"
