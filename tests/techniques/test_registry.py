"""The registry: every declaration, example and variant; refusals in one line that name field and remedy."""

import subprocess
import sys
from typing import Any

import pytest

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Adapter, Batch, Hardware, LossTerms, Offload, Optimizer
from trainfit.spec.recompute import Budget, BudgetGib, Every, SavedOps, Selective
from trainfit.techniques import registry
from trainfit.techniques.base import Data

LORA = Adapter(kind="lora", rank=4)
BF16 = {"precision": "bf16"}
FP8 = {"precision": "fp8"}
STREAMED = {"offload": Offload(weights=True), "optimizer": Optimizer(in_backward=True)}
MODEL: Data = {"model": {"config": {**TINY_LLAMA, "num_hidden_layers": 16}}, "batch": {"micro": 2, "seq": 16}}


def optimizer(*, precision: str = "bf16", **fields: Any) -> dict[str, Any]:
    return {"optimizer": Optimizer(**fields), "precision": precision}


def prefix(**fields: Any) -> Adapter:
    return Adapter(kind="prefix", **fields)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"recompute": BudgetGib(budget_gib=20)}, "recompute.budget_gib = 20", "planning.recompute.resolve"),
    ({"recompute": Budget(budget=0.5)}, "recompute.budget = 0.5: this budget is", "; set compile"),
    ({"hardware": Hardware(count=2), "compile": "model"}, "compile = 'model'", "with FSDP2 use false, block"),
    ({"attention": "flash"}, "attention = 'flash'", "precision: bf16"),
    ({"attention": "cudnn"}, "attention = 'cudnn'", "precision: bf16"),
    ({"attention": "best"}, "attention = 'best'", "planning.attention.choose"),
    ({"recompute": Selective(selective=SavedOps(save=("attention",), every=2))},
     "recompute.selective.every = 2: it counts kept matrix products", "add mm to save"),
    # offload
    ({"recompute": "selective", "offload": Offload(activations=True)}, "offload.act", "set recompute: full"),
    ({"recompute": Every(every=2), **STREAMED}, "offload.weights = true", "set recompute: full"),
    ({"recompute": "full", "compile": "model", **STREAMED}, "offload.weights = true", "use compile: block"),
    ({"recompute": "full", "offload": Offload(weights=True)}, "offload.weights = true", "train an adapter"),
    ({"adapter": Adapter(kind="prompt", reparametrization="mlp")}, "adapter.reparametrization = 'mlp'",
     "use adapter.kind: p-tuning"),
    ({"adapter": prefix(reparametrization="lstm")}, "adapter.reparametrization = 'lstm'", "none or mlp"),
    ({"adapter": Adapter(kind="lora", reparametrization="mlp")}, "adapter.reparametrization = 'mlp'",
     "LoRA has no"),
    ({"adapter": prefix(encoder_hidden_size=8)}, "adapter.encoder_hidden_size = 8: no layers", ""),
    # optimizers
    (optimizer(name="adafactor", implementation="fused", momentum=0.9), "optimizer.implementation = 'fused'",
     "use forloop"),
    (optimizer(name="adafactor", implementation="foreach", scale_parameter=False),
     "optimizer.scale_parameter = false", "fused or forloop"),
    (optimizer(momentum=0.9), "optimizer.momentum = 0.9: AdamW always keeps", "sgd or adafactor"),
    (optimizer(name="adamw4bit", momentum=0.9), "optimizer.momentum = 0.9", "sgd or adafactor"),
    (optimizer(name="adamw8bit", implementation="foreach"), "optimizer.implementation = 'foreach'",
     "one kernel a weight"),
    (optimizer(name="muon", momentum=0.0), "optimizer.momentum = 0.0", "needs a momentum above 0"),
    (optimizer(in_backward=True) | {"batch": Batch(accumulate=2)}, "optimizer.in_backward = true",
     "batch.accumulate: 1"),
    (optimizer(in_backward="block", precision="amp-fp16"), "optimizer.in_backward = 'block'", "amp-bf16"),
    (optimizer(clip_norm=1.0, in_backward="block"), "optimizer.clip_norm = 1.0", "norm of all is known"),
    (optimizer(stochastic_rounding=True, precision="amp-bf16"), "optimizer.stochastic_rounding = true",
     "fp32 weights, which lose no update to rounding"),
    (optimizer(stochastic_rounding=True, implementation="foreach"), "optimizer.stochastic_rounding",
     "rounds to nearest"),
    (optimizer(stochastic_rounding=True) | {"adapter": Adapter(kind="lora")},
     "optimizer.stochastic_rounding", "adapter.dtype: base"),
    (optimizer(name="bnb-adamw8bit", implementation="foreach"), "optimizer.implementation = 'foreach'",
     "one kernel a weight"),
    (optimizer(name="bnb-adamw8bit", stochastic_rounding=True), "optimizer.stochastic_rounding = true",
     "optimizer.name: adamw8bit"),
    (optimizer(name="paged-adamw", momentum=0.9), "optimizer.momentum = 0.9", "sgd or adafactor"),
    (optimizer(name="paged-adamw8bit", in_backward=True)
     | {"offload": Offload(weights=True), "recompute": "full"}, "optimizer.name = 'paged-adamw8bit'",
     "use bnb-adamw8bit"),
    (optimizer(name="bnb-adamw8bit") | {"hardware": Hardware(count=2)}, "optimizer.name = 'bnb-adamw8bit'",
     "with FSDP2 use"),
    # master weights
    (optimizer(name="adafactor", precision="bf16-master"), "precision = 'bf16-master': without FSDP2 AdamW",
     "use optimizer.name: adamw, or precision: amp-bf16"),
    (optimizer(implementation="foreach", precision="bf16-master"), "optimizer.implementation = 'foreach'",
     "use fused"),
    (optimizer(stochastic_rounding=True, precision="bf16-master"), "optimizer.stochastic_rounding = true",
     "lose no update to rounding"),
    ({"precision": "bf16-master", "adapter": LORA}, "precision = 'bf16-master': only the adapter trains",
     "use precision: bf16"),
    ({"precision": "fp16-master", "hardware": Hardware(gpu="t4")},
     "precision = 'fp16-master': NVIDIA T4 is older", "use precision: amp-fp16"),
    (optimizer(name="sgd", precision="fp16-master"), "precision = 'fp16-master'", "amp-fp16"),
    ({"precision": "fp16-master", "adapter": LORA}, "precision = 'fp16-master'", "use precision: fp16-pure"),
    ({"precision": "fp16-master", "hardware": Hardware(count=2)}, "precision = 'fp16-master'",
     "parallel.strategy: ddp"),
    (optimizer(stochastic_rounding=True, precision="fp16-pure"), "optimizer.stochastic_rounding = true",
     "use precision: bf16"),
    (optimizer(in_backward=True, precision="fp16-pure"), "optimizer.in_backward = true",
     "use precision: bf16 or"),
    ({"precision": "mixed-bf16"}, "precision = 'mixed-bf16'", "use precision: bf16-master"),
    # losses
    ({"loss_terms": LossTerms(z_loss=1e-4), "loss": "chunked"}, "loss_terms", "use loss: fused or standard"),
    ({"loss_terms": LossTerms(z_loss=1e-4), "adapter": Adapter(kind="prompt")}, "loss_terms",
     "around the model's own forward"),
    # fp8
    (FP8 | {"hardware": Hardware(gpu="a100-sxm4-80gb")}, "precision = 'fp8'", "no fp8 tensor cores"),
    (FP8 | {"hardware": Hardware(gpu="mi300x")}, "precision = 'fp8'", "not modelled on AMD"),
    ({"attention": "triton", "hardware": Hardware(gpu="mi300x")}, "attention = 'triton'", "tested on AMD"),
    (FP8 | {"adapter": LORA, "quantize": "fp8"}, "precision = 'fp8'", "with quantize: fp8"),
    (FP8 | {"batch": Batch(micro=1, seq=24)}, "batch.micro = 1", "a multiple of 16 tokens"),
    (FP8 | {"recompute": "full", **STREAMED}, "precision = 'fp8'", "offloaded weights cannot be converted"),
    # virtual tokens
    ({"adapter": Adapter(kind="prompt", rank=8)}, "adapter.rank = 8: prompt", "no rank"),
    ({"adapter": Adapter(kind="p-tuning", dropout=0.1)}, "adapter.dropout = 0.1: p-tuning", ""),
    ({"adapter": prefix(alpha=4)}, "adapter.alpha = 4: prefix", ""),
    ({"adapter": prefix(targets=("q_proj",))}, "adapter.targets = ('q_proj',)", ""),
    ({"adapter": prefix(), "attention": "flash", **BF16}, "attention = 'flash': a prefix needs a mask", ""),
    ({"adapter": prefix(), "compile": "block"}, "compile = 'block'", "compile: model"),
    ({"adapter": prefix(), "recompute": "full"}, "recompute = 'full'", "model.implementation: native"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "begin", "words"), REFUSED, ids=str)
def test_refused_in_one_line(fields: dict[str, Any], begin: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        registry.check(tiny_recipe(**fields))
    text = str(caught.value)
    assert text.startswith(begin)
    assert words in text
    assert "\n" not in text


def test_what_can_be_combined_passes() -> None:
    registry.check(tiny_recipe(optimizer=Optimizer(name="adafactor", implementation="foreach")))
    registry.check(tiny_recipe(optimizer=Optimizer(name="adafactor", momentum=0.9)))
    in_backward = Optimizer(in_backward=True)
    registry.check(tiny_recipe(optimizer=in_backward, adapter=LORA, precision="amp-bf16"))
    registry.check(tiny_recipe(attention="flash", precision="amp-fp16", recompute="full", compile="block"))
    registry.check(tiny_recipe(attention="efficient"))


@pytest.mark.parametrize("attention", ["cudnn", "efficient"])
def test_a_cpu_lacks_some_kernels(attention: Any) -> None:
    recipe = tiny_recipe(attention=attention, **BF16)
    registry.check_device(recipe, "cuda")
    with pytest.raises(InputError, match="CUDA only"):
        registry.check_device(recipe, "cpu")


def test_lora_without_peft_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'trainfit\[peft\]'"):
        registry.check(tiny_recipe(adapter=LORA))


def test_the_order_of_application() -> None:
    assert [technique.name for technique in registry.in_order()] == [
            "block_kernels", "swiglu_kernels", "quantize", "lora", "soft_prompts", "prefix_tuning",
            "fp8_block", "fp8_scaling", "fp8_weights", "fp8", "tensor_parallel", "context_parallel",
            "expert_parallel", "fused_accumulation", "recompute_full", "recompute_every",
            "recompute_selective",
            "recompute_budget", "recompute_layers", "chunked_loss", "fused_loss", "loss_terms",
            "preference_loss", "policy_loss", "pipeline_parallel", "compile_block", "compile_model",
            "offload_weights", "offload_activations", "precision", "attention", "packed_documents",
            "accumulation", "loader", "empty_cache", "fsdp", "adamw", "adamw_low_bit", "adamw_bitsandbytes",
            "adamw_torchao", "sgd", "adafactor", "muon", "stochastic_rounding", "decay_groups",
            "optimizer_in_backward", "offload_optimizer", "gradient_clipping", "data_parallel",
    ]  # fmt: skip


@pytest.mark.parametrize("name", registry.techniques())
def test_a_declaration_is_complete_and_its_examples_turn_it_on(name: str) -> None:
    """A variant is accepted, or refused in one line."""
    technique = registry.techniques()[name]
    assert technique.title
    assert technique.fields
    if "parallel." not in technique.fields[0]:  # Several GPUs are not in the suites of one.
        assert technique.examples
        assert technique.draw.alone or technique.draw.weights
    for example in technique.examples:
        recipe = recipe_from(merge(merge(MODEL, technique.needs), example))
        registry.check(recipe)
        assert technique.requested(recipe) or technique.applies(recipe)
        assert registry.describe(recipe).startswith(recipe.precision)
    for variant in technique.variants:
        try:
            registry.check(recipe_from(merge(merge(MODEL, technique.needs), variant)))
        except InputError as error:
            assert error.field
            assert "\n" not in str(error)


def test_a_recipe_is_refused_without_torch() -> None:
    code = (
        "import sys, json\n"
        "from trainfit.spec.recipe import Recipe\n"
        "from trainfit.techniques import registry\n"
        "recipe = Recipe.model_validate_json(sys.argv[1])\n"
        "registry.check(recipe)\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules), sorted(sys.modules)\n"
    )
    recipe = tiny_recipe(adapter=LORA, compile="block", recompute="full")
    command = [sys.executable, "-c", code, recipe.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_adafactors_implementation_is_filled_in_and_does_not_change_the_id() -> None:
    written = tiny_recipe(optimizer=Optimizer(name="adafactor", implementation="forloop"))
    assert tiny_recipe(optimizer=Optimizer(name="adafactor")).id == written.id
    assert Optimizer(name="adamw").implementation == Optimizer(name="sgd").implementation == "fused"
