"""bitsandbytes' nf4 in recipes: against scripts that load in 4 bits, and against the library's layer."""

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

import trainfit
from exported_runs import logits_of, logits_of_run, trained
from tiny_training import LLAMA
from trainfit.models.quantized_libraries import BitsandbytesLinear
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.quantize import Quantized
from trainfit.step import Step, assemble
from trainfit.training.export.export import export

CPU = torch.device("cpu")
CONFIG = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 2048,
}  # fmt: skip
"""Activations of a multiple of 2 MiB: the allocator rounds none of them up."""
TINY = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random bf16 weights, as the Hub keeps one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16().save_pretrained(path)
    return path


def script(folder: Path, *, nested: bool, prepared: bool, autocast: bool, lora: dict[str, Any]) -> None:
    """QLoRA as the documentation of PEFT and transformers shows it, in a plain loop."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    options: Any = {"dtype": torch.bfloat16, "device_map": {"": 0}, "quantization_config": quantization}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    if prepared:
        kwargs = {"use_reentrant": False}
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=kwargs)
    config = peft.LoraConfig(r=16, lora_alpha=16, task_type="CAUSAL_LM", **lora)
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    for _ in range(2):
        ids = torch.randint(0, CONFIG["vocab_size"], (2, 1024), device="cuda")
        labels = ids.clone()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def recipe_of(precision: str, quantize: Any, adapter: dict[str, Any], recompute: str = "none") -> Any:
    return {
        "model": {"config": {"model_type": "llama", **CONFIG}}, "batch": {"micro": 2, "seq": 1024},
        "precision": precision, "recompute": recompute, "quantize": quantize,
        "adapter": {"kind": "lora", "rank": 16, **adapter},
        "optimizer": {"name": "adamw", "implementation": "fused"}, "hardware": {"gpu": "h100-sxm"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "nested", "dora"),
    [("bf16", False, False), ("bf16", True, True), ("fp32", True, False), ("amp-bf16", False, False)],
)
def test_a_recipe_has_the_peak_of_a_script_that_loads_in_4_bits(
    folder: Path, precision: str, nested: bool, dora: bool
) -> None:
    """Prepared models (all that is not quantised in fp32, checkpoints) are precision fp32, or amp."""
    prepared, autocast = precision != "bf16", precision.startswith("amp")
    lora = {"target_modules": "all-linear", "use_dora": dora}
    expected = trainfit.trace(
        lambda: script(folder, nested=nested, prepared=prepared, autocast=autocast, lora=lora),
        gpu="h100-sxm", steps=2,
    )  # fmt: skip
    quantize = {"kind": "nf4", "double": nested, "compute": "bf16", "library": "bitsandbytes"}
    found = trainfit.predict(
        recipe_of(precision, quantize, {"dora": dora}, recompute="full" if prepared else "none")
    )
    assert found.peak_allocated_bytes == pytest.approx(expected.peak_allocated_bytes, rel=1e-3)


def layers(double: bool, block: int = 64) -> tuple[BitsandbytesLinear, Any]:
    """The same random weight in our layer and in the library's."""
    torch.manual_seed(0)
    weight, bias = torch.randn(192, 128, dtype=torch.bfloat16), torch.randn(192, dtype=torch.bfloat16)
    base = Quantized(kind="nf4", double=double, block=block, compute="bf16", library="bitsandbytes")  # pyright: ignore
    ours = BitsandbytesLinear(128, 192, True, base, torch.bfloat16, "cpu")
    ours.load(weight, bias)
    theirs: Any = bitsandbytes.nn.Linear4bit(128, 192, compute_dtype=torch.bfloat16)
    options: Any = {"quant_type": "nf4", "compress_statistics": double, "blocksize": block}
    theirs.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **options)
    theirs.bias = nn.Parameter(bias, requires_grad=False)
    return ours, theirs.to("cpu")


@pytest.mark.parametrize(("double", "block"), [(False, 64), (True, 64), (True, 128)])
def test_the_layer_is_the_librarys(double: bool, block: int) -> None:
    """Codes, magnitudes, tables, output and gradient, bit for bit."""
    ours, theirs = layers(double, block)
    state = theirs.weight.quant_state
    assert torch.equal(ours.codes, theirs.weight.data.view(-1))
    assert torch.equal(ours.absmax, state.absmax)
    assert torch.equal(ours.code, state.code)
    if double:
        assert torch.equal(ours.nested_absmax, state.state2.absmax)
        assert torch.equal(ours.nested_code, state.state2.code)
        assert torch.equal(ours.offset, state.offset)
    inputs = [torch.ones(3, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    outs = [layer(x) for layer, x in zip((ours, theirs), inputs, strict=True)]
    assert torch.equal(*outs)
    for out in outs:
        out.sum().backward()
    assert inputs[0].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # pyright: ignore[reportArgumentType]
    assert torch.equal(ours.dequantize(), bitsandbytes.functional.dequantize_4bit(theirs.weight.data, state))


def test_a_recipe_trains_through_pefts_layers_and_goes_on() -> None:
    """On the CPU: PEFT's Linear4bit adapts the layers; a saved state goes on to the last bit."""

    def made() -> Step:
        return assemble(recipe, CPU)

    recipe = recipe_from(
        {"model": {"config": TINY}, "batch": {"micro": 2, "seq": 16}, "quantize": "bnb-nf4-dq",
         "adapter": {"kind": "dora", "rank": 4}, "optimizer": {"lr": 1e-2}}
    )  # fmt: skip
    step, again = made(), made()
    found = {type(module).__module__ for module in step.model.modules() if hasattr(module, "lora_A")}
    assert found == {"peft.tuners.lora.bnb"}
    batches = step.random_batches()
    losses = [step(batches).item() for _ in range(4)]
    assert losses[-1] < losses[0]
    for _ in range(2):
        again(batches)
    third = made()
    third.load_state_dict(again.state_dict())
    assert [third(batches).item() for _ in range(2)] == losses[2:]


@pytest.mark.parametrize("settings", [(), ("adapter.kind=dora", "adapter.modules_to_save=[lm_head]")])
def test_a_run_over_4_bits_is_exported_merged(settings: tuple[str, ...], tmp_path: Path) -> None:
    """transformers computes the run's logits from the dequantised base with the adapter in it."""
    from transformers import AutoModelForCausalLM

    trained(
        tmp_path / "run",
        "adapter.kind=lora",
        "adapter.rank=4",
        "quantize=bnb-nf4-dq",
        *settings,
        config=LLAMA,
    )
    found = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert "dequantised" in found.notes[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits_of(model), logits_of_run(tmp_path / "run"), atol=1e-4, rtol=0)


def test_codes_are_sharded() -> None:
    plain = recipe_of("bf16", "bnb-nf4-dq", {}, recompute="full")
    two = plain | {"hardware": {"gpu": "h100-sxm", "count": 2}}
    whole, less = trainfit.predict(plain), trainfit.predict(two)
    codes = 2 * (2 * 1024 * 1024 + 2 * 512 * 1024 + 3 * 4096 * 1024) // 2
    assert whole.phases.after_init - less.phases.after_init > 0.4 * codes
