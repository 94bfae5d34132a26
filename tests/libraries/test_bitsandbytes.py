"""bitsandbytes in scripts under ``trainfit.trace``: the bytes that its CUDA code allocates."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.user import user_gpu

ROWS, COLUMNS = 4096, 1024
NUMEL = ROWS * COLUMNS
CODES = 256 * 4


def inside(code: Callable[[], None]) -> Ledger:
    """Return the ledger of some code on the virtual GPU."""
    with user_gpu(gpu("h200"), prefers_cudnn=False, max_steps=10) as virtual:
        code()
        return virtual.tracer.finish()


def launched(ledger: Ledger) -> list[str]:
    """Return the functions of the native library that were called."""
    return [
        op.name.removeprefix("bitsandbytes.") for op in ledger.ops if op.name.startswith("bitsandbytes.c")
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_linear_4bit(nested: bool) -> None:
    """Half a byte an element, a scale every 64; nested: scales of 8 bits, with one of 32 every 256."""
    held = []

    def code() -> None:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(
            COLUMNS,
            ROWS,
            bias=False,
            compute_dtype=torch.bfloat16,
            compress_statistics=nested,
            quant_type="nf4",
        )
        assert torch.cuda.memory_allocated() == 0
        layer.cuda()
        held.append(torch.cuda.memory_allocated())
        assert isinstance(layer.weight, bnb.nn.Params4bit)
        assert layer.weight.quant_state.shape == (ROWS, COLUMNS)
        layer(torch.ones(2, 2048, COLUMNS, device="cuda", dtype=torch.bfloat16))

    ledger = inside(code)
    scales = NUMEL // 64
    expected = NUMEL // 2 + (scales + 4 * scales // 256 if nested else 4 * scales)
    assert 0 <= held[0] - expected < 4096  # The tables of codes
    # 4,096 tokens: the weight is dequantized, then multiplied by cuBLAS.
    assert launched(ledger)[-1] == "cdequantize_blockwise_bf16_nf4"
    assert 2 * NUMEL in [s.num_bytes for s in ledger.storages]
    assert sum(op.flops for op in ledger.ops) == 2 * 4096 * NUMEL


def test_linear_4bit_on_few_tokens() -> None:
    """bitsandbytes multiplies with the 4-bit weight itself."""

    def code() -> None:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(COLUMNS, ROWS, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
        layer(torch.ones(4, COLUMNS, device="cuda", dtype=torch.bfloat16))

    ledger = inside(code)
    assert launched(ledger)[-1] == "cgemm_4bit_bf16"
    assert sum(op.flops for op in ledger.ops) == 2 * 4 * NUMEL
    assert max(op.num_bytes for op in ledger.ops if op.flops) < NUMEL


def test_linear_8bit() -> None:
    def code() -> None:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear8bitLt(COLUMNS, ROWS, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
        assert torch.cuda.memory_allocated() == NUMEL + 4 * ROWS
        layer(torch.ones(8, COLUMNS, device="cuda", dtype=torch.float16, requires_grad=True)).sum().backward()

    ledger = inside(code)
    assert "cigemmlt_32" in launched(ledger)
    assert sum(op.flops for op in ledger.ops) == 2 * 2 * 8 * NUMEL


CONFIG = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 2048,
}  # fmt: skip


def qlora(is_prepared: bool, autocast: bool, checkpoints: bool, nested: bool) -> None:
    """The usual script: linear layers of bitsandbytes in the blocks, PEFT, a plain loop."""
    import bitsandbytes as bnb
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                new = bnb.nn.Linear4bit(child.in_features, child.out_features, False, torch.bfloat16)
                options = {"quant_type": "nf4", "compress_statistics": nested}
                new.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False, **options)
                setattr(parent, name, new)
    model.cuda()
    model.is_loaded_in_4bit = True
    if is_prepared:
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = peft.prepare_model_for_kbit_training(model, checkpoints, **options)
    lora = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    for _ in range(2):
        ids = torch.randint(0, 32_000, (2, 1024), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("precision", "is_prepared", "checkpoints", "nested"),
    [("bf16", False, False, False), ("fp32", True, False, True), ("amp-bf16", True, False, True),
     ("amp-bf16", True, True, False)],
)  # fmt: skip
def test_a_recipe_has_the_peak_of_the_usual_script(
    precision: str, is_prepared: bool, checkpoints: bool, nested: bool
) -> None:
    """``prepare_model_for_kbit_training`` casts all that is not quantised to fp32: precision fp32, or amp."""
    autocast = precision.startswith("amp")
    script = trainfit.trace(lambda: qlora(is_prepared, autocast, checkpoints, nested), gpu="h200", steps=2)
    recipe = {
        "model": {"config": {"model_type": "llama", **CONFIG}},
        "batch": {"micro": 2, "seq": 1024},
        "precision": precision,
        "recompute": "full" if checkpoints else "none",
        "quantize": {"kind": "nf4", "double": nested, "compute": "bf16"},
        "adapter": {"kind": "lora", "rank": 16},
        "optimizer": {"name": "adamw", "implementation": "fused"},
        "hardware": {"gpu": "h200"},
    }
    estimate = trainfit.predict(recipe)
    assert estimate.peak_allocated_bytes == pytest.approx(script.peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize(("name", "in_bytes", "on_host"), [
    ("AdamW8bit", 2 * NUMEL + 2 * 4 * NUMEL // 256 + 2 * CODES, 0),
    ("AdamW", 8 * NUMEL, 0),
    ("PagedAdamW8bit", 2 * 4 * NUMEL // 256 + 2 * CODES, 2 * NUMEL),
    ("PagedAdamW32bit", 0, 8 * NUMEL),
    ("Lion8bit", NUMEL + 4 * NUMEL // 256 + CODES, 0),
])  # fmt: skip
def test_optimizer_states(name: str, in_bytes: int, on_host: int) -> None:
    states = []

    def train() -> None:
        import bitsandbytes as bnb

        model = nn.Linear(COLUMNS, ROWS, bias=False, device="cuda", dtype=torch.bfloat16)
        optimizer: Any = getattr(bnb.optim, name)(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(torch.ones(8, COLUMNS, device="cuda", dtype=torch.bfloat16)).sum().backward()
            before = torch.cuda.memory_allocated()
            optimizer.step()
            states.append(torch.cuda.memory_allocated() - before)
            optimizer.zero_grad()

    estimate = trainfit.trace(train, gpu="h200", steps=2)
    assert states == [in_bytes, 0]
    assert estimate.host_bytes == on_host
    assert any("paged optimizer states" in line for line in estimate.assumptions) == bool(on_host)


def test_a_measurement_imports_it_where_the_gpu_is_visible() -> None:
    """Imported while no GPU is visible, it has no CUDA kernels, and Inductor another benchmark."""
    program = (
        "import sys\n"
        "from trainfit.measurement.fork_server import ready_to_fork\n"
        "from trainfit.measurement.process import spawned\n"
        "ready_to_fork('cuda')\n"
        "print({'bitsandbytes', 'torch._inductor.runtime.benchmarking'} & set(sys.modules))\n"
        "import bitsandbytes\n"
        "print(ready_to_fork('cuda') is spawned, ready_to_fork('cpu') is spawned)\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert printed.stdout.splitlines() == ["set()", "True False"], printed.stderr
