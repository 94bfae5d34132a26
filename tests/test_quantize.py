"""Quantised frozen bases: the formats against published numbers, the kernels against their references, the layer
against F.linear with the weight that its codes stand for, the model's bytes against the closed form.
"""

import os
import statistics
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from test_techniques import BASE, FAMILIES, aot_eager, trajectory
from tiny_recipe import TINY_LLAMA, tiny_recipe
from tiny_step import learned
from trainfit.kernels import nf4, rows
from trainfit.kernels.moment_levels import levels
from trainfit.models.build import build_model
from trainfit.models.layers import layer_lists, num_quantized
from trainfit.models.quantized import QuantizedLinear
from trainfit.predict.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, ModelSpec, Optimizer
from virtual_runs import recipe_of, sums, with_layers

KINDS = ("nf4", "int8", "fp8")
LORA = Adapter(kind="lora", rank=4)
INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels run for real, in the tests below"
)


def layer(kind: str, num_in: int, num_out: int, bias: bool = False, dtype: torch.dtype = torch.float32):
    """A quantised layer with weights of N(0, 1), and its bias."""
    torch.manual_seed(num_in)
    made = QuantizedLinear(num_in, num_out, bias, kind, dtype, "cpu")
    made.load(torch.randn(num_out, num_in, dtype=dtype), torch.randn(num_out, dtype=dtype) if bias else None)
    return made


# -- the formats


def test_normal_floats_are_the_papers():
    """Section 3: quantiles of N(0, 1), half from either side, so that 0 is one of them; appendix E has the values.

    The outermost probability is the authors' code's: the middle of 1 - 1/30 and 1 - 1/32.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    quantile = statistics.NormalDist().inv_cdf
    positive = [quantile(outermost + (0.5 - outermost) * i / 8) for i in range(8)]
    negative = [-quantile(outermost + (0.5 - outermost) * i / 7) for i in range(7)]
    expected = sorted([*negative, 0.0, *positive])
    assert pytest.approx([value / expected[-1] for value in expected], abs=1e-6) == nf4.LEVELS


def test_bytes_are_floats_with_more_digits_near_one():
    """256 values; bitsandbytes' map has the same count, ends and finest step, 0.9 / 64 of the uppermost decade."""
    values = levels(8, signed=True)
    assert len(set(values)) == 256
    assert values == sorted(values)
    assert values[0] == pytest.approx(-0.99296875)
    assert values[-2:] == pytest.approx([0.99296875, 1.0])
    assert values[127] == 0.0
    assert values[128] == pytest.approx(0.55e-6)
    assert values[254] - values[253] == pytest.approx(0.9 / 64)


def test_errors_on_normal_weights_are_the_known_ones():
    """nf4: 0.0728 and 20.3 % in bitsandbytes' tests (test_4bit_quant, block 64). int8: a step over the root of 12."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024)
    error = (nf4.reference_dequantize(weight, *nf4.quantize_nf4(weight), 1024, 1024) - weight).abs()
    assert error.mean().item() == pytest.approx(0.0728, rel=5e-3)
    assert (error / (weight.abs() + 1e-8)).mean().item() == pytest.approx(0.203, rel=1e-2)
    step = weight.abs().amax(1, keepdim=True) / 127
    error = rows.reference_dequantize(weight, *rows.quantize_rows(weight, torch.int8)) - weight
    assert (error / step).pow(2).mean().sqrt().item() == pytest.approx(12**-0.5, rel=1e-3)
    # e4m3 keeps three bits after the first: half a step is 1/16 of the lower end of a binade.
    error = rows.reference_dequantize(weight, *rows.quantize_rows(weight, torch.float8_e4m3fn)) - weight
    assert (error.abs() / weight.abs()).quantile(0.9).item() < 1 / 16


@pytest.mark.parametrize("kind", KINDS)
def test_what_codes_can_say_comes_back_bit_for_bit(kind: str):
    torch.manual_seed(1)
    if kind == "nf4":
        picks = torch.randint(0, 16, (6, 128))
        picks[:, ::64] = 15
        weight = torch.tensor(nf4.LEVELS)[picks] * 0.25
    elif kind == "int8":
        weight = torch.randint(-127, 128, (6, 128)).float() * 2.0**-9
        weight[:, 7] = -127 * 2.0**-9
    else:
        weight = torch.randn(6, 128).to(torch.float8_e4m3fn).float() * 2.0**-9
        weight[:, 7] = 448 * 2.0**-9
    made = QuantizedLinear(128, 6, False, kind, torch.float32, "cpu")
    made.load(weight, None)
    assert torch.equal(made.dequantize(torch.float32), weight)
    again = QuantizedLinear(128, 6, False, kind, torch.float32, "cpu")
    again.load(made.dequantize(torch.float32), None)
    assert all(torch.equal(a, b) for a, b in zip(made.buffers(), again.buffers(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str):
    made = QuantizedLinear(64, 3, False, kind, torch.float32, "cpu")
    made.load(torch.zeros(3, 64), None)
    assert torch.equal(made.dequantize(torch.bfloat16), torch.zeros(3, 64, dtype=torch.bfloat16))


# -- the kernels

SHAPES = [(64, 128), (7, 33), (130, 257), (1, 1)]


def kernels_agree(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Bit for bit: codes, magnitudes and weights."""
    torch.manual_seed(shape[1])
    weight = torch.randn(shape).to(dtype).to(device)
    weight[0, : shape[1] // 2] = 0
    found = nf4.quantize_nf4(weight.cpu())
    on_device = nf4.Nf4(*(part.to(device) for part in found))
    codes, magnitudes = nf4.triton_quantize_blocks(weight, on_device.levels)
    expected_codes, expected = nf4.reference_quantize_blocks(weight.cpu(), found.levels)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(magnitudes.cpu(), expected)
    like = torch.empty(0, dtype=dtype)
    made = nf4.triton_dequantize(like, *on_device, *shape).cpu()
    assert torch.equal(made, nf4.reference_dequantize(like, *found, *shape))
    for code in rows.LARGEST:
        codes, scales = rows.quantize_rows(weight, code)
        made = rows.triton_dequantize(like, codes, scales).cpu()
        assert torch.equal(made, rows.reference_dequantize(like, codes.cpu(), scales.cpu()))


@INTERPRETED
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_in_the_interpreter(shape: tuple[int, int], dtype: torch.dtype):
    kernels_agree(shape, dtype, "cpu")


@INTERPRETED
def test_every_fp8_code_in_the_interpreter():
    """Subnormal ones too; two of 256 are not numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    made = rows.triton_dequantize(torch.empty(0), codes, torch.ones(1))
    assert (made == codes.float()).sum() == 254


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 11008)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype):
    kernels_agree(shape, dtype, "cuda")


FOR_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trainfit.kernels import quantize_triton as kernels

def widest(kernel, types, **constants):
    types = types | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind != "constexpr"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    text = made.asm["ptx"]
    assert "fma.rn.f32" not in text
    assert ".local" not in text
    return text.count("ld.global.v4.b32"), text.count("st.global.v4.b32")

table = {"CODES": "*u8", "BLOCK_CODES": "*u8", "GROUP_SCALES": "*fp32", "OFFSET": "*fp32", "LEVELS": "*fp32"}
sizes = {"num_weights": "i32", "num_blocks": "i32"}
print(widest(kernels.dequantize_nf4_kernel, {**table, "WEIGHT": "*bf16", **sizes}, BLOCKS=64))
for fp8, codes in ((True, "*u8"), (False, "*i8")):
    rows = {"CODES": codes, "SCALES": "*fp32", "WEIGHT": "*bf16", "columns": "i32"}
    print(widest(kernels.dequantize_rows_kernel, rows, FP8=fp8, BLOCK=2048))
whole = {"WEIGHT": "*bf16", "LEVELS": "*fp32", "CODES": "*u8", "MAGNITUDES": "*fp32", **sizes}
widest(kernels.quantize_nf4_kernel, whole, BLOCKS=32)
"""


def test_kernels_compile_for_an_h200():
    """No GPU is needed for that. Codes come 16 bytes a load, weights leave 16 a store; nothing is fused or spilt."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", FOR_HOPPER], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["(1, 4)", "(1, 2)", "(1, 2)"]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_operations_keep_torchs_rules(kind: str):
    """Fake results have the real ones' shapes, dtypes and strides, inputs stay as they are (fp8's is int8's operation)."""
    made, like = layer(kind, 33, 7), torch.empty(2, dtype=torch.bfloat16)
    if kind == "nf4":
        weight = torch.randn(7, 33)
        torch.library.opcheck(torch.ops.trainfit.quantize_blocks, (weight, made.levels))
        torch.library.opcheck(torch.ops.trainfit.dequantize_nf4, (like, *made.buffers(), 7, 33))
    else:
        torch.library.opcheck(torch.ops.trainfit.dequantize_rows, (like, *made.buffers()))


# -- the layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_equals_linear_with_the_weight_of_its_codes(kind: str, bias: bool, dtype: torch.dtype):
    made = layer(kind, 96, 40, bias, dtype)
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
    made, kept = layer(kind, 128, 256), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        made(torch.randn(2, 128, requires_grad=True))
    assert {t.data_ptr() for t in kept} == {part.data_ptr() for part in made.buffers()}


def test_autocast_decides_the_dtype():
    made = layer("nf4", 64, 64, True)
    x = torch.randn(2, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert made(x).dtype == torch.float32


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
    assert all(
        torch.equal(a, b)
        for a, b in zip(made.state_dict().values(), again.state_dict().values(), strict=True)
    )


DENSE = {name: config for name, config in FAMILIES.items() if name != "mixtral"}


@pytest.mark.parametrize("family", DENSE)
def test_other_families_are_quantised_and_adapted(family: str):
    """All but embeddings, head, norms and biases; GPT-2's transposed layers too."""
    spec = ModelSpec(config=DENSE[family])
    torch.manual_seed(0)
    whole = build_model(spec, dtype=torch.float32, device="cpu")
    matrices = [
        parameter.numel()
        for _, blocks in layer_lists(whole)
        for parameter in blocks.parameters()
        if parameter.dim() == 2
    ]
    recipe = tiny_recipe(
        quantize="int8", adapter=LORA, batch=Batch(micro=2, seq=8), optimizer=Optimizer(lr=1e-2)
    )
    step, losses = learned(recipe.model_copy(update={"model": spec, "recompute": "full"}))
    assert num_quantized(step.model) == sum(matrices)
    assert not any(t.is_meta for t in (*step.model.parameters(), *step.model.buffers()))
    assert all("lora_" in name for name, p in step.model.named_parameters() if p.requires_grad)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (FAMILIES["mixtral"], "mlp"),
        ({**BASE, "model_type": "mamba", "state_size": 4}, "mixer"),
    ],
    ids=["mixtral", "mamba"],
)
def test_experts_and_state_spaces_are_refused(config: dict[str, Any], named: str):
    with pytest.raises(InputError, match=rf"quantize = 'nf4'.*{named}.*dense transformer"):
        build_model(ModelSpec(config=config), dtype=torch.float32, device="cpu", quantize="nf4")


@pytest.mark.parametrize("code", ["hf", "native"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_an_adapter_learns_over_a_quantised_base(code: Any, kind: Any, precision: Any):
    """Recomputation changes nothing; adapters are fp32 unless they are to have the base's dtype."""
    asked = {"quantize": kind, "precision": precision, "optimizer": Optimizer(lr=1e-2), "adapter": LORA}
    _, losses = learned(tiny_recipe(code, **asked))
    assert losses[-1] < losses[0] - 0.05
    assert learned(tiny_recipe(code, recompute="full", **asked))[1] == losses
    base = asked | {"adapter": LORA.model_copy(update={"dtype": "base", "dropout": 0.1})}
    step, _ = learned(tiny_recipe(code, **base), 1)
    expected = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {p.dtype for p in step.model.parameters() if p.requires_grad} == {expected}


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_compiled_equals_eager_and_keeps_no_weights(fresh_compiler: None, kind: Any):
    """Ten equal blocks, two graphs (the first block's input needs no gradient); no kept tensor has a weight's size."""
    # 3 x 16 tokens: no activation has a weight's shape.
    recipe = tiny_recipe("native", 10, adapter=LORA, quantize=kind, batch=Batch(micro=3, seq=16))
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


@pytest.mark.parametrize("code", ["hf", "native"])
def test_predicted_bytes_of_an_8b_base(code: Any):
    """nf4: 4.127 bits a weight (QLoRA, section 3); int8: 8 and 32 a row. What is not quantised: 16 bits."""
    name, rank = "llama-3.1-8b", 16
    quantized = 32 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336))
    num_rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    whole = 2 * 128_256 * 4096 + 65 * 4096
    for kind, num_bytes in (("nf4", quantized * 4.127 / 8), ("int8", quantized + 4 * num_rows)):
        adapter = Adapter(kind="lora", rank=rank, dtype="base")
        recipe = recipe_of(name, code, adapter=adapter, quantize=kind, precision="bf16")
        ledger = trace(recipe)
        assert ledger.params == quantized + whole + ledger.trainable_params
        after_init = sums(ledger)["phases"]["after_init"]
        expected = num_bytes + 2 * (whole + ledger.trainable_params)
        assert after_init == pytest.approx(expected, rel=2e-3)
        assert not ledger.ops_without_flops


def test_a_step_with_few_layers_tells_the_whole_models():
    """The middle layers stand for the others, codes included; and what init leaves behind is no more than a block."""
    config = with_layers("llama-3.2-1b", 7)
    recipe = recipe_of(config, "native", adapter=LORA, quantize="nf4", precision="bf16", recompute="full")
    told, whole = sums(trace(recipe)), sums(trace(recipe, whole=True))
    assert told["params"] == whole["params"]
    assert told["peak_allocated_bytes"] == whole["peak_allocated_bytes"]
    assert told["num_bytes"] == whole["num_bytes"]
    assert whole["peak_reserved_bytes"] - whole["peak_allocated_bytes"] < 200 * 2**20


def test_quantising_spares_what_the_formats_say():
    """A 70B model's nf4 base fits one 80 GB card, with its adapters and a micro-batch of 2048 tokens."""
    recipe = recipe_of(
        "llama-3.1-70b", "native", adapter=Adapter(kind="lora"), quantize="nf4", precision="bf16",
        recompute="full", batch=Batch(micro=1, seq=2048),
    )  # fmt: skip
    assert sums(trace(recipe))["peak_reserved_bytes"] < 60 * 2**30
