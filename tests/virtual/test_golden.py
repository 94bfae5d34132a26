"""Published measurements, predicted. GB is 10**9 bytes, GiB 2**30: each table's unit is the one that
agrees."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainfit.catalog.load import gpu, model_config, recipes
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.replay import replay
from trainfit.prediction.predict import predict
from trainfit.spec.parsing.recipe_file import load_recipe
from trainfit.spec.recipe import Batch, Hardware, Optimizer, Recipe
from trainfit.spec.result import Estimate
from trainfit.spec.units import GIB
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu
from virtual_runs import recipe_of

# -- the course program of the published 2.7B measurements
#
# In our own words, every operation written out by hand: separate matrices without biases, RMSNorm, RoPE on
# neighbouring pairs, softmax and SiLU operation by operation, a causal mask made by every layer. Shapes:
# b batch, s sequence, d width, h heads, f feed-forward, v vocabulary.

EPSILON = 1e-5
THETA = 10_000.0


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=torch.device("cpu")))


class Matrix(nn.Module):
    def __init__(self, wide: int, high: int):
        super().__init__()
        self.weight = weight(high, wide)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.weight = weight(d)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * normed


def softmax(x: Tensor) -> Tensor:
    exponential = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return exponential / torch.sum(exponential, dim=-1, keepdim=True)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Rotation(nn.Module):
    def __init__(self, context: int, head: int):
        super().__init__()
        device = torch.device("cpu")
        frequencies = THETA ** -(torch.arange(0, head, 2, device=device) / head)
        angles = torch.arange(context, device=device)[:, None] * frequencies
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())))

    def forward(self, x_bhsd: Tensor, positions: Tensor) -> Tensor:
        turns: Any = self.turns
        cos, sin = turns[:, positions, :]
        first, second = x_bhsd.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((cos * first - sin * second, sin * first + cos * second), dim=-1)
        return turned.flatten(-2).contiguous()


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, rotation: Rotation):
        super().__init__()
        self.q, self.k, self.v, self.out = (Matrix(d, d) for _ in range(4))
        self.heads, self.rotation = heads, rotation

    def forward(self, x_bsd: Tensor) -> Tensor:
        s, d = x_bsd.shape[1:]
        q, k, v = (
            part(x_bsd).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        positions = torch.arange(s, device=x_bsd.device)
        q, k = self.rotation(q, positions), self.rotation(k, positions)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(d // self.heads)
        scores = torch.where(positions[:, None] >= positions[None, :], scores, float("-inf"))
        mixed = torch.einsum("bhqk,bhkd->bhqd", softmax(scores), v)
        return self.out(mixed.transpose(1, 2).flatten(-2).contiguous())


class Block(nn.Module):
    def __init__(self, d: int, heads: int, f: int, rotation: Rotation):
        super().__init__()
        self.attention = Attention(d, heads, rotation)
        self.gate, self.up, self.down = Matrix(d, f), Matrix(d, f), Matrix(f, d)
        self.before_attention, self.before_mlp = Norm(d), Norm(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        y = self.before_mlp(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class WrittenOut(nn.Module):
    """Token ids [b, s] -> logits [b, s, v]."""

    def __init__(self, *, v: int, context: int, d: int, layers: int, heads: int, f: int):
        super().__init__()
        self.embedding = weight(v, d)
        rotation = Rotation(context, d // heads)
        self.layers = nn.ModuleList(Block(d, heads, f, rotation) for _ in range(layers))
        self.norm, self.head = Norm(d), Matrix(d, v)

    def forward(self, ids_bs: Tensor) -> Tensor:
        x = self.embedding[ids_bs, :]
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


# -- the published numbers

GB = 10**9
FORWARD_GB = {128: 19.412, 256: 26.103, 512: 42.708}
"""2.7B, fp32, 4 sequences: highest allocated memory of a forward pass that keeps what its backward needs.
Published with a solution of the course whose sizes these are
(github.com/stanford-cs336/assignment2-systems)."""
FIRST_STEP_GB, STEADY_STEP_GB = 55.3, 69.7
"""The same at context 512: the published whole step, and what a step that has optimizer state comes to."""
SIZES = {"d": 2560, "f": 10240, "layers": 32, "heads": 32, "v": 10_000}


def test_the_published_program_to_every_digit() -> None:
    """The program itself, forward alone, without loss: 32 MiB of cuBLAS workspace say Hopper."""
    context = 512
    with virtual_gpu(GpuTraits.of(gpu("h100-sxm")), prefers_cudnn=True) as virtual:
        model = WrittenOut(context=512, **SIZES)
        virtual.model_is_complete(model, [])
        virtual.begin("first", "data")
        ids_bs = torch.randint(SIZES["v"], (4, context), device=torch.device("cpu"))
        virtual.begin("first", "forward")
        logits = model(ids_bs)
        ledger = virtual.finish()
    assert logits.shape == (4, context, SIZES["v"])
    peak = replay(ledger, CachingAllocator()).phases.first.forward
    assert round(peak / GB, 3) == FORWARD_GB[context]


def shipped(name: str, **fields: Any) -> Recipe:
    return load_recipe(recipes()[name]).model_copy(update=fields)


@pytest.mark.parametrize("context", FORWARD_GB)
def test_the_shipped_recipe(context: int) -> None:
    """The published step is a first one: no optimizer state while activations are alive."""
    phases = predict(shipped("2.7b-fp32-eager", batch=Batch(micro=4, seq=context))).phases
    assert phases.first.forward / GB == pytest.approx(FORWARD_GB[context], rel=0.002)
    if context != shipped("2.7b-fp32-eager").batch.seq:
        return
    assert phases.first.peak == phases.first.optimizer
    assert phases.first.peak / GB == pytest.approx(FIRST_STEP_GB, rel=0.01)
    assert phases.steady.peak == phases.steady.backward
    assert phases.steady.peak / GB == pytest.approx(STEADY_STEP_GB, rel=0.01)


def forward_bytes(context: int, implementation: str = "native", **switches: str) -> int:
    config: dict[str, Any] = dict(model_config("2.7b"))
    if implementation == "native":
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config = {"model_type": "trainfit", **{key: config[key] for key in sizes}, **switches}
    recipe = recipe_of(
        config, implementation, batch=Batch(micro=4, seq=context), precision="fp32", attention="eager",
        hardware=Hardware(gpu="h100-sxm"),
    )  # fmt: skip
    return predict(recipe).phases.first.forward


def test_what_separates_other_programs_of_the_same_shape() -> None:
    """Fused operations keep less. Each difference is a closed form in b = 4 sequences, fp32."""
    context = 512
    fused = forward_bytes(context)
    token = 4 * context * SIZES["layers"] * 4
    kept_by = {
        "softmax": SIZES["heads"] * context * token,  # exp(x - max), with the probabilities
        "hidden_act": SIZES["f"] * token,  # sigmoid(x), with x and silu(x)
        "norm": 2 * SIZES["d"] * token,  # x * rsqrt(...), before the weight, of both norms of a layer
    }
    written_out = {"softmax": "unfused", "hidden_act": "silu_unfused", "norm": "rmsnorm_unfused"}
    for switch, kept in kept_by.items():
        more = forward_bytes(context, **{switch: written_out[switch]}) - fused
        # The allocator hands out blocks up to 1 MiB larger than requested; how many differs by tens of MB.
        assert more == pytest.approx(kept, abs=0.05 * GB), switch
    everything = forward_bytes(context, **written_out) - fused
    assert everything == pytest.approx(sum(kept_by.values()), abs=0.05 * GB)
    # transformers' Llama: its norms are written out, its softmax and SiLU are not.
    of_transformers = forward_bytes(context, "hf")
    assert of_transformers == pytest.approx(fused + kept_by["norm"], rel=0.005)
    assert of_transformers / GB / FORWARD_GB[context] == pytest.approx(0.837, abs=0.002)
    assert fused / GB / FORWARD_GB[context] == pytest.approx(0.804, abs=0.002)


DEEP_ONE_GIB = {"fp32": 21.165, "bf16": 12.418}
"""Adafactor without momentum, 4 x 768 tokens. Norms written out and a bias kept by every layer were
chosen because both rows then agree (recipes/peak-memory/published.toml has the program). In the bf16 row the
optimizer runs in the backward."""


def deep_one(precision: Any, in_backward: bool, **config: str) -> Estimate:
    recipe = shipped("deep-one-1.6b", precision=precision)
    assert isinstance(recipe.model.config, dict)
    model = recipe.model.model_copy(update={"config": recipe.model.config | config})
    optimizer = Optimizer(name="adafactor", in_backward=in_backward)
    return predict(recipe.model_copy(update={"model": model, "optimizer": optimizer}))


@pytest.mark.parametrize(("precision", "in_backward"), [("fp32", False), ("bf16", True), ("bf16", False)])
def test_deep_one(precision: str, in_backward: bool) -> None:
    estimate = deep_one(precision, in_backward)
    assert estimate.params == pytest.approx(1.63e9, rel=0.003)
    # Where the update runs does not move the peak, which is in the backward before most gradients are there.
    assert estimate.peak_phase.endswith(".backward")
    assert estimate.peak_allocated_bytes / GIB == pytest.approx(DEEP_ONE_GIB[precision], rel=0.03)


@pytest.mark.parametrize(
    "config",
    [{"norm": "rmsnorm", "alibi_bias": "per_layer"}, {"norm": "rmsnorm_unfused", "alibi_bias": "shared"}],
)
def test_deep_one_without_either_choice_is_too_small(config: dict[str, str]) -> None:
    ratios = (
        deep_one(precision, precision == "bf16", **config).peak_allocated_bytes / GIB / published
        for precision, published in DEEP_ONE_GIB.items()
    )
    assert min(ratios) < 0.97
