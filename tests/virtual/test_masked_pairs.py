"""Model FLOPs count the query-key pairs that a mask leaves, whatever kernel computes all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import trainfit
from tiny_recipe import TINY_LLAMA
from trainfit.flops.closed_form import product_step_flops, visible_pairs
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.trace import trace
from trainfit.spec.recipe import Adapter, Batch, Recipe
from trainfit.virtual.trace.masks.tracker import MARK, MaskTracker
from trainfit.virtual.trace.masks.visible import visible_share
from virtual_runs import recipe_of, steady_sum, with_layers

# -- masks ---------------------------------------------------------------------------------------------------


class Following(TorchDispatchMode):
    """Follows masks through what runs inside, on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = MaskTracker(lambda product, share: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.pairs.propagate(func, args, kwargs or {}, out, None)
        return out


def causal(s: int) -> Tensor:
    return torch.ones(s, s, dtype=torch.bool).tril()


def additive(s: int) -> Tensor:
    return torch.full((s, s), float("-inf")).triu(1)


def lowest_of_bf16(s: int) -> Tensor:
    at = torch.arange(s)
    hidden = torch.finfo(torch.bfloat16).min
    return torch.where(at[None, :] <= at[:, None], torch.zeros((), dtype=torch.bfloat16), hidden)[None, None]


def window(s: int) -> Tensor:
    at = torch.arange(s)
    behind = at[:, None] - at[None, :]
    return torch.zeros(1, s, s).masked_fill((behind < 0) | (behind >= 37), float("-inf")).to(torch.bfloat16)


def documents(s: int) -> Tensor:
    document = (torch.arange(s) % 97 == 0).cumsum(0)
    return (document[:, None] == document[None, :]).logical_and(causal(s))[None].expand(3, s, s)


def prefix(s: int) -> Tensor:
    return torch.cat((torch.zeros(s, 5), additive(s)), dim=-1)


def padded_and_sliced(s: int) -> Tensor:
    return torch.nn.functional.pad(additive(s), (0, -s % 16))[..., :s].expand(2, 4, s, s)


def slopes(s: int) -> Tensor:
    at, slope = torch.arange(s), torch.full((4, 1, 1), 0.25)
    return slope * (at[None, :] - at[:, None]) + additive(s)


def from_transformers(s: int) -> Tensor:
    from transformers.masking_utils import eager_mask, sliding_window_causal_mask_function

    return eager_mask(2, s, s, mask_function=sliding_window_causal_mask_function(100), dtype=torch.float16)


def written_into(s: int) -> Tensor:
    mask = torch.zeros(s, s)
    mask.masked_fill_(causal(s).logical_not(), -1e9)
    return mask


MASKS = (
    lowest_of_bf16, window, documents, prefix, padded_and_sliced, slopes, from_transformers, written_into,
)  # fmt: skip


@pytest.mark.parametrize("make", MASKS)
@pytest.mark.parametrize("seq", [33, 1021])  # Every row is counted, and a few of them.
def test_the_visible_share_is_that_of_the_mask_itself(make: Callable[[int], Tensor], seq: int) -> None:
    real = make(seq)
    seen = real if real.dtype == torch.bool else real > max(-1e9, torch.finfo(real.dtype).min / 2)
    with FakeTensorMode(), Following() as following:
        mark = following.pairs.mark_of(make(seq))
    assert mark is not None
    assert mark.expression is not None
    assert float(visible_share(mark.expression)) == pytest.approx(seen.double().mean().item(), rel=1e-12)


def test_what_is_not_known_hides_nothing() -> None:
    with FakeTensorMode(), Following() as following:
        random = torch.where(torch.rand(8, 8) > 0.5, 0.0, float("-inf"))
        assert following.pairs.mark_of(random) is None
        mask = torch.zeros(8, 8)
        row = mask[0]
        row.copy_(torch.rand(8))  # The mask's memory, under another name.
        assert hasattr(mask, MARK)
        assert following.pairs.mark_of(mask) is None


# -- a step --------------------------------------------------------------------------------------------------

SEQ, WINDOW = 48, 20
MISTRAL = {**TINY_LLAMA, "model_type": "mistral", "sliding_window": WINDOW}
NATIVE = {**TINY_LLAMA, "model_type": "trainfit", "vocab_size": 128, "sliding_window": WINDOW}


def step(config: dict[str, Any], implementation: str = "hf", **fields: Any) -> Ledger:
    return trace(recipe_of(config, implementation, **{"batch": Batch(micro=2, seq=SEQ), **fields}))


def closed(config: dict[str, Any], batch: int = 2, seq: int = SEQ) -> float:
    return product_step_flops(config, batch=batch, seq=seq).model_flops


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": "sdpa"},
        {"attention": "efficient"},
        {"attention": "math"},
        {"attention": "eager", "batch": Batch(micro=1, seq=SEQ, accumulate=2), "precision": "amp-fp16"},
        {"attention": "eager", "recompute": "full"},
        {"attention": "sdpa", "compile": "block"},
        {"attention": "eager", "hardware": {"gpu": "cpu"}, "precision": "fp32"},
    ],
)
def test_a_window_counts_once_whatever_computes_it(fields: dict[str, Any]) -> None:
    base = recipe_of(MISTRAL, batch=Batch(micro=2, seq=SEQ)).model_dump(exclude_none=True)
    ledger = trace(Recipe.model_validate({**base, **fields}))
    assert steady_sum(ledger, "model_flops") == closed(MISTRAL)
    # The kernels compute every pair.
    assert steady_sum(ledger, "causal_flops") == steady_sum(ledger, "flops")
    assert steady_sum(ledger, "model_flops_full") > steady_sum(ledger, "model_flops")
    assert steady_sum(ledger, "causal_flops") >= steady_sum(ledger, "model_flops_full")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_native_model(attention: str, alibi: bool) -> None:
    config = {key: value for key, value in NATIVE.items() if key != "max_position_embeddings"}
    config |= {"position_embedding": "alibi"} if alibi else {}
    assert steady_sum(step(config, "native", attention=attention), "model_flops") == closed(config)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prefix_is_seen_by_every_token(attention: str) -> None:
    ledger = step(TINY_LLAMA, attention=attention, adapter=Adapter(kind="prefix", tokens=6))
    heads, head, layers = 4, 8, 2
    hidden = SEQ * (SEQ + 6) - (visible_pairs(SEQ, None) + 6 * SEQ)
    left_out = steady_sum(ledger, "model_flops_full") - steady_sum(ledger, "model_flops")
    fewest = 2 * heads * 2 * head * hidden  # of one product of one layer
    # Forward, and the gradients of both; where the first layer's queries need none, a product written out is
    # not made.
    products = 6 * layers - (1 if attention == "eager" else 0)
    assert left_out == products * fewest


def test_gemma_3_at_8192_tokens() -> None:
    """Five layers of six see 512 tokens."""
    config = with_layers("gemma-3-1b", 6)
    ledger = step(config, batch=Batch(micro=1, seq=8192))
    assert steady_sum(ledger, "model_flops") == closed(config, 1, 8192)
    assert config["sliding_window"] == 512


def test_an_outer_product_with_positions_is_no_model_flop() -> None:
    """Rotary angles as transformers 5.17 makes them; 5.23 multiplies elementwise."""
    seq, half = 32, 8

    def train(outer: bool) -> None:
        linear = nn.Linear(2 * half, 2 * half, bias=False).to("cuda")
        frequencies = torch.rand(half, device="cuda")
        positions = torch.arange(seq, device="cuda")[None].float()
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        for _ in range(2):
            with torch.no_grad():
                if outer:
                    angles = (frequencies[None, :, None] @ positions[:, None, :]).transpose(1, 2)
                else:
                    angles = positions[..., None] * frequencies
            x = torch.randn(1, seq, 2 * half, device="cuda") * torch.cat((angles, angles), dim=-1).cos()
            linear(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    products = 4 * seq * (2 * half) ** 2  # The forward, and the weight's gradient.
    outer, elementwise = (trainfit.trace(partial(train, outer)) for outer in (True, False))
    assert outer.model_flops == elementwise.model_flops == products
    assert (outer.hardware_flops, elementwise.hardware_flops) == (products + 2 * half * seq, products)


def test_user_code_with_attention_written_out() -> None:
    """A loop of one's own: a boolean buffer that hides the future, masked_fill, softmax."""
    heads, head, seq = 4, 16, 64

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
            self.register_buffer("past", torch.tril(torch.ones(128, 128)).view(1, 1, 128, 128))

        def forward(self, x: Tensor) -> Tensor:
            b, s, _ = x.shape
            q, k, v = (t.view(b, s, heads, head).transpose(1, 2) for t in self.qkv(x).split(64, dim=-1))
            scores = q @ k.transpose(-2, -1) / head**0.5
            weights = scores.masked_fill(self.past[:, :, :s, :s] == 0, float("-inf")).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).reshape(b, s, 64))

    def train() -> None:
        model = Attention().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(2, seq, 64, device="cuda", requires_grad=True)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    products = 6 * 2 * seq * 64 * 256
    assert traced.model_flops == products + 12 * 2 * heads * head * (seq * (seq + 1) // 2)
    assert traced.hardware_flops == products + 12 * 2 * heads * head * seq * seq
