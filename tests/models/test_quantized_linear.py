"""Quantised frozen bases: the layer against F.linear, training over it, bytes against the closed form."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tiny_recipe import TINY_LLAMA, tiny_recipe
from tiny_step import BASE, FAMILIES, KINDS, aot_eager, learned, quantized_layer, trajectory
from trainfit.models.build import build_model
from trainfit.models.layers import layer_lists, num_quantized
from trainfit.models.quantized_libraries import TorchaoLinear, nf4_tensor
from trainfit.models.quantized_linear import QuantizedLinear
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.quantize import Quantized
from trainfit.spec.recipe import Adapter, Batch, ModelSpec, Optimizer
from trainfit.techniques import registry
from virtual_runs import recipe_of, sums, with_layers

LORA = Adapter(kind="lora", rank=4)


# -- the layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_layer_equals_linear_with_the_weight_of_its_codes(kind: str, bias: bool, dtype: torch.dtype):
    made = quantized_layer(kind, 96, 40, bias, dtype)
    x = torch.randn(2, 5, 96, dtype=dtype, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    expected = nn.functional.linear(twin, made.dequantize(dtype), made.bias)
    out = made(x)
    assert torch.equal(out, expected)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    assert x.grad is not None
    assert twin.grad is not None
    assert torch.equal(x.grad, twin.grad)
    assert made.dequantize(dtype).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_weights_size_is_kept_for_backward(kind: str):
    made, kept = quantized_layer(kind, 128, 256), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        made(torch.randn(2, 128, requires_grad=True))
    assert {t.data_ptr() for t in kept} == {part.data_ptr() for part in made.buffers()}


def test_autocast_decides_the_dtype():
    made = quantized_layer("nf4", 64, 64, True)
    x = torch.randn(2, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert made(x).dtype == torch.float32


def test_products_in_a_dtype_of_their_own():
    """As bitsandbytes' Linear4bit: the input is cast, and the result is cast back, also under autocast."""
    made = quantized_layer("nf4", 64, 64, True)
    made.base = Quantized(kind="nf4", compute="bf16")
    x = torch.randn(2, 64, requires_grad=True)
    expected = made._product(x.bfloat16()).float()
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            assert torch.equal(made(x), expected)


def test_a_recipe_with_only_defaults_is_the_short_form():
    def of(quantize: Any) -> Any:
        return recipe_from(tiny_recipe(adapter=LORA, quantize="nf4").content() | {"quantize": quantize})

    assert of({"kind": "nf4", "double": True, "block": 64, "compute": None}) == of("nf4")
    base = of({"kind": "nf4", "double": False, "compute": "bf16"})
    assert recipe_from(base.content()) == base
    assert base.id != of("nf4").id
    assert "nf4 (fp32 magnitudes, products in bf16) base" in registry.describe(base)
    _, losses = learned(base.model_copy(update={"optimizer": Optimizer(lr=1e-2)}), 3)
    assert losses[-1] < losses[0]
    for wrong, named in (({"kind": "int8", "block": 32}, "quantize.block"), ("nf5", "quantize = 'nf5'")):
        with pytest.raises(InputError, match=named):
            of(wrong)


def test_words_for_layouts_of_libraries():
    def of(quantize: Any) -> Any:
        return recipe_from(tiny_recipe(adapter=LORA, quantize="nf4").content() | {"quantize": quantize})

    assert of("nf4-dq") == of("NF4") == of("nf4")
    assert of("bnb-nf4") == of({"kind": "nf4", "double": False, "library": "bitsandbytes"})
    assert of("BNB_NF4_DQ") == of({"kind": "nf4", "library": "bitsandbytes"})
    assert of("torchao-nf4").base == Quantized(kind="nf4", library="torchao")
    assert of({"kind": "nf4", "skip_modules": []}) == of("nf4")
    assert "by bitsandbytes" in str(of("bnb-nf4").base)
    for wrong, named in (
        ({"kind": "int8", "library": "bitsandbytes"}, "quantize.library"),
        ({"kind": "nf4", "library": "torchao", "double": False}, "quantize.double"),
        ("bitsandbytes", "here it is quantize: bnb-nf4"),
    ):
        with pytest.raises(InputError, match=named):
            of(wrong)


WIDE_LLAMA = {**TINY_LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
"""Of whose layers each has a multiple of 16,384 weights, as torchao's layout needs."""


def test_torchaos_layer_is_its_tensors():
    """Output and gradient of ``F.linear`` with an ``NF4Tensor``; nothing of the weight's size is kept."""
    torch.manual_seed(0)
    weight = torch.randn(128, 256)
    made = TorchaoLinear(256, 128, False, Quantized(kind="nf4", library="torchao"), torch.float32, "cpu")
    made.load(weight, None)
    theirs = nf4_tensor().from_tensor(weight, 64, 256)
    inputs = [torch.ones(3, 256).requires_grad_() for _ in range(2)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours = made(inputs[0])
    assert {t.data_ptr() for t in kept} == {part.data_ptr() for part in made.buffers()}
    expected = nn.functional.linear(inputs[1], theirs)
    assert torch.equal(ours, expected)
    ours.sum().backward()
    expected.sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # pyright: ignore[reportArgumentType]


def test_a_recipe_learns_over_torchaos_layout_and_is_predicted():
    recipe = tiny_recipe(adapter=LORA, quantize=Quantized(kind="nf4", library="torchao"), precision="bf16")
    with pytest.raises(InputError, match=r"quantize.library.*multiples of 16,384 weights.*32 x 32"):
        learned(recipe, 1)
    wide = recipe.model_copy(update={"model": ModelSpec(config=WIDE_LLAMA), "optimizer": Optimizer(lr=1e-2)})
    _, losses = learned(wide, 4)
    assert losses[-1] < losses[0]
    ledger = trace(wide)
    assert not ledger.ops_without_flops
    assert "torchao" in ledger.versions
    with pytest.raises(InputError, match="compile = 'block': torch.compile of torchao's"):
        registry.check(wide.model_copy(update={"compile": "block"}))


def test_modules_that_are_not_quantised():
    base = Quantized(kind="nf4", skip_modules=("down_proj", "lm_head"))
    model = build_model(ModelSpec(config=TINY_LLAMA), dtype=torch.float32, device="cpu", quantize=base)
    names = {name.rpartition(".")[2] for name, one in model.named_modules() if type(one) is nn.Linear}
    assert names == {"down_proj", "lm_head"}
    for wrong in ("down_pro", ""):
        base = Quantized(kind="nf4", skip_modules=(wrong,))
        with pytest.raises(InputError, match="quantize.skip_modules"):
            build_model(ModelSpec(config=TINY_LLAMA), dtype=torch.float32, device="cpu", quantize=base)


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match="the layer has 6 x 128"):
        QuantizedLinear(128, 6, False, "int8", torch.float32, "cpu").load(torch.zeros(128, 6), None)


# -- the model


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("kind", KINDS)
def test_native_starts_from_the_weights_that_the_seed_gives_unquantised(kind: str):
    spec = ModelSpec(config=TINY_LLAMA, implementation="native")
    models = []
    for quantize in (None, kind, kind):
        torch.manual_seed(3)
        models.append(build_model(spec, dtype=torch.float32, device="cpu", quantize=quantize))
    whole, made, again = models
    assert len(quantized_layers(made)) == 8
    for name, found in quantized_layers(made).items():
        twin = QuantizedLinear(found.in_features, found.out_features, False, kind, torch.float32, "cpu")
        twin.load(whole.get_parameter(f"{name}.weight"), None)
        assert all(torch.equal(a, b) for a, b in zip(found.buffers(), twin.buffers(), strict=True))
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name
    twice = zip(made.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in twice)


DENSE = {name: FAMILIES[name] for name in ("gpt2", "opt", "gemma2")}


@pytest.mark.parametrize("family", DENSE)
def test_other_families_are_quantised_and_adapted(family: str):
    """All but embeddings, head, norms and biases; GPT-2's transposed layers too."""
    spec = ModelSpec(config=DENSE[family])
    torch.manual_seed(0)
    whole = build_model(spec, dtype=torch.float32, device="cpu")
    ((_, blocks),) = layer_lists(whole)
    matrices = [parameter.numel() for parameter in blocks.parameters() if parameter.dim() == 2]
    options = {"quantize": "int8", "adapter": LORA, "batch": Batch(micro=2, seq=8)}
    recipe = tiny_recipe(**options, optimizer=Optimizer(lr=1e-2))
    step, losses = learned(recipe.model_copy(update={"model": spec, "recompute": "full"}))
    assert num_quantized(step.model) == sum(matrices)
    assert not any(t.is_meta for t in (*step.model.parameters(), *step.model.buffers()))
    assert all("lora_" in name for name, p in step.model.named_parameters() if p.requires_grad)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("config", "named"),
    [(FAMILIES["mixtral"], "mlp"), ({**BASE, "model_type": "mamba", "state_size": 4}, "mixer")],
    ids=["mixtral", "mamba"],
)
def test_experts_and_state_spaces_are_refused(config: dict[str, Any], named: str):
    with pytest.raises(InputError, match=rf"quantize = 'nf4'.*{named}.*dense transformer"):
        build_model(ModelSpec(config=config), dtype=torch.float32, device="cpu", quantize="nf4")


@pytest.mark.parametrize(
    ("code", "kind", "precision"),
    [("hf", "nf4", "fp32"), ("hf", "int8", "bf16"), ("hf", "fp8", "amp-bf16"), ("native", "nf4", "amp-bf16"),
     ("native", "int8", "fp32"), ("native", "fp8", "bf16")],
)  # fmt: skip
def test_an_adapter_learns_over_a_quantised_base(code: Any, kind: Any, precision: Any):
    """Recomputation changes nothing; adapters are fp32 unless they are to have the base's dtype."""
    options = {"quantize": kind, "precision": precision, "optimizer": Optimizer(lr=1e-2), "adapter": LORA}
    _, losses = learned(tiny_recipe(code, **options))
    assert losses[-1] < losses[0] - 0.05
    assert learned(tiny_recipe(code, recompute="full", **options))[1] == losses
    base = options | {"adapter": LORA.model_copy(update={"dtype": "base", "dropout": 0.1})}
    step, _ = learned(tiny_recipe(code, **base), 1)
    expected = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {p.dtype for p in step.model.parameters() if p.requires_grad} == {expected}


def test_compiled_equals_eager_and_keeps_no_weights(fresh_compiler: None):
    """Equal blocks, two graphs (the first's input needs no gradient); nothing kept has a weight's size."""
    # 3 x 16 tokens: no activation has a weight's shape.
    recipe = tiny_recipe("native", 4, adapter=LORA, quantize="nf4", batch=Batch(micro=3, seq=16))
    expected = trajectory(recipe, 2)[1]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = trajectory(recipe.model_copy(update={"compile": "block"}), 2, compiler=aot_eager)[1]
    assert found == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    weights = {(64, 32), (32, 32), (128, 32), (32, 64)}
    assert not [t for t in kept if tuple(t.shape) in weights and t.dtype == torch.float32]


# -- predicted


def test_predicted_bytes_of_an_8b_base():
    """nf4: 4.127 bits a weight (QLoRA, section 3); int8: 8 and 32 a row. What is not quantised: 16 bits."""
    layers = 4
    quantized = layers * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336))
    num_rows = layers * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    whole = 2 * 128_256 * 4096 + (2 * layers + 1) * 4096
    config, adapter = with_layers("llama-3.1-8b", layers), Adapter(kind="lora", dtype="base")
    for kind, num_bytes in (("nf4", quantized * 4.127 / 8), ("int8", quantized + 4 * num_rows)):
        ledger = trace(recipe_of(config, "native", adapter=adapter, quantize=kind, precision="bf16"))
        assert ledger.params == quantized + whole + ledger.trainable_params
        expected = num_bytes + 2 * (whole + ledger.trainable_params)
        assert sums(ledger)["phases"]["after_init"] == pytest.approx(expected, rel=2e-3)
        assert not ledger.ops_without_flops


def test_predicted_bytes_of_a_transformers_base():
    """Query, key, value, gate and up are separate matrices here; the embedding and the head keep 16 bits."""
    config = with_layers("llama-3.1-8b", 2) | {
        "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 1024,
    }  # fmt: skip
    quantized = 2 * 1024 * (1024 + 2 * 256 + 1024 + 3 * 2048)
    num_rows = 2 * (1024 + 2 * 256 + 1024 + 2 * 2048 + 1024)
    whole = 2 * 1024 * 1024 + 5 * 1024
    for kind, num_bytes in (("nf4", quantized * 4.127 / 8), ("int8", quantized + 4 * num_rows)):
        options = {"quantize": kind, "precision": "bf16", "batch": Batch(seq=16)}
        ledger = trace(recipe_of(config, adapter=Adapter(kind="lora", dtype="base"), **options))
        assert ledger.params == quantized + whole + ledger.trainable_params
        expected = num_bytes + 2 * (whole + ledger.trainable_params)
        assert sums(ledger)["phases"]["after_init"] == pytest.approx(expected, rel=3e-3)


def test_a_step_with_few_layers_tells_the_whole_models():
    """The middle layers stand for the others, codes included; init leaves no more than a block behind."""
    config = with_layers("llama-3.2-1b", 5)
    recipe = recipe_of(config, "native", adapter=LORA, quantize="nf4", precision="bf16", recompute="full")
    short, whole = sums(trace(recipe)), sums(trace(recipe, whole=True))
    assert short["params"] == whole["params"]
    assert short["peak_allocated_bytes"] == whole["peak_allocated_bytes"]
    assert short["num_bytes"] == whole["num_bytes"]
    assert whole["peak_reserved_bytes"] - whole["peak_allocated_bytes"] < 200 * 2**20
