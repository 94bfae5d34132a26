"""A ledger of a few layers, the middle ones repeated, equals the ledger of the whole model: every sum, byte
for byte."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Adapter, Batch, Hardware, Offload, Optimizer, Parallel
from trainfit.virtual.trace.repeated_layers import find_period, why_whole
from virtual_runs import PLAIN, recipe_of, steady, sums, with_layers

LLAMA = with_layers("llama-3.2-1b", 4)
IN_BACKWARD = {"in_backward": True}
Case = tuple[dict[str, Any], str, dict[str, Any]]


def case(name: str, layers: int = 4, implementation: str = "hf", **fields: Any) -> Case:
    return with_layers(name, layers), implementation, fields


CASES: dict[str, Case] = {
    "gpt2": case("gpt2", precision="amp-fp16", batch=Batch(micro=2, seq=32, accumulate=2),
                 optimizer=Optimizer(implementation="foreach")),
    "lora-dropout-recompute-gpt2": case("gpt2", adapter=Adapter(kind="lora", dropout=0.1), recompute="full"),
    "bloom": case("bloom-560m", optimizer=Optimizer(name="adafactor", implementation="foreach")),
    "falcon": case("falcon-7b", precision="fp32", optimizer=Optimizer(implementation="forloop")),
    "mixtral": case("mixtral-8x7b", precision="amp-bf16", optimizer=Optimizer(name="sgd")),
    "qwen3": case("qwen3-0.6b", attention="eager"),
    "phi-2": case("phi-2", recompute="full", optimizer=Optimizer(implementation="foreach", **IN_BACKWARD)),
    "deepseek-v2": case("deepseek-v2-lite", 5),
    "gpt-oss": (with_layers("gpt-oss-20b", 4) | {"layer_types": ["sliding_attention"] * 4}, "hf", {}),
    "sliding-pattern-two-embeddings-recompute": (
        with_layers("gemma-3-1b", 8) | {"layer_types": ["sliding_attention", "full_attention"] * 4}, "hf",
        {"recompute": "full"},
    ),
    "adafactor-fused": (
        LLAMA, "native", {"optimizer": Optimizer(name="adafactor", implementation="fused")},
    ),
    "offload-compile": (
        PLAIN, "native", {"recompute": "full", "offload": Offload(activations=True), "compile": "block"},
    ),
    # Groups of three layers, the number of buffers in which they take turns; momentum is read from these.
    "streamed-state": (
        with_layers("llama-3.2-1b", 13), "native",
        {"offload": Offload(optimizer=True), "optimizer": Optimizer(name="adafactor", momentum=0.9)},
    ),
    "streamed-state-in-backward": (
        with_layers("qwen3-0.6b", 14), "hf",
        {"offload": Offload(optimizer=True), "optimizer": Optimizer(in_backward="block")},
    ),
    "native-momentum": (LLAMA, "native", {"optimizer": Optimizer(name="adafactor", momentum=0.9)}),
    "native-in-backward-math": (
        LLAMA, "native", {"optimizer": Optimizer(name="adafactor", **IN_BACKWARD), "attention": "math"},
    ),
    "native-lora-base": (LLAMA, "native", {"adapter": Adapter(kind="lora", dtype="base")}),
    "native-post-norm-alibi": case("deep-one-1.6b", 4, "native", precision="amp-bf16"),
}  # fmt: skip
"""Families and techniques, each of both in at least one case."""


@pytest.mark.parametrize("case", CASES)
def test_families_and_techniques(case: str) -> None:
    config, implementation, fields = CASES[case]
    recipe = recipe_of(config, implementation, **fields)
    repeated, whole = trace(recipe), trace(recipe, whole=True)
    assert repeated.repeat > 1
    assert len(repeated.ops) < len(whole.ops)
    assert sums(repeated) == sums(whole)


@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_quantised_blocks_are_built_in_the_same_order(implementation: str) -> None:
    """A block's last weight is freed while the next block is quantised."""
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
              "num_attention_heads": 8, "vocab_size": 512}  # fmt: skip
    recipe = recipe_of(config, implementation, adapter=Adapter(kind="lora"), quantize="int8")
    ledgers = trace(recipe), trace(recipe, whole=True)
    repeated, whole = ([(e.kind, e.num_bytes, e.segment) for e in ledger.expand()] for ledger in ledgers)
    assert ledgers[0].repeat > 1
    assert repeated == whole


def test_more_layers_cost_no_more_to_trace() -> None:
    deep, shallow = (trace(recipe_of(with_layers("llama-3.1-405b", layers))) for layers in (None, 4))
    assert (deep.repeat, shallow.repeat) == (124, 2)
    # Only building the model takes longer: its operations, made before the layers are cut out, are in the
    # ledger.
    assert len(steady(deep)) == len(steady(shallow))


class Layer(nn.Module):
    """``width`` sets its size, ``layer_idx`` and ``doubled`` what its forward does."""

    def __init__(self, width: int, layer_idx: int = 0, doubled_at: int | None = None):
        super().__init__()
        device = torch.device("cpu")
        self.layer_idx, self.doubled_at = layer_idx, doubled_at
        self.up = nn.Linear(64, width, device=device)
        self.down = nn.Linear(width, 64, device=device)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).relu())
        if self.doubled_at is not None and self.layer_idx % 2 == self.doubled_at:
            y = y.sigmoid() * y
        return x + y


class Stack(nn.Module):
    """A language model of such layers, as the step calls one."""

    def __init__(self, layers: list[Layer]):
        super().__init__()
        device = torch.device("cpu")
        self.config = type("Config", (), {"vocab_size": 50})()
        self.embed = nn.Embedding(50, 64, device=device)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(64, 50, device=device)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def made_of(widths: list[int], **settings: Any) -> Any:
    def build(*_: Any, on_model: Callable[[Stack], None], **__: Any) -> Stack:
        model = Stack([Layer(width, index, **settings) for index, width in enumerate(widths)])
        on_model(model)
        return model

    return build


PATTERNS = {
    "equal": ([128] * 9, 7),
    "every-other": ([128, 256] * 5, 3),
    "every-other-odd-count": ([128, 256] * 5 + [128], 3),
    "five-to-one": ([128] * 5 + [256] + ([128] * 5 + [256]) * 3 + [128, 128], 2),
    "leading-dense": ([512, 512] + [128] * 8, 6),
    "irregular": ([128, 256, 128, 128, 256, 64, 128, 32], 1),
    "last-differs": ([128] * 7 + [256], 1),
}
"""Widths of the layers, and how many groups the middle one must stand for (1: traced whole)."""


REASON = {
    "irregular": "layers repeats in no pattern of up to 8 layers: 0 and 1 differ in up.out_features",
    "last-differs": "layers repeats in no pattern of up to 8 layers: 6 and 7 differ in up.out_features",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_found(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, num_groups = PATTERNS[pattern]
    monkeypatch.setattr("trainfit.step.build_model", made_of(widths))
    recipe = recipe_of({"model_type": "synthetic"}, precision="fp32")
    repeated, whole = trace(recipe), trace(recipe, whole=True)
    assert repeated.repeat == num_groups
    assert sums(repeated) == sums(whole)
    assert repeated.traced_whole == (REASON[pattern] if num_groups == 1 else "")
    assert whole.traced_whole == ""


def test_layers_whose_forward_depends_on_their_index_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Their parameters and settings are equal; only the forward differs, by layer_idx.
    monkeypatch.setattr("trainfit.step.build_model", made_of([128] * 8, doubled_at=0))
    recipe = recipe_of({"model_type": "synthetic"}, precision="fp32")
    noticed, whole = trace(recipe), trace(recipe, whole=True)
    assert noticed.repeat == 1
    assert noticed.traced_whole.startswith("layers that look alike are not: ")
    assert sums(noticed) == sums(whole)


@pytest.mark.parametrize(
    ("targets", "num_adapted"),
    [
        (r".*layers\.[34]\.self_attn\.q_proj", 2),
        (("layers.4.self_attn.q_proj",), 1),
    ],
)
def test_adapters_of_some_layers(targets: Any, num_adapted: int) -> None:
    five = with_layers("llama-3.2-1b", 5)
    recipe = recipe_of(five, adapter=Adapter(kind="lora", rank=4, targets=targets))
    ledger, whole = trace(recipe), trace(recipe, whole=True)
    adapters = {op.module.rpartition(".lora_A")[0] for op in whole.ops if ".lora_A" in op.module}
    assert len(adapters) == num_adapted
    assert sums(ledger) == sums(whole)


def test_what_compares_recipes_is_not_shortened_where_layers_differ_much() -> None:
    def repeat(**fields: Any) -> int:
        return trace(recipe_of(with_layers("llama-3.2-1b", 5), "native", **fields), shorten=True).repeat

    two = Hardware(gpu="h200", count=2)
    assert repeat(hardware=two) > 1
    # Few layers' gradients would fill few of DDP's buckets.
    assert repeat(hardware=two, parallel=Parallel(strategy="ddp")) == 1
    assert repeat(adapter=Adapter(kind="lora", rank=4, targets=("layers.3.attention.qkv",))) == 1


def test_why_all_layers_are_traced_is_known() -> None:
    def reason(*lists: list[Layer]) -> str:
        return why_whole((f"stack{number}", nn.ModuleList(one)) for number, one in enumerate(lists))

    assert reason() == "no list of repeated layers"
    assert reason([Layer(8)] * 4, [Layer(8)] * 4) == "2 lists of layers: stack0, stack1"
    assert reason([Layer(8)] * 3) == "stack0 has 3 layers, too few to leave any out"
    frozen = Layer(8)
    frozen.down.weight.requires_grad_(False)
    pattern = "stack0 repeats in no pattern of up to 8 layers: 3 and 4 differ in "
    assert reason([*[Layer(8)] * 4, frozen]) == f"{pattern}down.weight"
    recipe = recipe_of(LLAMA, hardware=Hardware(gpu="h200", count=2))
    assert trace(recipe).traced_whole == "technique fsdp makes equal layers act differently"


def test_find_period() -> None:
    assert find_period(list("aaaaaa")) == (0, 1)
    assert find_period(list("abababab")) == (0, 2)
    assert find_period(list("xaaaaaa")) == (1, 1)
    assert find_period(list("aaa")) is None  # nothing to save
    assert find_period(list("aabaaabbab")) is None
    assert find_period(["a"] * 13, 2, 3) == (0, 3)
    assert find_period(list("aaab" * 6), 3) == (0, 4)
    assert find_period(list("aaab" * 9), 1, 3) is None  # Groups of 12 would be too long.


def test_gpu_without_cuda_is_refused() -> None:
    with pytest.raises(InputError, match=r"hardware\.gpu"):
        trace(recipe_of(LLAMA, hardware=Hardware(gpu="tpu-v5p")))
