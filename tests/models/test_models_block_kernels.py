"""Models with our block kernels: same numbers as without, less memory; other forms are refused."""

from typing import Any

import pytest
import torch

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.models.block_kernels import KernelFeedForward
from trainfit.models.layers import decoder_blocks
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.spec.data import Data
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, ModelSpec, Optimizer, Recipe
from trainfit.step import assemble
from virtual_runs import recipe_of, steady, steady_sum

CPU = torch.device("cpu")
QWEN = {"head_dim": 16, "use_sliding_window": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mistral": {"sliding_window": 5},
    "qwen2": QWEN,
    "qwen3": QWEN,
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5},
}  # fmt: skip
OURS = {"own_rms_norm", "swiglu", "rotate_pairs"}


def of_family(family: str, **fields: Any) -> Recipe:
    config = {**TINY_LLAMA, "model_type": family, **FAMILIES.get(family, {})}
    return tiny_recipe(**fields).model_copy(update={"model": ModelSpec(config=config)})


def trained(recipe: Recipe, compiler: Any = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps and the weights after them, on one batch."""
    step = assemble(recipe, CPU, compiler=compiler)
    batches = step.random_batches()
    return [step(batches).item() for _ in range(3)], dict(step.model.state_dict())


def same(recipe: Recipe, rel: float = 1e-5, compiler: Any = None, kernels: str = "triton") -> None:
    runs = [
        trained(recipe.model_copy(update={"block_kernels": one}), compiler) for one in ("standard", kernels)
    ]
    (expected, before), (found, after) = runs
    assert found == pytest.approx(expected, rel=rel)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert (after[name] - weight).float().norm() <= 100 * rel * weight.float().norm(), name


SGD = Optimizer(name="sgd", lr=0.1)
"""Its update is in proportion to the gradient; AdamW's would enlarge gradients that are rounding alone."""


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_llamas_form_compute_the_same(family: str):
    same(of_family(family, optimizer=SGD))


@pytest.mark.parametrize(
    ("code", "fields"),
    [("hf", {"precision": "bf16"}), ("native", {"precision": "amp-bf16"}), ("hf", {"attention": "eager"}),
     ("native", {"recompute": "full"}), ("hf", {"recompute": "selective"}),
     ("hf", {"adapter": Adapter(kind="lora", rank=4)}), ("hf", {"adapter": Adapter(kind="prefix")}),
     ("native", {"adapter": Adapter(kind="prefix")})],
    ids=str,
)  # fmt: skip
def test_with_other_techniques(code: Any, fields: dict[str, Any]):
    same(tiny_recipe(code, **{"optimizer": SGD, **fields}), 1e-3 if "bf16" in str(fields) else 1e-5)


@pytest.mark.parametrize("kernels", ["triton", "swiglu"])
@pytest.mark.parametrize(("code", "unit"), [("hf", "model"), ("native", "block")])
def test_they_compile(code: Any, unit: Any, kernels: str):
    """The blocks without a break."""
    torch._dynamo.reset()
    whole = unit == "block"
    same(
        tiny_recipe(code, 1 if unit == "model" else 2, compile=unit, optimizer=SGD),
        compiler=lambda module: module.compile(backend="aot_eager", fullgraph=whole),
        kernels=kernels,
    )


@pytest.mark.parametrize("code", ["hf", "native"])
def test_swiglu_alone_leaves_norms_and_rotations(code: Any):
    same(tiny_recipe(code, optimizer=SGD), kernels="swiglu")
    fields = {"compile": "block", "batch": Batch(micro=1, seq=32), "hardware": Hardware(gpu="h100-sxm")}
    ledger = trace(recipe_of({**TINY_LLAMA, "num_hidden_layers": 5}, code, block_kernels="swiglu", **fields))
    names = {name for op in steady(ledger) for name in op.name.split(".")[1:2]}
    assert names & {*OURS, "rotate_pairs_backward"} == {"swiglu"}
    assert "swiglu_backward" in names
    compiled = {op.name for op in steady(ledger) if op.name.startswith("triton_")}
    assert not any("silu" in name for name in compiled)
    assert any("rsqrt" in name or "rms_norm" in name for name in compiled)


def test_qk_norms_and_unfused_spellings_of_native():
    config = {
        "model_type": "trainfit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": True, "norm": "rmsnorm_unfused",
        "hidden_act": "silu_unfused", "partial_rotary_factor": 0.5,
    }  # fmt: skip
    plain = tiny_recipe("native", optimizer=SGD)
    same(plain.model_copy(update={"model": ModelSpec(config=config, implementation="native")}))


@pytest.mark.parametrize(("code", "compiled"), [("hf", "block"), ("native", False)])
def test_every_norm_gate_and_rotation_runs_ours(code: Any, compiled: Any):
    """2 norms a block and the last one; no standard kernel is left, in compiled blocks neither."""
    config = {**TINY_LLAMA, "num_hidden_layers": 5}
    options = {"block_kernels": "triton", "compile": compiled}
    ledger = trace(recipe_of(config, code, batch=Batch(micro=1, seq=32), **options))
    counts = {
        name: sum(ledger.times(op) for op in steady(ledger) if op.name.startswith(f"trainfit.{name}."))
        for name in (*OURS, *(f"{name}_backward" for name in OURS))
    }
    assert counts == {
        "own_rms_norm": 11, "own_rms_norm_backward": 11, "swiglu": 5, "swiglu_backward": 5,
        "rotate_pairs": 10, "rotate_pairs_backward": 0,  # Its gradient is itself, turned back.
    }  # fmt: skip
    left = {name for op in steady(ledger) for name in op.name.split(".")[1:2]}
    assert not left & {"silu", "silu_backward", "rsqrt", "_fused_rms_norm", "neg"}


@pytest.mark.parametrize("code", ["hf", "native"])
def test_the_same_flops_and_every_operation_known(code: Any):
    standard, ours = (
        trace(recipe_of(TINY_LLAMA, code, block_kernels=kernels)) for kernels in ("standard", "triton")
    )
    assert ours.ops_without_flops == ()
    for quantity in ("causal_flops", "model_flops"):
        assert steady_sum(ours, quantity) == steady_sum(standard, quantity)
    assert steady_sum(ours, "num_bytes") < steady_sum(standard, "num_bytes")


def test_native_saves_one_feed_forward_tensor_per_layer_less():
    """silu(gate), 2 bytes for each element of [tokens, f]; the rest is unchanged."""
    config = {**TINY_LLAMA, "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512}
    peaks = [
        predict(recipe_of(config, "native", batch=Batch(micro=2, seq=512), block_kernels=kernels))
        for kernels in ("standard", "triton")
    ]
    standard, ours = (one.phases.steady.forward for one in peaks)
    assert standard - ours == 4 * 1024 * 512 * 2


GEMMA = {"model_type": "gemma", "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (TINY_LLAMA | GEMMA, "hf", "GemmaRMSNorm is no norm like Llama's"),
        (TINY_LLAMA | {"hidden_act": "gelu"}, "hf", "has no gated SiLU feed-forward part like Llama's"),
        ({**TINY_LLAMA, "model_type": "mixtral", "num_local_experts": 2}, "hf",
        "no gated SiLU feed-forward part"),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}, "hf", "LayerNorm is no norm"),
        (TINY_LLAMA | {"hidden_act": "gelu"}, "native", "support hidden_act silu or silu_unfused"),
        ({**TINY_LLAMA, "model_type": "trainfit", "norm": "layernorm"}, "native", "this model has layernorm"),
        ({**TINY_LLAMA, "model_type": "trainfit", "position_embedding": "learned"}, "native",
        "position_embedding rope"),
        ({**TINY_LLAMA, "model_type": "trainfit", "gated_mlp": False}, "native", "gated_mlp True"),
    ],
    ids=str,
)  # fmt: skip
def test_other_forms_are_refused(config: dict[str, Any], code: Any, words: str):
    recipe = recipe_of(config, code, block_kernels="triton")
    with pytest.raises(InputError, match=words) as caught:
        assemble(recipe, torch.device("meta"))
    assert "block_kernels = 'triton'" in str(caught.value)
    assert "use block_kernels: standard" in str(caught.value)


def test_blocks_modules_keep_their_kind():
    """What asks for a block's parts by class still finds them."""
    step = assemble(tiny_recipe("native", block_kernels="triton"), CPU)
    plain = assemble(tiny_recipe("native"), CPU)
    for ours, theirs in zip(decoder_blocks(step.model), decoder_blocks(plain.model), strict=True):
        for one, other in zip(ours.modules(), theirs.modules(), strict=True):
            assert isinstance(one, type(other))


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (TINY_LLAMA | {"hidden_act": "gelu"}, "hf", "has no gated SiLU feed-forward part like Llama's"),
        (TINY_LLAMA | {"hidden_act": "gelu"}, "native", "support hidden_act silu or silu_unfused"),
        ({**TINY_LLAMA, "model_type": "trainfit", "gated_mlp": False}, "native", "gated_mlp True"),
    ],
    ids=str,
)
def test_feed_forward_parts_of_other_forms_are_refused(config: dict[str, Any], code: Any, words: str):
    with pytest.raises(InputError, match=words) as caught:
        assemble(recipe_of(config, code, block_kernels="swiglu"), torch.device("meta"))
    assert "block_kernels = 'swiglu'" in str(caught.value)


@pytest.mark.parametrize("compiled", [False, "block"])
def test_split_and_rotation_in_one_kernel(compiled: Any):
    torch._dynamo.reset()
    fields = {"optimizer": SGD, "compile": compiled}
    same(
        tiny_recipe("native", **fields), kernels="swiglu-rope",
        compiler=lambda module: module.compile(backend="aot_eager", fullgraph=True),
    )  # fmt: skip
    qwen = ModelSpec(
        config={**TINY_LLAMA, "model_type": "qwen2", **QWEN, "head_dim": 8}, implementation="native"
    )
    same(tiny_recipe("native", optimizer=SGD).model_copy(update={"model": qwen}), kernels="swiglu-rope")
    config = {**TINY_LLAMA, "num_hidden_layers": 5}
    on_gpu = {"compile": compiled, "batch": Batch(micro=1, seq=32), "hardware": Hardware(gpu="h100-sxm")}
    ledger = trace(recipe_of(config, "native", block_kernels="swiglu-rope", **on_gpu))
    names = [op.name for op in steady(ledger) for _ in range(ledger.times(op))]
    ours = ("swiglu", "swiglu_backward", "split_rotated", "split_rotated_backward")
    assert [names.count(f"trainfit.{name}.default") for name in ours] == [5] * 4
    assert not any("_cat_" in name for name in names if name.startswith("triton_poi"))


def test_split_and_rotation_with_a_prefix_and_documents():
    same(tiny_recipe("native", optimizer=SGD, adapter=Adapter(kind="prefix")), kernels="swiglu-rope")
    same(tiny_recipe("native", optimizer=SGD, data=Data(pack="documents")), kernels="swiglu-rope")


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (TINY_LLAMA, "hf", "native decoder's parts"),
        ({**TINY_LLAMA, "model_type": "qwen3", "head_dim": 8}, "native", "norms of their own"),
        ({**TINY_LLAMA, "model_type": "trainfit", "partial_rotary_factor": 0.5, "norm": "rmsnorm",
          "hidden_act": "silu", "gated_mlp": True, "position_embedding": "rope"}, "native", "whole heads"),
        (TINY_LLAMA | {"hidden_act": "gelu"}, "native", "support hidden_act silu or silu_unfused"),
    ],
    ids=str,
)  # fmt: skip
def test_attention_of_other_forms_is_refused(config: dict[str, Any], code: Any, words: str):
    with pytest.raises(InputError, match=words) as caught:
        assemble(recipe_of(config, code, block_kernels="swiglu-rope"), torch.device("meta"))
    assert "block_kernels = 'swiglu-rope'" in str(caught.value)


def test_swiglu_alone_needs_no_norm_like_llamas():
    config = {
        **TINY_LLAMA,
        "model_type": "trainfit",
        "norm": "layernorm",
        "hidden_act": "silu",
        "gated_mlp": True,
    }
    step = assemble(recipe_of(config, "native", block_kernels="swiglu"), torch.device("meta"))
    assert any(isinstance(module, KernelFeedForward) for module in step.model.modules())
