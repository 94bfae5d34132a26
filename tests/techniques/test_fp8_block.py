"""Blocks in fp8: against products in fp64 of operands rounded alone, torchao's layers, and bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_recipe import TINY_LLAMA
from trainfit.measurement.run import measure
from trainfit.models import fp8_functions
from trainfit.models.block_kernels import SplitAttention
from trainfit.models.fp8_block import Fp8AttentionLinear, Fp8Block, Fp8FeedForward
from trainfit.models.fp8_weights import Fp8Linear, Kept
from trainfit.prediction.predict import ledger_of, predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Recipe
from trainfit.step import Step, assemble
from trial_start import forked
from virtual_runs import recipe_of

CPU = torch.device("cpu")
LLAMA = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 4112, "num_hidden_layers": 2}
WIDE = {
    "model_type": "trainfit", "hidden_size": 64, "intermediate_size": 4112, "num_hidden_layers": 2,
    "num_attention_heads": 40, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128,
    "attention_bias": True, "attention_output_bias": True,
}  # fmt: skip
"""All products of a block are in fp8: qkv has 6,144 outputs, attention's output layer 5,120 inputs."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def recipe(config: dict[str, Any] = LLAMA, **fields: Any) -> Recipe:
    wanted = {"precision": "fp8", "block_kernels": "fp8", "batch": Batch(micro=2, seq=16), **fields}
    return recipe_of(config, "native", **wanted)


def step_of(wanted: Recipe) -> Step:
    return assemble(wanted, CPU, compiler=lambda module: module.compile(backend="aot_eager"))


def part_of(step: Step) -> Fp8FeedForward:
    return next(module for module in step.model.modules() if isinstance(module, Fp8FeedForward))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest values of an fp8 format whose largest stands for the tensor's largest, in fp64."""
    scale = x.abs().max().double() / torch.finfo(dtype).max
    return (x.double() / scale).float().to(dtype).double() * scale


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def test_outputs_and_gradients_are_those_of_operands_rounded_alone() -> None:
    part = part_of(assemble(recipe(), CPU))
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    d = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    w_up, w_down = (layer.weight.detach().double() for layer in (part.up, part.down))
    y = part(x)
    y.backward(d)
    x_ne, d_ne = x.detach().flatten(0, 1), d.flatten(0, 1)
    x8, d8, up8, down8 = rounded(x_ne, E4M3), rounded(d_ne, E5M2), rounded(w_up, E4M3), rounded(w_down, E4M3)
    gate, up = (x8 @ up8.T).to(torch.bfloat16).double().chunk(2, 1)
    hidden = rounded(gate * gate.sigmoid() * up, E4M3)
    d_hidden, s = (d8 @ down8).to(torch.bfloat16).double(), gate.sigmoid()
    both = torch.cat((d_hidden * up * s * (1 + gate * (1 - s)), d_hidden * gate * s), 1)
    both = rounded(both, E5M2)
    assert x.grad is not None
    assert part.up.weight.grad is not None
    assert part.down.weight.grad is not None
    pairs = (
        (y, hidden @ down8.T), (x.grad, both @ up8), (part.up.weight.grad, both.T @ x8),
        (part.down.weight.grad, d8.T @ hidden),
    )  # fmt: skip
    for found, expected in pairs:
        assert off(found.flatten(0, -2), expected) < 0.01


def filled(model: Any) -> Any:
    """Give the first block weights and biases of about the size of trained ones, and return it."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.layers[0].named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.ndim == 1 else 0.1)
    return model.layers[0]


def run(block: Any, model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output of a block and its gradients."""
    torch.manual_seed(1)
    x, d = torch.randn(2, 2, 16, 64, dtype=torch.bfloat16).to(dtype)
    x.requires_grad_()
    y = block(x, model.position_tensors(16, x))
    y.backward(d)
    gradients = {name: one.grad for name, one in block.named_parameters()} | {"x": x.grad}
    assert all(one is not None for one in gradients.values())
    return {"y": y.detach(), **gradients}  # pyright: ignore


@pytest.mark.parametrize("changes", [{}, {"attention_bias": False}, {"qk_norm": True}], ids=str)
def test_a_whole_block_is_as_near_to_fp64_as_torchaos(changes: dict[str, Any]) -> None:
    found = dict[str, dict[str, Tensor]]()
    for kernels, precision in (("fp8", "fp8"), ("standard", "fp8"), ("standard", "bf16")):
        model: Any = assemble(recipe(WIDE | changes, block_kernels=kernels, precision=precision), CPU).model
        block = filled(model)
        is_exact = precision == "bf16"
        if kernels == "fp8":
            assert isinstance(block, Fp8Block)
            assert isinstance(block.attention, SplitAttention) is not changes.get("qk_norm", False)
            assert isinstance(block.attention.qkv, Fp8AttentionLinear)
            assert isinstance(block.attention.out, Fp8AttentionLinear)
        wide = model.double() if is_exact else model
        found[kernels + precision] = run(block, wide, torch.float64 if is_exact else torch.bfloat16)
    for name, exact in found["standardbf16"].items():
        ours, torchaos = (off(found[f"{kind}fp8"][name], exact) for kind in ("fp8", "standard"))
        # Few numbers differ by chance.
        assert ours < (1.1 if exact.ndim > 1 else 1.5) * torchaos < 0.4, name


def test_codes_of_attentions_layers_are_those_of_a_layer_apart() -> None:
    """Of the same operands, so that no bit of products differs, and the norm's gradient by its rounding."""
    block = filled(assemble(recipe(WIDE | {"attention_bias": False}), CPU).model)
    torch.manual_seed(1)
    x, past = torch.randn(2, 2, 16, 64, dtype=torch.bfloat16)
    d = torch.randn(2, 16, 6144, dtype=torch.bfloat16)
    x.requires_grad_()
    weight, norm = block.attention.qkv.weight, block.attention_norm
    layer = fp8_functions.Layer(weight, None, None, Kept())
    apart = Fp8Linear(64, 6144, bias=False, dtype=torch.bfloat16)
    apart.weight, apart.emulated = weight, True
    leaves = weight, norm.weight, x
    y, same = fp8_functions.norm_product(x, norm.weight, norm.eps, layer, emulated=True)
    found = torch.autograd.grad((y, same), leaves, (d, past))
    expected = apart(norm(x))
    wanted = torch.autograd.grad((expected, x * 1), leaves, (d, past))
    assert torch.equal(y, expected)
    assert torch.equal(found[0], wanted[0])
    assert all(off(one, other.double()) < 2**-7 for one, other in zip(found, wanted, strict=True))
    both = fp8_functions.linear(x, layer, emulated=True), apart(x)
    assert torch.equal(*both)
    alone, others = (torch.autograd.grad(one, (weight, x), d) for one in both)
    assert all(map(torch.equal, alone, others))


def test_the_branch_is_the_part_between_a_sum_and_a_norm() -> None:
    block = filled(assemble(recipe(WIDE), CPU).model)
    torch.manual_seed(1)
    x, added, d = torch.randn(3, 2, 16, 64, dtype=torch.bfloat16)

    def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        y.backward(d)
        found = [one.grad for one in (*inputs, *block.mlp.parameters(), *block.mlp_norm.parameters())]
        for one in block.parameters():
            one.grad = None
        return found  # pyright: ignore

    both = [[one.clone().requires_grad_() for one in (x, added)] for _ in range(2)]
    y = block.mlp(*both[0], block.mlp_norm)
    found = gradients(y, both[0])
    h = both[1][0] + both[1][1]
    apart = h + block.mlp(block.mlp_norm(h))
    expected = gradients(apart, both[1])
    assert torch.equal(y, apart)
    assert torch.equal(found[0], found[1])
    for one, other in zip(found, expected, strict=True):
        assert off(one, other.double()) < 2**-7
    assert torch.equal(found[2], expected[2])
    assert torch.equal(found[3], expected[3])


def losses(step: Step, steps: int = 4) -> list[float]:
    return [step(step.random_batches(0)).item() for _ in range(steps)]


def test_it_trains_as_products_in_fp8_do() -> None:
    fused, plain = (losses(assemble(recipe(block_kernels=one), CPU)) for one in ("fp8", "standard"))
    assert fused != plain
    assert fused == pytest.approx(plain, rel=2e-3)
    assert fused[-1] < fused[0]


ONLY_PRE_NORM_RMS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    # Changes of WIDE; whether norms are fused; whether queries, keys and values are split by the kernel.
    "qk norms": ({"qk_norm": True}, True, False),
    "unfused norms": ({"norm": "rmsnorm_unfused"}, True, True),
    "heads rotated in part": ({"rope": {"partial_rotary_factor": 0.5}}, True, False),
    "learned positions": ({"position_embedding": "learned"}, True, False),
    "ALiBi": ({"position_embedding": "alibi"}, True, False),
    "sliding window": ({"sliding_window": 4}, True, True),
    "layer norms": ({"norm": "layernorm"}, False, True),
    "norms after sums": ({"norm_placement": "post"}, False, True),
    "attention in bf16": ({"num_attention_heads": 4, "head_dim": 64}, True, True),
}


@pytest.mark.parametrize("form", ONLY_PRE_NORM_RMS)
def test_models_of_other_forms_keep_their_own_parts(form: str) -> None:
    changes, fuses, splits = ONLY_PRE_NORM_RMS[form]
    step = assemble(recipe(WIDE | changes), CPU)
    model: Any = step.model
    block = model.layers[0]
    assert isinstance(block, Fp8Block) is fuses
    assert isinstance(block.attention, SplitAttention) is splits
    assert isinstance(block.attention.qkv, Fp8AttentionLinear) is (form != "attention in bf16")
    plain = losses(assemble(recipe(WIDE | changes, block_kernels="standard"), CPU))
    assert losses(step) == pytest.approx(plain, rel=5e-3)


SAME: dict[str, dict[str, Any]] = {
    "compiled": {"compile": "block"},
    "recomputed": {"recompute": "full"},
    "compiled and recomputed": {"compile": "block", "recompute": "full"},
    "every second": {"recompute": {"every": 2}},
    "compiled every second": {"compile": "block", "recompute": {"every": 2}},
    "selective": {"recompute": "selective"},
    "compiled selective": {"compile": "block", "recompute": "selective"},
    "by operation": {"recompute": {"layers": [{"recompute": "elementwise", "count": 2}]}},
    "offloaded in part": {"recompute": {"layers": [{"recompute": "none", "offload": 0.5, "count": 2}]}},
    "inputs on the host": {"offload": {"activations": True}, "recompute": "full"},
    "moments on the host": {"offload": {"optimizer": True}},
    "scales kept": {"fp8_weights": "scales"},
    "codes kept": {"fp8_weights": "codes"},
    "both layouts kept": {"fp8_weights": "both-layouts", "compile": "block"},
    "again": {},
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", SAME)
def test_no_bit_of_three_updates_differs(case: str) -> None:
    found, plain = step_of(recipe(WIDE, **SAME[case])), step_of(recipe(WIDE))
    assert losses(found, 3) == losses(plain, 3)
    for one, other in zip(found.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "config", [LLAMA, WIDE, WIDE | {"norm": "layernorm"}], ids=["llama", "wide", "layer norms"]
)
def test_predicted_and_measured_bytes_are_equal(config: dict[str, Any], recompute: str) -> None:
    on_cpu = recipe(config, recompute=recompute, hardware=Hardware(gpu="cpu"))
    predicted, measured = predict(on_cpu), measure(on_cpu, steps=0, device="cpu", start=forked)
    assert measured.status == "done", measured.message
    assert predicted.phases == measured.phases


@pytest.mark.parametrize("compiled", [False, "block"])
def test_on_a_virtual_gpu_both_layouts_are_written_once(compiled: bool | str) -> None:
    batch, hidden = Batch(micro=2, seq=64), 4112
    ledger = ledger_of(recipe(batch=batch, compile=compiled, hardware=Hardware(gpu="h100-sxm")))
    numel = 128 * hidden
    moved = {
        "trainfit.swiglu_amax.default": 4 * numel + 4, "trainfit.swiglu_fp8.default": 5 * numel + 8,
        "trainfit.swiglu_backward_amax.default": 6 * numel + 4,
        "trainfit.swiglu_backward_fp8.default": 11 * numel + 12,
    }  # fmt: skip
    found = [(op, ledger.times(op)) for op in ledger.steady_ops if op.name in moved]
    assert sum(times for _, times in found) == 4 * LLAMA["num_hidden_layers"]
    assert {op.name: op.num_bytes for op, _ in found} == moved
    products = [op for op in ledger.steady_ops if "_scaled_mm" in op.name and "triton_" not in op.name]
    assert sum(map(ledger.times, products)) == 6 * LLAMA["num_hidden_layers"]
    if compiled:
        names = [op.name for op in ledger.steady_ops if op.name.startswith("triton_")]
        assert not any("silu" in name for name in names)


@pytest.mark.parametrize("attention", ["sdpa", "cudnn", "triton"])
@pytest.mark.parametrize("compiled", [False, "block"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}], ids=str)
def test_on_a_virtual_gpu_products_are_fed_by_kernels_of_ours(
    changes: dict[str, Any], compiled: bool | str, attention: str
) -> None:
    """Each tensor of a block is cast once a direction, and a compiler is left sums and magnitudes."""
    fields = {"compile": compiled, "attention": attention, "hardware": Hardware(gpu="h100-sxm")}
    wanted = recipe(WIDE | changes, batch=Batch(micro=2, seq=64), fp8_weights="both-layouts", **fields)
    ledger = ledger_of(wanted)
    counts = dict[str, int]()
    for op in ledger.steady_ops:
        name = op.name.removeprefix("trainfit.").partition(".")[0]
        if op.name.startswith("trainfit.") and ledger.segments[op.segment].phase != "optimizer":
            counts[name] = counts.get(name, 0) + ledger.times(op)
    two, layers = ("rms_norm_fp8_rows", "rms_norm_fp8_transposed", "rms_norm_backward_add"), 2
    ones = ("rms_norm_amax", "add_rms_norm_amax", "fp8_cast_rows", "fp8_cast_transposed")
    assert {name: counts[name] for name in two} == dict.fromkeys(two, 2 * layers)
    assert {name: counts[name] for name in ones} == dict.fromkeys(ones, layers)
    assert counts["fp8_cast_both"] == 3 * layers  # Gradients of the part's output, of attention's and of qkv
    assert counts.get("split_rotated", 0) == (0 if changes else layers)
    moved = {op.name.partition(".")[2].partition(".")[0]: op.num_bytes for op in ledger.steady_ops}
    numel, scalars = 128 * 64, 2 * 4
    assert (
        moved["rms_norm_fp8_rows"]
        == moved["rms_norm_fp8_transposed"]
        == (3 * numel + 2 * 64 + 4 * 128 + scalars)
    )
    assert moved["fp8_cast_transposed"] == moved["fp8_cast_rows"] == 3 * 128 * 5120 + scalars
    if compiled:
        names = [op.name for op in ledger.steady_ops if op.name.startswith("triton_")]
        assert names
        words = ("scaled_mm", "clamp", "silu", *(() if changes else ("rsqrt", "cat")))  # Else of heads
        assert not any(word in name for name in names for word in words)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bf16": ({"precision": "bf16"}, "the kernels write fp8"),
    "gelu": ({"config": LLAMA | {"hidden_act": "gelu"}}, "silu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    fields, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        assemble(recipe(**fields), CPU)


def test_transformers_models_are_refused() -> None:
    with pytest.raises(InputError, match="native decoder"):
        assemble(recipe_of(LLAMA, "hf", precision="fp8", block_kernels="fp8"), CPU)
