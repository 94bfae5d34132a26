"""What runs under the operation timer: matrix products, attention, and steps of models of one layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.catalog.load import model as find_model
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB
from trainfit.techniques.precision.fp8 import CAPABILITY

Workload = tuple[str, Callable[[], object]]
"""A part's name and what it runs."""

TOKENS = (256, 1024, 4096, 16384)
LINEARS = (
    (768, 768), (768, 3072), (1024, 4096), (2048, 512), (2048, 2048), (2048, 8192), (8192, 2048),
    (3072, 9216), (4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096), (768, 50257), (2048, 50304),
    (2304, 256000), (2048, 128256), (4096, 128256), (64, 1024), (1024, 16), (16, 4096),
)  # fmt: skip
"""Inputs and outputs: square, MLP, grouped keys, heads with odd and even vocabularies, experts, LoRA."""
MOST_PRODUCT_BYTES = 9 * 2**30
BATCHED = ((64, 1024, 64), (64, 1024, 128), (32, 2048, 128), (128, 256, 64), (16, 4096, 128))
"""Heads of all sequences, length and head size: attention written out."""
PRODUCT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_FP32_FLOPS, MOST_FP16_TOKENS = 4e12, 4096
FP8_TOKENS = (1024, 4096, 16384)
FP8_LINEARS = (
    (1024, 4096), (2048, 2048), (2048, 8192), (8192, 2048), (3072, 3072), (3072, 9216), (3072, 16384),
    (8192, 3072), (4096, 1536), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672),
)  # fmt: skip
"""Inputs and outputs of layers that fp8 converts."""

ATTENTION_TOKENS = 16384
ATTENTION = {
    "cudnn": ("bf16", (64, 80, 96, 128, 256), (128, 256, 512, 1024, 2048, 4096, 8192)),
    "flash": ("bf16", (64, 80, 128, 256), (128, 512, 1024, 2048, 4096, 8192)),
    "efficient": ("fp32", (64, 128, 256), (128, 512, 2048)),
    "ours": ("bf16", (64, 80, 128, 256), (256, 1024, 4096, 8192)),
    "cudnn, masked": ("bf16", (64, 96, 128, 256), (256, 1024, 2048, 4096)),
    "efficient, masked": ("bf16", (64, 128), (512, 2048)),
}
"""Kernel: dtype, head sizes, lengths."""
PARTIAL_LENGTHS, MORE_LENGTHS = (200, 680, 1288, 3000), (136, 424, 1032, 1896)
"""Multiples of 8 that leave the last tiles of attention partly empty; MORE_LENGTHS in long calibrations."""
PARTIAL_ATTENTION = {
    "cudnn": ("bf16", (64, 128, 256)),
    "flash": ("bf16", (64, 128)),
    "ours": ("bf16", (64, 128)),
    "efficient": ("fp32", (64, 128)),
    "cudnn, masked": ("bf16", (64, 128, 256)),
}
"""Kernel: dtype, head sizes."""
HEADS, SMALL_TOKENS = 16, 2048


def workloads(device: torch.device, *, tiny: bool) -> Iterator[Workload]:
    """Yield the parts, those that most steps need first; each builds its tensors when it is run."""
    if tiny:
        yield "products", lambda: products(device, (64,), ((32, 48),), ("fp32",))
        yield from (("model, tiny", lambda: one_step(tiny_recipe(), device)),)
        return
    yield "products, bf16", lambda: products(device, TOKENS, LINEARS, ("bf16",))
    yield "products, batched", lambda: batched(device)
    for name, (dtype, heads, lengths) in ATTENTION.items():
        yield f"attention, {name}", lambda a=(name, dtype, heads, lengths): attention(device, *a)
    for name, data in recipes():
        yield f"model, {name}", lambda data=data: one_step(recipe_from(data), device)
    if torch.cuda.get_device_capability(device) >= CAPABILITY:
        yield "products, fp8", lambda: fp8_products(device, FP8_TOKENS, FP8_LINEARS)
    yield "products, fp16 and fp32", lambda: products(device, (1024, 4096), LINEARS[:14], ("fp16", "fp32"))
    yield from _partial_attention(device, PARTIAL_LENGTHS)
    share = min(1.0, torch.cuda.get_device_properties(device).total_memory / LARGE_BYTES)
    large = [(name, max(1, int(share * micro)), seq, rest) for name, micro, seq, rest in LARGE]
    for name, data in recipes(large):
        yield f"large model, {name}", lambda data=data: one_step(recipe_from(data), device)


def more_workloads(device: torch.device) -> Iterator[Workload]:
    """Yield the parts of a long calibration alone."""
    yield from _partial_attention(device, MORE_LENGTHS)


def _partial_attention(device: torch.device, lengths: Sequence[int]) -> Iterator[Workload]:
    for name, (dtype, heads) in PARTIAL_ATTENTION.items():
        yield (
            f"attention, partial tiles, {name}",
            lambda a=(name, dtype, heads, lengths): attention(device, *a),
        )


def products(device: torch.device, tokens: Any, linears: Any, dtypes: Any) -> None:
    """Run the three products of linear layers."""
    for dtype in dtypes:
        kind = PRODUCT_DTYPES[dtype]
        for count in tokens:
            for inputs, outputs in linears:
                if 2 * (count * (inputs + outputs) + inputs * outputs) > MOST_PRODUCT_BYTES:
                    continue
                if dtype == "fp32" and 2 * count * inputs * outputs > MOST_FP32_FLOPS:
                    continue
                x = torch.randn(count, inputs, device=device, dtype=kind)
                w = torch.randn(outputs, inputs, device=device, dtype=kind)
                g = torch.randn(count, outputs, device=device, dtype=kind)
                _ = x @ w.t(), g @ w, g.t() @ x


def fp8_products(device: torch.device, tokens: Any, linears: Any) -> None:
    """Run the three products of fp8 linear layers as torchao does: only the forward accumulates fast."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    scale = torch.ones((), device=device)

    def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).mul_(64).to(dtype)

    def product(a: torch.Tensor, b: torch.Tensor, *, fast: bool) -> None:
        torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast)

    for count in tokens:
        for inputs, outputs in linears:
            product(random(count, inputs, e4m3), random(outputs, inputs, e4m3), fast=True)
            product(random(count, outputs, e5m2), random(inputs, outputs, e4m3), fast=False)
            product(random(outputs, count, e5m2), random(inputs, count, e4m3), fast=False)


def batched(device: torch.device) -> None:
    """Run the products of attention written out."""
    for dtype in ("bf16", "fp32"):
        for heads, length, head in BATCHED:
            q = torch.randn(heads, length, head, device=device, dtype=PRODUCT_DTYPES[dtype])
            scores = q @ q.transpose(1, 2)
            _ = scores @ q, scores.transpose(1, 2) @ q


def attention(device: torch.device, name: str, dtype: str, heads: Any, lengths: Any) -> None:
    """Run forward and backward of one kernel; few tokens too, which leave a GPU idle."""
    for head in heads:
        for length in lengths:
            for tokens in (ATTENTION_TOKENS, SMALL_TOKENS):
                if tokens >= length:
                    _attend(device, name, PRODUCT_DTYPES[dtype], tokens // length, length, head)


def _attend(device: torch.device, name: str, dtype: torch.dtype, batch: int, length: int, head: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from trainfit.kernels.flash_attention.op import flash_attention

    shape = batch, length, HEADS, head
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    if name == "ours":
        out = flash_attention(q, k, v, is_causal=True)
    else:
        kernel, _, masked = name.partition(", ")
        backends = {
            "cudnn": "CUDNN_ATTENTION",
            "flash": "FLASH_ATTENTION",
            "efficient": "EFFICIENT_ATTENTION",
        }
        mask = None
        if masked:
            mask = torch.full((length, length), float("-inf"), device=device, dtype=dtype).triu(1)[None, None]
        with sdpa_kernel(getattr(SDPBackend, backends[kernel])):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    out.backward(torch.randn_like(out))


# -- models of one layer --

NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def with_layers(name: str, num_layers: int, **changes: Any) -> dict[str, Any]:
    """Return the config of a model of the catalog with so many layers."""
    row = find_model(name)
    if row is None:
        raise ValueError(f"{name}: not in the catalog")
    config: dict[str, Any] = dict(row.config)
    for key in NUM_LAYERS:
        if key in config:
            config[key] = num_layers
    return {**config, **changes}


Row = tuple[str, int, int, dict[str, Any]]
"""A model's name, sequences, tokens of each, and the recipe's other fields."""
ADAFACTOR, MUON = {"name": "adafactor"}, {"name": "muon"}
FOREACH, FORLOOP = {"implementation": "foreach"}, {"implementation": "forloop"}
COMMON: tuple[Row, ...] = (
    ("llama-3.2-1b", 4, 2048, {}),
    ("llama-3.1-8b", 2, 4096, {"optimizer": FOREACH}),
    ("gpt2", 8, 1024, {"precision": "amp-bf16", "optimizer": FORLOOP}),
    ("llama-3.2-1b", 4, 1024, {"precision": "fp32", "optimizer": FOREACH}),
    ("phi-2", 2, 2048, {"precision": "amp-fp16", "optimizer": {"name": "sgd", **FOREACH}}),
    ("olmoe-1b-7b", 4, 1024, {"optimizer": {"name": "sgd"}}),
    ("gemma-2b", 2, 2048, {"optimizer": ADAFACTOR}),
    ("gemma-2-2b", 2, 2048, {"attention": "eager"}),
    ("falcon-7b", 2, 2048, {"adapter": {"kind": "lora"}}),
    ("deepseek-v2-lite", 2, 1024, {"optimizer": FORLOOP}),
    ("qwen2.5-0.5b", 2, 256, {"precision": "amp-bf16", "optimizer": ADAFACTOR}),
    ("gemma-3-1b", 2, 4096, {"optimizer": {"name": "sgd", "momentum": 0.9, **FOREACH}}),
    ("opt-1.3b", 4, 2048, {"precision": "fp32", "optimizer": {"name": "sgd"}}),
    ("bloom-560m", 4, 1024, {"optimizer": FORLOOP}),
    ("pythia-1.4b", 1, 2048, {"attention": "math", "optimizer": FOREACH}),
    ("phi-3-mini-4k", 2, 2048, {"precision": "amp-fp16", "attention": "eager"}),
    ("mistral-7b-v0.1", 1, 8192, {"adapter": {"kind": "lora"}, "precision": "amp-bf16"}),
    ("gpt2-xl", 1, 1024, {"attention": "eager", "optimizer": {"name": "adamw", **FOREACH}}),
    ("qwen3-0.6b", 4, 512, {"precision": "fp32", "adapter": {"kind": "lora"}}),
    ("olmoe-1b-7b", 2, 2048, {"precision": "amp-fp16", "optimizer": ADAFACTOR}),
    ("gemma-3-4b", 1, 1024, {"precision": "amp-bf16"}),
    ("llama-3.1-8b", 2, 4096, {"quantize": "nf4", "adapter": {"kind": "lora"}}),
    ("medium", 8, 1024, {"optimizer": MUON}),
    ("xl", 4, 1024, {"precision": "fp32", "attention": "eager"}),
    ("llama-3.1-8b", 1, 2048, {"optimizer": {"name": "adamw8bit"}, "loss": "chunked"}),
    ("llama-3.2-1b", 4, 2048, {"optimizer": {"name": "adamw4bit"}, "loss": "fused"}),
    ("llama-3.2-1b", 4, 2048, {"attention": "triton", "block_kernels": "triton"}),
    ("qwen3-8b", 2, 4096, {"optimizer": {"stochastic_rounding": True}}),
    ("llama-3.1-8b", 2, 4096, {"precision": "fp8"}),
    ("llama-3.2-1b", 1, 512, {"optimizer": FOREACH}),
    ("gpt2", 2, 256, {"precision": "fp32"}),
)
"""The commonest first."""
LARGE: tuple[Row, ...] = (
    ("llama-3.2-1b", 16, 2048, {}),
    ("gpt2-large", 32, 512, {"optimizer": FOREACH}),
    ("pythia-410m", 16, 4096, {}),
    ("opt-2.7b", 16, 1888, {"precision": "amp-bf16"}),
    ("qwen2.5-0.5b", 16, 2424, {"precision": "amp-bf16"}),
    ("gemma-2b", 4, 5432, {"optimizer": FOREACH}),
    ("mistral-7b-v0.3", 8, 2528, {}),
    ("phi-2", 8, 2048, {"precision": "amp-bf16"}),
    ("gemma-3-1b", 16, 1288, {"precision": "amp-bf16"}),
    ("olmoe-1b-7b", 16, 1024, {}),
    ("phi-3-mini-4k", 16, 1024, {"precision": "amp-fp16"}),
    ("deepseek-v2-lite", 16, 1024, {}),
    ("qwen3-14b", 4, 4096, {"optimizer": FOREACH}),
    ("tinyllama-1.1b", 4, 14336, {}),
    ("gemma-3-4b", 8, 1024, {"precision": "amp-fp16"}),
    ("falcon-7b", 8, 2048, {}),
    ("gpt2", 32, 1024, {"precision": "amp-bf16"}),
    ("bloom-1b1", 8, 2048, {"precision": "amp-fp16"}),
    ("opt-1.3b", 32, 688, {"precision": "amp-fp16", "attention": "eager"}),
    ("gpt2-xl", 8, 1024, {"precision": "fp32"}),
)
"""Steps of many tokens; the commonest first."""
LARGE_BYTES = 139 * GIB
"""Memory of a GPU that holds these; one of less runs smaller micro-batches."""


def recipes(table: Sequence[Row] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield recipes of one layer, by default those that run the operations of common steps."""
    native = {"medium", "xl"}
    for name, micro, seq, rest in table or COMMON:
        implementation = "native" if name in native or rest.get("block_kernels") else "hf"
        label = ", ".join((name, *(f"{key} {value}" for key, value in rest.items())))
        config = with_layers(name, 1)
        model = {"config": config, "implementation": implementation, "name": f"{name}, 1 layer"}
        yield label, {"model": model, "batch": {"micro": micro, "seq": seq}, **rest}


def one_step(recipe: Recipe, device: torch.device) -> None:
    """Run two steps: the first one makes the optimizer's state. Building the model is not timed."""
    from trainfit.step import assemble

    with _disable_current_modes():
        step = assemble(recipe, device)
    for _ in range(2):
        step(step.random_batches())


def tiny_config() -> dict[str, Any]:
    """Return a small model whose operations take a GPU no time."""
    return with_layers(
        "llama-3.2-1b", 4, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def tiny_recipe() -> Recipe:
    model = {"config": tiny_config(), "name": "tiny llama"}
    return recipe_from({"model": model, "batch": {"micro": 1, "seq": 16}, "hardware": {"gpu": "cpu"}})
