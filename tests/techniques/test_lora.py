"""LoRA's options: DoRA, rsLoRA, modules_to_save and embeddings, real and predicted."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tiny_recipe import tiny_recipe
from tiny_step import FAMILIES, learned
from tiny_training import Listener, options_for, stop_at, tiny
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Adapter, ModelSpec, Optimizer, Recipe
from trainfit.step import assemble
from trainfit.training.loop import train
from virtual_runs import sums

CPU = torch.device("cpu")


def lora(code: Any = "hf", **fields: Any) -> Recipe:
    """A tiny recipe with rank 4 that learns fast; fields of the adapter, others in ``recipe``."""
    others = fields.pop("recipe", {})
    adapter = Adapter(kind="lora", rank=4, **fields)
    return tiny_recipe(code, adapter=adapter, optimizer=Optimizer(lr=1e-2), **others)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


NATIVE_NAMES = {"q_proj": "qkv", "embed_tokens": "embed"}
OPTIONS: dict[str, dict[str, Any]] = {
    "dora": {"dora": True},
    "dora-dropout": {"dora": True, "dropout": 0.1},
    "rslora": {"rslora": True},
    "saved": {"modules_to_save": ("lm_head", "embed_tokens")},
    "embedding": {"targets": ("q_proj", "embed_tokens")},
    "dora-embedding": {"dora": True, "targets": ("q_proj", "embed_tokens")},
}


def named(options: dict[str, Any], code: str) -> dict[str, Any]:
    """Return the options with the names of the implementation's modules."""
    names = NATIVE_NAMES if code == "native" else {}
    return {
        key: tuple(names.get(one, one) for one in value) if isinstance(value, tuple) else value
        for key, value in options.items()
    }


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_learns_and_is_predicted(code: str, name: str):
    """On the CPU the loss falls; on the virtual GPU as many parameters train, over a 4-bit base too."""
    for base in (None, "nf4"):
        recipe = lora(code, **named(OPTIONS[name], code), recipe={"quantize": base, "precision": "bf16"})
        step, losses = learned(recipe, 4)
        assert losses[-1] < losses[0]
        ledger = trace(recipe)
        assert ledger.trainable_params == sum(p.numel() for p in trained(step.model).values())
        assert not ledger.ops_without_flops


def test_rslora_scales_by_the_root_of_the_rank():
    for rslora, expected in ((False, 32 / 4), (True, 32 / math.sqrt(4))):
        model: Any = assemble(lora(rslora=rslora, alpha=32), CPU).model
        scales = {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")}
        assert scales == {expected}


@pytest.mark.parametrize("base", [None, "nf4", "int8"])
def test_a_dora_magnitude_starts_as_the_norm_of_the_dequantised_weight(base: Any):
    """Row norms of the weight that the layer multiplies with (Liu et al., section 4.1)."""
    model = assemble(lora(dora=True, recipe={"quantize": base, "precision": "fp32"}), CPU).model
    layer: Any = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    original = layer.base_layer
    weight = original.weight if base is None else original.dequantize(torch.float32)
    norms = weight.float().norm(dim=1)
    torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight, norms)


def test_a_saved_module_is_a_copy_that_trains_whole():
    step, _ = learned(lora(modules_to_save=("lm_head",)), 2)
    head: Any = step.model.get_submodule("base_model.model.lm_head")
    copy = head.modules_to_save["default"]
    assert copy.weight.requires_grad
    assert not head.original_module.weight.requires_grad
    assert not torch.equal(copy.weight, head.original_module.weight)


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_losses_without_logits_read_the_copy_of_the_head(loss: Any):
    """From the copy's weight, which trains, not the frozen original's."""
    options = {"modules_to_save": ("lm_head",), "recipe": {"precision": "fp32"}}
    expected = learned(lora(**options), 3)[1]
    options["recipe"] = {"precision": "fp32", "loss": loss}
    assert learned(lora(**options), 3)[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["dora", "saved", "dora-embedding"])
def test_recomputation_changes_nothing(name: str):
    plain = lora(**OPTIONS[name], recipe={"precision": "fp32"})
    assert learned(plain.model_copy(update={"recompute": "full"}), 3)[1] == learned(plain, 3)[1]


def test_training_stops_and_goes_on_to_the_last_bit(tmp_path: Path):
    adapter = "adapter={kind: dora, rank: 4, targets: [q_proj, embed_tokens], modules_to_save: [lm_head]}"
    recipe = tiny(adapter, "quantize=nf4")
    straight = train(recipe, options_for(tmp_path / "straight", 4))
    first = train(recipe, options_for(tmp_path / "broken", 4), observers=[Listener(stop_at(2))])
    second = train(recipe, options_for(tmp_path / "broken", 4, resume=True))
    assert first.losses + second.losses == straight.losses


def test_dora_costs_the_memory_of_written_out_weights():
    """In each layer's forward the adapted weight in fp32; and its products' FLOPs."""
    config = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = ModelSpec(config={"model_type": "llama", "vocab_size": 512, **config})
    options = {"model": model, "recompute": "full", "precision": "bf16", "quantize": "nf4"}
    plain, dora = (lora(dora=on).model_copy(update=options) for on in (False, True))
    peaks = [sums(trace(recipe))["peak_allocated_bytes"] for recipe in (plain, dora)]
    assert peaks[1] - peaks[0] > 2 * 4 * 512 * 4096  # The base's and the product's copies
    assert sums(trace(dora))["flops"] > sums(trace(plain))["flops"]


# -- words


def test_words_of_peft_are_taken():
    def of(adapter: Any) -> Recipe:
        return recipe_from(tiny_recipe().content() | {"adapter": adapter, "quantize": None})

    dora = of({"kind": "lora", "dora": True})
    assert of({"kind": "lora", "use_dora": True}) == of("dora") == of({"kind": "DoRA"}) == dora
    assert of({"kind": "lora", "use_rslora": True}) == of("rslora")
    assert of("qdora").quantize == "nf4"
    assert of({"kind": "lora", "dora": False, "rslora": False, "modules_to_save": []}).id == of("lora").id
    assert recipe_from(dora.content()) == dora


@pytest.mark.parametrize(
    ("data", "field"),
    [({"use_dora": True}, "adapter.dora"), ({"modules_to_save": ["lm_head"]}, "adapter.modules_to_save"),
     ({"use_rslora": True}, "adapter.rslora")],
)  # fmt: skip
def test_words_outside_the_adapter_name_its_field(data: dict[str, Any], field: str):
    with pytest.raises(InputError, match=f"here it is {field}"):
        recipe_from(tiny_recipe().content() | data)


@pytest.mark.parametrize(
    ("fields", "family", "text"),
    [
        ({"modules_to_save": ("lm_hed",)}, "qwen3", "the model has no module lm_hed.*such as lm_head"),
        ({"modules_to_save": ("act_fn",)}, "qwen3", "act_fn has no weights"),
        ({"dora": True}, "mixtral", "adapter.dora = true: PEFT refuses it"),
    ],
)  # fmt: skip
def test_refused_by_the_model(fields: dict[str, Any], family: str, text: str):
    recipe = lora(**fields).model_copy(update={"model": ModelSpec(config=FAMILIES[family])})
    with pytest.raises(InputError, match=text):
        assemble(recipe, CPU)


def test_quantised_blocks_are_not_saved():
    recipe = lora(modules_to_save=("mlp",), recipe={"quantize": "nf4"})
    with pytest.raises(InputError, match=r"adapter.modules_to_save.*holds quantised weights"):
        assemble(recipe, CPU)


def test_adapters_that_untie_embeddings_are_named():
    recipe = lora(targets=("q_proj", "embed_tokens"))
    tied = recipe.model_copy(update={"model": ModelSpec(config=FAMILIES["gemma2"])})
    assert ["embed_tokens changes one side" in line for line in trace(tied).warnings] == [True]
    assert not trace(recipe).warnings
    assert not trace(tied.model_copy(update={"adapter": Adapter(kind="lora")})).warnings


def test_no_closed_form_of_flops_stands_for_what_is_no_product_of_tokens():
    """DoRA multiplies weights with each other; a table that is looked up takes no FLOPs."""
    from trainfit.api.mfu import _trains_more_than_products as is_more

    for options in (
        {"dora": True},
        {"modules_to_save": ("lm_head",)},
        {"targets": ("q_proj", "embed_tokens")},
    ):
        assert is_more(Adapter(kind="lora", **options))
    assert not is_more(Adapter(kind="lora", rslora=True, targets=("q_proj", "lm_head")))
